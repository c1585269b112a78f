"""Threads of the `tokenizers` package: one for each core of the machine in every process, unless it is told otherwise.

It can be told by an environment variable alone, which it reads at its first call of several texts.
"""

from __future__ import annotations

import os


def one_thread() -> None:
    """Let the package work in the calling thread of this process, where the user has not said anything else."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
