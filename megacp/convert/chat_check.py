"""The chat template of an exported model: whether it has one, and the conversations that it is held against.

Key property: the ids of the probe are made by the data room, piece by piece as in a build, so the template is true to
training or is not written. Rejected: a template for every export, since a checkpoint does not say whether its records
had `messages`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megacp.convert import chat
from megacp.convert.hf_files import read_json, write_json
from megacp.convert.source import Loaded
from megacp.data.media.geometry import TOKEN_TEXTS
from megacp.data.records.sample import parse_record
from megacp.data.tokenize.tokenizer import Tokenizer
from megacp.generation.prompt import PromptMaker
from megacp.training.state import first_token, stored_progress

CHOICES = ("auto", "messages", "none")
_CONTENTS = (
    *("Which animal?", "A cat.", "", " one space first", "  two spaces first", "\nnewline first", "newline last\n"),
    *("two newlines last\n\n", "spaces last  ", "x = {'a': [1]};", "\U0001f642 e\u0301 \u4e2d\u6587", "a\n\n  b", "1"),
)
_IMAGE = {"type": "image", "path": "probe"}


def _probe_messages() -> list[list[dict[str, Any]]]:
    """Conversations of one to many turns; each content ends one message and begins another."""
    found: list[list[dict[str, Any]]] = []
    for i, content in enumerate(_CONTENTS):
        other = _CONTENTS[(i + 1) % len(_CONTENTS)]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": other}]
        found += [
            turns[:1],
            turns,
            [{"role": "system", "content": other}, *turns, *turns, {**turns[0], "role": "tool"}],
        ]
        parts = [{"type": "text", "text": content}, {"type": "text", "text": other}]
        found.append([{"role": "user", "content": parts}, *turns[1:]] if content or other else turns)
    return found


def _image_messages() -> list[list[dict[str, Any]]]:
    answer: dict[str, Any] = {"role": "assistant", "content": "A cat."}
    found = list[list[dict[str, Any]]]()
    for text in _CONTENTS:
        says = {"type": "text", "text": text}
        for content in ([_IMAGE], [_IMAGE, says], [says, _IMAGE], [_IMAGE, _IMAGE, says, says], [says, _IMAGE, says]):
            found.append([{"role": "user", "content": content}, answer, {"role": "user", "content": content}])
    return found


def _ids(messages: list[dict[str, Any]], tokenizer: Tokenizer, media: list[int]) -> list[int]:
    """What a build makes of a record, `media` in the place of each image."""
    ids = [] if tokenizer.begins_with is None else [tokenizer.begins_with]
    for piece in parse_record({"messages": messages}, media=True).prefix:
        if piece.text is not None:
            ids += tokenizer.encode_reference(piece.text).tolist()
        elif piece.media is not None:
            ids += media
        elif tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
    return ids


def probe(tokenizer: Tokenizer, image_ids: dict[str, int]) -> list[chat.Conversation]:
    """Conversations with the ids of a build, with images where there are ids for them."""
    media = [image_ids["image_start"], image_ids["image_end"]] if image_ids else []
    every = _probe_messages() + (_image_messages() if media else [])
    found = [chat.Conversation(messages, _ids(messages, tokenizer, media)) for messages in every]
    maker = PromptMaker(tokenizer)
    for messages in _probe_messages():
        answered = {"messages": [*messages, {"role": "assistant", "content": "x"}]}
        ids = maker.of_record(answered).prefix.tokens.tolist()
        found.append(chat.Conversation(messages, ids, prompt=True))
    return found


def write_chat_template(loaded: Loaded, folder: Path, tokenizer: Tokenizer, choice: str) -> str:
    """Write the template where there is one to write; a sentence that says what was done.

    ValueError when `choice` asks for a template that this tokenizer cannot follow.
    """
    own = (folder / chat.TEMPLATE_FILE).is_file() or "chat_template" in read_json(folder / "tokenizer_config.json")
    assert loaded.checkpoint is not None
    trained = "updates" in loaded.checkpoint.extra
    if choice == "none":
        return "the tokenizer's own" if own else "none"
    if choice == "auto" and own:
        also = "; --chat-template messages writes that of records with `messages`" if trained else ""
        return f"the tokenizer's own{also}"
    if choice == "auto" and not (loaded.rules is not None and trained):
        return "none; for a model that was trained on records with `messages`: --chat-template messages"
    tokenizer.begins_with = first_token(stored_progress(loaded.checkpoint), tokenizer.begins_with)
    images = loaded.rules.token_ids if loaded.rules is not None else {}
    media = TOKEN_TEXTS["image_start"] + TOKEN_TEXTS["image_end"]
    try:
        special = chat.Special(tokenizer.eos_id, tokenizer.begins_with)
        has_seam = chat.write_template(folder, special, probe(tokenizer, images), media)
    except ValueError as error:
        if choice == "auto":
            return f"none: no template gives this tokenizer the ids of training ({error})"
        raise ValueError(
            f"--chat-template {choice}: no template gives this tokenizer the ids of training: {error}"
        ) from error
    settings = read_json(folder / "tokenizer_config.json")
    if settings.pop("chat_template", None) is not None:  # which of the two a library prefers is its own choice
        write_json(folder / "tokenizer_config.json", settings)
    how = " (texts meet at a mark that tokenizer.json cuts at and drops)" if has_seam else ""
    return f"that of records with `messages`, with the ids of a build{how}"
