"""What the files beside a tokenizer say of served texts: their first token and their chat template.

Key property: both are read from files and never guessed, so that a model is served the tokens it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.core.storage.files import read_json, read_regular

CONFIG_NAME = "tokenizer_config.json"
OLDER_NAME = "special_tokens_map.json"
TEMPLATE_NAMES = ("chat_template.jinja", "chat_template.json")
TEMPLATE_FOLDER = "additional_chat_templates"
_OURS = b"{#- megacp's messages."
"""What a template begins with that the converter wrote: a build makes the same ids of the same messages."""


@dataclass(frozen=True)
class Beside:
    """The files beside a tokenizer's own."""

    config: Path | None
    """tokenizer_config.json; None when there is none."""
    values: dict[str, Any]
    """What stands in it."""
    chat_template: Path | None
    """The file with a chat template; None when there is none."""


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. ValueError names a file that holds none."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def text_of(token: Any) -> str | None:
    """The text of a token as a config names it, by itself or in an object; None when it names none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def chosen_token(
    values: Mapping[str, Any],
    key: str,
    names: Sequence[str],
    find: Callable[[str], int | None],
    special: Mapping[str, int],
) -> int | None:
    """The id of the token that a config names under `key`; None when it names none, as a null does.

    Only where the config is silent, the first of `names` that is a key of `special` counts: a word of a vocabulary may
    be spelled the same. find: the id of any token by its text.
    """
    if key in values:
        text = text_of(values[key])
        return None if text is None else find(text)
    return next((special[name] for name in names if name in special), None)


def read_beside(folder: Path) -> Beside:
    """What lies in a tokenizer's folder. ValueError names a file that is no JSON object."""
    config = folder / CONFIG_NAME
    values = read_object(config) if config.is_file() else {}
    found = [folder / name for name in TEMPLATE_NAMES if (folder / name).is_file()]
    if found and read_regular(found[0]).startswith(_OURS):
        return Beside(config if config.is_file() else None, values, None)
    template = found[0] if found else None
    if template is None and values.get("chat_template"):
        template = config
    return Beside(config if config.is_file() else None, values, template)


def settings_of(folder: Path) -> dict[str, Any]:
    """What the library takes for the tokenizer's settings: an older file counts where the config lists no tokens.

    ValueError names a file that is no JSON object.
    """
    values, older = read_beside(folder).values, folder / OLDER_NAME
    return {**values, **read_object(older)} if "added_tokens_decoder" not in values and older.is_file() else values


@dataclass(frozen=True)
class Surroundings:
    """The special tokens that a tokenizer's files put around every text."""

    before: tuple[int, ...] = ()
    """By the post-processor of tokenizer.json."""
    after: tuple[int, ...] = ()
    stated: bool | None = None
    """`add_bos_token` of tokenizer_config.json; None when it does not say."""

    def first(self, bos_id: int | None) -> int | None:
        """The token that begins every text; None when there is none."""
        if self.stated is False or not (self.before or self.stated):
            return None
        return self.before[0] if self.before else bos_id

    def problem(self, eos_id: int | None, has_post_processor: bool) -> str | None:
        """Why a document cannot be what the files say, or that they contradict each other; None when all is clear."""
        if len(self.before) > 1 or self.after not in ((), (eos_id,)):
            return (
                f"the tokenizer puts the tokens {list(self.before)} before and {list(self.after)} after every text, "
                "and a document begins with one at most and ends with that of --eod-token"
            )
        if has_post_processor and self.stated is not None and self.stated != bool(self.before):
            does = f"puts token {self.before[0]} before every text" if self.before else "puts none before a text"
            return f"{CONFIG_NAME} says add_bos_token {self.stated}, but the post-processor of tokenizer.json {does}"
        return None


def both_ways(model: Any) -> list[list[int]]:
    """Ids of a text that has some, without and with what a `tokenizers.Tokenizer` puts around it."""
    added = {token.content for token in model.get_added_tokens_decoder().values()}
    texts = ("a", "0", *sorted(model.get_vocab(with_added_tokens=False).keys() - added))
    text = next((text for text in texts if model.encode(text, add_special_tokens=False).ids), "a")
    return [model.encode(text, add_special_tokens=add).ids for add in (False, True)]


def surroundings(plain: Sequence[int], with_special: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before and after the ids of a text once a post-processor has added its own."""
    plain, whole = list(plain), list(with_special)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return tuple(whole), ()
