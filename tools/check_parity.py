"""`megacp-parity` from a checkout: see megacp/verify/command.py."""

import sys

from megacp.verify.command import main

if __name__ == "__main__":
    sys.exit(main())
