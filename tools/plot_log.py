"""`megacp-plot` from a checkout: see megacp/commands/plot.py."""

import sys

from megacp.commands.plot import main

if __name__ == "__main__":
    sys.exit(main())
