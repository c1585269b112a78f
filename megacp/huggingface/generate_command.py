"""Answers of a megacp checkpoint on one process: to texts, to texts with images and videos, or to a file of records.

    python tools/generate.py --checkpoint out/checkpoints --tokenizer out/tokenizer.json --prompt "def main"
    python tools/generate.py --checkpoint out/checkpoints --tokenizer byte --image a.png --image b.png \\
        --prompt $'<|user|>\\nwhich digits?\\n<|assistant|>\\n'
    python tools/generate.py --checkpoint out/checkpoints --tokenizer byte --input held_out.jsonl --image-root images \\
        --output answers.jsonl

A prompt stands as it is written, after all images and videos in the order of their flags. The frames of a video are
those of a build with these image rules. Records are those of preprocess_data.py: the model answers in place of the last
message of an assistant in a record or branch, which stands as `expected` beside its `answer`. Where the last message is
another's, the header of an assistant's stands behind it, as the exported chat template writes it.
"""

from __future__ import annotations

import argparse
import codecs
import functools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from megacp.core.storage.files import open_own, open_regular, read_regular
from megacp.huggingface.generation.prompt import Prompt, PromptMaker
from megacp.huggingface.generation.sampler import Generator, Sampling
from megacp.prepare.media.reader import LARGEST_ITEM
from megacp.prepare.records.parts import Media
from megacp.prepare.records.record import RecordError, decode_json
from megacp.prepare.tokenize.tokenizer import Tokenizer, load_tokenizer

_A = {"image": "an image", "video": "a video"}


def given_media(kind: str, path: str) -> Media:
    """The file of `--image` or `--video`, not yet read."""
    return Media(kind, "path", path, f"--{kind}")


def arguments_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description="Sample from a checkpoint that any grid wrote.")
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="--save directory of a run, or one step of it"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="KIND_OR_PATH", help="as given to preprocess_data.py build"
    )
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be repeated")
    for kind in ("image", "video"):  # one list, for their order
        parser.add_argument(
            f"--{kind}",
            type=functools.partial(given_media, kind),
            action="append",
            dest="media",
            default=[],
            metavar="FILE",
            help=f"{_A[kind]} that is seen before each prompt; repeatable",
        )
    parser.add_argument("--input", type=Path, metavar="FILE.jsonl", help="records to answer, instead of --prompt")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="where the answers to --input go")
    parser.add_argument("--image-root", metavar="DIR", help="directory that paths in --input are relative to")
    parser.add_argument(
        "--data-path", metavar="DIR", help="dataset that gives the image rules (default: those of the run)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling")
    return parser


def refuse(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with one message that holds all faults of the flags."""
    reasons = []
    if bool(arguments.prompt) == (arguments.input is not None):
        reasons.append("give either --prompt or --input")
    if (arguments.input is None) != (arguments.output is None):
        reasons.append("--input and --output go together")
    for key in sorted({media.key for media in arguments.media} if arguments.input is not None else ()):
        reasons.append(f"{key} goes with --prompt; records of --input name their own images and videos")
    if arguments.input is None and arguments.image_root is not None:
        reasons.append("--image-root goes with --input")
    elif arguments.image_root is not None and not Path(arguments.image_root).is_dir():
        reasons.append(f"--image-root {arguments.image_root}: no such directory")
    if not 0 <= arguments.temperature < math.inf:
        reasons.append(f"--temperature {arguments.temperature}: must be a finite number, 0 or more")
    if arguments.output is not None and arguments.input is not None and _same_file(arguments.output, arguments.input):
        reasons.append(f"--output {arguments.output} is --input, which it would overwrite")
    if arguments.max_new_tokens < 1:
        reasons.append(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1")
    if reasons:
        parser.error("; ".join(reasons))


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def load(arguments: argparse.Namespace) -> tuple[Generator, Tokenizer]:
    """The model and its tokenizer. ValueError when they do not belong together."""
    tokenizer = load_tokenizer(arguments.tokenizer)
    try:
        generator = Generator(arguments.checkpoint)
    except ValueError as error:  # the loader of runs says --load
        raise ValueError(str(error).replace("--load ", "--checkpoint ")) from error
    if generator.tokenizer_sha256 and tokenizer.sha256 != generator.tokenizer_sha256:
        raise ValueError(f"--tokenizer {arguments.tokenizer} is not the one that {generator.path} was trained with")
    if tokenizer.vocab_size > generator.config.model.embedding_rows:
        raise ValueError(
            f"--tokenizer {arguments.tokenizer} has {tokenizer.vocab_size} ids, "
            f"the model was trained with {generator.config.model.embedding_rows}"
        )
    tokenizer.begins_with = generator.first_token(tokenizer.begins_with)
    tokenizer.eos_id = generator.last_token(tokenizer.eos_id)
    return generator, tokenizer


@contextmanager
def _named(flag: str, path: str | Path) -> Iterator[None]:
    """A fault of a file that the block opens becomes a ValueError with the flag and the path."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error
    except ValueError as error:  # of `megacp.core.storage.files`, which begins with the path
        raise ValueError(f"{flag} {path}: {str(error).removeprefix(str(path)).strip(': ')}") from error


@dataclass(frozen=True)
class Question:
    """A record of --input."""

    name: str
    """Its `id`, or its line."""
    place: str
    """Where it stands, for messages."""
    prompt: Prompt


def read_records(path: Path, maker: PromptMaker) -> list[Question]:
    """The records of a file. ValueError names the line and its fault."""
    found = []
    with _named("--input", path), open_regular(path) as stream:
        lines = stream.read().removeprefix(codecs.BOM_UTF8).splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"--input {path}:{number}"
        try:
            record = decode_json(line)
            prompt = maker.of_record(record)
        except RecordError as error:
            raise ValueError(f"{place}: {error}") from error
        found.append(Question(str(number if record.get("id") is None else record["id"]), place, prompt))
    if not found:
        raise ValueError(f"--input {path} holds no record")
    return found


def read_media(named: Media) -> Media:
    """The same with the bytes of its file. ValueError names flag and path."""
    path = str(named.value)
    with _named(named.key, path):
        return Media(named.kind, "bytes", read_regular(path, LARGEST_ITEM), f"{named.key} {path}")


def opened(path: Path) -> TextIO:
    """The file for the answers, empty; ValueError."""
    with _named("--output", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(open_own(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8")


def sampling_of(arguments: argparse.Namespace, generator: Generator, tokenizer: Tokenizer) -> Sampling:
    """How answers are made; a line on stderr where nothing is known to end those of a chat template."""
    ends = generator.template_ends(tokenizer)
    if generator.by_template and not ends:
        print(
            f"note: {generator.path}: the chat template of training is not known to end answers with a special token; "
            f"they may go on to --max-new-tokens {arguments.max_new_tokens}",
            file=sys.stderr,
        )
    if tokenizer.eos_id is not None:
        ends = (*ends, tokenizer.eos_id)
    return Sampling(arguments.max_new_tokens, arguments.temperature, arguments.seed, ends)


def spoken(tokenizer: Tokenizer, tokens: np.ndarray, ends: Sequence[int]) -> str:
    """An answer as text, without the token that ends it."""
    return tokenizer.decode(tokens[:-1] if len(tokens) and int(tokens[-1]) in ends else tokens)


def answer_prompts(arguments: argparse.Namespace, generator: Generator, tokenizer: Tokenizer) -> None:
    """Print every prompt with its continuation."""
    rules = generator.image_rules(arguments.data_path) if arguments.media or generator.has_image_rules else None
    maker = PromptMaker(tokenizer, rules)
    media = [read_media(named) for named in arguments.media]
    asked = [arguments.prompt] if media else [[text] for text in arguments.prompt]  # one row sees the media once
    names = ["--prompt " + ", ".join(map(repr, texts)) for texts in asked]
    prompts = []
    for name, texts in zip(names, asked, strict=True):
        try:
            prompts.append(maker.of_texts(texts, media))
        except RecordError as error:
            raise ValueError(str(error) if "`--" in str(error) else f"{name}: {error}") from error
    sampling = sampling_of(arguments, generator, tokenizer)
    print(f"{generator.path} after step {generator.step}")
    new = (tokens for answers in generator.answer(prompts, sampling, names) for tokens in answers)
    for text, tokens in zip(arguments.prompt, new, strict=True):
        print(f"--- {text!r}\n{text}{spoken(tokenizer, tokens, sampling.ends)}")


def answer_records(arguments: argparse.Namespace, generator: Generator, tokenizer: Tokenizer) -> None:
    """Write one line of JSON for every answer, in the order of the records."""
    has_vision = generator.config.vision.vision_num_layers > 0
    rules = generator.image_rules(arguments.data_path) if has_vision else None
    questions = read_records(
        arguments.input, PromptMaker(tokenizer, rules, arguments.image_root, generator.by_template)
    )
    prompts = [question.prompt for question in questions]
    sampling = sampling_of(arguments, generator, tokenizer)
    right, total, asked = 0, 0, 0
    with opened(arguments.output) as stream:
        given = generator.answer(prompts, sampling, [question.place for question in questions])
        for question, prompt, answers in zip(questions, prompts, given, strict=True):
            for text, expected, tokens in zip(prompt.questions, prompt.expected, answers, strict=True):
                line = {"id": question.name, "images": prompt.images, "prompt": text, "expected": expected}
                line["answer"] = spoken(tokenizer, tokens, sampling.ends)
                right += expected is not None and line["answer"] == expected
                asked += expected is not None
                total += 1
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{generator.path} after step {generator.step}")
    print(f"{arguments.output}: {total} answers" + (f", {right} of {asked} as expected" if asked else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, answer; exit status 2 with one message on bad input."""
    parser = arguments_parser()
    arguments = parser.parse_args(argv)
    refuse(parser, arguments)
    try:
        (answer_prompts if arguments.input is None else answer_records)(arguments, *load(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
