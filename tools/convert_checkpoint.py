"""`megacp-convert` from a checkout: see megacp/huggingface/convert_command.py."""

import sys

from megacp.huggingface.convert_command import main

if __name__ == "__main__":
    sys.exit(main())
