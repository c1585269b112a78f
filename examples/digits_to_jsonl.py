"""Write scikit-learn's 1,797 scans of handwritten digits as PNG files and JSONL records with
questions.

    python examples/digits_to_jsonl.py --output out/digits

Writes OUTPUT/images/*.png, OUTPUT/train.jsonl and OUTPUT/held_out.jsonl. A record has one to six
scans. Its questions are branches: each attends to the images but not to the other questions, and
only the answers are learned. The last 297 scans are held out from all training records. Training
scans are shifted randomly by up to `--shift` pixels; held-out scans are not. The same flags give
the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NUM_SCANS = 1797
HELD_OUT = 297
"""Number of scans at the end of the dataset that are used only for testing."""
SIDE = 16
"""Side of an image in pixels, twice the side of the original scans."""
MOST_IMAGES = 6


def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Return the scans, uint8 [1797, 8, 8] with values 0..255, and the digits, int [1797].

    Raise ValueError if scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "the digit scans are part of scikit-learn: pip install -e '.[demo]'"
        ) from error
    data = load_digits()
    assert len(data.images) == NUM_SCANS
    # scikit-learn's pixels have values 0 to 16.
    return np.rint(data.images * (255 / 16)).astype(np.uint8), data.target


def png(scan: np.ndarray, across: int, down: int) -> bytes:
    """Return a scan at twice its size, shifted by `across` and `down` pixels, as a grey PNG."""
    from PIL import Image

    image = Image.fromarray(scan).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    moved = Image.new("L", image.size)
    moved.paste(image, (across, down))
    stream = io.BytesIO()
    moved.save(stream, "PNG")
    return stream.getvalue()


def questions(digits: Sequence[int]) -> dict[str, str]:
    """Return the questions about the digits of a record, with their answers."""
    asked = {
        "which digits?": " ".join(map(str, digits)),
        "how many are even?": str(sum(digit % 2 == 0 for digit in digits)),
    }
    if len(digits) > 1:
        asked["sum of the first two?"] = str(digits[0] + digits[1])
    return asked


def record(identity: str, files: Sequence[str], digits: Sequence[int]) -> dict[str, Any]:
    """Return a record with the images as a shared prefix and one branch per question."""
    branches = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in questions(digits).items()
    ]
    return {
        "id": identity,
        "content": [{"type": "image", "path": file} for file in files],
        "branches": branches,
    }


def counts_of_images(generator: np.random.Generator, records: int, single: float) -> np.ndarray:
    """Draw the number of images of each record: 1 with probability `single`, otherwise 2 to 6
    uniformly.
    """
    # Both random numbers are drawn for each record, so the shares do not affect the order.
    several = generator.integers(2, MOST_IMAGES + 1, records)
    return np.where(generator.random(records) < single, 1, several)


class Writer:
    """Writes JSONL files, and each image that their records contain once."""

    def __init__(self, folder: Path, scans: np.ndarray, digits: np.ndarray) -> None:
        self._folder, self._scans, self._digits = folder, scans, digits
        self._written: set[str] = set()
        (folder / "images").mkdir(parents=True, exist_ok=True)

    def write(self, name: str, records: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """Write records, each a list of images (scan, shift across, shift down)."""
        with (self._folder / f"{name}.jsonl").open("w", encoding="utf-8") as stream:
            for number, images in enumerate(records):
                files = [self._picture(*image) for image in images]
                shown = [int(self._digits[scan]) for scan, _, _ in images]
                stream.write(json.dumps(record(f"{name}-{number}", files, shown)) + "\n")

    def _picture(self, scan: int, across: int, down: int) -> str:
        name = f"{scan:04d}_{across:+d}{down:+d}.png"
        # Several records may contain the same image; write it only once.
        if name not in self._written:
            (self._folder / "images" / name).write_bytes(png(self._scans[scan], across, down))
            self._written.add(name)
        return name


def training_records(
    records: int, single: float, shift: int, seed: int
) -> list[list[tuple[int, int, int]]]:
    """Return training records in random order, in which all scans are used equally often (+-1)."""
    generator = np.random.default_rng(seed)
    counts = counts_of_images(generator, records, single)
    total, scans = int(counts.sum()), NUM_SCANS - HELD_OUT
    # Concatenate enough permutations of all scans, so that their uses differ by at most one.
    order = np.concatenate([generator.permutation(scans) for _ in range(-(-total // scans))])[
        :total
    ]
    shifts = generator.integers(-shift, shift + 1, (total, 2))
    images = [(int(scan), int(x), int(y)) for scan, (x, y) in zip(order, shifts, strict=True)]
    # Cut the flat list of images into records.
    ends = np.cumsum(counts)
    return [images[end - count : end] for end, count in zip(ends, counts, strict=True)]


def held_out_records(several: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """Return one record per held-out scan, then `several` records for each of 2, 3, ... 6 scans."""
    generator = np.random.default_rng(seed)
    scans = np.arange(NUM_SCANS - HELD_OUT, NUM_SCANS)
    # First every held-out scan in a separate record, then random groups of 2 to 6.
    groups = [[scan] for scan in scans]
    for count in range(2, MOST_IMAGES + 1):
        groups += [list(generator.choice(scans, count, replace=False)) for _ in range(several)]
    return [[(int(scan), 0, 0) for scan in group] for group in groups]


def main(argv: Sequence[str] | None = None) -> int:
    """Write both files and print their sizes; return 0, or 2 after an error message."""
    parser = argparse.ArgumentParser(
        description="Write scikit-learn's digit scans as PNG files and JSONL with questions."
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--records",
        type=int,
        default=12000,
        metavar="N",
        help="number of training records (default: 12000)",
    )
    parser.add_argument(
        "--single",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of training records with one image (default: 0.5)",
    )
    parser.add_argument(
        "--shift",
        type=int,
        default=1,
        metavar="N",
        help="largest random shift of training scans, in pixels (default: 1)",
    )
    parser.add_argument(
        "--held-out-several",
        type=int,
        default=40,
        metavar="N",
        help="number of held-out records for each number of images from 2 to 6 (default: 40)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of the order, grouping and shifts (default: 0)",
    )
    arguments = parser.parse_args(argv)
    if (
        arguments.records < 1
        or arguments.held_out_several < 0
        or not 0 <= arguments.shift <= SIDE // 4
    ):
        parser.error(
            f"--records must be at least 1, --held-out-several at least 0, --shift 0 to {SIDE // 4}"
        )
    if not 0 <= arguments.single <= 1:
        parser.error(f"--single {arguments.single}: must be between 0 and 1")
    try:
        writer = Writer(arguments.output, *load_scans())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    splits = {
        "train": training_records(
            arguments.records, arguments.single, arguments.shift, arguments.seed
        ),
        "held_out": held_out_records(arguments.held_out_several, arguments.seed),
    }
    for name, records in splits.items():
        writer.write(name, records)
        scans = {scan for images in records for scan, _, _ in images}
        shown = sum(map(len, records))
        print(
            f"{arguments.output / name}.jsonl: {len(records)} records, {shown} images of "
            f"{len(scans)} scans"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
