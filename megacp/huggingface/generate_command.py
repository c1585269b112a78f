"""Answers of a megacp checkpoint on one process: to texts, to texts with images and videos, or to a
file of records.

    python tools/generate.py --checkpoint runs/chat --chat python tools/generate.py --checkpoint
    runs/chat --prompt "Why is the sky blue?" python tools/generate.py --checkpoint out/checkpoints
    --image a.png --prompt 'Which?' python tools/generate.py --checkpoint out/checkpoints --input
    records.jsonl --output answers.jsonl

A model is asked in the form in which it learned answers: by its chat template, as messages in
megacp's own form, or by Alpaca's prompt. If it learned plain texts, and with --raw, a prompt stands
as it is written. It comes after all images and videos in the order of their flags. Records are
those of preprocess_data.py: the model answers in place of an assistant's last message, which stands
as `expected` beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacp.engine.config.cli import OneLineParser, path_text, path_texts
from megacp.huggingface.generation.prompt import Prompt, PromptMaker
from megacp.huggingface.generation.sampler import Generator, Sampling
from megacp.prepare.media.reader import LARGEST_ITEM
from megacp.prepare.records.chat_template import THINKS, template_of, templates_of
from megacp.prepare.records.conversation import answer_ends
from megacp.prepare.records.forms import alpaca_prompt
from megacp.prepare.records.read import Extent, read_extent
from megacp.prepare.records.record import ALPACA, AS_MESSAGES, Media, RecordError, Refusal
from megacp.prepare.tokenize.kept import own_tokenizer
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.storage.files import open_own, open_regular, read_regular, require_free
from megacp.storage.wording import counted
from megacp.training.data.manifest import THOUGHTS, answers_told, thoughts_told
from megacp.training.loop.state import first_token, last_token
from megacp.training.monitor.console import ends_with_its_reader, say, warn


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; ends with one message that holds all their faults."""
    parser = OneLineParser(description="Sample from a checkpoint that any grid wrote.")
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="DIR",
        type=path_text,
        help="--save directory of a run, or one step of it",
    )
    add(
        "--tokenizer",
        metavar="KIND_OR_PATH",
        type=path_texts,
        help="as given to preprocess_data.py build (default: the run's own)",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        help="what is asked, or the text to continue; may be repeated",
    )
    add("--chat", action="store_true", help="a conversation in the terminal; an empty line ends it")
    add(
        "--raw",
        action="store_true",
        help="continue the text of --prompt as it is, whatever the model learned",
    )
    told = f"the template's `{THINKS}` (as answers were learned, where they were in one way)"
    add("--thinking", action=argparse.BooleanOptionalAction, help=told)
    for kind in ("image", "video"):  # one list, for their order
        read = functools.partial(_media, kind)
        told = f"{kind} that is seen before each prompt; repeatable"
        add(
            f"--{kind}",
            type=read,
            action="append",
            dest="media",
            default=[],
            metavar="FILE",
            help=told,
        )
    add("--input", type=Path, metavar="FILE.jsonl", help="records to answer, instead of --prompt")
    add("--output", type=Path, metavar="FILE.jsonl", help="where the answers to --input go")
    add("--overwrite", action="store_true", help="replace --output where it exists")
    add(
        "--image-root",
        metavar="DIR",
        type=path_text,
        help="directory that paths in --input are relative to",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens of an answer at most (64)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (0)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (0)")
    arguments, reasons = parser.parse_args(argv), []
    if [bool(arguments.prompt), arguments.chat, arguments.input is not None].count(True) != 1:
        reasons.append("give one of --prompt, --chat and --input")
    if arguments.raw and not arguments.prompt:
        reasons.append("--raw goes with --prompt")
    if (arguments.input is None) != (arguments.output is None):
        reasons.append("--input and --output go together")
    if arguments.input is not None and arguments.media:
        reasons.append(
            "--image and --video go with --prompt or --chat; records of --input name their own"
        )
    if not 0 <= arguments.temperature < math.inf:
        reasons.append(f"--temperature {arguments.temperature}: must be a finite number, 0 or more")
    given = [
        path for path in (arguments.input, arguments.output) if path is not None and path.exists()
    ]
    if len(given) == 2 and given[0].samefile(given[1]):
        reasons.append(f"--output {arguments.output} is --input, which it would overwrite")
    elif arguments.output is not None:
        try:
            require_free("--output", arguments.output, arguments.overwrite)
        except ValueError as error:
            reasons.append(str(error))
    if arguments.max_new_tokens < 1:
        reasons.append(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1")
    if reasons:
        parser.error("; ".join(reasons))
    return arguments


def _media(kind: str, text: str) -> Media:
    """Read what --image or --video names."""
    return Media(kind, "path", path_text(text), key=f"--{kind}")


@contextmanager
def _named(flag: str, path: str | Path) -> Iterator[None]:
    """A fault of a file that the block opens becomes a ValueError with the flag and the path."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error
    except ValueError as error:  # begins with the path
        raise ValueError(f"{flag} {error}") from error


def read_records(path: Path, maker: PromptMaker) -> tuple[list[Prompt], list[str], list[str]]:
    """The questions of a file's records, the ids (or lines) of these, and where they stand.

    ValueError names the line and its fault.
    """
    prompts: list[Prompt] = []
    ids, places = list[str](), list[str]()
    with _named("--input", path):
        open_regular(path).close()
    for item in read_extent(Extent(0, str(path), 0, path.stat().st_size)):
        place = f"--input {path}:{item.line}"
        try:
            if isinstance(item, Refusal):
                raise RecordError(item.reason)
            found = maker.of_record(item.value)
        except RecordError as error:
            raise ValueError(f"{place}: {error}") from error
        prompts += found
        places += [place] * len(found)
        named = (
            item.value.get("id") if isinstance(item.value, dict) else None
        )  # a list is one of messages
        ids += [str(named if named is not None else item.number or item.line)] * len(found)
    if not prompts:
        raise ValueError(f"--input {path} holds no record")
    return prompts, ids, places


def asked_by(kept: dict[str, Any], thinking: bool | None) -> dict[str, Any]:
    """What of a ChatTemplate makes it ask: `thinking`, else how its answers were learned where none
    followed a thought.

    ValueError: neither says it.
    """
    before, reads = kept.get("before_answers", ""), THINKS in kept["default"]
    _, real, none = (kept.get(name, 0) for name in THOUGHTS)
    empty = kept.get(
        "empty_thoughts", "before_answers" in kept
    )  # of an earlier version: all stood behind it
    if thinking is None and (real or empty <= none):
        return {}
    if reads and (thinking is not None or not before):
        return {"variables": {THINKS: bool(thinking)}}
    if thinking or (thinking is False and not before):
        raise ValueError(
            f"--{'' if thinking else 'no-'}thinking: the chat template reads no `{THINKS}`"
        )
    return {"before_answers": before}


class Session:
    """A checkpoint that is asked: its model, its tokenizer, how prompts are made and where answers
    end.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        """ValueError when there is no checkpoint, or the tokenizer is not that of its training."""
        try:
            generator = self.generator = Generator(arguments.checkpoint)
        except ValueError as error:  # the loader of runs says --load
            told, folder = (
                str(error).replace("--load ", "--checkpoint "),
                Path(arguments.checkpoint),
            )
            if (folder / "config.json").is_file():
                way = (
                    f"tools/convert_checkpoint.py --from hf --to megacp --input {folder} "
                    "--output DIR makes one"
                )
                told += f"; of this Hugging Face folder {way}, as training with --load-hf does"
            raise ValueError(told) from error
        progress, rows, name = (
            generator.progress,
            generator.config.model.embedding_rows,
            arguments.tokenizer,
        )
        if name is None:
            folder, data_path = Path(str(generator.path)).parent, generator.config.data.data_path
            name = own_tokenizer(folder, progress.tokenizer_sha256, data_path)
        if name is None:
            raise ValueError(
                f"--tokenizer: that of {generator.path} lies neither beside it nor in its "
                "--data-path"
            )
        tokenizer = self.tokenizer = load_tokenizer(name)
        if progress.tokenizer_sha256 not in ("", tokenizer.sha256):
            raise ValueError(
                f"--tokenizer {name} is not the one that {generator.path} was trained with"
            )
        if tokenizer.vocab_size > rows:
            raise ValueError(
                f"--tokenizer {name} has {tokenizer.vocab_size} ids, the model has {rows}"
            )
        tokenizer.begins_with = first_token(progress, tokenizer.begins_with)
        tokenizer.eos_id = last_token(progress, tokenizer.eos_id)
        kept, ends = progress.chat_template, tuple[int, ...]()
        if (
            kept is None and not generator.step and tokenizer.kind == "huggingface"
        ):  # converted: it knows its folder's
            own = templates_of(tokenizer.files[0].parent)
            kept = own if "default" in own else None
        if kept is not None and not (ends := answer_ends(kept["default"], tokenizer)):
            note = "the chat template of training is not known to end answers with a special token; they may go on to"
            warn(f"note: {generator.path}: {note} --max-new-tokens {arguments.max_new_tokens}")
        self.ends = ends if tokenizer.eos_id is None else (*ends, tokenizer.eos_id)
        self.by_template, template = kept is not None and not arguments.raw, None
        if kept is not None and self.by_template:
            today = datetime.date.today().isoformat()  # as a server would write it
            template = template_of(kept["default"], tokenizer, today)
            template = dataclasses.replace(template, **asked_by(kept, arguments.thinking))
            if (
                arguments.thinking is None
                and kept.get("empty_thoughts")
                and kept.get("real_thoughts")
            ):
                note = f"{thoughts_told(kept)}; --thinking and --no-thinking ask for one kind"
                warn(f"note: {generator.path}: {note}")
        elif arguments.thinking is not None:
            raise ValueError(
                "--thinking and --no-thinking go with a chat template, and none is applied here"
            )
        forms = progress.answer_forms or {}
        self.form = ""
        if template is None and not arguments.raw:
            self.form = next((form for form in (AS_MESSAGES, ALPACA) if form in forms), "")
        self.note = ""
        if self.form:
            told = answers_told({self.form: forms[self.form]}).replace(
                "are learned", "were learned", 1
            )
            self.note = f"note: {told}, and are asked for so; --raw continues a --prompt as it is"
        as_messages = AS_MESSAGES in forms
        self.maker = PromptMaker(
            tokenizer, generator.rules, arguments.image_root, template, as_messages
        )
        self.sampling = Sampling(
            arguments.max_new_tokens, arguments.temperature, arguments.seed, self.ends
        )
        self.media = []
        for one in arguments.media:
            with _named(one.key, one.value):
                data = read_regular(one.value, LARGEST_ITEM)
                self.media.append(Media(one.kind, "bytes", data, f"{one.key} {one.value}"))

    def __str__(self) -> str:
        return f"{self.generator.path} after step {self.generator.step}"

    def questions(self, text: str, said: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """What was said, and then `text` of a user, as messages; images and videos stand in the
        first.
        """
        parts = [{"type": one.kind, "bytes": one.value} for one in self.media if not said]
        return [
            *said,
            {
                "role": "user",
                "content": [*parts, {"type": "text", "text": text}] if parts else text,
            },
        ]

    def ask(self, text: str, said: Sequence[dict[str, Any]] = ()) -> str:
        """The answer to `text` of a user after what was said; Alpaca's prompt has no place for
        earlier turns.
        """
        if self.form == ALPACA:
            asked = self.prompts(text)
        else:
            asked = self.maker.of_record({"messages": self.questions(text, said)})
        (answer,) = self.answers(asked, ["it"], len(said))
        return answer

    def prompts(self, text: str) -> list[Prompt]:
        """Return what asks `text` in the form in which the model learned answers, or continues it.
        RecordError.
        """
        if not text and not self.media:
            raise RecordError("the prompt is empty; give at least one token of text")
        if self.by_template:
            return self.maker.of_record({"messages": self.questions(text)})
        if self.form == AS_MESSAGES and not text.startswith(
            "<|"
        ):  # else it has the header of a message already
            return [self.maker.of_question(text, self.media)]
        return [
            self.maker.of_text(alpaca_prompt(text) if self.form == ALPACA else text, self.media)
        ]

    def answers(
        self, prompts: Sequence[Prompt], names: Sequence[str], seed: int = 0
    ) -> Iterator[str]:
        """The answers as texts, without the tokens that end them."""
        sampling = dataclasses.replace(self.sampling, seed=self.sampling.seed + seed)
        for tokens in self.generator.answer(prompts, sampling, names):
            yield self.tokenizer.decode(
                tokens[:-1] if len(tokens) and int(tokens[-1]) in self.ends else tokens
            )


def open_session(checkpoint: str, max_new_tokens: int = 64, temperature: float = 0.0) -> Session:
    """What --chat asks, for a script or a notebook. ValueError as of `Session`."""
    numbers = [f"--max-new-tokens={max_new_tokens}", f"--temperature={temperature}"]
    return Session(parsed(["--checkpoint", checkpoint, "--chat", *numbers]))


@ends_with_its_reader()
def converse(session: Session, arguments: argparse.Namespace) -> None:
    """Answer what is typed, line by line, with all that was said before."""
    said = list[dict[str, Any]]()
    if session.note:
        say(session.note)
    say(f"{session}; an empty line ends the conversation")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while None not in (sys.stdin, sys.stdout) and (
            text := input("> ")
        ):  # None: closed before it began
            try:
                answer = session.ask(text, said)
            except ValueError as error:
                say(f"error: {error}")
                continue
            say(answer)
            said = [*session.questions(text, said), {"role": "assistant", "content": answer}]


@ends_with_its_reader()
def answer_prompts(session: Session, arguments: argparse.Namespace) -> None:
    """Print every prompt with its continuation."""
    names = [f"--prompt {text!r}" for text in arguments.prompt]
    prompts = []
    for name, text in zip(names, arguments.prompt, strict=True):
        try:
            prompts += session.prompts(text)
        except RecordError as error:
            raise ValueError(str(error) if "`--" in str(error) else f"{name}: {error}") from error
    if session.note:
        say(session.note)
    say(str(session))
    for text, answer in zip(arguments.prompt, session.answers(prompts, names), strict=True):
        say(f"--- {text!r}\n{'' if session.by_template or session.form else text}{answer}")


def answer_records(session: Session, arguments: argparse.Namespace) -> None:
    """Write one line of JSON for every answer, in the order of the records."""
    prompts, ids, places = read_records(arguments.input, session.maker)
    asked, right = sum(prompt.expected is not None for prompt in prompts), 0
    with _named("--output", arguments.output):
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        new = os.O_TRUNC if arguments.overwrite else os.O_EXCL
        stream = os.fdopen(open_own(arguments.output, os.O_WRONLY | new), "w", encoding="utf-8")
    with stream:
        for name, prompt, answer in zip(
            ids, prompts, session.answers(prompts, places), strict=True
        ):
            line = {
                "id": name,
                "images": prompt.images,
                "prompt": prompt.question,
                "expected": prompt.expected,
            }
            right += answer == prompt.expected
            stream.write(json.dumps({**line, "answer": answer}, ensure_ascii=False) + "\n")
    with ends_with_its_reader():
        say(str(session))
        told = f"{arguments.output}: {counted(len(prompts), 'answer')}"
        say(told + (f", {right} of {asked} as expected" if asked else ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, answer; exit status 2 with one message on bad input."""
    arguments = parsed(argv)
    try:
        ways = {"chat": converse, "prompt": answer_prompts, "input": answer_records}
        next(way for name, way in ways.items() if getattr(arguments, name))(
            Session(arguments), arguments
        )
    except ValueError as error:
        warn(f"error: {error}")
        return 2
    return 0
