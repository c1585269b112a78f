"""Entry point of `python -m megacp.finetune`; the code is in `megacp.finetuning`."""

from __future__ import annotations

import sys

from megacp.finetuning.command import main

if __name__ == "__main__":
    sys.exit(main())
