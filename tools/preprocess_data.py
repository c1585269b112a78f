"""`megacp-preprocess` from a checkout: see megacp/prepare/command.py."""

import sys

from megacp.prepare.command import main

if __name__ == "__main__":
    sys.exit(main())
