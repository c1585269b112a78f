#!/usr/bin/env python
"""Makes packed datasets of text, images, videos (`build`), and looks into them: `inspect`, `stats`,
`verify`.

This file only reads the command line and prints. argparse, as tyro costs more to import than a tiny
build takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megacp.engine.config.cli import OneLineParser, path_text, path_texts
from megacp.engine.config.yaml_file import nearest
from megacp.training.monitor.console import ends_with_its_reader, say, warn

if TYPE_CHECKING:
    from megacp.prepare.packs.settings import BuildSettings
    from megacp.training.data.vision.rules import VisionRules

EXAMPLES = """examples:
  tools/preprocess_data.py build --input corpus.jsonl --output data/corpus --tokenizer tokenizer.json --seq-length 4096
  tools/preprocess_data.py build --input part-*.jsonl.zst --output data/big --tokenizer tok.model \\
      --seq-length 32768 --oversize split --workers 16 --on-error skip --max-errors 100
  tools/preprocess_data.py build --input pairs.jsonl --output data/pairs --tokenizer tokenizer.json \\
      --seq-length 16384 --image-root photos --max-crops-per-pack 64 --cp-degrees 1,2,4,8
  tools/preprocess_data.py build ... --units 3/16 (one of 16 processes), after all of them: finish ...
  tools/preprocess_data.py inspect data/corpus --pack 0 (or stats data/corpus, verify data/corpus)
"""


def _numbers(kind: type[int] | type[float]) -> Callable[[str], list[int] | list[float]]:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = (
        f"{kind.__name__}s with commas between"  # what argparse says that a value is not
    )
    return parse


def _token_ids(text: str) -> dict[str, int]:
    return {
        name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))
    }


_token_ids.__name__ = "NAME=ID with commas between"
_INTS = _numbers(int)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Read pairs of two names; ValueError where one is missing."""
    found = []
    for part in text.split(","):
        own, equals, name = part.partition("=")
        if not (own and equals and name):
            raise ValueError(part)
        found.append((own.strip(), name.strip()))
    return tuple(found)


_pairs.__name__ = "OURS=THEIRS with commas between"
_PAIRS: dict[str, Any] = {"type": _pairs, "default": (), "metavar": "OURS=THEIRS,..."}


class _CommandParser(OneLineParser):
    """The parser of one command: it names the flag that is nearest to an unknown one."""

    def parse_known_args(self, *given: Any) -> Any:  # type: ignore[override]
        """Parse as argparse does; an unknown flag ends the command."""
        found, unknown = super().parse_known_args(*given)
        if unknown:
            self.error(
                "unrecognized arguments: "
                f"{' '.join(unknown)}{nearest(unknown[0], self._option_string_actions)}"
            )
        return found, unknown


def preprocess_parser() -> argparse.ArgumentParser:
    """The commands and their flags."""
    parser = OneLineParser(
        description="Make packed datasets from text, images and videos, and look into them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    made = "tokenize and pack files of records; the result does not depend on --workers or on interruptions"
    work = _add_build_flags(commands.add_parser("build", help=made, description=made))
    work.add_argument(
        "--overwrite", action="store_true", help="delete the dataset in DIR first, finished or not"
    )
    work.add_argument(
        "--units", metavar="I/N", help="build this part alone, as one of N processes; then `finish`"
    )
    parts = "make a dataset of the parts that `build --units I/N` made, with their flags; names what is missing"
    _add_build_flags(commands.add_parser("finish", help=parts, description=parts))
    inspect = commands.add_parser(
        "inspect", help="show packs: documents, lengths, loss weights, beginnings"
    )
    inspect.add_argument("dataset", type=path_text)
    inspect.add_argument(
        "--pack", type=int, nargs="+", default=[0], metavar="N", help="which packs (default: 0)"
    )
    inspect.add_argument(
        "--tokenizer",
        metavar="KIND_OR_PATH",
        type=path_texts,
        help="default: the one kept in the dataset",
    )
    inspect.add_argument(
        "--characters", type=int, default=240, metavar="N", help="how much of each document (240)"
    )
    inspect.add_argument(
        "--documents", type=int, default=10, metavar="N", help="how many of a pack; 0 is all (10)"
    )
    inspect.add_argument(
        "--html",
        metavar="FILE",
        type=path_text,
        help="write one pack as a page, with its images; no text",
    )
    inspect.add_argument(
        "--overwrite", action="store_true", help="replace the page where it exists"
    )
    stats = commands.add_parser(
        "stats", help="counts, packing efficiency, histogram of lengths, refused records"
    )
    stats.add_argument("dataset", type=path_text)
    stats.add_argument("--json", action="store_true", help="print JSON")
    verify = commands.add_parser(
        "verify", help="read every byte: sizes, hashes, bounds, token ids; exit 1 on damage"
    )
    verify.add_argument("dataset", nargs="+", type=path_text)
    return parser


_YES_OR_NO: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_LIST: dict[str, Any] = {
    "type": lambda text: tuple(name for name in text.split(",") if name),
    "default": (),
}
_RECORDS = "what is refused unless it is named here, for it would be lost"
_IMAGES = "any of these, or --max-crops-per-pack, lets records hold images"
_INPUTS = ".jsonl, .json, .gz, .zst, .parquet or .tar; paths, URLs, patterns with *"
_TOKENIZERS = "byte | FOLDER of a model | FILE.model (SentencePiece) | tokenizer.json | vocab.json,merges.txt (GPT-2)"
_TEMPLATES = (
    "what writes conversations: auto (the tokenizer's template), its NAME, FILE.jinja, ignore (the form of these "
    "tools) or alpaca (Alpaca's prompt of 2023, for its records alone); default: auto where the tokenizer has a "
    "template, else Alpaca's records as alpaca does and others as ignore does"
)
_CORES = len(os.sched_getaffinity(0))


BUILD_FLAGS: dict[tuple[str, str], list[tuple[str, str, dict[str, Any]]]] = {
    ("input and output", ""): [
        ("--input", _INPUTS, {"type": path_text, "nargs": "+", "required": True, "metavar": "F"}),
        (
            "--output",
            "directory of the dataset",
            {"type": path_text, "required": True, "metavar": "DIR"},
        ),
        (
            "--valid-share",
            "part of the records that becomes DIR/valid, for --valid-data-path (0)",
            {"type": float, "default": 0.0, "metavar": "X"},
        ),
        (
            "--text-key",
            "key of plain text in a record (text)",
            {"default": "text", "metavar": "KEY"},
        ),
    ],
    ("records", _RECORDS): [
        (
            "--ignore-keys",
            "unknown keys of records to leave out; * in names",
            {**_LIST, "metavar": "A,B"},
        ),
        ("--context-roles", "further roles of messages, not learned", {**_LIST, "metavar": "A,B"}),
        (
            "--columns",
            "keys of records by other names, as in prompt=question,completion=answer",
            _PAIRS,
        ),
        (
            "--roles",
            "roles of messages by other names, as in user=customer,assistant=agent",
            _PAIRS,
        ),
        (
            "--prefix-tree",
            "make a tree of what `rollouts` or `completions` share (no)",
            {"action": "store_true"},
        ),
        ("--chat-template", _TEMPLATES, {"type": path_text, "metavar": "T"}),
        (
            "--chat-template-date",
            "the date that a template writes (needed where it does)",
            {"metavar": "YYYY-MM-DD"},
        ),
    ],
    ("tokens", ""): [
        (
            "--tokenizer",
            _TOKENIZERS,
            {"type": path_texts, "required": True, "metavar": "KIND_OR_PATH"},
        ),
        ("--append-eod", "end documents (yes)", {**_YES_OR_NO, "default": True}),
        (
            "--prepend-bos",
            "begin documents with the tokenizer's first token (as its files say)",
            _YES_OR_NO,
        ),
        (
            "--eod-token",
            "the token that ends a document, when its files do not say",
            {"metavar": "TEXT"},
        ),
        (
            "--tokenizer-engine",
            "auto: the fast engine where its ids are identical (auto)",
            {"choices": ("auto", "reference"), "default": "auto"},
        ),
    ],
    ("packs", ""): [
        ("--seq-length", "tokens of a pack", {"type": int, "required": True, "metavar": "N"}),
        (
            "--oversize",
            "what to do with a document longer than a pack (error)",
            {"choices": ("error", "drop", "split", "truncate"), "default": "error"},
        ),
        (
            "--pad-multiple",
            "pad every document to this (1)",
            {"type": int, "default": 1, "metavar": "N"},
        ),
        (
            "--seed",
            "shuffle documents within a window (default: input order)",
            {"type": int, "metavar": "N"},
        ),
        (
            "--window-tokens",
            "tokens packed at a time (2^24)",
            {"type": int, "default": 1 << 24, "metavar": "N"},
        ),
        (
            "--max-crops-per-pack",
            "second budget of a pack: image crops (none)",
            {"type": int, "metavar": "N"},
        ),
        (
            "--cp-degrees",
            "context-parallel sizes planned for (1,2,4,8,16)",
            {"type": _INTS, "default": "1,2,4,8,16", "metavar": "A,B"},
        ),
    ],
    ("images", _IMAGES): [
        (
            "--image-root",
            "directory or URL that paths of images are relative to",
            {"type": path_text, "metavar": "DIR"},
        ),
        (
            "--image-urls",
            "how URLs begin that records may name images by (none)",
            {**_LIST, "metavar": "URL,URL"},
        ),
        (
            "--max-image-bytes",
            "largest image that a path or a URL may name (64 MiB)",
            {"type": int, "default": 64 << 20, "metavar": "N"},
        ),
        (
            "--max-video-bytes",
            "largest video that a path or a URL may name (512 MiB)",
            {"type": int, "default": 512 << 20, "metavar": "N"},
        ),
    ],
    ("work", ""): [
        (
            "--workers",
            "processes (default: one for each core)",
            {"type": int, "default": _CORES, "metavar": "N"},
        ),
        (
            "--executor",
            "what runs the units (local)",
            {"choices": ("local", "ray"), "default": "local"},
        ),
        (
            "--ray-address",
            "cluster of --executor ray, or auto (one that is started here)",
            {"metavar": "A"},
        ),
        (
            "--unit-bytes",
            "input of one shard (8 MiB or 256 packs; with images about 1024 records)",
            {"type": int, "default": 0, "metavar": "N"},
        ),
        ("--on-error", "at a bad record (fail)", {"choices": ("fail", "skip"), "default": "fail"}),
        (
            "--max-errors",
            "with skip: give up after more bad records than N",
            {"type": int, "metavar": "N"},
        ),
        (
            "--max-record-bytes",
            "longest record (64 MiB)",
            {"type": int, "default": 64 << 20, "metavar": "N"},
        ),
    ],
}
"""Flags of a build by their group: name, what --help shows, how argparse reads it."""


def _add_build_flags(build: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags of a build; the group of those that change nothing of its result."""
    for (title, description), flags in BUILD_FLAGS.items():
        group = build.add_argument_group(title, description or None)
        for flag, text, how in [*flags, *(_rule_flags() if title == "images" else [])]:
            group.add_argument(flag, help=text, **how)
    return group


def _rule_flags() -> list[tuple[str, str, dict[str, Any]]]:
    """The flags of image rules: fields of all families, each with its defaults."""
    from megacp.training.data.vision.decoding import RULES

    first = next(iter(RULES))
    whose = (
        f"whose rules make patches and tokens: {' or '.join(RULES)} (the tokenizer's folder's, "
        f"else {first})"
    )
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("--vision-family", whose, {"dest": "family", "metavar": "NAME"})
    ]
    owners: dict[str, dict[str, Any]] = {}  # name of a field -> family -> its field
    for family, rules in RULES.items():
        for field in fields(rules):  # type: ignore[arg-type]
            owners.setdefault(field.name, {})[family] = field
    for name, own in owners.items():
        defaults = {family: _shown(field.default) for family, field in own.items()}
        is_shared = len(own) == len(RULES) and len({*defaults.values()}) == 1
        told = (
            [*defaults.values()][:1]
            if is_shared
            else [f"{family}: {text}" for family, text in defaults.items()]
        )
        field = next(iter(own.values()))
        flag = field.metadata["flag"] or f"--{name.replace('_', '-')}"
        text = field.metadata["help"] + (f" ({', '.join(told)})" if any(defaults.values()) else "")
        found.append((flag, text, {"dest": name, **_read(field.default)}))
    return found


def _shown(default: Any) -> str:
    """A default as the command line has it; empty where the help says what it is."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "" if default in (None, MISSING) else str(default)


def _read(default: Any) -> dict[str, Any]:
    """How argparse reads what has the type of a field's default; MISSING: what dictionaries
    have.
    """
    if isinstance(default, tuple):
        return {"type": _numbers(type(default[0])), "metavar": ",".join("ABC"[: len(default)])}
    if default is MISSING:
        return {"type": _token_ids, "metavar": "NAME=ID,..."}
    if isinstance(default, bool | None):
        return _YES_OR_NO
    return {"type": type(default), "metavar": {int: "N", float: "X", str: "WORD"}[type(default)]}


def _model_folder(args: argparse.Namespace) -> Path:
    """Return the folder that --tokenizer names, or that its first file is in."""
    first = Path(args.tokenizer.partition(",")[0])
    return first.parent if first.is_file() else first


def _family(args: argparse.Namespace, families: Collection[str]) -> dict[str, str]:
    """Return the family of the model in whose folder the tokenizer is; empty where the folder does
    not say.

    ValueError where --vision-family names another one.
    """
    from megacp.prepare.tokenize.beside import read_object
    from megacp.training.data.vision.decoding import RULES

    config = _model_folder(args) / "config.json"
    content = read_object(config) if config.is_file() else {}
    model_type = f"{content.get('model_type')!s:.80}"
    found = next((name for name in families if model_type in RULES[name].model_types), None)
    if found is None:
        if "vision_config" in content and args.family is None:
            raise ValueError(
                f"--vision-family: {config} is of a {model_type}; choose one of "
                f"{', '.join(families)}"
            )
        return {}
    if args.family not in (None, found):
        raise ValueError(
            f"--vision-family {args.family}: {config} is of a {model_type}, leave the flag out"
        )
    if args.family is None:
        warn(f"--vision-family {found}: as {config} says")
    return {"family": found}


def _image_rules(args: argparse.Namespace, given: dict[str, Any]) -> VisionRules:
    """Return the rules of images: flags in `given`, then the files in the tokenizer's folder, then
    the family's own.

    Lines on standard error name the files, and each flag that overrides one of their fields.
    """
    from megacp.prepare.media import processor_files
    from megacp.training.data.vision.decoding import RULES, rules_from_dict

    of_folder = _family(args, RULES)
    family = of_folder.get("family") or given.get("family") or next(iter(RULES))
    folder = _model_folder(args)
    told: processor_files.FolderRules | None = None
    if family in RULES:
        try:
            told = processor_files.read_processor(folder, family)
        except processor_files.OtherProcessorError as error:
            # config.json names no family that we know, so the files may belong to another one than
            # --vision-family
            if of_folder:
                raise ValueError(f"--tokenizer {error}") from error
            print(f"image rules: not read, {error}", file=sys.stderr)
        except (ValueError, OSError) as error:
            raise ValueError(f"--tokenizer {error}") from error
    if told is None:
        if of_folder:
            missing = f"{folder} has no {processor_files.IMAGES}"
            print(
                f"image rules: the defaults of --vision-family {family}, as {missing}",
                file=sys.stderr,
            )
        return rules_from_dict(of_folder | given)
    if of_folder and (misfit := processor_files.misfit_of_config(told)):
        raise ValueError(f"--tokenizer {folder}: {misfit}")
    print(f"image rules: as {', '.join(told.files)} of {folder} say", file=sys.stderr)
    rules = rules_from_dict({"family": family, **told.values, **of_folder, **given})
    overridden = told.differences(rules.to_dict())
    notes = list(told.notes)
    if overridden:
        notes.append(
            f"{'; '.join(overridden)}: the flag counts, and --load-hf {folder} refuses packs with "
            "other rules"
        )
    for note in notes:
        print(f"image rules: {note}", file=sys.stderr)
    return rules


def _settings(args: argparse.Namespace) -> BuildSettings:
    """The settings of a build, unchecked."""
    from megacp.prepare.packs.settings import BuildSettings
    from megacp.training.data.vision.decoding import RULES

    given = {
        field.name: getattr(args, field.name)
        for field in fields(BuildSettings)
        if field.name in args
    }
    lists: dict[str, Any] = {
        name: tuple(value) for name, value in given.items() if isinstance(value, list)
    }
    names = {"family", *(f.name for rules in RULES.values() for f in fields(rules))}  # type: ignore[arg-type]
    rules = {name: value for name in sorted(names) if (value := getattr(args, name)) is not None}
    if (
        rules or args.image_urls or (args.image_root, args.max_crops_per_pack) != (None, None)
    ):  # there are images
        lists["image_rules"] = _image_rules(args, rules)
    return BuildSettings(**{**given, **lists})


def _say(text: str) -> None:
    with ends_with_its_reader():
        say(text)


def _build(args: argparse.Namespace) -> int:
    from megacp.prepare.packs.run import build

    sentences = []
    for settings in _settings(args).shares:
        if args.command == "finish":
            summary = build(settings, sys.stderr, builds_missing=False)
        else:
            summary = build(settings, sys.stderr, args.overwrite, _part(args))
        sentences.append(f"{settings.output}: {summary.sentence}")
    _say("\n".join(sentences))
    return 0


def _part(args: argparse.Namespace) -> tuple[int, int] | None:
    """Which part of how many --units names; None = all of the build."""
    if args.units is None:
        return None
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", args.units)
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(
            f"--units {args.units}: expected I/N with 0 <= I < N, as in 0/16 and 15/16"
        )
    if args.overwrite:
        raise ValueError(
            f"--overwrite with --units {args.units} would delete what other parts have built"
        )
    return int(match[1]), int(match[2])


def _inspect(args: argparse.Namespace) -> int:
    from megacp.prepare.describe import describe_pack
    from megacp.prepare.tokenize.kept import kept_tokenizer
    from megacp.prepare.tokenize.tokenizer import load_tokenizer
    from megacp.training.data.reader import PackedDataset

    dataset = PackedDataset(args.dataset)
    tokenizer = load_tokenizer(args.tokenizer or kept_tokenizer(args.dataset), engine="reference")
    if tokenizer.sha256 != dataset.manifest.tokenizer.sha256:
        raise ValueError(
            f"--tokenizer {args.tokenizer} is not the one {args.dataset} was made with (sha256 "
            "differs)"
        )
    if args.html is not None:
        from megacp.prepare.inspect_page import write_page

        if len(args.pack) > 1:
            raise ValueError(f"--html shows one pack, --pack names {len(args.pack)}")
        write_page(args.html, dataset, args.pack[0], tokenizer, args.overwrite)
        _say(f"{args.html}: pack {args.pack[0]} of {args.dataset}")
        return 0
    for index in args.pack:
        _say(describe_pack(dataset, index, tokenizer, args.characters, args.documents))
    return 0


def _stats(args: argparse.Namespace) -> int:
    from megacp.prepare.describe import statistics, statistics_text

    values = statistics(args.dataset)
    _say(json.dumps(values, indent=1) if args.json else statistics_text(values))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megacp.prepare.verify import verify

    damaged = 0
    for path in args.dataset:
        reasons = verify(path)
        damaged += bool(reasons)
        for reason in reasons:
            warn(f"error: {reason}")
        if not reasons:
            _say(f"{path}: sound")
    return 1 if damaged else 0


COMMANDS = {
    "build": _build,
    "finish": _build,
    "inspect": _inspect,
    "stats": _stats,
    "verify": _verify,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 damage found, 2 an error, 130
    interrupted.
    """
    args = preprocess_parser().parse_args(argv)
    from megacp.prepare.packs.workers import WorkerFailed

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        return COMMANDS[args.command](args)
    except (ValueError, OSError, WorkerFailed) as error:
        warn(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        again = (
            "; run the same command again to continue"
            if args.command in ("build", "finish")
            else ""
        )
        warn(f"interrupted{again}")
        return 130
