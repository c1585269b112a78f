"""`megacp-generate` from a checkout: see megacp/huggingface/generate_command.py."""

import sys

from megacp.huggingface.generate_command import main

if __name__ == "__main__":
    sys.exit(main())
