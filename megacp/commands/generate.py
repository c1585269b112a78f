"""Answers of a megacp checkpoint on one process: to texts, to texts with images, or to a file of records.

    python tools/generate.py --checkpoint out/checkpoints --tokenizer out/tokenizer.json --prompt "def main"
    python tools/generate.py --checkpoint out/checkpoints --tokenizer byte --image a.png --image b.png \\
        --prompt $'<|user|>\\nwhich digits?\\n<|assistant|>\\n'
    python tools/generate.py --checkpoint out/checkpoints --tokenizer byte --input held_out.jsonl --image-root images \\
        --output answers.jsonl

A prompt stands as it is written, after all images. Records are those of preprocess_data.py; the last thing that an
assistant says in a record or branch is what the model has to say, and stands as `expected` beside its `answer`.
"""

from __future__ import annotations

import argparse
import codecs
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from megacp.data.prompt import Prompt, PromptMaker
from megacp.data.sample import RecordError, decode_json
from megacp.data.tokenizer import Tokenizer, load_tokenizer
from megacp.training.generate import Generator, Sampling


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
    parser.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="seen before each prompt; repeatable"
    )
    parser.add_argument("--input", type=Path, metavar="FILE.jsonl", help="records to answer, instead of --prompt")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="where the answers to --input go")
    parser.add_argument("--image-root", metavar="DIR", help="directory that paths in --input are relative to")
    parser.add_argument(
        "--data-path", metavar="DIR", help="dataset whose image rules to take (default: those of the run)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling")
    return parser


def refuse(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with one message that holds all that is wrong with the flags."""
    reasons = []
    if bool(arguments.prompt) == (arguments.input is not None):
        reasons.append("give either --prompt or --input")
    if (arguments.input is None) != (arguments.output is None):
        reasons.append("--input and --output go together")
    if arguments.input is not None and arguments.image:
        reasons.append("--image goes with --prompt; records of --input name their own images")
    if arguments.input is None and arguments.image_root is not None:
        reasons.append("--image-root goes with --input")
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
    generator = Generator(arguments.checkpoint)
    if generator.tokenizer_sha256 and tokenizer.sha256 != generator.tokenizer_sha256:
        raise ValueError(f"--tokenizer {arguments.tokenizer} is not the one that {generator.path} was trained with")
    if tokenizer.vocab_size > generator.config.model.embedding_rows:
        raise ValueError(
            f"--tokenizer {arguments.tokenizer} has {tokenizer.vocab_size} ids, "
            f"the model was trained with {generator.config.model.embedding_rows}"
        )
    return generator, tokenizer


def read_records(path: Path, maker: PromptMaker) -> tuple[list[str], list[Prompt]]:
    """The `id` of each record (or its line) and its prompt. ValueError names the line and what is wrong with it."""
    names, prompts = [], []
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ValueError(f"--input {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = decode_json(line)
            prompts.append(maker.of_record(record))
        except RecordError as error:
            raise ValueError(f"--input {path}:{number}: {error}") from error
        names.append(str(number if record.get("id") is None else record["id"]))
    if not prompts:
        raise ValueError(f"--input {path} holds no record")
    return names, prompts


def read_image(path: Path) -> bytes:
    """The bytes of a file; ValueError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--image {path}: {error.strerror}") from error


def opened(path: Path) -> TextIO:
    """The file for the answers, empty; ValueError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: {error.strerror}") from error


def spoken(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """An answer as text, without the token that ends it."""
    return tokenizer.decode(tokens[:-1] if len(tokens) and tokens[-1] == tokenizer.eos_id else tokens)


def answer_prompts(arguments: argparse.Namespace, generator: Generator, tokenizer: Tokenizer) -> None:
    """Print every prompt with its continuation."""
    rules = generator.image_rules(arguments.data_path) if arguments.image or generator.has_image_rules else None
    maker = PromptMaker(tokenizer, rules)
    if arguments.image:
        prompts = [maker.of_texts(arguments.prompt, [read_image(path) for path in arguments.image])]
    else:
        prompts = [maker.of_texts([text]) for text in arguments.prompt]
    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.seed, tokenizer.eos_id)
    print(f"{generator.path} after step {generator.step}")
    new = (tokens for answers in generator.answer(prompts, sampling) for tokens in answers)
    for text, tokens in zip(arguments.prompt, new, strict=True):
        print(f"--- {text!r}\n{text}{spoken(tokenizer, tokens)}")


def answer_records(arguments: argparse.Namespace, generator: Generator, tokenizer: Tokenizer) -> None:
    """Write one line of JSON for every answer, in the order of the records."""
    has_vision = generator.config.vision.vision_num_layers > 0
    rules = generator.image_rules(arguments.data_path) if has_vision else None
    names, prompts = read_records(arguments.input, PromptMaker(tokenizer, rules, arguments.image_root))
    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.seed, tokenizer.eos_id)
    right, total, asked = 0, 0, 0
    with opened(arguments.output) as stream:
        for name, prompt, answers in zip(names, prompts, generator.answer(prompts, sampling), strict=True):
            for question, expected, tokens in zip(prompt.questions, prompt.expected, answers, strict=True):
                line = {"id": name, "images": prompt.images, "prompt": question, "expected": expected}
                line["answer"] = spoken(tokenizer, tokens)
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
