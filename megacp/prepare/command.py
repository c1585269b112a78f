#!/usr/bin/env python
"""Command line of preprocess_data.py: build packed datasets and look into them.

`build` and `finish` make a dataset; `inspect`, `stats` and `verify` read one. This file only parses
flags and prints. It uses argparse because importing tyro takes longer than a tiny build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megacp.engine.config.cli import OneLineParser, path_text, path_texts
from megacp.engine.config.other_programs import nearest
from megacp.training.monitor.console import ends_with_its_reader, say, warn

if TYPE_CHECKING:
    from megacp.prepare.packs.settings import BuildSettings
    from megacp.training.data.vision.rules import VisionRules

EXAMPLES = """examples:
  tools/preprocess_data.py build --input corpus.jsonl --output data/corpus \\
      --tokenizer tokenizer.json --seq-length 4096
  tools/preprocess_data.py build --input part-*.jsonl.zst --output data/big --tokenizer tok.model \\
      --seq-length 32768 --oversize split --workers 16 --on-error skip --max-errors 100
  tools/preprocess_data.py build --input pairs.jsonl --output data/pairs \\
      --tokenizer tokenizer.json --seq-length 16384 --image-root photos --max-crops-per-pack 64 \\
      --cp-degrees 1,2,4,8
  tools/preprocess_data.py build ... --units 3/16    one of 16 processes; then `finish ...`
  tools/preprocess_data.py inspect data/corpus --pack 0    (or stats ..., verify ...)
"""


# ---- types of flags


def _numbers(kind: type[int] | type[float]) -> Callable[[str], list[int] | list[float]]:
    """Return a parser of comma-separated numbers, as the `type` of a flag."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    # argparse puts this name into its message about an invalid value
    parse.__name__ = f"comma-separated {kind.__name__}s"
    return parse


def _token_ids(text: str) -> dict[str, int]:
    """Parse comma-separated pairs of a token name and its id."""
    ids = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        ids[name] = int(value)
    return ids


_token_ids.__name__ = "comma-separated NAME=ID"
_INTS = _numbers(int)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Parse comma-separated pairs of names. Raise ValueError if a name is missing."""
    found = []
    for part in text.split(","):
        own, equals, name = part.partition("=")
        if not (own and equals and name):
            raise ValueError(part)
        found.append((own.strip(), name.strip()))
    return tuple(found)


_pairs.__name__ = "comma-separated OURS=THEIRS"
_PAIRS: dict[str, Any] = {"type": _pairs, "default": (), "metavar": "OURS=THEIRS,..."}


# ---- the parser


class _CommandParser(OneLineParser):
    """Parser of one command; its error for an unknown flag suggests the nearest known flag."""

    def parse_known_args(self, *given: Any) -> Any:  # type: ignore[override]
        """Parse like argparse, but exit with an error if a flag is unknown."""
        found, unknown = super().parse_known_args(*given)
        # argparse itself would report unknown flags without a suggestion
        if unknown:
            self.error(
                "unrecognized arguments: "
                f"{' '.join(unknown)}{nearest(unknown[0], self._option_string_actions)}"
            )
        return found, unknown


def preprocess_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their flags."""
    parser = OneLineParser(
        description="Make packed datasets from text, images and videos, and look into them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # build and finish share their flags, so the parts of a build can be finished by the same line
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    made = (
        "tokenize records and pack them into a dataset; "
        "the result depends neither on --workers nor on interruptions"
    )
    work = _add_build_flags(commands.add_parser("build", help=made, description=made))
    work.add_argument(
        "--overwrite",
        action="store_true",
        help="delete the dataset in DIR first, whether finished or not",
    )
    work.add_argument(
        "--units",
        metavar="I/N",
        help="build only part I of N, for N independent processes; run `finish` after all of them",
    )
    parts = (
        "combine the parts of `build --units I/N` into a dataset, given the same flags; "
        "report missing parts"
    )
    _add_build_flags(commands.add_parser("finish", help=parts, description=parts))

    # the remaining commands only read a finished dataset
    inspect = commands.add_parser(
        "inspect", help="show packs: documents, lengths, loss weights and excerpts"
    )
    inspect.add_argument("dataset", type=path_text)
    inspect.add_argument(
        "--pack",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="packs to show, by number (0)",
    )
    inspect.add_argument(
        "--tokenizer",
        metavar="KIND_OR_PATH",
        type=path_texts,
        help="tokenizer for decoding (default: the copy in the dataset)",
    )
    inspect.add_argument(
        "--characters",
        type=int,
        default=240,
        metavar="N",
        help="characters to show of each document (240)",
    )
    inspect.add_argument(
        "--documents",
        type=int,
        default=10,
        metavar="N",
        help="documents to show of each pack; 0 shows all (10)",
    )
    inspect.add_argument(
        "--html",
        metavar="FILE",
        type=path_text,
        help="write one pack with its images to an HTML page instead of printing it",
    )
    inspect.add_argument("--overwrite", action="store_true", help="replace an existing page")
    stats = commands.add_parser(
        "stats", help="print counts, packing efficiency, length histogram and rejected records"
    )
    stats.add_argument("dataset", type=path_text)
    stats.add_argument("--json", action="store_true", help="print JSON")
    verify = commands.add_parser(
        "verify",
        help="check every byte: sizes, hashes, bounds and token ids; exit with 1 on damage",
    )
    verify.add_argument("dataset", nargs="+", type=path_text)
    return parser


# keyword arguments for argparse that several flags share
_YES_OR_NO: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_LIST: dict[str, Any] = {
    "type": lambda text: tuple(name for name in text.split(",") if name),
    "default": (),
}
# texts that --help shows for groups and for flags with long descriptions
_RECORDS = (
    "A record with a field or role that is neither known nor listed here is an error, "
    "because its content would be lost."
)
_IMAGES = "Records may contain images if any of these flags or --max-crops-per-pack is given."
_INPUTS = (
    "input files (.jsonl, .json, .gz, .zst, .parquet, .tar, .csv, .tsv or .txt), or tokenized "
    "Megatron datasets (.idx): paths, URLs, or patterns with *"
)
_TOKENIZERS = (
    "byte | FOLDER of a model | FILE.model (SentencePiece) | tokenizer.json | "
    "vocab.json,merges.txt (GPT-2)"
)
_TEMPLATES = (
    "chat template for conversations: auto (the tokenizer's own), the NAME of a built-in one, "
    "FILE.jinja, ignore (plain role headers), or alpaca (the 2023 Alpaca prompt; accepts only "
    "Alpaca records); default: auto if the tokenizer has a template, otherwise alpaca for Alpaca "
    "records and ignore for all other records"
)
# cores that this process may use, which a scheduler can restrict
_CORES = len(os.sched_getaffinity(0))


BUILD_FLAGS: dict[tuple[str, str], list[tuple[str, str, dict[str, Any]]]] = {
    ("input and output", ""): [
        ("--input", _INPUTS, {"type": path_text, "nargs": "+", "required": True, "metavar": "F"}),
        (
            "--output",
            "dataset directory to write",
            {"type": path_text, "required": True, "metavar": "DIR"},
        ),
        (
            "--valid-share",
            "fraction of records to put into DIR/valid, for --valid-data-path (0)",
            {"type": float, "default": 0.0, "metavar": "X"},
        ),
        (
            "--text-key",
            "key under which records have plain text (text)",
            {"default": "text", "metavar": "KEY"},
        ),
    ],
    # these flags decide which records are accepted and how their keys are read
    ("records", _RECORDS): [
        (
            "--ignore-keys",
            "unknown record keys to leave out; names may contain *",
            {**_LIST, "metavar": "A,B"},
        ),
        (
            "--context-roles",
            "extra message roles; the loss excludes their messages",
            {**_LIST, "metavar": "A,B"},
        ),
        (
            "--columns",
            "other names of record keys, such as prompt=question,completion=answer",
            _PAIRS,
        ),
        (
            "--roles",
            "other names of message roles, such as user=customer,assistant=agent",
            _PAIRS,
        ),
        (
            "--prefix-tree",
            "merge the common prefixes of `rollouts` or `completions` into a tree (no)",
            {"action": "store_true"},
        ),
        ("--chat-template", _TEMPLATES, {"type": path_text, "metavar": "T"}),
        (
            "--chat-template-date",
            "date for templates that write the current date; required by them",
            {"metavar": "YYYY-MM-DD"},
        ),
    ],
    # how texts become token ids
    ("tokens", ""): [
        (
            "--tokenizer",
            _TOKENIZERS,
            {"type": path_texts, "required": True, "metavar": "KIND_OR_PATH"},
        ),
        (
            "--append-eod",
            "append the end-of-document token to each document (yes)",
            {**_YES_OR_NO, "default": True},
        ),
        (
            "--prepend-bos",
            "begin each document with the BOS token (default: as the tokenizer's files say)",
            _YES_OR_NO,
        ),
        (
            "--eod-token",
            "end-of-document token, if the tokenizer's files do not name one",
            {"metavar": "TEXT"},
        ),
        (
            "--tokenizer-engine",
            "implementation of the tokenizer: auto uses a fast one if it gives identical ids, "
            "reference always uses the tokenizer's own library (auto)",
            {"choices": ("auto", "reference"), "default": "auto"},
        ),
    ],
    # the length of packs, and how documents are put into them
    ("packs", ""): [
        ("--seq-length", "tokens per pack", {"type": int, "required": True, "metavar": "N"}),
        (
            "--oversize",
            "handling of documents longer than a pack (error)",
            {"choices": ("error", "drop", "split", "truncate"), "default": "error"},
        ),
        (
            "--pad-multiple",
            "pad each document to a multiple of N tokens (1)",
            {"type": int, "default": 1, "metavar": "N"},
        ),
        (
            "--seed",
            "seed for shuffling documents within a window (default: keep the input order)",
            {"type": int, "metavar": "N"},
        ),
        (
            "--window-tokens",
            "tokens per packing window (2^24)",
            {"type": int, "default": 1 << 24, "metavar": "N"},
        ),
        (
            "--max-crops-per-pack",
            "maximum number of image crops per pack (unlimited)",
            {"type": int, "metavar": "N"},
        ),
        (
            "--cp-degrees",
            "context-parallel sizes to plan for (1,2,4,8,16)",
            {"type": _INTS, "default": "1,2,4,8,16", "metavar": "A,B"},
        ),
    ],
    # _rule_flags adds the flags of the vision families to this group
    ("images", _IMAGES): [
        (
            "--image-root",
            "directory or URL to which image paths are relative",
            {"type": path_text, "metavar": "DIR"},
        ),
        (
            "--image-urls",
            "URL prefixes that records may use for images (none)",
            {**_LIST, "metavar": "URL,URL"},
        ),
        (
            "--max-image-bytes",
            "largest allowed image file, in bytes (64 MiB)",
            {"type": int, "default": 64 << 20, "metavar": "N"},
        ),
        (
            "--max-video-bytes",
            "largest allowed video file, in bytes (512 MiB)",
            {"type": int, "default": 512 << 20, "metavar": "N"},
        ),
    ],
    # must be the last group: _add_build_flags returns it for --overwrite and --units
    ("work", ""): [
        (
            "--workers",
            "worker processes (default: one per core)",
            {"type": int, "default": _CORES, "metavar": "N"},
        ),
        (
            "--executor",
            "executor of the work units (local)",
            {"choices": ("local", "ray"), "default": "local"},
        ),
        (
            "--ray-address",
            "address of the Ray cluster for --executor ray; auto starts a local cluster",
            {"metavar": "A"},
        ),
        (
            "--unit-bytes",
            "input bytes per shard (8 MiB or 256 packs; with images about 1024 records)",
            {"type": int, "default": 0, "metavar": "N"},
        ),
        (
            "--on-error",
            "handling of bad records (fail)",
            {"choices": ("fail", "skip"), "default": "fail"},
        ),
        (
            "--max-errors",
            "with --on-error skip: stop after more than N bad records",
            {"type": int, "metavar": "N"},
        ),
        (
            "--max-record-bytes",
            "largest allowed record, in bytes (64 MiB)",
            {"type": int, "default": 64 << 20, "metavar": "N"},
        ),
    ],
}
"""Flags of `build` and `finish` by group: name, help text, keyword arguments for argparse."""


def _add_build_flags(build: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the build flags to a parser; return the last group.

    The flags of the last group ("work") do not affect the result of a build.
    """
    for (title, description), flags in BUILD_FLAGS.items():
        group = build.add_argument_group(title, description or None)
        rule_flags = _rule_flags() if title == "images" else []
        # the fields of the vision families become flags, too
        for flag, text, how in [*flags, *rule_flags]:
            group.add_argument(flag, help=text, **how)
    return group


def _rule_flags() -> list[tuple[str, str, dict[str, Any]]]:
    """Return the flags for image rules: the fields of every family, with their defaults."""
    from megacp.training.data.vision.decoding import RULES

    first = next(iter(RULES))
    whose = (
        f"vision family whose rules make patches and tokens: {' or '.join(RULES)} (default: the "
        f"family of the tokenizer's folder, or {first})"
    )
    # RULES is the registry of families, so a new family gets its flags without a change here
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("--vision-family", whose, {"dest": "family", "metavar": "NAME"})
    ]
    owners: dict[str, dict[str, Any]] = {}  # field name -> family -> field
    for family, rules in RULES.items():
        for field in fields(rules):  # type: ignore[arg-type]
            owners.setdefault(field.name, {})[family] = field
    for name, own in owners.items():
        defaults = {family: _shown(field.default) for family, field in own.items()}
        # a default that all families share is shown once, without the families' names
        is_shared = len(own) == len(RULES) and len(set(defaults.values())) == 1
        if is_shared:
            shown = next(iter(defaults.values()))
        else:
            shown = ", ".join(f"{family}: {text}" for family, text in defaults.items())
        # a shared field takes its flag, help text and type from the first family
        field = next(iter(own.values()))
        flag = field.metadata["flag"] or f"--{name.replace('_', '-')}"
        text = field.metadata["help"]
        if any(defaults.values()):
            text += f" ({shown})"
        found.append((flag, text, {"dest": name, **_read(field.default)}))
    return found


def _shown(default: Any) -> str:
    """Format a default as on the command line; "" if the help text already describes it."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "" if default in (None, MISSING) else str(default)


def _read(default: Any) -> dict[str, Any]:
    """Return argparse arguments for the type of a field's default; MISSING means a dictionary."""
    # a tuple has a fixed number of values, such as A,B,C for red, green and blue
    if isinstance(default, tuple):
        return {"type": _numbers(type(default[0])), "metavar": ",".join("ABC"[: len(default)])}
    if default is MISSING:
        return {"type": _token_ids, "metavar": "NAME=ID,..."}
    if isinstance(default, bool | None):
        return _YES_OR_NO
    return {"type": type(default), "metavar": {int: "N", float: "X", str: "WORD"}[type(default)]}


def _model_folder(args: argparse.Namespace) -> Path:
    """Return the folder given by --tokenizer, or the folder of its first file."""
    first = Path(args.tokenizer.partition(",")[0])
    return first.parent if first.is_file() else first


def _family(args: argparse.Namespace, families: Collection[str]) -> dict[str, str]:
    """Return the family of the model in the tokenizer's folder as {"family": name}; {} if unknown.

    Raise ValueError if --vision-family names a different family, or if it is needed but missing.
    """
    from megacp.prepare.tokenize.beside import read_object
    from megacp.training.data.vision.decoding import RULES

    config = _model_folder(args) / "config.json"
    content = read_object(config) if config.is_file() else {}
    model_type = f"{content.get('model_type')!s:.80}"
    found = next((name for name in families if model_type in RULES[name].model_types), None)
    if found is None:
        # an unknown model with a vision tower: any default family would make wrong tokens
        if "vision_config" in content and args.family is None:
            raise ValueError(
                f"--vision-family: {config} belongs to a {model_type} model; choose one of "
                f"{', '.join(families)}"
            )
        return {}
    if args.family not in (None, found):
        raise ValueError(
            f"--vision-family {args.family}: {config} belongs to a {model_type} model; leave the "
            "flag out"
        )
    # report the choice, because it decides about every image token
    if args.family is None:
        warn(f"--vision-family {found}: taken from {config}")
    return {"family": found}


def _image_rules(args: argparse.Namespace, given: dict[str, Any]) -> VisionRules:
    """Return the image rules. Flags in `given` override the files in the tokenizer's folder, which
    override the family's defaults.

    Log to standard error which files were read and which of their fields a flag overrides.
    """
    from megacp.prepare.media import processor_files
    from megacp.training.data.vision.decoding import RULES, rules_from_dict

    of_folder = _family(args, RULES)
    # the folder's family wins, because `_family` has refused a different flag
    family = of_folder.get("family") or given.get("family") or next(iter(RULES))
    folder = _model_folder(args)
    told: processor_files.FolderRules | None = None
    if family in RULES:
        try:
            told = processor_files.read_processor(folder, family)
        except processor_files.OtherProcessorError as error:
            # config.json names no known family, so the processor files may belong to a model that
            # differs from --vision-family
            if of_folder:
                raise ValueError(f"--tokenizer {error}") from error
            print(f"image rules: files not used: {error}", file=sys.stderr)
        except (ValueError, OSError) as error:
            raise ValueError(f"--tokenizer {error}") from error
    # no processor files: use the defaults, and say so if the model is known
    if told is None:
        if of_folder:
            missing = f"{folder} has no {processor_files.IMAGES}"
            print(
                f"image rules: defaults of --vision-family {family}, because {missing}",
                file=sys.stderr,
            )
        return rules_from_dict(of_folder | given)
    # the processor files may state rules that contradict the vision tower in config.json
    if of_folder and (misfit := processor_files.misfit_of_config(told)):
        raise ValueError(f"--tokenizer {folder}: {misfit}")
    print(f"image rules: read from {', '.join(told.files)} in {folder}", file=sys.stderr)
    rules = rules_from_dict({"family": family, **told.values, **of_folder, **given})
    overridden = told.differences(rules.to_dict())
    notes = list(told.notes)
    if overridden:
        notes.append(
            f"{'; '.join(overridden)}: the flag is used, and --load-hf {folder} refuses packs with "
            "different rules"
        )
    for note in notes:
        print(f"image rules: {note}", file=sys.stderr)
    return rules


def build_settings(words: Sequence[str]) -> BuildSettings:
    """Return the settings of `build` with these flags; their values are not checked yet.

    Exit with an error for unknown flags and for values of the wrong type.
    """
    return _settings(preprocess_parser().parse_args(["build", *words]))


def _settings(args: argparse.Namespace) -> BuildSettings:
    """Return the settings of a build; their values are not checked yet."""
    from megacp.prepare.packs.settings import BuildSettings
    from megacp.training.data.vision.decoding import RULES

    given = {}
    for field in fields(BuildSettings):
        # some fields have no flag, such as `is_valid`
        if field.name in args:
            given[field.name] = getattr(args, field.name)
    changed: dict[str, Any] = {}
    for name, value in given.items():
        # argparse returns lists, but the settings have tuples
        if isinstance(value, list):
            changed[name] = tuple(value)
    # every family's rules are flags; a value other than None was given on the command line
    names = {"family"}
    for family_rules in RULES.values():
        names.update(field.name for field in fields(family_rules))  # type: ignore[arg-type]
    rules = {}
    for name in sorted(names):
        value = getattr(args, name)
        if value is not None:
            rules[name] = value
    # any of these flags makes it a dataset with images
    has_media_flags = args.image_root is not None or args.max_crops_per_pack is not None
    if rules or args.image_urls or has_media_flags:
        changed["image_rules"] = _image_rules(args, rules)
    return BuildSettings(**{**given, **changed})


def _say(text: str) -> None:
    """Print a result; exit quietly if the reader of the pipe is gone."""
    with ends_with_its_reader():
        say(text)


def _build(args: argparse.Namespace) -> int:
    """Build the dataset, and its validation share if there is one; `finish` only combines parts."""
    from megacp.prepare.packs.run import build

    sentences = []
    # with --valid-share: the training dataset in DIR, then the validation dataset in DIR/valid
    for settings in _settings(args).shares:
        # `finish` must not build anything, even if a part is missing
        if args.command == "finish":
            summary = build(settings, sys.stderr, builds_missing=False)
        else:
            summary = build(settings, sys.stderr, args.overwrite, _part(args))
        sentences.append(f"{settings.output}: {summary.sentence}")
    _say("\n".join(sentences))
    return 0


def _part(args: argparse.Namespace) -> tuple[int, int] | None:
    """Return I and N of --units I/N, or None to build all parts."""
    if args.units is None:
        return None
    # at most nine digits: far more parts than any build has
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", args.units)
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(
            f"--units {args.units}: expected I/N with 0 <= I < N, such as 0/16 or 15/16"
        )
    if args.overwrite:
        raise ValueError(
            f"--overwrite with --units {args.units} would delete parts that other processes have "
            "built; leave --overwrite out"
        )
    return int(match[1]), int(match[2])


def _inspect(args: argparse.Namespace) -> int:
    """Print packs, or write one of them as an HTML page."""
    from megacp.prepare.describe import describe_pack
    from megacp.prepare.tokenize.kept import kept_tokenizer
    from megacp.prepare.tokenize.tokenizer import load_tokenizer
    from megacp.training.data.reader import PackedDataset

    # the reference engine starts faster, and decoding does not need the fast one
    dataset = PackedDataset(args.dataset)
    tokenizer = load_tokenizer(args.tokenizer or kept_tokenizer(args.dataset), engine="reference")
    # another tokenizer would decode the ids to unrelated text
    if tokenizer.sha256 != dataset.manifest.tokenizer.sha256:
        raise ValueError(
            f"--tokenizer {args.tokenizer} differs from the tokenizer of {args.dataset} (by its "
            "sha256)"
        )
    if args.html is not None:
        from megacp.prepare.inspect_page import write_page

        if len(args.pack) > 1:
            raise ValueError(
                f"--html shows one pack, but --pack names {len(args.pack)}; give one number"
            )
        write_page(args.html, dataset, args.pack[0], tokenizer, args.overwrite)
        _say(f"{args.html}: pack {args.pack[0]} of {args.dataset}")
        return 0
    for index in args.pack:
        _say(describe_pack(dataset, index, tokenizer, args.characters, args.documents))
    return 0


def _stats(args: argparse.Namespace) -> int:
    """Print the statistics of a dataset."""
    from megacp.prepare.describe import statistics, statistics_text

    values = statistics(args.dataset)
    text = json.dumps(values, indent=1) if args.json else statistics_text(values)
    _say(text)
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Check datasets; return 1 if any of them is damaged."""
    from megacp.prepare.verify import verify

    is_damaged = False
    # check all datasets, and report every problem of each
    for path in args.dataset:
        reasons = verify(path)
        for reason in reasons:
            warn(f"error: {reason}")
        if reasons:
            is_damaged = True
        else:
            _say(f"{path}: sound")
    return 1 if is_damaged else 0


COMMANDS = {
    "build": _build,
    "finish": _build,
    "inspect": _inspect,
    "stats": _stats,
    "verify": _verify,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Return its exit code: 0 success, 1 damage, 2 error, 130 interrupted."""
    # --help and wrong flags exit here, before the slow imports
    args = preprocess_parser().parse_args(argv)
    from megacp.prepare.packs.workers import WorkerFailed

    # a scheduler stops a job by SIGTERM: handle it like Ctrl-C, so workers end and files are closed
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        return COMMANDS[args.command](args)
    except (ValueError, OSError, WorkerFailed) as error:
        warn(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        again = ""
        if args.command in ("build", "finish"):
            again = "; run the same command again to continue"
        warn(f"interrupted{again}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
