"""`megacp-convert` from a checkout: see megacp/commands/convert.py."""

import sys

from megacp.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
