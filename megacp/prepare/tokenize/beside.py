"""Read the files next to a tokenizer: special tokens, the first token, the chat template.

These are read from files and never guessed, so that a served model gets the same tokens as in
training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacp.storage.files import TEXT_LIMIT, parse_json, read_json, read_regular

CONFIG_NAME = "tokenizer_config.json"
OLDER_NAME = "special_tokens_map.json"
TEMPLATE_NAMES = ("chat_template.jinja", "chat_template.json")
TEMPLATE_FOLDER = "additional_chat_templates"
ADDED_NAME = "added_tokens.json"
NAMED_TOKENS = ("eos_token", "bos_token", "pad_token")
"""Fields of tokenizer_config.json for special tokens; null means that there is no such token."""
MODEL_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
BESIDE_NAMES = (CONFIG_NAME, OLDER_NAME, ADDED_NAME, *TEMPLATE_NAMES, MODEL_NAME)
"""Files that, together with a vocabulary, determine the tokenizer that the library builds."""
_OURS = b"{#- megacp's messages."
"""Beginning of a template written by the converter; a build produces the same ids without it."""


@dataclass(frozen=True)
class Beside:
    """The relevant contents of the files next to a tokenizer."""

    config: Path | None
    """tokenizer_config.json, or None."""
    values: dict[str, Any]
    """Contents of tokenizer_config.json."""
    chat_template: Path | None
    """File with a chat template, or None."""
    is_ours: bool = False
    """Whether the converter wrote the template, for a model trained without a chat template."""


def read_object(path: Path, limit: int = TEXT_LIMIT) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes. Raise ValueError, naming the file, if the file
    contains anything else.
    """
    value = read_json(path, limit)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def token_text(token: Any) -> str | None:
    """Return the text of a token in a config: a string, or an object with `content`; None for
    neither.
    """
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_beside(folder: Path) -> Beside:
    """Read the files next to a tokenizer. Raise ValueError, naming the file, if one is invalid."""
    config = folder / CONFIG_NAME if (folder / CONFIG_NAME).is_file() else None
    values = read_object(config) if config else {}
    # check the fields that are used later, so that errors name the file
    for name in NAMED_TOKENS:
        if values.get(name) is not None and token_text(values[name]) is None:
            raise ValueError(
                f"{config}: {name} is {values[name]!r:.80}, but it must be a text, an object with "
                "`content`, or null"
            )
    adds = values.get("add_bos_token")
    if adds is not None and not isinstance(adds, bool):
        raise ValueError(
            f"{config}: add_bos_token is {adds!r:.80}, but it must be true, false or null"
        )
    template = next((folder / name for name in TEMPLATE_NAMES if (folder / name).is_file()), None)
    # this template only repeats the format of a build without a chat template
    if template is not None and read_regular(template).startswith(_OURS):
        return Beside(config, values, None, is_ours=True)
    # an older folder has the template inside its config
    if template is None and values.get("chat_template"):
        template = config
    return Beside(config, values, template)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings as the library reads them.

    If tokenizer_config.json lists no added tokens, special_tokens_map.json (the older file) takes
    precedence.
    """
    values = read_beside(folder).values
    older = folder / OLDER_NAME
    if "added_tokens_decoder" in values or not older.is_file():
        return values
    return {**values, **read_object(older)}


def end_ids(folder: Path) -> list[int]:
    """Return the token ids at which generation stops according to the model's files; [] if
    unknown.
    """
    found: dict[int, None] = {}  # an ordered set
    for name in (GENERATION_NAME, MODEL_NAME):
        path = folder / name
        values = read_object(path) if path.is_file() else {}
        # a model with a vision tower has the settings of its decoder in `text_config`
        inner = values.get("text_config")
        for each in (values, inner if isinstance(inner, dict) else {}):
            ids = each.get("eos_token_id")
            if not isinstance(ids, list):
                ids = [ids]
            # a bool is an int in Python, but not an id
            for i in ids:
                if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
                    found[i] = None
    return [*found]


def tokens_beside(folder: Path) -> set[str]:
    """Return the texts of all tokens that the files next to a vocabulary define."""
    settings = settings_of(folder)
    added = folder / ADDED_NAME
    # every field that defines tokens ends with one of these
    ends = ("_token", "_special_tokens", "added_tokens_decoder")
    named = [value for key, value in settings.items() if key.endswith(ends)]
    texts = _texts(named)
    if added.is_file():
        texts |= read_object(added).keys()
    return texts


def _texts(value: Any) -> set[str]:
    """Return the texts of a token, or of a list or object of tokens."""
    text = token_text(value)
    if text is not None:
        return {text}
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return set()
    texts: set[str] = set()
    for part in value:
        texts |= _texts(part)
    return texts


@dataclass(frozen=True)
class Surroundings:
    """Special tokens that the post-processor of tokenizer.json puts around every text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    stated: bool | None = None
    """Value of `add_bos_token` in tokenizer_config.json; None if absent."""

    def first(self, bos_id: int | None) -> int | None:
        """Return the token that begins every text, or None."""
        if self.stated is False or not (self.before or self.stated):
            return None
        # the post-processor's token, or the BOS token if only the config asks for one
        return self.before[0] if self.before else bos_id


def _without_ids(model: Any) -> list[str]:
    """Return the special tokens that a post-processor adds without defining their ids."""
    if model.post_processor is None:
        return []
    state = parse_json(model.post_processor.__getstate__())
    found: list[str] = []
    # a sequence of processors, or a single one
    for each in state.get("processors") or [state]:
        written = [*(each.get("single") or ()), *(each.get("pair") or ())]
        names = [part["SpecialToken"]["id"] for part in written if "SpecialToken" in part]
        known = each.get("special_tokens") or {}
        found += [name[:80] for name in names if name not in known and name not in found]
    return found


def surroundings_of(model: Any) -> Surroundings:
    """Return the special tokens that a `tokenizers.Tokenizer` puts before and after a text.

    Raise ValueError if its post-processor adds a token without an id: encoding would panic in Rust.
    """
    if unknown := _without_ids(model):
        raise ValueError(
            f"its post_processor adds {', '.join(map(repr, unknown))} without defining their ids"
        )
    # the mask of a one-letter text is 1 for each added token; 0 is the text
    encoding = model.encode("a")
    mask = encoding.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    after = [i for i, special in zip(encoding.ids[first:], mask[first:], strict=True) if special]
    return Surroundings(tuple(encoding.ids[:first]), tuple(after))
