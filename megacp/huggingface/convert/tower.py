"""A text model with a vision tower added: the config of both, and where each tensor comes from.

The tower is that of a Molmo2 folder, or new. Of the folder's connector the tensors whose widths agree with the text
model are taken. New are those that remain, and the embedding's rows for image tokens. The head of a tied model becomes
a copy of its embedding, as the embedding alone has the rows for image tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from megacp.core.config.run import RunConfig, fields, flatten, with_values
from megacp.huggingface.convert.source import Loaded
from megacp.huggingface.convert.tables import molmo2
from megacp.huggingface.convert.tables.mapping import Source

EMBEDDING, HEAD = "embedding.weight", "head.weight"
IMAGE_ROWS = 128
"""Rows of the embedding for image tokens, where no flag says how many (as Molmo2 has)."""


class Together:
    """Tensors of several sources: ours by name -> the source, and the tensor's name there."""

    def __init__(self, places: Mapping[str, tuple[Source, str]]) -> None:
        self._places = places
        self.infos = {name: source.infos[theirs] for name, (source, theirs) in places.items()}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor."""
        source, theirs = self._places[name]
        return source.rows(theirs, start, stop)


@dataclass(frozen=True)
class WithTower:
    """A text model and a tower."""

    config: RunConfig
    source: Source
    known_rows: dict[str, int]
    """Of tensors that are new from some row on: how many rows are read."""
    note: str


def with_tower(text: Loaded, tower: Loaded | None, config: RunConfig, given: Collection[str]) -> WithTower:
    """`text` with the tower of a Molmo2, or with a new one as the flags of `config` describe it.

    ValueError for a text model that has a tower, and for a tower that is none.
    """
    if text.config.vision.vision_num_layers:
        raise ValueError(f"--vision-from-hf adds a tower to a text model, {text.folder} has one: leave the flag out")
    if tower is not None and not tower.config.vision.vision_num_layers:
        raise ValueError(f"--vision-from-hf {tower.folder} is a {tower.architecture.name}, a molmo2 is needed")
    if tower is None and not config.vision.vision_num_layers:
        raise ValueError("--vision-from-hf none makes a new tower: give its --vision-num-layers (Molmo2 has 25)")
    values = flatten(config if tower is None else tower.config)
    changes = {name: values[name] for name, info in fields().items() if info.room == "vision"}
    asked = config.model.additional_vocab_size if "additional_vocab_size" in given else IMAGE_ROWS
    changes |= {"additional_vocab_size": asked, "untie_embeddings_and_output_weights": True, "hf_model_type": None}
    whole = with_values(text.config, changes)
    places = {name: (text.source, name) for name in text.source.infos}
    places.setdefault(HEAD, (text.source, EMBEDDING))
    wanted = {one.name: one.shape for link in molmo2.links(flatten(whole), molmo2.NATIVE) for one in link.ours}
    if tower is not None:
        infos = {name: info for name, info in tower.source.infos.items() if name.startswith(("vision.", "connector."))}
        places |= {name: (tower.source, name) for name, info in infos.items() if info.shape == wanted[name]}
    new = [name for name in wanted if name not in places]
    known = {EMBEDDING: text.config.model.vocab_size, **dict.fromkeys(new, 0)}
    told = [name for name in new if name.startswith("connector.")] if tower is not None else ["tower and connector"]
    note = f"new and not read: {', '.join([*told, f'{asked} rows of the embedding for image tokens'])}"
    return WithTower(whole, Together(places), known, note)
