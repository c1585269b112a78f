"""`megacp-parity` from a checkout: see megacp/commands/parity.py."""

import sys

from megacp.commands.parity import main

if __name__ == "__main__":
    sys.exit(main())
