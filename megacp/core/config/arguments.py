"""A command line with errors of one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that prints no usage with its errors."""

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` and exit 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")
