"""`megacp-preprocess` from a checkout: see megacp/commands/preprocess.py."""

import sys

from megacp.commands.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
