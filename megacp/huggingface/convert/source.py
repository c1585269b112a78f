"""Opens the input of a conversion, a megacp checkpoint or a Hugging Face folder, with our tensor
names.

This module reads only headers and configs, and checks the tensors against the config. Tensor values
are read later, one tensor at a time.
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
    Named,
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
from megacp.storage.hub import no_such_folder
from megacp.training.checkpoint.commit import LoadedCheckpoint, load_checkpoint
from megacp.training.checkpoint.directory import MANIFEST_FILE, is_step_name
from megacp.training.data.vision.decoding import RULES, rules_from_dict
from megacp.training.data.vision.rules import VisionRules
from megacp.training.loop.state import stored_state
from megacp.training.loop.stored import stored_config

# Number of problems that a message lists.
_TOLD = 20
# The --dtype values of a run.
_DTYPES = ("float32", "bfloat16", "float64")
# Files next to a tokenizer that are copied with it.
_COMPANIONS = (*TEMPLATE_NAMES, OLDER_NAME, "added_tokens.json")
# Special-token fields of a config.json or generation_config.json.
SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")
GENERATION = "generation_config.json"
CONFIG = "config.json"
# The file that makes the library load an adapter, even next to the weights of a model.
ADAPTER_CONFIG = "adapter_config.json"


def require_all(
    infos: Mapping[str, Info], links: Sequence[Link], to_ours: bool, where: Path
) -> None:
    """Raise ValueError with each tensor that is missing, unexpected or has a wrong shape.

    `infos` has the library's names if `to_ours`, else our names.
    """
    wanted: list[Named] = []
    for link in links:
        wanted += link.theirs if to_ours else link.ours
    found = tensor_problems(infos, wanted, IGNORED_TENSORS if to_ours else ())
    if found:
        raise ValueError(f"the tensors of {where} do not match its config: {in_brief(found)}")


def in_brief(lines: Sequence[str]) -> str:
    """Join the first lines into one line, which ends with the number of omitted lines."""
    return wording.listed(lines, _TOLD, "; ")


class CheckpointSource:
    """The weights of a megacp checkpoint, by global name."""

    def __init__(self, loaded: LoadedCheckpoint) -> None:
        self._loaded = loaded
        with loaded.reading():
            self._payload = loaded.payload()
        tensors = self._payload.tensors.items()
        begin = f"{MODEL}."  # without the state of the optimizer
        self.infos = {
            name.removeprefix(begin): Info(*shape_and_dtype)
            for name, shape_and_dtype in tensors
            if name.startswith(begin)
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor. Raise ValueError for inf or NaN."""
        info = self.infos[name]
        tensor = torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype)
        # A box of rows, which may be spread across the files of several ranks.
        offsets = (start, *[0] * (len(info.shape) - 1))
        with self._loaded.reading():
            self._payload.read([TensorBox(f"{MODEL}.{name}", info.shape, offsets, tensor)])
        if not is_finite(tensor):
            raise ValueError(
                f"{self._loaded.path} has inf or NaN weights: {not_finite(name, tensor)}"
            )
        return tensor


@dataclass(frozen=True)
class Loaded:
    """A model to convert, with our names and flags, from a folder or a checkpoint."""

    folder: Path
    family: Family
    source: Source
    config: RunConfig
    rules: VisionRules | None
    checkpoint: LoadedCheckpoint | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    """The folder's config.json."""
    files: Sequence[str] = ()
    """Names of a folder's weight files."""
    pairs: Pairs | None = None
    """The LoRA pairs of a checkpoint. They are already merged into the weights of `source` and
    removed from `config`.
    """
    left_out: Sequence[str] = ()
    """Fields of the config.json that have no effect in the library."""
    processor: FolderRules | None = None
    """Rules of a folder's processor files, even if the ids of image tokens are unknown."""
    unused: Sequence[str] = ()
    """A message for each group of fields, files or tensors of a folder that is not used."""
    cls: str = ""
    """The library's class for a folder's model."""

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """All flags of `config` by name."""
        return flatten(self.config)

    @property
    def stated_dtype(self) -> str | None:
        """The dtype in config.json; None if it has no such field."""
        content = {**(self.content.get("text_config") or {}), **self.content}
        stated = content.get("dtype") or content.get("torch_dtype")
        return stated.removeprefix("torch.") if isinstance(stated, str) else None

    @functools.cached_property
    def settled_dtype(self) -> str | None:
        """The dtype in config.json if the weights mix float32 and bfloat16; otherwise None.

        Some published models have norms in float32 and other weights in bfloat16.
        """
        found = {str(dtype).removeprefix("torch.") for dtype in dtypes(self.source)}
        stated = self.stated_dtype
        if found == {"float32", "bfloat16"} and stated in found:
            return stated
        return None

    def notes(self, dtype_given: bool) -> list[str]:
        """Return messages about ignored parts of a folder and about its dtype.

        `dtype_given`: whether --dtype is set.
        """
        found = []
        if self.left_out:
            fields = ", ".join(self.left_out)
            found.append(f"config.json: ignoring {fields}, which transformers does not use")
        found += self.unused
        if dtype_given:
            return found
        if self.settled_dtype is not None:
            found.append(
                f"weights in float32 and bfloat16 are converted to {self.settled_dtype}, the dtype "
                "of config.json"
            )
        # The weights decide, not the config.
        kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes(self.source)]
        stated = self.stated_dtype
        if len(kinds) == 1 and stated not in (None, "auto", kinds[0]):
            found.append(
                f"config.json: ignoring dtype {stated}: the weights are {kinds[0]} and are "
                "converted only with --dtype"
            )
        return found


def read_checkpoint(path: Path, world: Axis) -> Loaded:
    """Open the newest complete checkpoint below `path`, or the step at `path`.

    Collective over `world`, whose ranks share the work of hashing.
    """
    loaded = load_checkpoint(path, world)
    return on_each(world, lambda: _described(loaded))


def _described(loaded: LoadedCheckpoint) -> Loaded:
    """Return a checkpoint's model. Raise ValueError if no family can express it."""
    stored = stored_config(loaded)
    folder = Path(str(loaded.path))  # a local path, since `path` is local
    source, config, pairs = folded(CheckpointSource(loaded), stored)
    values = flatten(config)
    family = of_values(values)
    family.config(values)  # raises ValueError for a model that the family cannot express
    require_all(source.infos, family.links(values), False, folder)
    # Image rules with which the run's dataset was built.
    given = stored_state(loaded).image_rules
    rules = rules_from_dict(given) if given is not None else None
    return Loaded(folder, family, source, config, rules, loaded, pairs=pairs)


def read_hf(path: Path, flag: str = "--input", adapter: Path | None = None) -> Loaded:
    """Open a Hugging Face folder.

    `adapter` is the folder of --load-adapter, which the caller applies. Raise ValueError with the
    flag and the invalid field, file or tensor.
    """
    try:
        # Checks that need no parsing come first.
        refuse_other_input(path, "hf", trains=flag == "--load-hf")
        refuse_embedded_adapter(path, adapter)
        return _of_folder(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{flag} {path}: {error}") from error


def _of_folder(path: Path) -> Loaded:
    """Read the config and headers of a folder, and match its tensors with ours."""
    whole = read_object(path / CONFIG)
    kind = whole.get("model_type")
    # For some vision-language models, only the text model is supported.
    part = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    content = whole if part is None else text_content(whole, part)
    family = of_config(content)
    fields: list[str] = []
    unused: list[str] = []
    # Read the config, and check that a run could have this model.
    values = family.values(content, fields, unused)
    config = with_values(RunConfig(), {**values, "hf_model_type": family.name})
    reasons = check(config, 1, trains=False)
    if reasons:
        raise ValueError(
            f"{path / CONFIG} describes a model that megacp cannot run: {'; '.join(reasons)}"
        )
    unused += _unused_ties(whole, values)
    # Special tokens may be in either place.
    for section in (content, content.get("text_config")):
        if isinstance(section, dict):
            require_ids(path / CONFIG, section)
    unused += generation_notes(path)
    weights: Source
    # If the vision tower is not supported, only the text model is read.
    if part is None:
        weights = files = hf_files.SafetensorsFolder(path)
    else:
        files = hf_files.SafetensorsFolder(path, without=NOT_TEXT)
        weights = TextTensors(files)
        unused.append(left_out(whole, files.left_out))
    weights = family.opened(weights, values)
    # Some models store layers for multi-token prediction, which training does not use.
    further = further_tensors(weights.infos, values["num_layers"], family.further_layers(content))
    if further:
        names = wording.listed([*further], 3)
        unused.append(f"ignoring multi-token-prediction tensors, as in transformers: {names}")
    infos = {name: info for name, info in weights.infos.items() if name not in further}
    # The file decides whether embedding and head are really tied.
    found = _links_of_file(family, values, weights, infos)
    if found.untied:
        config = with_values(config, {"untie_embeddings_and_output_weights": True})
    if found.note:
        unused.append(found.note)
    require_all(found.infos, found.links, True, path)
    source = Mapped(weights, found.links, to_ours=True)
    processor: FolderRules | None = None
    rules: VisionRules | None = None
    if config.vision.vision_num_layers:
        processor, rules = rules_of(path, content, config, family)
        unused += notes_on_rules(processor, rules)
    else:
        present = [name for name in processor_files.PROCESSOR_NAMES if os.path.lexists(path / name)]
        if present:
            unused.append(
                f"{', '.join(present)}: ignored, because the model in config.json has no vision "
                "tower"
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
    """Return a message if a `tie_word_embeddings` of the config differs from the library's choice.

    The config may have the field twice, or its class may not read it. Raise ValueError if a field
    is not true or false.
    """
    inside = content.get("text_config")
    stated = {"tie_word_embeddings": content.get("tie_word_embeddings", ABSENT)}
    if isinstance(inside, Mapping):
        stated["text_config.tie_word_embeddings"] = inside.get("tie_word_embeddings", ABSENT)
    for name, value in stated.items():
        if value is not ABSENT and not isinstance(value, bool):
            raise ValueError(f"config.json: {name} is {shown(value)}, expected true or false")
    tied = not values["untie_embeddings_and_output_weights"]
    unused = [name for name, value in stated.items() if value is not ABSENT and value != tied]
    if not unused:
        return []
    choice = "ties the head to the embedding" if tied else "does not tie the head to the embedding"
    value = str(not tied).lower()
    return [f"config.json: ignoring {' and '.join(unused)} {value}, transformers {choice}"]


@dataclass(frozen=True)
class _LinksOfFile:
    """How the tensors of a folder correspond to ours."""

    links: Sequence[Link]
    infos: Mapping[str, Info]
    """The tensors of the folder; `links` must cover exactly these."""
    untied: bool = False
    """Whether the file has a different embedding and head although the config ties them."""
    note: str = ""
    """A message if the file's tensors override the config; otherwise empty."""


def _links_of_file(
    family: Family, values: Values, weights: Source, infos: Mapping[str, Info]
) -> _LinksOfFile:
    """Link a folder's tensors to ours; treat a tied head like `PreTrainedModel.tie_weights`.

    If the config ties embedding and head, one of them may be missing. If the file has both and they
    differ, the library keeps both.
    """
    # Names of the file, and of our tensors.
    layout = family.layout_of(infos)
    links = family.links(values, layout, infos)
    if values["untie_embeddings_and_output_weights"]:
        return _LinksOfFile(links, infos)
    # Find the names of both tensors in this family and layout.
    apart = family.links({**values, "untie_embeddings_and_output_weights": True}, layout, infos)
    by_ours: dict[str, Link] = {}
    for link in apart:
        by_ours |= dict.fromkeys((named.name for named in link.ours), link)
    head = by_ours[HEAD]
    embedding = by_ours[EMBEDDING]
    name_of_head = head.theirs[0].name
    name_of_embedding = embedding.theirs[0].name
    if name_of_head not in infos:
        return _LinksOfFile(links, infos)
    if name_of_embedding not in infos:
        of_head = Link(head.theirs, embedding.ours)
        remaining = [link for link in links if link != embedding]
        note = f"{name_of_head} is also used as the embedding, because the config ties them"
        return _LinksOfFile([of_head, *remaining], infos, note=note)
    if same_values(weights, name_of_embedding, name_of_head):
        # Some files store a tied head as a copy, which is not needed.
        without_head = {name: info for name, info in infos.items() if name != name_of_head}
        return _LinksOfFile(links, without_head)
    note = (
        f"tie_word_embeddings is true, but {name_of_head} differs from {name_of_embedding}: both "
        "are kept and not tied, as in transformers"
    )
    return _LinksOfFile(apart, infos, True, note)


# Names of modules for multi-token prediction, and of layers, which may be such modules.
_FURTHER_TENSOR = re.compile(r"(^|\.)(mtp|nextn)(_[a-z]+)*\.")
_OF_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d{1,9})\.")


def further_tensors(names: Iterable[str], layers: int, further: int) -> dict[str, None]:
    """Return the multi-token-prediction tensors, in order.

    They are found by name, or because they belong to one of `further` layers after the model's
    `layers`.
    """
    found = dict[str, None]()
    for name in names:
        # The further layers follow the model's last layer, or have a module with its own name.
        numbered = _OF_LAYER.match(name)
        is_further = numbered is not None and layers <= int(numbered[1]) < layers + further
        if is_further or _FURTHER_TENSOR.search(name):
            found[name] = None
    return found


def require_ids(path: Path, content: Mapping[str, Any]) -> None:
    """Raise ValueError if a special-token field of a file is not an id or a list of ids."""
    for name in SPECIAL:
        found = content.get(name)
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not ids or any(type(one) is not int for one in ids):
            raise ValueError(
                f"{path}: {name} is {shown(found)}, expected a token id or a list of token ids"
            )


def read_generation(path: Path) -> dict[str, Any]:
    """Return the content of a generation_config.json.

    Raise ValueError if its special tokens are not ids.
    """
    content = read_object(path)
    require_ids(path, content)
    return content


# Prefixes of generation settings that need no message, because they do not affect the choice of
# tokens or because they are used.
_NO_CHOICE = ("transformers_version", "use_cache", "output_", "return_", "cache_", "_", *SPECIAL)


def generation_notes(folder: Path) -> list[str]:
    """Return at most one message, which lists the ignored generation settings of a folder.

    Raise ValueError for an invalid file. Zeros and ones have no effect: they mean no beam search,
    no penalty, or a temperature of 1.
    """
    # A dangling link exists too, and is reported when it is read.
    if not os.path.lexists(folder / GENERATION):
        return []
    content = read_generation(folder / GENERATION)
    settings = []
    for name, value in sorted(content.items()):
        # True == 1, so it needs a comparison by identity.
        has_effect = value is True or value not in (None, False, 0, 1, [], {})
        if has_effect and not name.startswith(_NO_CHOICE):
            settings.append(f"{processor_files.printable(name)} {shown(value)}")
    if not settings:
        return []
    return [
        f"{GENERATION}: ignoring {wording.listed(settings, 10)}: these settings are kept for the "
        "export; set generation options with the flags of tools/generate.py"
    ]


def rules_of(
    folder: Path, content: dict[str, Any], config: RunConfig, family: Family
) -> tuple[FolderRules | None, VisionRules | None]:
    """Return the image rules of a folder's processor files, without and with image-token ids.

    The ids come from its tokenizer or config. Without processor files, both results are None; if an
    id is unknown, only the second is None.
    """
    ids: dict[str, int] = {}
    vision = config.vision
    # The tokenizer contains all image tokens; the config has only some of their ids.
    texts = RULES[vision.vision_family].token_texts
    if (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(str(folder / "tokenizer.json"), engine="reference")
        found = {name: tokenizer.token_id(text) for name, text in texts.items()}
        ids = {name: i for name, i in found.items() if i is not None}
    fields = family.token_fields.items()
    stated = {name: content[field] for field, name in fields if field in content}
    wrong = [name for name in stated if ids.get(name, stated[name]) != stated[name]]
    if wrong:
        words = ", ".join(f"{name} {stated[name]} and {ids[name]}" for name in wrong)
        raise ValueError(f"{folder}: config.json and tokenizer.json have different ids for {words}")
    processor = processor_files.read_processor(folder, vision.vision_family)
    if processor is None:
        return None, None
    ids = {**stated, **ids}
    # Check the rules against the tower: patch size, image size.
    rules = processor.with_ids(ids)
    misfit = rules.misfit(vision)
    if misfit:
        raise ValueError(f"{folder}: its processor {misfit}")
    # Without a tokenizer some ids are unknown, such as those of column tokens.
    return processor, rules if set(ids) == set(texts) else None


def notes_on_rules(processor: FolderRules | None, rules: VisionRules | None) -> list[str]:
    """Return messages about missing or unused processor files of a model with a vision tower."""
    if processor is None:
        return [
            f"the folder has no {processor_files.IMAGES}: image rules come only from the dataset"
        ]
    found = list(processor.notes)
    if rules is None:
        files = ", ".join(processor.files)
        found.append(
            f"{files}: not kept for the export, because the ids of some image tokens are unknown"
        )
    return found


def copy_companions(source: Path, folder: Path, without: Sequence[str] = ()) -> None:
    """Copy the files that accompany a tokenizer, except those in `without`."""
    for name in _COMPANIONS:
        if name not in without and (source / name).is_file():
            hf_files.copy_file(source / name, folder / name)
    templates = source / TEMPLATE_FOLDER
    if not templates.is_dir():
        return
    target = folder / TEMPLATE_FOLDER
    for path in sorted(templates.iterdir()):
        if path.suffix == ".jinja" and path.is_file():
            # Never write through a link.
            if target.is_symlink():
                target.unlink()
            target.mkdir(exist_ok=True)
            hf_files.copy_file(path, target / path.name)


def model_dtype(source: Source) -> str:
    """Return the `--dtype` of weights. Raise ValueError if megacp does not support it."""
    dtype = str(one_dtype(source)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(
            f"the weights are {dtype}, but megacp supports {', '.join(_DTYPES)}: choose one with "
            "--dtype"
        )
    return dtype


def keep_generation(loaded: Loaded, folder: Path) -> None:
    """Copy a folder's generation settings, or write the special-token ids of its config."""
    given = loaded.folder / GENERATION
    if given.is_file():
        read_generation(given)  # refuses an invalid file now, not at the export
        hf_files.copy_file(given, folder / GENERATION)
        return
    text = loaded.content.get("text_config")
    stated: dict[str, Any] = dict(text) if isinstance(text, dict) else {}
    for name, value in loaded.content.items():
        if value is not None:
            stated[name] = value
    ids = {key: stated[key] for key in SPECIAL if stated.get(key) is not None}
    if ids:
        hf_files.write_json(folder / GENERATION, ids)


def copy_tokenizer(loaded: Loaded, folder: Path) -> str:
    """Copy a folder's tokenizer; return the hash that a run stores ("" without a tokenizer)."""
    names = tokenizer_files(loaded.folder)
    if not names:
        return ""
    paths = ",".join(str(loaded.folder / name) for name in names)
    tokenizer = load_tokenizer(paths, engine="reference")
    # If the library had to convert the tokenizer, its file is in another folder.
    source = tokenizer.files[0].parent
    # A run's folder gets the same files, so an export finds them there.
    for name in (*(path.name for path in tokenizer.files), "tokenizer_config.json"):
        if (source / name).is_file():
            hf_files.copy_file(source / name, folder / name)
    copy_companions(source, folder)
    rows = loaded.config.model.embedding_rows
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{loaded.folder}: the tokenizer has {tokenizer.vocab_size} ids, but the embedding has "
            f"{rows} rows"
        )
    return tokenizer.sha256


def refuse_embedded_adapter(path: Path, applied: Path | None = None) -> None:
    """Raise ValueError if a model's folder has an adapter other than `applied`.

    The library would apply it automatically.
    """
    if not os.path.lexists(path / ADAPTER_CONFIG):
        return
    # If --load-adapter is this folder, the adapter is applied.
    if applied is not None and applied.exists() and applied.samefile(path):
        return
    raise ValueError(
        f"the folder has a model and an adapter ({ADAPTER_CONFIG}), which transformers would apply "
        f"automatically: use --load-hf and --load-adapter {path} to continue training the adapter, "
        "merge it into the weights (peft: merge_and_unload), or move the adapter's files to "
        "another folder"
    )


def refuse_other_input(path: Path, kind: str, trains: bool = False) -> None:
    """Raise ValueError if `path` is not a folder of this kind (`hf` or `megacp`).

    `trains` says whether a training run reads the folder, rather than a conversion.
    """
    if not path.exists():
        raise ValueError(no_such_folder(path))
    if not path.is_dir():
        raise ValueError("this is a file, expected a folder")
    # Recognise the other kinds of folders, for a helpful message.
    names = {entry.name for entry in path.iterdir()}
    is_checkpoint = MANIFEST_FILE in names or any(map(is_step_name, names))
    if kind == "hf" and CONFIG not in names:
        advice = ""
        if ADAPTER_CONFIG in names:
            advice = "; this is an adapter: use --load-hf MODEL and --load-adapter ADAPTER"
        elif is_checkpoint:
            advice = "; this is a megacp checkpoint: "
            if trains:
                advice += "train it with --load, or convert it with --from megacp --to hf"
            else:
                advice += "use --from megacp"
        raise ValueError(f"the folder has no {CONFIG}{advice}")
    if kind == "megacp" and not is_checkpoint and CONFIG in names:
        raise ValueError(
            "the folder has no complete checkpoint; this is a Hugging Face folder with a "
            f"{CONFIG}: use --from hf"
        )
