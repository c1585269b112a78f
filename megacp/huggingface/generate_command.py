r"""Generate text from a megacp checkpoint on one process: for text prompts, for prompts with images
and videos, or for a file of records.

    python tools/generate.py --checkpoint runs/chat --chat
    python tools/generate.py --checkpoint runs/chat --prompt "Why is the sky blue?"
    python tools/generate.py --checkpoint out/checkpoints --image a.png --prompt 'Which?'
    python tools/generate.py --checkpoint out/checkpoints --input records.jsonl \
        --output answers.jsonl

Prompts use the format of the training data: the chat template of training, messages in megacp's own
format, or Alpaca's prompt. A model trained on plain text continues the prompt unchanged, and so
does any model with --raw. Images and videos come before the prompt, in the order of their flags.
Records have the format of preprocess_data.py: the model answers in place of the last assistant
message, which is written next to the answer as `expected`.
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
from megacp.storage.hub import no_such_folder
from megacp.storage.url import is_url
from megacp.storage.wording import counted
from megacp.training.data.manifest import THOUGHTS, answers_told, thoughts_told
from megacp.training.loop.state import first_token, last_token
from megacp.training.monitor.console import ends_with_its_reader, say, warn


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. Exit with one message that lists every invalid flag."""
    parser = OneLineParser(description="Generate text from a checkpoint saved on any device grid.")
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="DIR",
        type=path_text,
        help="--save directory of a run, or one of its steps",
    )
    add(
        "--tokenizer",
        metavar="KIND_OR_PATH",
        type=path_texts,
        help="tokenizer, as passed to preprocess_data.py build (default: the run's tokenizer)",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        help="question to answer, or text to continue; repeatable",
    )
    add("--chat", action="store_true", help="chat in the terminal; an empty line ends the chat")
    add(
        "--raw",
        action="store_true",
        help="continue the text of --prompt unchanged, without the format of the training data",
    )
    add(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help=f"set the chat template's variable `{THINKS}` (default: as in training, if all "
        "training answers agree)",
    )
    # Both flags append to one list, which keeps their order.
    for kind in ("image", "video"):
        add(
            f"--{kind}",
            type=functools.partial(_media, kind),
            action="append",
            dest="media",
            default=[],
            metavar="FILE",
            help=f"{kind} to place before each prompt; repeatable",
        )
    add("--input", type=Path, metavar="FILE.jsonl", help="records to answer, instead of --prompt")
    add("--output", type=Path, metavar="FILE.jsonl", help="file for the answers to --input")
    add("--overwrite", action="store_true", help="replace an existing --output")
    add(
        "--image-root",
        metavar="DIR",
        type=path_text,
        help="directory that relative image and video paths in --input refer to",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of tokens per answer (default: 64)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 always selects the most likely token (default: 0)",
    )
    add("--seed", type=int, default=0, metavar="N", help="random seed for sampling (default: 0)")
    arguments = parser.parse_args(argv)
    reasons = _flag_reasons(arguments)
    if reasons:
        parser.error("; ".join(reasons))
    return arguments


def _flag_reasons(arguments: argparse.Namespace) -> list[str]:
    """Return an error for each invalid flag."""
    reasons = []
    # Collect all faults; one message lists them.
    modes = [bool(arguments.prompt), arguments.chat, arguments.input is not None]
    if modes.count(True) != 1:
        reasons.append("use exactly one of --prompt, --chat and --input")
    if arguments.raw and not arguments.prompt:
        reasons.append("--raw requires --prompt")
    if (arguments.input is None) != (arguments.output is None):
        reasons.append("--input and --output must be used together")
    if arguments.input is not None and arguments.media:
        reasons.append(
            "--image and --video require --prompt or --chat; with --input, records contain paths"
        )
    if not 0 <= arguments.temperature < math.inf:
        reasons.append(f"--temperature {arguments.temperature}: must be a finite number, 0 or more")
    # Both flags may name the same file by different paths.
    paths = (arguments.input, arguments.output)
    existing = [path for path in paths if path is not None and path.exists()]
    if len(existing) == 2 and existing[0].samefile(existing[1]):
        reasons.append(f"--output {arguments.output} is the file of --input and would overwrite it")
    elif arguments.output is not None:
        try:
            require_free("--output", arguments.output, arguments.overwrite)
        except ValueError as error:
            reasons.append(str(error))
    if arguments.max_new_tokens < 1:
        reasons.append(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1")
    return reasons


def _media(kind: str, text: str) -> Media:
    """Return the file of --image or --video, which is not opened yet."""
    return Media(kind, "path", path_text(text), key=f"--{kind}")


@contextmanager
def _named(flag: str, path: str | Path) -> Iterator[None]:
    """Turn errors in the enclosed block into a ValueError with the flag and the path."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error
    except ValueError as error:  # its message begins with the path
        raise ValueError(f"{flag} {error}") from error


def read_records(path: Path, maker: PromptMaker) -> tuple[list[Prompt], list[str], list[str]]:
    """Return the prompts of a file's records, their ids (or line numbers), and their places for
    error messages.

    Raise ValueError with the line of an invalid record.
    """
    prompts: list[Prompt] = []
    ids: list[str] = []
    places: list[str] = []
    # Check the file first: `read_extent` reads it lazily.
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
        # A record may also be a list, of messages, which has no id.
        named = item.value.get("id") if isinstance(item.value, dict) else None
        if named is None:
            named = item.number or item.line
        # A record with several branches has one prompt per branch.
        prompts += found
        places += [place] * len(found)
        ids += [str(named)] * len(found)
    if not prompts:
        raise ValueError(f"--input {path} contains no record")
    return prompts, ids, places


def asked_by(kept: dict[str, Any], thinking: bool | None) -> dict[str, Any]:
    """Return the fields of a ChatTemplate that make the prompt open or close a thought.

    `thinking` selects one of the two. If it is None, prompts are written as in training, provided
    that no training answer followed a thought. Raise ValueError for a `thinking` that the template
    cannot express.
    """
    before = kept.get("before_answers", "")
    has_switch = THINKS in kept["default"]
    _, real, none = (kept.get(name, 0) for name in THOUGHTS)
    # Older checkpoints have no counts; in their training, all answers followed `before_answers`.
    empty = kept.get("empty_thoughts", "before_answers" in kept)
    # Some answers had thoughts, or most had no empty one: the template's prompt is unchanged.
    if thinking is None and (real or empty <= none):
        return {}
    # The template has a variable for this.
    if has_switch and (thinking is not None or not before):
        return {"variables": {THINKS: bool(thinking)}}
    # Without a variable, only the empty thought of training can be added to prompts.
    if thinking or (thinking is False and not before):
        flag = "--thinking" if thinking else "--no-thinking"
        raise ValueError(f"{flag}: the chat template has no variable `{THINKS}`")
    return {"before_answers": before}


class Session:
    """A checkpoint that answers prompts: its model, tokenizer, prompt format and end tokens."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Load the checkpoint.

        Raise ValueError if there is no checkpoint, or if the tokenizer differs from the run's.
        """
        folder = Path(arguments.checkpoint)
        if not is_url(arguments.checkpoint):
            if not folder.exists():
                raise ValueError(f"--checkpoint {folder}: {no_such_folder(folder)}")
            if folder.is_file():
                raise ValueError(f"--checkpoint {folder} is a file: give the folder of --save")
        try:
            generator = self.generator = Generator(arguments.checkpoint)
        except ValueError as error:
            # Training loads checkpoints with --load; this command has another flag.
            message = str(error).replace("--load ", "--checkpoint ")
            if (folder / "config.json").is_file():
                message += (
                    "; this is a Hugging Face folder: convert it with tools/convert_checkpoint.py "
                    f"--from hf --to megacp --input {folder} --output DIR, or train with --load-hf"
                )
            raise ValueError(message) from error
        # Find the tokenizer of training: next to the checkpoints, or in a dataset.
        progress = generator.progress
        rows = generator.config.model.embedding_rows
        name = arguments.tokenizer
        if name is None:
            folder = Path(str(generator.path)).parent
            data_path = generator.config.data.data_path
            name = own_tokenizer(folder, progress.tokenizer_sha256, data_path)
        if name is None:
            raise ValueError(
                f"the tokenizer of {generator.path} is neither next to the checkpoint nor in the "
                "run's --data-path; set it with --tokenizer"
            )
        tokenizer = self.tokenizer = load_tokenizer(name)
        if progress.tokenizer_sha256 not in ("", tokenizer.sha256):
            raise ValueError(f"--tokenizer {name} differs from the tokenizer of the run")
        if tokenizer.vocab_size > rows:
            raise ValueError(
                f"--tokenizer {name} has {tokenizer.vocab_size} ids, but the embedding has {rows} "
                "rows"
            )
        # Begin and end texts as in training.
        tokenizer.begins_with = first_token(progress, tokenizer.begins_with)
        tokenizer.eos_id = last_token(progress, tokenizer.eos_id)
        kept = progress.chat_template
        if kept is None and not generator.step and tokenizer.kind == "huggingface":
            # A converted model (step 0) has no training template, so use that of its folder.
            own = templates_of(tokenizer.files[0].parent)
            kept = own if "default" in own else None
        ends: tuple[int, ...] = ()
        if kept is not None:
            ends = answer_ends(kept["default"], tokenizer)
            if not ends:
                warn(
                    f"note: {generator.path}: no special token is known to end the answers of its "
                    "chat template; an answer may use all of --max-new-tokens "
                    f"{arguments.max_new_tokens}"
                )
        # A plain text ends with the tokenizer's end token, an answer with its template's.
        self.ends = ends if tokenizer.eos_id is None else (*ends, tokenizer.eos_id)
        self.by_template = kept is not None and not arguments.raw
        template = None
        if kept is not None and self.by_template:
            today = datetime.date.today().isoformat()  # some templates write the date
            template = template_of(kept["default"], tokenizer, today)
            template = dataclasses.replace(template, **asked_by(kept, arguments.thinking))
            is_mixed = bool(kept.get("empty_thoughts") and kept.get("real_thoughts"))
            if arguments.thinking is None and is_mixed:
                note = f"{thoughts_told(kept)}; choose with --thinking or --no-thinking"
                warn(f"note: {generator.path}: {note}")
        elif arguments.thinking is not None:
            raise ValueError(
                "--thinking and --no-thinking require a chat template, but these prompts use none"
            )
        # Without a template, prompts use megacp's format or Alpaca's prompt, as in training.
        forms = progress.answer_forms or {}
        self.form = ""
        if template is None and not arguments.raw:
            self.form = next((form for form in (AS_MESSAGES, ALPACA) if form in forms), "")
        self.note = ""
        if self.form:
            learned = answers_told({self.form: forms[self.form]})
            learned = learned.replace("are learned", "were learned", 1)
            self.note = (
                f"note: {learned}; prompts use the same format. --raw continues a --prompt "
                "unchanged."
            )
        as_messages = AS_MESSAGES in forms
        self.maker = PromptMaker(
            tokenizer, generator.rules, arguments.image_root, template, as_messages
        )
        self.sampling = Sampling(
            arguments.max_new_tokens, arguments.temperature, arguments.seed, self.ends
        )
        # Read the files now, for an error before the first prompt.
        self.media = []
        for one in arguments.media:
            with _named(one.key, one.value):
                data = read_regular(one.value, LARGEST_ITEM)
                self.media.append(Media(one.kind, "bytes", data, f"{one.key} {one.value}"))

    def __str__(self) -> str:
        return f"{self.generator.path} after step {self.generator.step}"

    def questions(self, text: str, said: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Return the earlier messages `said`, followed by the user's `text`.

        Images and videos are part of the first message.
        """
        content: Any = text
        if self.media and not said:
            parts = [{"type": one.kind, "bytes": one.value} for one in self.media]
            content = [*parts, {"type": "text", "text": text}]
        return [*said, {"role": "user", "content": content}]

    def ask(self, text: str, said: Sequence[dict[str, Any]] = ()) -> str:
        """Return the answer to the user's `text` after the earlier messages `said`.

        Alpaca's prompt cannot express earlier messages and leaves them out.
        """
        if self.form == ALPACA:
            asked = self.prompts(text)
        else:
            asked = self.maker.of_record({"messages": self.questions(text, said)})
        (answer,) = self.answers(asked, ["it"], len(said))
        return answer

    def prompts(self, text: str) -> list[Prompt]:
        """Return `text` as a prompt in the format of training, or unchanged to continue it.

        Raise RecordError if the prompt is empty.
        """
        if not text and not self.media:
            raise RecordError("the prompt is empty; give at least one token of text")
        if self.by_template:
            return self.maker.of_record({"messages": self.questions(text)})
        # A text that begins with `<|` already has the header of a message.
        if self.form == AS_MESSAGES and not text.startswith("<|"):
            return [self.maker.of_question(text, self.media)]
        if self.form == ALPACA:
            text = alpaca_prompt(text)
        return [self.maker.of_text(text, self.media)]

    def answers(
        self, prompts: Sequence[Prompt], names: Sequence[str], seed: int = 0
    ) -> Iterator[str]:
        """Yield the answers as text, without their end tokens."""
        sampling = dataclasses.replace(self.sampling, seed=self.sampling.seed + seed)
        for tokens in self.generator.answer(prompts, sampling, names):
            has_end = len(tokens) > 0 and int(tokens[-1]) in self.ends
            yield self.tokenizer.decode(tokens[:-1] if has_end else tokens)


def open_session(checkpoint: str, max_new_tokens: int = 64, temperature: float = 0.0) -> Session:
    """Load a checkpoint for a script or a notebook; `Session.ask` answers as --chat does.

    Raise the errors of `Session`.
    """
    numbers = [f"--max-new-tokens={max_new_tokens}", f"--temperature={temperature}"]
    return Session(parsed(["--checkpoint", checkpoint, "--chat", *numbers]))


@ends_with_its_reader()
def converse(session: Session, arguments: argparse.Namespace) -> None:
    """Answer each typed line, with the conversation so far as context."""
    said = list[dict[str, Any]]()
    if session.note:
        say(session.note)
    say(f"{session}; an empty line ends the conversation")
    if sys.stdin is None or sys.stdout is None:  # closed before the process began
        return
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while text := input("> "):
            try:
                answer = session.ask(text, said)
            except ValueError as error:
                say(f"error: {error}")
                continue
            say(answer)
            # The whole conversation is the context of the next question.
            said = [*session.questions(text, said), {"role": "assistant", "content": answer}]


@ends_with_its_reader()
def answer_prompts(session: Session, arguments: argparse.Namespace) -> None:
    """Print each prompt and its continuation."""
    names = [f"--prompt {text!r}" for text in arguments.prompt]
    prompts = []
    for name, text in zip(names, arguments.prompt, strict=True):
        try:
            prompts += session.prompts(text)
        except RecordError as error:
            # An error about an image or video already includes its flag.
            message = str(error) if "`--" in str(error) else f"{name}: {error}"
            raise ValueError(message) from error
    if session.note:
        say(session.note)
    say(str(session))
    for text, answer in zip(arguments.prompt, session.answers(prompts, names), strict=True):
        # An answer is printed by itself, a continuation after its text.
        is_answer = session.by_template or session.form
        beginning = "" if is_answer else text
        say(f"--- {text!r}\n{beginning}{answer}")


def answer_records(session: Session, arguments: argparse.Namespace) -> None:
    """Write one line of JSON per answer, in the order of the records."""
    prompts, ids, places = read_records(arguments.input, session.maker)
    compared = sum(prompt.expected is not None for prompt in prompts)
    right = 0
    with _named("--output", arguments.output):
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL: another process may have created the file since the flags were checked.
        new = os.O_TRUNC if arguments.overwrite else os.O_EXCL
        stream = os.fdopen(open_own(arguments.output, os.O_WRONLY | new), "w", encoding="utf-8")
    with stream:
        answers = session.answers(prompts, places)
        for name, prompt, answer in zip(ids, prompts, answers, strict=True):
            line = {
                "id": name,
                "images": prompt.images,
                "prompt": prompt.question,
                "expected": prompt.expected,
                "answer": answer,
            }
            # Exact matches of the text, without partial credit.
            right += answer == prompt.expected
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    with ends_with_its_reader():
        say(str(session))
        summary = f"{arguments.output}: {counted(len(prompts), 'answer')}"
        if compared:
            summary += f", {right} of {compared} as expected"
        say(summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the prompts of the command line; return 0, or 2 after an error message."""
    arguments = parsed(argv)
    try:
        session = Session(arguments)
        if arguments.chat:
            converse(session, arguments)
        elif arguments.prompt:
            answer_prompts(session, arguments)
        else:
            answer_records(session, arguments)
    except ValueError as error:
        warn(f"error: {error}")
        return 2
    return 0
