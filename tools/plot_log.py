"""`megacp-plot` from a checkout: see megacp/verify/plot.py."""

import sys

from megacp.verify.plot import main

if __name__ == "__main__":
    sys.exit(main())
