"""Names of models on the Hugging Face Hub, for messages about folders that do not exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

# A name on the hub, such as Qwen/Qwen3-0.6B.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def download_command(name: str) -> str:
    """Return the shell command that downloads a model of the hub into a folder."""
    return f"hf download {name} --local-dir {name.rpartition('/')[2]}"


def is_hub_name(text: str) -> bool:
    """Return whether a text can be a name on the hub, and is not an existing path."""
    return _HUB_NAME.fullmatch(text) is not None and not Path(text).exists()


def no_such_folder(path: str | os.PathLike[str]) -> str:
    """Return the message about a model folder that does not exist.

    If the path can be a name on the hub, the message has the command that downloads the model.
    """
    name = os.fspath(path)
    if not is_hub_name(name):
        return "the folder does not exist"
    folder = name.rpartition("/")[2]
    return (
        f"the folder does not exist. If this is a model's name on the Hugging Face Hub, run "
        f"`{download_command(name)}` and give the folder {folder}"
    )
