"""Text and photos as JSONL, to measure the preprocessor on: Python's own sources, and photo-like noise."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path


def write_text(path: Path, megabytes: float) -> tuple[int, list[str]]:
    """The standard library's sources as JSONL, over and over up to the size; bytes of text and the first texts."""
    texts, size = [], 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = "" if "site-packages" in source.parts else source.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            texts.append(text)
            size += len(text.encode())
        if size > megabytes * 1e6:
            break
    copies = max(1, math.ceil(megabytes * 1e6 / size))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) * copies, encoding="utf-8")
    return size * copies, texts
