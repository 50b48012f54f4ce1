"""The text of the ``torchdevice`` command, as pip installs it."""

import sys

from torchdevice.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
