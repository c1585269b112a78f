"""`megacp-plan` from a checkout: see megacp/plan/command.py."""

import sys

from megacp.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
