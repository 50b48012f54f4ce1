"""``python -m torchdevice``: the same as the ``torchdevice`` command."""

import sys

from torchdevice.cli import main

if __name__ == "__main__":
    sys.exit(main())
