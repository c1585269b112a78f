"""Entry of `python -m megacp`."""

import sys

from megacp.programs import main

if __name__ == "__main__":
    sys.exit(main())
