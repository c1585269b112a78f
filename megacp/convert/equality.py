"""Is what was written what was read? Every tensor bit by bit, every field of the model, and what the library holds.

Key property: nothing is sampled. A row that no probe's token names, or a number that comes back only because reader and
writer are wrong alike, is seen by one of three comparisons: tensors of both folders through the links, fields of both
configs, and the state of the library's own model. Two tensors are in memory at a time. Rejected: logits alone, which
see 64 rows of an embedding and no epsilon beside ordinary hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megacp.config.run import flag
from megacp.convert.source import HEAD, Loaded
from megacp.convert.tables.architectures import LAYOUTS
from megacp.convert.tables.fields import Same
from megacp.convert.tables.mapping import Cast, Info, Mapped, Source, whole

_MOST_NAMED = 10


class State:
    """The tensors of a model of the library, by its names."""

    def __init__(self, model: Any, tied: bool) -> None:
        """`tied`: the head is the embedding, and no tensor of its own."""
        self._tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == HEAD)}
        self.infos: Mapping[str, Info] = {
            name: Info(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """As Source."""
        return self._tensors[name][start:stop]


def state_by_our_names(loaded: Loaded, model: Any) -> Source:
    """What the library's model holds, seen under our names. ValueError when it holds other tensors."""
    links = loaded.architecture.links(loaded.values, LAYOUTS[0])
    state = State(model, tied=not loaded.values["untie_embeddings_and_output_weights"])
    wanted = {named.name for link in links for named in link.theirs}
    if wanted != state.infos.keys():
        names = sorted(wanted ^ state.infos.keys())
        raise ValueError(
            f"the library's model does not hold the tensors of the table: {', '.join(names[:_MOST_NAMED])}"
        )
    return Mapped(state, links, to_ours=True)


def tensor_differences(before: Source, after: Source) -> list[str]:
    """What differs between the tensors of two sources, one line each; bits are compared, so NaN equals itself."""
    found = [f"{name} is in one of the two alone" for name in sorted(before.infos.keys() ^ after.infos.keys())]
    for name, info in before.infos.items():
        if name not in after.infos:
            continue
        if info != after.infos[name]:
            found.append(f"{name} is {_words(after.infos[name])}, it was {_words(info)}")
        elif rows := _rows_that_differ(whole(before, name), whole(after, name)):
            count, first = rows
            found.append(f"{name} differs in {count} row{'s' * (count > 1)}, first {first}")
    return found


def in_float32(source: Source, rounded_to: torch.dtype | None) -> Source:
    """A source as the library computes with it: float32, its values `rounded_to` another dtype before."""
    return Cast(Cast(source, rounded_to) if rounded_to is not None else source, torch.float32)


def _rows_that_differ(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int] | None:
    """Number of dim-0 rows whose bits differ, and the first of them; None when there is none."""
    bits = [tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1) for tensor in (first, second)]
    if torch.equal(*bits):
        return None
    rows = (bits[0] != bits[1]).any(dim=1).nonzero().flatten()
    return len(rows), int(rows[0])


def _words(info: Info) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {tuple(info.shape)}"


def field_differences(before: Loaded, after: Loaded) -> list[str]:
    """Flags that an architecture's config speaks of and that differ between two folders, one line each."""
    first, second = (_said(loaded) for loaded in (before, after))
    return [
        f"{flag(name)} is {first.get(name)} in what was read and {second.get(name)} in what was written"
        for name in first | second
        if first.get(name) != second.get(name)
    ]


def _said(loaded: Loaded) -> dict[str, Any]:
    """The values of all flags that the architecture's table knows, with None resolved to what it stands for."""
    values, architecture = loaded.values, loaded.architecture
    names = architecture.values(architecture.config(values)).keys() - {"seq_length"}  # rows are the run's
    found = {name: values[name] for name in names}
    for field in architecture.fields:
        if isinstance(field, Same) and field.ours in found:
            found[field.ours] = field.resolved(values)
    if "vision_feature_layers" in found:  # counted from either end
        found["vision_feature_layers"] = tuple(i % values["vision_num_layers"] for i in values["vision_feature_layers"])
    return found
