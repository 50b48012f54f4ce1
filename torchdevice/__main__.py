"""``python -m torchdevice`` is the ``torchdevice`` command."""

import sys

from torchdevice.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
