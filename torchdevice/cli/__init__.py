"""The ``torchdevice`` command. ``run`` and ``doctor`` are its commands."""
