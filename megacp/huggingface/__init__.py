"""To and from transformers.

The names for other people's programs stand here; each is imported when it is asked for.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "context_parallel": "context",
    "cut_multimodal": "multimodal",
    "register_with_transformers": "transformers",
    "shard_sequences": "accelerate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megacp.huggingface.door.{_HOMES[name]}"), name)
