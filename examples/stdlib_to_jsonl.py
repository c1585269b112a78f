"""Write the Python standard library's sources as JSONL for training and validation.

    python examples/stdlib_to_jsonl.py --output out/text --megabytes 8

Every machine with Python has this text. A hash of a file's name decides whether it is used for
validation, as about a tenth of the files are, so the split does not depend on Python's location.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the relative name and the text of every readable module below `root`, except tests and
    installed packages.
    """
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if {"site-packages", "test", "tests", "idle_test", "lib2to3"} & set(
            path.relative_to(root).parts
        ):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield name, text


def main() -> int:
    """Write OUTPUT/train.jsonl and OUTPUT/valid.jsonl, and print their sizes."""
    parser = argparse.ArgumentParser(
        description="Write standard library sources as JSONL records with `id` and `text`."
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--megabytes",
        type=float,
        default=8.0,
        metavar="N",
        help="stop after about N MB of text (default: 8)",
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    sizes = {"train": 0, "valid": 0}
    counts = {"train": 0, "valid": 0}
    with (
        (arguments.output / "train.jsonl").open("w", encoding="utf-8") as train,
        (arguments.output / "valid.jsonl").open("w", encoding="utf-8") as valid,
    ):
        files = {"train": train, "valid": valid}
        for name, text in sources(Path(sysconfig.get_path("stdlib"))):
            # The hash's first byte is uniform, so about a tenth of the files are for validation.
            split = "valid" if hashlib.sha256(name.encode()).digest()[0] % 10 == 0 else "train"
            files[split].write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
            sizes[split] += len(text.encode())
            counts[split] += 1
            if sum(sizes.values()) > arguments.megabytes * 1e6:
                break
    for split in sizes:
        print(
            f"{arguments.output / split}.jsonl: {counts[split]} files, {sizes[split] / 1e6:.1f} MB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
