"""What a program needs of a GPU's memory, for ``torchdevice plan``."""
