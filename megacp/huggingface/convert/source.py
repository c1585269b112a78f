"""The input of a conversion, by our names: a checkpoint of ours or a Hugging Face folder.

Only headers and configs are read here; tensors are read one by one, already checked against their
config.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megacp.distributed.grid import Axis
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, flatten, with_values
from megacp.engine.data_parallel.boxes import MODEL, TensorBox
from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.config_json import ABSENT, Values, shown
from megacp.huggingface.convert.families import IGNORED_TENSORS, of_config, of_values
from megacp.huggingface.convert.family import Family
from megacp.huggingface.convert.hf_files import on_each
from megacp.huggingface.convert.lora import Pairs, folded
from megacp.huggingface.convert.tables import EMBEDDING, HEAD
from megacp.huggingface.convert.tensors import (
    Info,
    Link,
    Mapped,
    Source,
    dtypes,
    is_finite,
    not_finite,
    one_dtype,
    same_values,
    tensor_problems,
)
from megacp.huggingface.convert.text_part import (
    NOT_TEXT,
    TEXT_PARTS,
    TextTensors,
    left_out,
    text_content,
)
from megacp.prepare.media import processor_files
from megacp.prepare.media.processor_files import FolderRules
from megacp.prepare.tokenize.beside import OLDER_NAME, TEMPLATE_FOLDER, TEMPLATE_NAMES, read_object
from megacp.prepare.tokenize.tokenizer import load_tokenizer, tokenizer_files
from megacp.storage import wording
from megacp.training.checkpoint.commit import LoadedCheckpoint, load_checkpoint
from megacp.training.checkpoint.directory import MANIFEST_FILE, is_step_name
from megacp.training.data.vision.decoding import RULES, rules_from_dict
from megacp.training.data.vision.rules import VisionRules
from megacp.training.loop.state import stored_state
from megacp.training.loop.stored import stored_config

_TOLD = 20
_DTYPES = ("float32", "bfloat16", "float64")
_COMPANIONS = (*TEMPLATE_NAMES, OLDER_NAME, "added_tokens.json")
"""Files that may lie beside a tokenizer and go with it."""
SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")
GENERATION = "generation_config.json"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which the library finds an adapter, also next to the weights of a model."""


def require_all(
    infos: Mapping[str, Info], links: Sequence[Link], to_ours: bool, where: Path
) -> None:
    """ValueError that lists every tensor that is missing, unexpected or of another shape."""
    wanted = [named for link in links for named in (link.theirs if to_ours else link.ours)]
    found = tensor_problems(infos, wanted, IGNORED_TENSORS if to_ours else ())
    if found:
        raise ValueError(f"{where} does not hold the tensors of its config: {in_brief(found)}")


def in_brief(lines: Sequence[str]) -> str:
    """The first lines in one, and how many more there are."""
    return wording.listed(lines, _TOLD, "; ")


class CheckpointSource:
    """The weights of a checkpoint of ours, by global name."""

    def __init__(self, loaded: LoadedCheckpoint) -> None:
        self._loaded = loaded
        with loaded.reading():
            self._payload = loaded.payload()
        tensors = self._payload.tensors.items()
        begin = f"{MODEL}."
        self.infos = {
            name.removeprefix(begin): Info(*what)
            for name, what in tensors
            if name.startswith(begin)
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor."""
        info = self.infos[name]
        tensor = torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype)
        offsets = (start, *[0] * (len(info.shape) - 1))
        with self._loaded.reading():
            self._payload.read([TensorBox(f"{MODEL}.{name}", info.shape, offsets, tensor)])
        if not is_finite(tensor):
            raise ValueError(
                f"{self._loaded.path} has weights that are inf or NaN: {not_finite(name, tensor)}"
            )
        return tensor


@dataclass(frozen=True)
class Loaded:
    """A model to be converted, by our names and flags, wherever it comes from."""

    folder: Path
    family: Family
    source: Source
    config: RunConfig
    rules: VisionRules | None
    checkpoint: LoadedCheckpoint | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    """The config.json it was read from."""
    files: Sequence[str] = ()
    """Names of a folder's files of weights."""
    pairs: Pairs | None = None
    """Low-rank pairs of a checkpoint; `source` and `config` are without them: they are folded into
    the weights.
    """
    left_out: Sequence[str] = ()
    """Fields of the config.json that change nothing in the library."""
    processor: FolderRules | None = None
    """What a folder's processor files say, also where ids of image tokens are not known."""
    unused: Sequence[str] = ()
    """A line for each kind of fields, files or tensors that a folder has and that is not used."""
    cls: str = ""
    """The library's class of a folder."""

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """All flags of `config` by name."""
        return flatten(self.config)

    @property
    def stated_dtype(self) -> str | None:
        """The dtype in config.json; None where it names none."""
        content = {**(self.content.get("text_config") or {}), **self.content}
        said = content.get("dtype") or content.get("torch_dtype")
        return said.removeprefix("torch.") if isinstance(said, str) else None

    @functools.cached_property
    def settled_dtype(self) -> str | None:
        """The dtype in config.json of weights that are float32 and bfloat16, as published norms
        are; else None.
        """
        found = {str(dtype).removeprefix("torch.") for dtype in dtypes(self.source)}
        said = self.stated_dtype
        return said if found == {"float32", "bfloat16"} and said in found else None

    def notes(self, dtype_given: bool) -> list[str]:
        """List what was decided about a folder, a line each."""
        found = []
        if self.left_out:
            found.append(
                f"config.json: {', '.join(self.left_out)} left out, the library names no such field"
            )
        found += self.unused
        if not dtype_given and self.settled_dtype is not None:
            found.append(
                f"weights of float32 and bfloat16 become {self.settled_dtype}, the dtype of "
                "config.json"
            )
        kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes(self.source)]
        if (
            not dtype_given
            and len(kinds) == 1
            and self.stated_dtype not in (None, "auto", kinds[0])
        ):
            said = self.stated_dtype
            found.append(
                f"config.json: dtype {said} not used: the weights are {kinds[0]} and stay so "
                "without --dtype"
            )
        return found


def read_checkpoint(path: Path, world: Axis) -> Loaded:
    """The newest whole checkpoint below `path`, or that step. Collective over `world`, which shares
    the hashing.
    """
    loaded = load_checkpoint(path, world)
    return on_each(world, lambda: _described(loaded))


def _described(loaded: LoadedCheckpoint) -> Loaded:
    stored, folder = (
        stored_config(loaded),
        Path(str(loaded.path)),
    )  # one of this machine, as `path` is
    source, config, pairs = folded(CheckpointSource(loaded), stored)
    values = flatten(config)
    family = of_values(values)
    family.config(values)  # refuses what it cannot say
    require_all(source.infos, family.links(values), False, folder)
    given = stored_state(loaded).image_rules
    rules = rules_from_dict(given) if given is not None else None
    return Loaded(folder, family, source, config, rules, loaded, pairs=pairs)


def read_hf(path: Path, flag: str = "--input", adapter: Path | None = None) -> Loaded:
    """Open a Hugging Face folder; `adapter` is the folder of --load-adapter, which the caller
    applies.

    ValueError names the flag, and the field, file or tensor at fault.
    """
    try:
        refuse_other_input(path, "hf")
        refuse_embedded_adapter(path, adapter)
        return _of_folder(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{flag} {path}: {error}") from error


def _of_folder(path: Path) -> Loaded:
    whole = read_object(path / CONFIG)
    kind = whole.get("model_type")
    part = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    content = whole if part is None else text_content(whole, part)
    family = of_config(content)
    fields: list[str] = []
    unused: list[str] = []
    values = family.values(content, fields, unused)
    config = with_values(RunConfig(), {**values, "hf_model_type": family.name})
    if reasons := check(config, 1, trains=False):
        raise ValueError(
            f"{path / CONFIG} describes a model that no run can have: {'; '.join(reasons)}"
        )
    unused += _unused_ties(whole, values)
    for section in (content, content.get("text_config")):
        if isinstance(section, dict):
            require_ids(path / CONFIG, section)
    unused += generation_notes(path)
    weights: Source
    if part is None:
        weights = files = hf_files.SafetensorsFolder(path)
    else:
        files = hf_files.SafetensorsFolder(path, without=NOT_TEXT)
        weights = TextTensors(files)
        unused.append(left_out(whole, files.left_out))
    weights = family.opened(weights, values)
    further = further_tensors(weights.infos, values["num_layers"], family.further_layers(content))
    if further:
        names = wording.listed([*further], 3)
        unused.append(
            f"tensors of layers that predict further tokens left out, as in the library: {names}"
        )
    infos = {name: info for name, info in weights.infos.items() if name not in further}
    found = _links_of_file(family, values, weights, infos)
    if found.untied:
        config = with_values(config, {"untie_embeddings_and_output_weights": True})
    if found.note:
        unused.append(found.note)
    require_all(found.infos, found.links, True, path)
    source = Mapped(weights, found.links, to_ours=True)
    processor, rules = None, None
    if config.vision.vision_num_layers:
        processor, rules = rules_of(path, content, config, family)
        unused += notes_on_rules(processor, rules)
    elif others := [
        name for name in processor_files.PROCESSOR_NAMES if os.path.lexists(path / name)
    ]:
        unused.append(
            f"{', '.join(others)}: not used, the model of config.json has no vision tower"
        )
    return Loaded(
        path,
        family,
        source,
        config,
        rules,
        None,
        content,
        [*files.files],
        left_out=fields,
        processor=processor,
        unused=unused,
        cls=family.cls if part is None else part.cls,
    )


def _unused_ties(content: Mapping[str, Any], values: Values) -> list[str]:
    """Return a line if a config says twice whether it ties, differently, or says it of a family
    without a tie.

    Raises ValueError for an inner field that is neither true nor false; the outer one has been
    checked.
    """
    inside = content.get("text_config")
    said = {"tie_word_embeddings": content.get("tie_word_embeddings", ABSENT)}
    if isinstance(inside, Mapping):
        said["text_config.tie_word_embeddings"] = inside.get("tie_word_embeddings", ABSENT)
    for name, value in said.items():
        if value is not ABSENT and not isinstance(value, bool):
            raise ValueError(f"config.json: {name} is {shown(value)}, expected true or false")
    tied = not values["untie_embeddings_and_output_weights"]
    unused = [name for name, value in said.items() if value is not ABSENT and value != tied]
    if not unused:
        return []
    what = "ties the head to the embedding" if tied else "does not tie the head to the embedding"
    return [
        f"config.json: {' and '.join(unused)} {str(not tied).lower()} not used, the library {what}"
    ]


@dataclass(frozen=True)
class _LinksOfFile:
    """How the tensors of a folder become ours."""

    links: Sequence[Link]
    infos: Mapping[str, Info]
    """The tensors that `links` must name, and no others."""
    untied: bool = False
    """Whether the config ties embedding and head, and the file has two that differ."""
    note: str = ""
    """A line about a tie that the file decides differently from the config."""


def _links_of_file(
    family: Family, values: Values, weights: Source, infos: Mapping[str, Info]
) -> _LinksOfFile:
    """Link a folder's tensors to ours, and settle a tied head as the library does
    (`PreTrainedModel.tie_weights`).

    A config that ties says what happens to a missing tensor. Of two tensors that differ, the
    library keeps both.
    """
    layout = family.layout_of(infos)
    links = family.links(values, layout, infos)
    if values["untie_embeddings_and_output_weights"]:
        return _LinksOfFile(links, infos)
    # the names of both tensors in this family and layout
    apart = family.links({**values, "untie_embeddings_and_output_weights": True}, layout, infos)
    (head,) = (link for link in apart if any(named.name == HEAD for named in link.ours))
    (embedding,) = (link for link in apart if any(named.name == EMBEDDING for named in link.ours))
    name_of_head, name_of_embedding = head.theirs[0].name, embedding.theirs[0].name
    if name_of_head not in infos:
        return _LinksOfFile(links, infos)
    if name_of_embedding not in infos:
        of_head = Link(head.theirs, embedding.ours)
        others = [link for link in links if link != embedding]
        return _LinksOfFile(
            [of_head, *others], infos, note=f"{name_of_head} is also the embedding: they are tied"
        )
    if same_values(weights, name_of_embedding, name_of_head):
        # some files hold a tied head all the same
        return _LinksOfFile(
            links, {name: info for name, info in infos.items() if name != name_of_head}
        )
    note = (
        f"tie_word_embeddings is true, but {name_of_head} differs from {name_of_embedding}: both "
        "are kept and not "
        "tied, as by the library"
    )
    return _LinksOfFile(apart, infos, True, note)


_FURTHER_TENSOR = re.compile(r"(^|\.)(mtp|nextn)(_[a-z]+)*\.")
_OF_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d{1,9})\.")


def further_tensors(names: Iterable[str], layers: int, further: int) -> dict[str, None]:
    """Return the tensors of layers that predict further tokens, in order: by name, or after the
    last of `layers`.
    """
    found = dict[str, None]()
    for name in names:
        numbered = _OF_LAYER.match(name)
        is_behind = numbered is not None and layers <= int(numbered[1]) < layers + further
        if is_behind or _FURTHER_TENSOR.search(name):
            found[name] = None
    return found


def require_ids(path: Path, content: Mapping[str, Any]) -> None:
    """ValueError for special tokens in a file that are not ids."""
    for name in SPECIAL:
        found = content.get(name)
        ids = found if isinstance(found, list) else [found]
        if found is not None and (not ids or any(type(one) is not int for one in ids)):
            raise ValueError(
                f"{path}: {name} is {shown(found)}, expected the id of a token, or a list of ids"
            )


def read_generation(path: Path) -> dict[str, Any]:
    """Read a generation_config.json. ValueError for one whose special tokens are not ids."""
    content = read_object(path)
    require_ids(path, content)
    return content


_NO_CHOICE = ("transformers_version", "use_cache", "output_", "return_", "cache_", "_", *SPECIAL)
"""How fields of generation settings begin that choose no token, or that are used."""


def generation_notes(folder: Path) -> list[str]:
    """List what is not used of a folder's generation settings, in one line at most. ValueError for
    a damaged file.

    Zeros and ones change nothing: no beams, no penalty, a temperature of 1.
    """
    if not os.path.lexists(folder / GENERATION):
        return []
    content = read_generation(folder / GENERATION)
    settings = []
    for name, value in sorted(content.items()):
        if not name.startswith(_NO_CHOICE) and (
            value is True or value not in (None, False, 0, 1, [], {})
        ):
            settings.append(f"{processor_files.printable(name)} {shown(value)}")
    if not settings:
        return []
    told = wording.listed(settings, 10)
    return [
        f"{GENERATION}: {told} not used: kept for the export, generation takes the flags of its "
        "command"
    ]


def rules_of(
    folder: Path, content: dict[str, Any], config: RunConfig, family: Family
) -> tuple[FolderRules | None, VisionRules | None]:
    """Return what a folder's processor files say, and its rules with ids from its tokenizer or its
    config.

    The first is None without such files, the second also where an id is not known.
    """
    ids, vision = dict[str, int](), config.vision
    texts = RULES[vision.vision_family].token_texts
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(str(folder / "tokenizer.json"), engine="reference")
        found = {name: tokenizer.token_id(text) for name, text in texts.items()}
        ids = {name: i for name, i in found.items() if i is not None}
    said = {name: content[field] for field, name in family.token_fields.items() if field in content}
    if wrong := [name for name in said if ids.get(name, said[name]) != said[name]]:
        words = ", ".join(f"{name} {said[name]} and {ids[name]}" for name in wrong)
        raise ValueError(f"{folder}: config.json and tokenizer.json have different ids for {words}")
    processor = processor_files.read_processor(folder, vision.vision_family)
    if processor is None:
        return None, None
    ids = {**said, **ids}
    rules = processor.with_ids(ids)
    if misfit := rules.misfit(vision):
        raise ValueError(f"{folder}: its processor {misfit}")
    # without a tokenizer the ids of column tokens are not known
    return processor, rules if set(ids) == set(texts) else None


def notes_on_rules(processor: FolderRules | None, rules: VisionRules | None) -> list[str]:
    """List what is not used of the processor files of a folder with a tower, a line each."""
    if processor is None:
        return [
            f"there is no {processor_files.IMAGES}: the packs alone say how images become tokens"
        ]
    found = list(processor.notes)
    if rules is None:
        files = ", ".join(processor.files)
        found.append(
            f"{files}: not kept for an export, since the folder does not say the ids of all image "
            "tokens"
        )
    return found


def copy_companions(source: Path, folder: Path, without: Sequence[str] = ()) -> None:
    """Copy what lies beside a tokenizer, but for the files named in `without`."""
    for name in _COMPANIONS:
        if name not in without and (source / name).is_file():
            hf_files.copy_file(source / name, folder / name)
    for path in (
        sorted((source / TEMPLATE_FOLDER).iterdir()) if (source / TEMPLATE_FOLDER).is_dir() else []
    ):
        if path.suffix == ".jinja" and path.is_file():
            if (folder / TEMPLATE_FOLDER).is_symlink():
                (folder / TEMPLATE_FOLDER).unlink()
            (folder / TEMPLATE_FOLDER).mkdir(exist_ok=True)
            hf_files.copy_file(path, folder / TEMPLATE_FOLDER / path.name)


def model_dtype(source: Source) -> str:
    """The `--dtype` of weights. ValueError where no run has such weights."""
    dtype = str(one_dtype(source)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(
            f"the weights are {dtype}, runs of megacp have {', '.join(_DTYPES)}: choose with "
            "--dtype"
        )
    return dtype


def keep_generation(loaded: Loaded, folder: Path) -> None:
    """Copy a folder's generation settings; where it has none, write the special ids of its
    config.
    """
    given = loaded.folder / GENERATION
    if given.is_file():
        read_generation(given)  # refused now rather than when it is exported
        hf_files.copy_file(given, folder / GENERATION)
        return
    text = loaded.content.get("text_config")
    said = {
        **(text if isinstance(text, dict) else {}),
        **{k: v for k, v in loaded.content.items() if v is not None},
    }
    ids = {key: said[key] for key in SPECIAL if said.get(key) is not None}
    if ids:
        hf_files.write_json(folder / GENERATION, ids)


def copy_tokenizer(loaded: Loaded, folder: Path) -> str:
    """Copy the tokenizer that a folder brings; its hash as a run records it, or nothing where there
    is none.
    """
    names = tokenizer_files(loaded.folder)
    if not names:
        return ""
    tokenizer = load_tokenizer(
        ",".join(str(loaded.folder / name) for name in names), engine="reference"
    )
    source = tokenizer.files[
        0
    ].parent  # another one than the folder where the library has made one of its files
    for name in (*(path.name for path in tokenizer.files), "tokenizer_config.json"):
        if (source / name).is_file():
            hf_files.copy_file(source / name, folder / name)
    copy_companions(source, folder)
    rows = loaded.config.model.embedding_rows
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{loaded.folder}: the tokenizer has {tokenizer.vocab_size} ids, the model has {rows} "
            "rows"
        )
    return tokenizer.sha256


def refuse_embedded_adapter(path: Path, applied: Path | None = None) -> None:
    """ValueError for a model's folder with an adapter in it that is not `applied`: the library
    would apply it.
    """
    if not os.path.lexists(path / ADAPTER_CONFIG):
        return
    if applied is not None and applied.exists() and applied.samefile(path):
        return
    raise ValueError(
        f"the folder holds a model and an adapter ({ADAPTER_CONFIG}), which the transformers "
        "library applies: train "
        f"on with --load-hf and --load-adapter {path}, merge it into the weights (peft: "
        "merge_and_unload), or move "
        "the adapter's files to another folder"
    )


def refuse_other_input(path: Path, kind: str) -> None:
    """ValueError when `path` is no folder of this kind (`hf`, `megacp`), with what it is
    instead.
    """
    if not path.is_dir():
        raise ValueError(
            "it is a file, expected a folder" if path.exists() else "there is no such folder"
        )
    names = {entry.name for entry in path.iterdir()}
    is_checkpoint = MANIFEST_FILE in names or any(map(is_step_name, names))
    if kind == "hf" and CONFIG not in names:
        also = ", it is a checkpoint of megacp: --from megacp" if is_checkpoint else ""
        if ADAPTER_CONFIG in names:
            also = ", it is an adapter: give its model with --load-hf, and the adapter with --load-adapter"
        raise ValueError(f"the folder has no {CONFIG}{also}")
    if kind == "megacp" and not is_checkpoint and CONFIG in names:
        raise ValueError(
            f"there is no committed checkpoint, it is a Hugging Face folder with a {CONFIG}: "
            "--from hf"
        )
