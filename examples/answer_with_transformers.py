"""Answer the questions about digit scans using only the transformers library, and compare the
answers with megacp's.

    python examples/answer_with_transformers.py --model out/hf --answers out/answers.jsonl --images
    out/digits/images

`--model` is a folder from tools/convert_checkpoint.py, and `--answers` is a file from
tools/generate.py. The answers use no code of megacp: tokenizer, model, generation and its
cache are the library's. Only the crops are made here, because the library's image processor
requires torchvision. Each scan is one crop, so a reshape is enough. The exit status is 1 if an
answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate_digits import accuracies, read_answers, table

Answer = dict[str, Any]


class Library:
    """A folder in Hugging Face format, loaded with transformers."""

    def __init__(self, folder: Path) -> None:
        """Load the folder.

        Raise ValueError if it is not a Molmo2 folder with tokenizer and processor files.
        """
        import transformers

        transformers.utils.logging.disable_progress_bar()
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, local_files_only=True
            )
            settings = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
        except (OSError, KeyError) as error:
            raise ValueError(f"--model {folder}: {' '.join(str(error).split())}") from error
        self.model = model.eval()
        images = settings["image_processor"]
        self.side, self.patch, self.window = (
            images["size"]["height"],
            images["patch_size"],
            images["pooling_size"],
        )
        self.mean, self.std = (
            np.array(images[f"image_{name}"], np.float32) for name in ("mean", "std")
        )
        if images["max_crops"] != 1 or settings["image_use_col_tokens"]:
            raise ValueError(
                f"--model {folder}: only images of one crop without column tokens are supported"
            )
        across = self.side // self.patch
        self.tokens = across // self.window[0] * (across // self.window[1])
        # The ids of the image tokens, which are marked for the library (mm_token_type_ids).
        names = ("<im_patch>", "<im_start>", "<low_res_im_start>", "<im_end>")
        self.image_ids = self.tokenizer.convert_tokens_to_ids(list(names))

    def crop(self, path: Path) -> np.ndarray:
        """Return the patches of a one-crop image, float32 [patches, 3 * patch * patch]."""
        from PIL import Image

        pixels = np.asarray(Image.open(path).convert("RGB"), np.float32) / 255
        if pixels.shape[:2] != (self.side, self.side):
            raise ValueError(
                f"{path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, but a crop has side "
                f"{self.side}"
            )
        # [side, side, 3] -> [n, p, n, p, 3] -> [n, n, p, p, 3] -> [n * n, p * p * 3]
        n, p = self.side // self.patch, self.patch
        return (
            ((pixels - self.mean) / self.std)
            .reshape(n, p, n, p, 3)
            .swapaxes(1, 2)
            .reshape(n * n, -1)
        )

    def pooling(self, crops: int) -> np.ndarray:
        """Return the indices of the patches that each token pools, numbered across the batch.

        The result is int64 [tokens of all crops, patches per window].
        """
        across, (high, wide) = self.side // self.patch, self.window
        # Number all patches of the batch row by row, then group them into windows of high x wide.
        grid = np.arange(crops * across * across).reshape(
            crops, across // high, high, across // wide, wide
        )
        return grid.swapaxes(2, 3).reshape(crops * self.tokens, high * wide)

    @torch.no_grad()
    def answer(self, group: Sequence[Answer], images: Path, count: int) -> list[str]:
        """Return greedy answers of at most `count` tokens to questions of equal length."""
        # Each image occurs twice in the text: as a low-resolution crop and as a full crop.
        patch = "<im_patch>" * self.tokens
        picture = f"<low_res_im_start>{patch}<im_end><im_start>{patch}<im_end>"
        texts = [picture * len(one["images"]) + one["prompt"] for one in group]
        ids = torch.tensor(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        files = [images / name for one in group for name in one["images"]]
        # The low-resolution crop comes first; a scan of one crop has the same pixels in both.
        crops = np.stack([crop for file in files for crop in [self.crop(file)] * 2])
        # Pooled rows and columns of a crop; image_grids contains them for both crops of an image.
        rows, columns = (self.side // self.patch // size for size in self.window)
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=torch.isin(ids, torch.tensor(self.image_ids)).long(),
            pixel_values=torch.from_numpy(crops),
            image_token_pooling=torch.from_numpy(self.pooling(len(crops))),
            image_grids=torch.tensor([[rows, columns, rows, columns]] * len(files)),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=self.tokenizer.eos_token_id,
        )
        return self.tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)


def answers_again(
    library: Library, answers: Sequence[Answer], images: Path, count: int
) -> list[Answer]:
    """Return the same questions in the same order, with answers from the library."""
    # Questions with the same text and number of images have the same length, so they form a batch
    # without padding.
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, one in enumerate(answers):
        groups[len(one["images"]), one["prompt"]].append(place)
    again = [dict(one) for one in answers]
    for places in groups.values():
        group = [answers[place] for place in places]
        for place, text in zip(places, library.answer(group, images, count), strict=True):
            again[place] |= {"answer": text, "right": text == answers[place]["expected"]}
    return again


def main(argv: Sequence[str] | None = None) -> int:
    """Answer, count and compare; return 1 if answers differ, or 2 after an error message."""
    parser = argparse.ArgumentParser(
        description="Answer with an exported model in transformers, and compare the answers."
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the model in Hugging Face format",
    )
    parser.add_argument(
        "--answers", type=Path, required=True, metavar="FILE.jsonl", help="answers to compare with"
    )
    parser.add_argument(
        "--images", type=Path, required=True, metavar="DIR", help="folder of the records' images"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=8,
        metavar="N",
        help="maximum number of tokens per answer (default: 8)",
    )
    arguments = parser.parse_args(argv)
    try:
        answers = read_answers(arguments.answers)
        again = answers_again(
            Library(arguments.model), answers, arguments.images, arguments.max_new_tokens
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(accuracies(again)))
    other = [
        (one, two)
        for one, two in zip(answers, again, strict=True)
        if one["answer"] != two["answer"]
    ]
    for one, two in other[:10]:
        print(
            f"{one['id']}: {one['question']} megacp {one['answer']!r}, transformers "
            f"{two['answer']!r}"
        )
    print(f"{len(answers) - len(other)} of {len(answers)} answers equal those of megacp")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
