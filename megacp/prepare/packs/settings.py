"""Everything a build depends on, and all that can be wrong with it before a record is read.

Every reason is found before anything is written, and all are reported at once.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

from megacp.prepare.media.reader import LARGEST_ITEM, LIMITS
from megacp.prepare.records.chat_template import ChatTemplate, Template, load_chat_template
from megacp.prepare.records.forms import READ_KEYS
from megacp.prepare.records.read import input_problem
from megacp.prepare.records.record import (
    ALPACA,
    AS_MESSAGES,
    CONTEXT_ROLES,
    DEFAULT_MAX_RECORD_BYTES,
    LEARNED_ROLES,
    RecordRules,
)
from megacp.prepare.records.sample import RECORD_KEYS
from megacp.prepare.tokenize.tokenizer import Tokenizer, load_tokenizer
from megacp.storage.url import is_url
from megacp.training.data.vision.rules import VisionRules

VALID_FOLDER = "valid"
"""Folder of the validation records in a dataset with --valid-share."""
HOUSE_FORM = "ignore"
"""Word of --chat-template by which all conversations are written in the house's own form, Alpaca's
too.
"""


@dataclass(frozen=True)
class BuildSettings:
    """Everything a build depends on; the names are those of the flags, whose help says what they
    do.
    """

    input: tuple[str, ...]
    output: str
    tokenizer: str
    seq_length: int
    oversize: str = "error"
    pad_multiple: int = 1
    append_eod: bool = True
    seed: int | None = None
    text_key: str = "text"
    max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES
    on_error: str = "fail"
    max_errors: int | None = None
    workers: int = 1
    executor: str = "local"
    ray_address: str | None = None
    unit_bytes: int = 0
    window_tokens: int = 1 << 24
    cp_degrees: tuple[int, ...] = (1, 2, 4, 8, 16)
    tokenizer_engine: str = "auto"
    eod_token: str | None = None
    image_rules: VisionRules | None = None
    image_root: str | None = None
    image_urls: tuple[str, ...] = ()
    max_image_bytes: int = LIMITS["image"]
    max_video_bytes: int = LIMITS["video"]
    valid_share: float = 0.0
    is_valid: bool = False
    """Whether it is the dataset of --valid-share that is built, not that of all other records."""
    max_crops_per_pack: int | None = None
    ignore_keys: tuple[str, ...] = ()
    context_roles: tuple[str, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    columns: tuple[tuple[str, str], ...] = ()
    chat_template: str | None = None
    """None: the tokenizer's own where it has one, loaded once there are messages."""
    chat_template_date: str | None = None
    prepend_bos: bool | None = None
    prefix_tree: bool = False

    @property
    def bytes_per_unit(self) -> int:
        """unit_bytes, or at least 8 MiB and 256 packs of 4-byte tokens."""
        return self.unit_bytes or max(8 << 20, 1024 * self.seq_length)

    @property
    def longest_piece(self) -> int:
        """Tokens of the longest document, or piece of one, that fits a pack."""
        return self.seq_length // self.pad_multiple * self.pad_multiple

    @property
    def shares(self) -> tuple[BuildSettings, ...]:
        """The settings of each dataset: all records, or training and validation."""
        if not self.valid_share:
            return (self,)
        return self, replace(self, output=os.path.join(self.output, VALID_FOLDER), is_valid=True)

    def record_rules(self, tokenizer: Tokenizer) -> RecordRules:
        """Return how records are read for a tokenizer."""
        forms = {HOUSE_FORM: AS_MESSAGES, ALPACA: ALPACA}
        by_folder = (
            AS_MESSAGES if tokenizer.asked_as_messages and self.chat_template is None else ""
        )
        return RecordRules(
            text_key=self.text_key,
            media=self.image_rules is not None,
            ignore_keys=self.ignore_keys,
            context_roles=self.context_roles,
            roles=self.roles,
            columns=self.columns,
            form=forms.get(self.chat_template or "", by_folder),
            prefix_tree=self.prefix_tree,
        )

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer these settings name."""
        return load_tokenizer(
            self.tokenizer, self.tokenizer_engine, self.eod_token, self.prepend_bos
        )

    def load_template(self, tokenizer: Tokenizer) -> Template | None:
        """The chat template that these settings name, or what loads the one of the tokenizer; None:
        the house's form.

        ValueError, also from what loads it: as of load_chat_template.
        """
        if self.chat_template in (HOUSE_FORM, ALPACA):
            return None
        if self.chat_template is not None:
            return load_chat_template(self.chat_template, tokenizer, self.chat_template_date)

        @functools.cache
        def load() -> ChatTemplate:
            try:
                return load_chat_template("auto", tokenizer, self.chat_template_date)
            except ValueError as error:
                reason = (
                    f"there are records with messages, and {tokenizer.chat_template} has a "
                    "chat template"
                )
                raise ValueError(
                    f"{reason}: {error}; or --chat-template {HOUSE_FORM} leaves it out"
                ) from error

        return None if tokenizer.chat_template is None else load


def problems(settings: BuildSettings) -> list[str]:
    """Everything that is wrong with the settings and the input files, before anything is read or
    written.
    """
    paths, rules, root = settings.input, settings.image_rules, settings.image_root
    found = [f"--input: {reason}" for reason in map(input_problem, paths) if reason is not None]
    files = [path if is_url(path) else os.path.realpath(path) for path in paths]
    if repeated := sorted(
        {path for path, file in zip(paths, files, strict=True) if files.count(file) > 1}
    ):
        found.append(f"--input: given more than once: {', '.join(repeated)}")
    least = {
        "--seq-length": (settings.seq_length, 1),
        "--pad-multiple": (settings.pad_multiple, 1),
        "--workers": (settings.workers, 1),
        "--max-record-bytes": (settings.max_record_bytes, 1),
        "--max-image-bytes": (settings.max_image_bytes, 1),
        "--max-video-bytes": (settings.max_video_bytes, 1),
        "--window-tokens": (settings.window_tokens, 1),
        "--unit-bytes": (settings.unit_bytes, 0),
        "--max-errors": (settings.max_errors, 0),
        "--max-crops-per-pack": (settings.max_crops_per_pack, 1),
        "--seed": (settings.seed, 0),
        "--cp-degrees": (min(settings.cp_degrees, default=1), 1),
    }
    for flag, (value, low) in least.items():
        if value is not None and value < low:
            found.append(f"{flag} is {value}, it must be at least {low}")
    for flag, value in {
        "--max-image-bytes": settings.max_image_bytes,
        "--max-video-bytes": settings.max_video_bytes,
    }.items():
        if value > LARGEST_ITEM:
            found.append(
                f"{flag} is {value}, a dataset stores items of at most {LARGEST_ITEM} bytes"
            )
    if is_url(settings.output):
        found.append(
            f"--output {settings.output}: a dataset is built in a directory; copy it when it is "
            "finished"
        )
    if settings.pad_multiple >= 1 and settings.seq_length % settings.pad_multiple:
        found.append(
            f"--seq-length {settings.seq_length} is not a multiple of --pad-multiple "
            f"{settings.pad_multiple}"
        )
    if settings.ray_address is not None and settings.executor != "ray":
        found.append(f"--ray-address {settings.ray_address} needs --executor ray")
    if settings.max_errors is not None and settings.on_error != "skip":
        found.append(f"--max-errors {settings.max_errors} needs --on-error skip")
    if read := sorted({settings.text_key, *RECORD_KEYS} & {*settings.ignore_keys}):
        found.append(f"--ignore-keys {','.join(read)}: these keys are read, not ignored")
    if learned := sorted({*LEARNED_ROLES} & {*settings.context_roles}):
        found.append(f"--context-roles {','.join(learned)}: what this role says is learned")
    found += _naming_problems(settings)
    if rules is not None and root is not None and not is_url(root) and not os.path.isdir(root):
        found.append(f"--image-root {root} is not a directory")
    if paths_only := [url for url in settings.image_urls if not is_url(url)]:
        found.append(
            f"--image-urls {','.join(paths_only)}: no URL; paths are relative to --image-root"
        )
    if queries := [url for url in settings.image_urls if {*url} & {*"?#"}]:
        found.append(
            f"--image-urls {','.join(queries)}: URLs begin with a place, without a query or a "
            "fragment"
        )
    if not 0 <= settings.valid_share < 1:
        found.append(
            f"--valid-share is {settings.valid_share:g}, it must be at least 0 and below 1"
        )
    return found


def _naming_problems(settings: BuildSettings) -> list[str]:
    """Return what is wrong with the names that --columns and --roles give."""
    found = []
    known = {"--columns": READ_KEYS, "--roles": (*CONTEXT_ROLES, *LEARNED_ROLES)}
    for flag, pairs in {"--columns": settings.columns, "--roles": settings.roles}.items():
        for own, name in pairs:
            given = f"{flag} {own}={name}"
            if own in known[flag]:
                continue
            if name in known[flag]:
                found.append(f"{given}: the name that is read stands first, {flag} {name}={own}")
            else:
                found.append(
                    f"{given}: {own!r} is none of the names that are read, {', '.join(known[flag])}"
                )
        theirs = [name for _, name in pairs]
        own_names = [own for own, _ in pairs] if flag == "--columns" else []
        for names in (theirs, own_names):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                found.append(f"{flag} names {', '.join(repeated)} twice")
    columns = {name for _, name in settings.columns}
    if both := sorted(columns & {*settings.ignore_keys}):
        found.append(f"--ignore-keys {','.join(both)}: --columns reads these keys")
    if settings.text_key in columns or (
        settings.text_key != "text" and "text" in dict(settings.columns)
    ):
        found.append(
            f"--text-key {settings.text_key} and --columns both name the key of plain text; leave "
            "one out"
        )
    if both := sorted({name for _, name in settings.roles} & {*settings.context_roles}):
        found.append(f"--context-roles {','.join(both)}: --roles gives these names another role")
    return found


def tokenizer_problem(settings: BuildSettings, tokenizer: Tokenizer) -> str | None:
    """Why documents cannot begin and end as the tokenizer's files say; None when they can."""
    if settings.append_eod and tokenizer.eos_id is None:
        return (
            f"--tokenizer {settings.tokenizer} does not say which token ends a document: "
            "name it with --eod-token, or give --no-append-eod"
        )
    around, unclear = tokenizer.surroundings, None
    if len(around.before) > 1 or around.after not in ((), (tokenizer.eos_id,)):
        unclear = (
            f"the tokenizer puts the tokens {list(around.before)} before and {list(around.after)} "
            "after every text, "
            "and a document begins with one at most and ends with that of --eod-token"
        )
    elif tokenizer.kind == "huggingface" and around.stated not in (None, bool(around.before)):
        unclear = (
            f"tokenizer_config.json says add_bos_token {around.stated}, and the post-processor of "
            "tokenizer.json puts "
            f"the tokens {list(around.before)} before every text"
        )
    if settings.prepend_bos is not None or unclear is None:
        return None
    return f"--tokenizer {settings.tokenizer}: {unclear}; choose --prepend-bos or --no-prepend-bos"
