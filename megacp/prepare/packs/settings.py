"""Settings of a build, and their checks.

All problems are reported together, before any record is read or any file is written.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

from megacp.prepare.media.reader import LARGEST_ITEM, LIMITS
from megacp.prepare.records.chat_template import ChatTemplate, Template, load_chat_template
from megacp.prepare.records.forms import READ_KEYS
from megacp.prepare.records.indexed import input_of
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
from megacp.storage.place import expanded
from megacp.storage.url import is_url
from megacp.training.data.vision.rules import VisionRules

# Folder of the validation dataset inside a dataset built with --valid-share.
VALID_FOLDER = "valid"
# Value of --chat-template that selects megacp's own form for all conversations, including Alpaca
# records.
HOUSE_FORM = "ignore"


@dataclass(frozen=True)
class BuildSettings:
    """Settings of a build. Each field is named after its flag; see the help of that flag."""

    input: tuple[str, ...]
    output: str
    # Tokenizer, and how documents are stored.
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
    """Whether to build the validation dataset of --valid-share instead of the training dataset."""
    max_crops_per_pack: int | None = None
    ignore_keys: tuple[str, ...] = ()
    context_roles: tuple[str, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    columns: tuple[tuple[str, str], ...] = ()
    chat_template: str | None = None
    """None selects the tokenizer's template, if any; it is loaded when a record has messages."""
    chat_template_date: str | None = None
    prepend_bos: bool | None = None
    prefix_tree: bool = False

    def __post_init__(self) -> None:
        """Convert single texts to tuples, because Python would iterate over their characters."""
        for name in ("input", "image_urls", "ignore_keys", "context_roles"):
            value: Any = getattr(self, name)
            values = [value] if isinstance(value, str | os.PathLike) else value
            # the dataclass is frozen, so assign through `object`
            object.__setattr__(self, name, tuple(os.fspath(each) for each in values))

    @property
    def bytes_per_unit(self) -> int:
        """Input bytes per unit: `unit_bytes`, or by default at least 8 MiB and 256 packs."""
        # The default assumes 4 bytes per token: 256 packs are 1024 * seq_length bytes.
        return self.unit_bytes or max(8 << 20, 1024 * self.seq_length)

    @property
    def longest_piece(self) -> int:
        """Maximum length in tokens of a document, or a piece of it, that fits in a pack."""
        return self.seq_length // self.pad_multiple * self.pad_multiple

    @property
    def shares(self) -> tuple[BuildSettings, ...]:
        """Settings of each dataset to build: one for all records, or training and validation."""
        if not self.valid_share:
            return (self,)
        output = os.path.join(self.output, VALID_FOLDER)
        return self, replace(self, output=output, is_valid=True)

    def record_rules(self, tokenizer: Tokenizer) -> RecordRules:
        """Return the rules for reading records with a tokenizer."""
        forms = {HOUSE_FORM: AS_MESSAGES, ALPACA: ALPACA}
        # Without --chat-template, the tokenizer's folder may select megacp's own form for messages.
        by_folder = ""
        if tokenizer.asked_as_messages and self.chat_template is None:
            by_folder = AS_MESSAGES
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
        """Load the tokenizer of these settings."""
        return load_tokenizer(
            self.tokenizer, self.tokenizer_engine, self.eod_token, self.prepend_bos
        )

    def load_template(self, tokenizer: Tokenizer) -> Template | None:
        """Return the chat template, a function that loads the tokenizer's template, or None.

        None selects megacp's own form. Raise ValueError, here or in the returned function, if
        `load_chat_template` cannot load the template.
        """
        # These two values select forms that need no template.
        if self.chat_template in (HOUSE_FORM, ALPACA):
            return None
        if self.chat_template is not None:
            return load_chat_template(self.chat_template, tokenizer, self.chat_template_date)

        # A dataset of plain text does not need a valid template, so the tokenizer's template is
        # only loaded for the first record with messages.
        @functools.cache
        def load() -> ChatTemplate:
            try:
                return load_chat_template("auto", tokenizer, self.chat_template_date)
            except ValueError as error:
                raise ValueError(
                    f"the input has records with messages, but the chat template in "
                    f"{tokenizer.chat_template} cannot be used: {error}; or use --chat-template "
                    f"{HOUSE_FORM} to write messages without a template"
                ) from error

        return None if tokenizer.chat_template is None else load


def checked(settings: BuildSettings) -> BuildSettings:
    """Return the settings with the files that the patterns of --input match.

    Raise ValueError with all problems of the settings and the input files.
    """
    found: list[str] = []
    for text in settings.input:
        try:
            # a pattern such as x* matches both files of a tokenized dataset
            found += dict.fromkeys(map(input_of, expanded(text)))
        except ValueError as error:
            raise ValueError(f"--input: {error}") from error
    settings = replace(settings, input=tuple(found))
    wrong = problems(settings)
    if wrong:
        raise ValueError("; ".join(wrong))
    return settings


def problems(settings: BuildSettings) -> list[str]:
    """Return all problems of the settings and the input files, without reading a record."""
    paths = settings.input
    found = [f"--input: {reason}" for reason in map(input_problem, paths) if reason is not None]
    # Resolve links, so that two names of one file count as a repetition.
    files = [path if is_url(path) else os.path.realpath(path) for path in paths]
    repeated = {path for path, file in zip(paths, files, strict=True) if files.count(file) > 1}
    if repeated:
        found.append(f"--input: given more than once: {', '.join(sorted(repeated))}")
    # Value and minimum of each flag. None means that the flag is not set.
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
            found.append(f"{flag} is {value}, but must be at least {low}")
    item_limits = {
        "--max-image-bytes": settings.max_image_bytes,
        "--max-video-bytes": settings.max_video_bytes,
    }
    for flag, value in item_limits.items():
        if value > LARGEST_ITEM:
            found.append(
                f"{flag} is {value}, but a dataset stores items of at most {LARGEST_ITEM} bytes"
            )
    if is_url(settings.output):
        found.append(
            f"--output {settings.output}: a dataset must be built in a local directory; use a "
            "local path, and copy the finished dataset to the URL"
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
    read = sorted({settings.text_key, *RECORD_KEYS} & {*settings.ignore_keys})
    if read:
        found.append(
            f"--ignore-keys {','.join(read)}: a build reads these keys, so they cannot be ignored"
        )
    learned = sorted({*LEARNED_ROLES} & {*settings.context_roles})
    if learned:
        found.append(
            f"--context-roles {','.join(learned)}: these roles always have a loss; remove them"
        )
    found += _naming_problems(settings)
    found += _image_problems(settings)
    if not 0 <= settings.valid_share < 1:
        found.append(
            f"--valid-share is {settings.valid_share:g}, but must be at least 0 and below 1"
        )
    return found


def _image_problems(settings: BuildSettings) -> list[str]:
    """Return all problems with --image-root and --image-urls."""
    found = []
    root = settings.image_root
    if settings.image_rules is not None and root is not None and not is_url(root):
        if not os.path.isdir(root):
            found.append(f"--image-root {root} is not a directory")
    paths_only = [url for url in settings.image_urls if not is_url(url)]
    if paths_only:
        found.append(
            f"--image-urls {','.join(paths_only)}: not a URL; use --image-root for local paths"
        )
    # Each value is compared with the beginning of an image's URL.
    queries = [url for url in settings.image_urls if {*url} & {*"?#"}]
    if queries:
        found.append(
            f"--image-urls {','.join(queries)}: give the beginning of URLs, without a query or "
            "fragment"
        )
    return found


def _naming_problems(settings: BuildSettings) -> list[str]:
    """Return all problems with the names in --columns and --roles, including conflicts."""
    found = []
    known = {"--columns": READ_KEYS, "--roles": (*CONTEXT_ROLES, *LEARNED_ROLES)}
    for flag, pairs in {"--columns": settings.columns, "--roles": settings.roles}.items():
        # A pair is OWN=NAME: a name that megacp reads, and the corresponding name in the input.
        for own, name in pairs:
            given = f"{flag} {own}={name}"
            if own in known[flag]:
                continue
            # Users often give the two names in the wrong order, so the message shows the correct
            # order.
            if name in known[flag]:
                found.append(f"{given}: reverse the names, as in {flag} {name}={own}")
            else:
                found.append(
                    f"{given}: {own!r} is not a name that megacp reads; choose one of "
                    f"{', '.join(known[flag])}"
                )
        # Several names in the input may have one role, but a key can be read from only one column.
        name_lists = [[name for _, name in pairs]]
        if flag == "--columns":
            name_lists.append([own for own, _ in pairs])
        for names in name_lists:
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                found.append(f"{flag} contains {', '.join(repeated)} twice; keep only one pair")
    columns = {name for _, name in settings.columns}
    ignored = sorted(columns & {*settings.ignore_keys})
    if ignored:
        found.append(
            f"--ignore-keys {','.join(ignored)}: --columns reads these keys; remove them from one "
            "of the flags"
        )
    renames_text = settings.text_key != "text" and "text" in dict(settings.columns)
    if settings.text_key in columns or renames_text:
        found.append(
            f"--text-key {settings.text_key} and --columns both define the key of plain text; use "
            "only one of them"
        )
    role_names = {name for _, name in settings.roles}
    both = sorted(role_names & {*settings.context_roles})
    if both:
        found.append(
            f"--context-roles {','.join(both)}: --roles maps these names to another role; remove "
            "them from one of the flags"
        )
    return found


def tokenizer_problem(settings: BuildSettings, tokenizer: Tokenizer) -> str | None:
    """Return why the tokens around a document are undefined or ambiguous; None if they are clear.

    The tokenizer's files must define an end token, and at most one token at the beginning.
    """
    if settings.append_eod and tokenizer.eos_id is None:
        return (
            f"--tokenizer {settings.tokenizer} does not define an end-of-document token: "
            "set it with --eod-token, or use --no-append-eod"
        )
    around = tokenizer.surroundings
    unclear = None
    if len(around.before) > 1 or around.after not in ((), (tokenizer.eos_id,)):
        unclear = (
            f"the tokenizer puts the tokens {list(around.before)} before and {list(around.after)} "
            "after every text, but a document can have at most one token in front and only "
            "--eod-token at its end"
        )
    elif tokenizer.kind == "huggingface" and around.stated not in (None, bool(around.before)):
        # The two files contradict each other, so the user must decide.
        unclear = (
            f"tokenizer_config.json sets add_bos_token to {around.stated}, but the post-processor "
            f"of tokenizer.json puts the tokens {list(around.before)} before every text"
        )
    if settings.prepend_bos is not None or unclear is None:
        return None
    return f"--tokenizer {settings.tokenizer}: {unclear}; choose --prepend-bos or --no-prepend-bos"
