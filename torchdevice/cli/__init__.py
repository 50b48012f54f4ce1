"""The ``torchdevice`` command. Each file here is one of its commands."""
