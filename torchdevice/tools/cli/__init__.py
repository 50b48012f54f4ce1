"""The ``torchdevice`` command. Each of its commands is a file here."""
