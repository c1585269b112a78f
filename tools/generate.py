"""`megacp-generate` from a checkout: see megacp/commands/generate.py."""

import sys

from megacp.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
