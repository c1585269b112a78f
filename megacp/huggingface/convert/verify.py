"""--verify: the model that was written is the one that was read, by every tensor, every field, logits and token ids.

Nothing is sampled. Tensors of both folders are compared bit by bit through the links. Then come the fields of both
configs and the state of the library's own model. So a row that no probe's token names is seen, and a number that reader
and writer get wrong alike. Logits alone see 64 rows of an embedding, and no epsilon beside ordinary hidden states. Two
tensors are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megacp.core.config.run import flag
from megacp.huggingface.convert.export import Request, given_files
from megacp.huggingface.convert.logits import (
    Probed,
    compare,
    compare_quiet,
    library_encoder,
    library_logits,
    library_model,
    our_logits,
)
from megacp.huggingface.convert.noise import rows_for
from megacp.huggingface.convert.source import HEAD, Loaded, listed
from megacp.huggingface.convert.tables.architectures import LAYOUTS
from megacp.huggingface.convert.tables.fields import Same
from megacp.huggingface.convert.tables.mapping import Info, Mapped, Source, in_dtype, whole
from megacp.huggingface.convert.tokenizer import refuse_difference
from megacp.prepare.tokenize.tokenizer import PROBE, load_tokenizer

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
        return self._tensors[name][start:stop]


def state_by_our_names(loaded: Loaded, model: Any) -> Source:
    """The tensors of the library's model under our names. ValueError when it holds other ones."""
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
    """Differences of the tensors of two sources, one line each; bits are compared, so NaN equals itself."""
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


def _rows_that_differ(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int] | None:
    """Number of dim-0 rows with other bits, and the first of them; None when there is none."""
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


def probed(loaded: Loaded, dtype: torch.dtype | None = None) -> tuple[Probed, list[str]]:
    """A model to ask for logits, its weights rounded to `dtype`: a checkpoint in our code, a folder in the library's.

    Also the tensors that the library holds otherwise than the folder's files.
    """
    if loaded.checkpoint is not None:
        return our_logits(loaded.config, in_dtype(loaded.source, dtype)), []
    model = library_model(loaded.folder, loaded.architecture.cls, dtype)
    held = state_by_our_names(loaded, model)
    wrong = tensor_differences(in_dtype(in_dtype(loaded.source, dtype), torch.float32), held)
    same = f"{len(wrong)} of {len(held.infos)} tensors otherwise: {listed(wrong)}"
    print(f"verify: the transformers library holds {same if wrong else f'the same {len(held.infos)} tensors'}")
    links = loaded.architecture.links(loaded.values, LAYOUTS[0])
    return library_logits(model, links), wrong


def verify(before: Loaded, after: Loaded, request: Request) -> bool:
    """Print how far the result is from what was read; whether it is the same model."""
    given = in_dtype(before.source, request.dtype)
    wrong, count = tensor_differences(given, after.source), len(given.infos)
    if wrong:
        print(f"verify: {len(wrong)} of {count} tensors are not those of what was read: {listed(wrong)}")
    else:
        print(f"verify: all {count} tensors are those of what was read, bit for bit")
    fields = field_differences(before, after)
    print(f"verify: {listed(fields)}" if fields else "verify: all fields of the model are those of what was read")
    if wrong or fields:
        return False
    (first, held), (second, others) = probed(before, request.dtype), probed(after)
    rows = rows_for(before.config, before.probe_rules if before.config.vision.vision_num_layers else None)
    found = [*compare(first, second, rows), *compare_quiet(before.config, first, second, rows)]
    for difference in found:
        print(f"verify: {difference}")
    if before.checkpoint is not None and request.tokenizer not in (None, "none"):
        tokenizer = load_tokenizer(request.tokenizer, engine="reference", eod_token=request.eod_token)
        own = given_files(before, tokenizer, request.accept_ties)
        refuse_difference(own, library_encoder(after.folder), PROBE)
        print(f"verify: {len(PROBE)} texts get the ids of --tokenizer from the library's AutoTokenizer")
    return not held and not others and all(difference.is_small for difference in found)
