"""A run that starts from a Hugging Face folder: its model by our flags, its weights by our names,
its tokenizer.

Tokenizer and generation settings are kept beside the run's checkpoints, so an export finds them
there. A text model may get a vision tower, that of a Molmo2 folder or a new one; a tied head
becomes a copy of the embedding then.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megacp.engine.backends.native import DTYPES
from megacp.engine.config.run import RunConfig, fields, flag, flatten, with_values
from megacp.engine.config.vision import VISION_FAMILIES
from megacp.engine.layers.stack import lora_kinds, pair_tensors
from megacp.huggingface.convert.adapter import Adapter
from megacp.huggingface.convert.families import FAMILIES
from megacp.huggingface.convert.source import (
    ADAPTER_CONFIG,
    Loaded,
    copy_tokenizer,
    keep_generation,
    model_dtype,
    read_hf,
)
from megacp.huggingface.convert.tables import EMBEDDING, HEAD, shapes_of
from megacp.huggingface.convert.tensors import Source, in_dtype
from megacp.prepare.tokenize.tokenizer import load_tokenizer, tokenizer_files
from megacp.storage.place import Place
from megacp.storage.url import Url
from megacp.training.checkpoint.weights import TensorRows
from megacp.training.data.vision.decoding import RULES
from megacp.training.loop.stored import with_model_of

ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")


class Together:
    """Tensors of several sources: ours by name -> the source, and the name there."""

    def __init__(self, places: Mapping[str, tuple[Source, str]]) -> None:
        self._places = places
        self.infos = {name: source.infos[theirs] for name, (source, theirs) in places.items()}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        source, theirs = self._places[name]
        return source.rows(theirs, start, stop)


def with_tower(
    text: Loaded, tower: Loaded | None, config: RunConfig, given: Collection[str]
) -> tuple[RunConfig, Source, dict[str, int], str]:
    """Put a vision tower before a text model: that of `tower`, or a new one as the flags of
    `config` describe it.

    Return the config, its tensors, how many rows of tensors are read (the remaining rows are new),
    and a note. Raises ValueError for a second tower, for none, and for one that cannot stand before
    another text model.
    """
    (giver,) = (family for family in FAMILIES.values() if family.gives_tower)
    if text.config.vision.vision_num_layers:
        raise ValueError(
            f"--vision-from-hf adds a tower to a text model, {text.folder} has one: leave the flag "
            "out"
        )
    if tower is not None and tower.family is not giver:
        raise ValueError(
            f"--vision-from-hf {tower.folder} is a {tower.family.name}, a {giver.name} is needed"
        )
    if tower is None and not config.vision.vision_num_layers:
        raise ValueError(
            "--vision-from-hf none makes a new tower: give its --vision-num-layers, such as 25"
        )
    if tower is None and config.vision.vision_family != giver.name:
        raise ValueError(
            f"--vision-from-hf none makes the tower of a {giver.name}, --vision-family is "
            f"{config.vision.vision_family}"
        )
    values = flatten(config if tower is None else tower.config)
    changes = {name: values[name] for name, info in fields().items() if info.room == "vision"}
    usual = VISION_FAMILIES[giver.name].token_rows
    asked = config.model.additional_vocab_size if "additional_vocab_size" in given else usual
    changes |= {
        "additional_vocab_size": asked,
        "untie_embeddings_and_output_weights": True,
        "hf_model_type": None,
    }
    whole = with_values(text.config, changes)
    places = {name: (text.source, name) for name in text.source.infos}
    places.setdefault(HEAD, (text.source, EMBEDDING))
    flags = flatten(whole)
    wanted = shapes_of(flags)
    if tower is not None:
        infos = {
            name: info
            for name, info in tower.source.infos.items()
            if name.startswith(("vision.", "connector."))
        }
        places |= {
            name: (tower.source, name) for name, info in infos.items() if info.shape == wanted[name]
        }
    new = [name for name in wanted if name not in places]
    known = {EMBEDDING: text.config.model.vocab_size, **dict.fromkeys(new, 0)}
    told = (
        [name for name in new if name.startswith("connector.")]
        if tower is not None
        else ["tower and connector"]
    )
    note = (
        f"new and not read: {', '.join([*told, f'{asked} rows of the embedding for image tokens'])}"
    )
    return whole, Together(places), known, note


@dataclass
class FolderStart:
    """The weights of a folder, as `megacp.training.checkpoint.weights.Weights`."""

    loaded: Loaded
    place: Path
    source: TensorRows
    tokenizer_sha256: str = ""
    fingerprint: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)
    known_rows: Mapping[str, int] = field(default_factory=dict)
    tower: Loaded | None = None
    """The folder of --vision-from-hf, whose image tokens have other ids in this model."""

    @property
    def image_rules(self) -> Mapping[str, Any] | None:
        """Rules by which images become tokens, as a manifest has them; None where they are not
        known.
        """
        if self.tower is not None or self.loaded.rules is None:
            return None
        return self.loaded.rules.to_dict()

    def image_misfits(self, where: str, image_rules: Mapping[str, Any]) -> list[str]:
        """List how packs at `where`, made by `image_rules`, differ from the processor files of the
        folder.
        """
        flag, loaded = (
            ("--vision-from-hf", self.tower)
            if self.tower is not None
            else ("--load-hf", self.loaded)
        )
        processor = loaded.processor
        if processor is None or image_rules.get("family", next(iter(RULES))) != processor.family:
            return []  # other families are refused by name elsewhere
        found = processor.differences(image_rules)
        if self.tower is None and loaded.rules is not None:
            said, given = loaded.rules.token_ids, image_rules.get("token_ids", {})
            found += [
                f"the id of {name} is {given[name]}, the folder's is {said[name]}"
                for name in said
                if given.get(name, said[name]) != said[name]
            ]
        if not found:
            return []
        again = "build it again by the folder's (without these flags)"
        return [
            f"{where} was built with other image rules than those of {flag} {loaded.folder}: "
            f"{'; '.join(found)}: "
            f"{again}, or write the dataset's numbers into the folder's files"
        ]

    def keep(self, folder: Place) -> None:
        """Put tokenizer and generation settings beside the run's checkpoints."""
        with tempfile.TemporaryDirectory() as own:
            local = folder if isinstance(folder, Path) else Path(own)
            copy_tokenizer(self.loaded, local)
            keep_generation(self.loaded, local)
            for path in sorted(Path(own).rglob("*")):
                if isinstance(folder, Url) and path.is_file():
                    (folder / str(path.relative_to(local))).upload(path)


def _adapter(config: RunConfig, loaded: Loaded, given: Collection[str]) -> Adapter:
    """The adapter of --load-adapter. ValueError where a flag in `given` contradicts it."""
    path = config.checkpoint.load_adapter
    try:
        adapter = Adapter(Path(str(path)), loaded.family, loaded.values)
    except (ValueError, OSError) as error:
        raise ValueError(f"--load-adapter {path}: {error}") from error
    has = with_values(loaded.config, adapter.flags).model
    flags = flatten(config)
    said = {name: flags[name] if name in given else value for name, value in adapter.flags.items()}
    asked = with_values(loaded.config, said).model
    wanted, held = (
        {kind: model.lora_pairs[kind] for kind in lora_kinds(model)} for model in (asked, has)
    )
    if wanted != held:
        told = " ".join(f"{flag(name)} {value}" for name, value in adapter.flags.items())
        raise ValueError(f"--load-adapter {path} has {told}: leave these flags out")
    return adapter


def open_start(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, FolderStart, str]:
    """The config with the model of --load-hf, as far as no flag in `given` says what it is; the
    start; a note.

    Only headers are read. ValueError for a folder that cannot be taken.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ValueError(
            "--load-hf reads weights with the package safetensors: pip install 'megacp[hf]'"
        )
    folder, vision = Path(str(config.checkpoint.load_hf)), config.checkpoint.vision_from_hf
    applied = config.checkpoint.load_adapter
    loaded = read_hf(folder, "--load-hf", None if applied is None else Path(applied))
    try:
        said = config.training.dtype if "dtype" in given else loaded.settled_dtype
        dtype = said or model_dtype(loaded.source)
        sha256 = load_tokenizer(str(folder), "reference").sha256 if tokenizer_files(folder) else ""
    except ValueError as error:
        raise ValueError(f"--load-hf {folder}: {error}") from error
    stored, source, known, notes = (
        loaded.config,
        loaded.source,
        dict[str, int](),
        loaded.notes("dtype" in given),
    )
    files = {f"--load-hf {name}": folder / name for name in loaded.files}
    tower: Loaded | None = None
    if vision is not None:
        tower = read_hf(Path(vision), "--vision-from-hf") if vision != "none" else None
        stored, source, known, told_new = with_tower(loaded, tower, config, given)
        notes += [told_new, *(tower.notes(True) if tower is not None else ())]
        files |= {
            f"--vision-from-hf {name}": Path(vision) / name
            for name in (tower.files if tower else ())
        }
    stored = with_values(stored, {"dtype": dtype})
    if config.checkpoint.load_adapter is not None:
        adapter = _adapter(config, loaded, given)
        notes += adapter.notes
        files |= {
            f"--load-adapter {name}": Path(config.checkpoint.load_adapter) / name
            for name in ADAPTER_FILES
        }
        config, stored = with_values(config, adapter.flags), with_values(stored, adapter.flags)
        source = Together({name: (each, name) for each in (source, adapter) for name in each.infos})
    config, note = with_model_of(config, stored, folder, given, weights_only=True)
    # pairs that nothing has begin as they are drawn
    known |= dict.fromkeys(
        (pair.name for pair in pair_tensors(config.model) if pair.name not in source.infos), 0
    )
    told = {name: [list(info.shape), str(info.dtype)] for name, info in source.infos.items()}
    rules = loaded.rules.to_dict() if loaded.rules is not None else None
    described = [told, flatten(stored), sorted(files), rules]
    fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    start = FolderStart(
        loaded, folder, in_dtype(source, DTYPES[dtype]), sha256, fingerprint, files, known, tower
    )
    return config, start, "\n".join([note, *notes])
