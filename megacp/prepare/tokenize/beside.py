"""What the files beside a tokenizer say of served texts: special tokens, the first token, the chat
template.

They are read from files and never guessed, so that a model is served the tokens it was trained on.
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
"""Fields of tokenizer_config.json that name a token; null names none."""
MODEL_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
BESIDE_NAMES = (CONFIG_NAME, OLDER_NAME, ADDED_NAME, *TEMPLATE_NAMES, MODEL_NAME)
"""Files on which it depends, with a vocabulary, what the library makes of a folder."""
_OURS = b"{#- megacp's messages."
"""What a template begins with that the converter wrote: a build makes the same ids of the same
messages.
"""


@dataclass(frozen=True)
class Beside:
    """The files beside a tokenizer's own."""

    config: Path | None
    """tokenizer_config.json; None when there is none."""
    values: dict[str, Any]
    """What stands in it."""
    chat_template: Path | None
    """The file with a chat template; None when there is none."""
    is_ours: bool = False
    """Whether there is the template that the converter wrote, which stands for the house's own
    form.
    """


def read_object(path: Path, limit: int = TEXT_LIMIT) -> dict[str, Any]:
    """The object of a JSON file of at most `limit` bytes. ValueError names a file that holds
    none.
    """
    value = read_json(path, limit)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def token_text(token: Any) -> str | None:
    """The text of a token as a config names it, by itself or in an object; None when it names
    none.
    """
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_beside(folder: Path) -> Beside:
    """What lies in a tokenizer's folder. ValueError names a file that is no JSON object."""
    config = folder / CONFIG_NAME if (folder / CONFIG_NAME).is_file() else None
    values = read_object(config) if config else {}
    for name in NAMED_TOKENS:
        if values.get(name) is not None and token_text(values[name]) is None:
            raise ValueError(
                f"{config}: {name} is {values[name]!r:.80}, expected a text, an object with one, "
                "or null"
            )
    adds = values.get("add_bos_token")
    if adds is not None and not isinstance(adds, bool):
        raise ValueError(f"{config}: add_bos_token is {adds!r:.80}, expected true, false or null")
    template = next((folder / name for name in TEMPLATE_NAMES if (folder / name).is_file()), None)
    if template is not None and read_regular(template).startswith(_OURS):
        return Beside(config, values, None, is_ours=True)
    return Beside(config, values, template or (config if values.get("chat_template") else None))


def settings_of(folder: Path) -> dict[str, Any]:
    """What the library takes for the tokenizer's settings: an older file counts where the config
    lists no tokens.
    """
    values, older = read_beside(folder).values, folder / OLDER_NAME
    return (
        {**values, **read_object(older)}
        if "added_tokens_decoder" not in values and older.is_file()
        else values
    )


def end_ids(folder: Path) -> list[int]:
    """Return the ids at which generation stops, by the files of the model in a folder; none where
    none says it.
    """
    found: dict[int, None] = {}
    for name in (GENERATION_NAME, MODEL_NAME):
        path = folder / name
        values = read_object(path) if path.is_file() else {}
        inner = values.get("text_config")
        for each in (values, inner if isinstance(inner, dict) else {}):
            ids = each.get("eos_token_id")
            for i in ids if isinstance(ids, list) else [ids]:
                if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
                    found[i] = None
    return [*found]


def tokens_beside(folder: Path) -> set[str]:
    """Texts of all tokens that the files beside a vocabulary name."""
    settings, added = settings_of(folder), folder / ADDED_NAME
    ends = ("_token", "_special_tokens", "added_tokens_decoder")
    named = [value for key, value in settings.items() if key.endswith(ends)]
    return _texts(named) | (read_object(added).keys() if added.is_file() else set())


def _texts(value: Any) -> set[str]:
    """Texts of a token, of a list of tokens, or of an object of them."""
    if (text := token_text(value)) is not None:
        return {text}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {text for part in parts for text in _texts(part)}


@dataclass(frozen=True)
class Surroundings:
    """The special tokens that a tokenizer's files put around every text, by the post-processor of
    tokenizer.json.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    stated: bool | None = None
    """`add_bos_token` of tokenizer_config.json; None when it does not say."""

    def first(self, bos_id: int | None) -> int | None:
        """The token that begins every text; None when there is none."""
        if self.stated is False or not (self.before or self.stated):
            return None
        return self.before[0] if self.before else bos_id


def _without_ids(model: Any) -> list[str]:
    """Special tokens that the templates of a post-processor write and do not describe."""
    if model.post_processor is None:
        return []
    state = parse_json(model.post_processor.__getstate__())
    found = list[str]()
    for each in state.get("processors") or [state]:
        written = [*(each.get("single") or ()), *(each.get("pair") or ())]
        names = [part["SpecialToken"]["id"] for part in written if "SpecialToken" in part]
        known = each.get("special_tokens") or {}
        found += [name[:80] for name in names if name not in known and name not in found]
    return found


def surroundings_of(model: Any) -> Surroundings:
    """What a `tokenizers.Tokenizer` puts before and after the ids of a text.

    Raises ValueError for a post-processor that writes a token without an id: encoding any text
    would panic.
    """
    if unknown := _without_ids(model):
        raise ValueError(
            f"its post_processor adds {', '.join(map(repr, unknown))}, of which it has no ids"
        )
    encoding = model.encode("a")
    mask = encoding.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    after = [i for i, special in zip(encoding.ids[first:], mask[first:], strict=True) if special]
    return Surroundings(tuple(encoding.ids[:first]), tuple(after))
