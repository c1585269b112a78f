"""Starts training from a Hugging Face folder: reads its model as flags, its weights with our names,
and its tokenizer.

The tokenizer and the generation settings are stored next to the run's checkpoints, where an export
finds them. A vision tower can be added to a text model, either from a Molmo2 folder or a new one. A
tied head then becomes a copy of the embedding.
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
from megacp.storage.hub import no_such_folder
from megacp.storage.place import Place
from megacp.storage.url import Url
from megacp.training.checkpoint.weights import TensorRows
from megacp.training.data.vision.decoding import RULES
from megacp.training.loop.stored import with_model_of

ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")


class Together:
    """Tensors of several sources with our names.

    `places` maps each of our names to a source and the tensor's name in that source.
    """

    def __init__(self, places: Mapping[str, tuple[Source, str]]) -> None:
        self._places = places
        self.infos = {name: source.infos[theirs] for name, (source, theirs) in places.items()}

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        source, theirs = self._places[name]
        return source.rows(theirs, start, stop)


def with_tower(
    text: Loaded, tower: Loaded | None, config: RunConfig, given: Collection[str]
) -> tuple[RunConfig, Source, dict[str, int], str]:
    """Add a vision tower to a text model: the tower of `tower`, or a new one with the flags of
    `config`.

    Return the config, its tensors, the number of rows to read from each partly read tensor (the
    remaining rows are new), and a message. Raise ValueError if the model has a tower, if no tower
    is given, or if the given tower cannot be combined with another text model.
    """
    # One family has a tower that fits any text model.
    (giver,) = (family for family in FAMILIES.values() if family.gives_tower)
    if text.config.vision.vision_num_layers:
        raise ValueError(
            f"--vision-from-hf adds a tower to a text model, but {text.folder} already has one; "
            "remove the flag"
        )
    if tower is not None and tower.family is not giver:
        raise ValueError(
            f"--vision-from-hf {tower.folder} is a {tower.family.name} model; use a "
            f"{giver.name} model"
        )
    if tower is None and not config.vision.vision_num_layers:
        raise ValueError(
            "--vision-from-hf none creates a new tower; set --vision-num-layers, for example to 25"
        )
    if tower is None and config.vision.vision_family != giver.name:
        raise ValueError(
            f"--vision-from-hf none creates a {giver.name} tower, but --vision-family is "
            f"{config.vision.vision_family}"
        )
    # Take all flags of the tower from its folder, or from the command line.
    values = flatten(config if tower is None else tower.config)
    changes = {name: values[name] for name, info in fields().items() if info.room == "vision"}
    token_rows = VISION_FAMILIES[giver.name].token_rows
    if "additional_vocab_size" in given:
        token_rows = config.model.additional_vocab_size
    # Rows of the embedding for image tokens, and a head that is separate from it.
    changes |= {
        "additional_vocab_size": token_rows,
        "untie_embeddings_and_output_weights": True,
        "hf_model_type": None,
    }
    whole = with_values(text.config, changes)
    # Where each tensor of the new model is read.
    places = {name: (text.source, name) for name in text.source.infos}
    places.setdefault(HEAD, (text.source, EMBEDDING))  # a tied head becomes a copy
    wanted = shapes_of(flatten(whole))
    if tower is not None:
        # Connector tensors whose size depends on the text model fit only if the sizes agree.
        for name, info in tower.source.infos.items():
            is_vision = name.startswith(("vision.", "connector."))
            if is_vision and info.shape == wanted[name]:
                places[name] = (tower.source, name)
    # Missing tensors are initialised; in the embedding, only the rows of the image tokens are.
    new = [name for name in wanted if name not in places]
    known = {EMBEDDING: text.config.model.vocab_size, **dict.fromkeys(new, 0)}
    parts = ["tower and connector"]
    if tower is not None:
        parts = [name for name in new if name.startswith("connector.")]
    parts.append(f"{token_rows} rows of the embedding for image tokens")
    note = f"newly initialised: {', '.join(parts)}"
    return whole, Together(places), known, note


@dataclass
class FolderStart:
    """The weights of a folder, as a `megacp.training.checkpoint.weights.Weights`."""

    loaded: Loaded
    place: Path
    source: TensorRows
    tokenizer_sha256: str = ""
    fingerprint: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)
    known_rows: Mapping[str, int] = field(default_factory=dict)
    tower: Loaded | None = None
    """The folder of --vision-from-hf. Its image tokens have different ids in this model."""

    @property
    def image_rules(self) -> Mapping[str, Any] | None:
        """Image rules in the form of a dataset's manifest; None if they are unknown."""
        if self.tower is not None or self.loaded.rules is None:
            return None
        return self.loaded.rules.to_dict()

    def image_misfits(self, where: str, image_rules: Mapping[str, Any]) -> list[str]:
        """Return at most one message: how a dataset's image rules differ from the folder's files.

        `where` is the dataset's name in messages, and `image_rules` come from its manifest.
        """
        flag = "--load-hf"
        loaded = self.loaded
        if self.tower is not None:
            flag = "--vision-from-hf"
            loaded = self.tower
        processor = loaded.processor
        if processor is None or image_rules.get("family", next(iter(RULES))) != processor.family:
            # Another vision family is refused elsewhere, by its name.
            return []
        # Compare every rule, so the message can list all differences.
        found = processor.differences(image_rules)
        if self.tower is None and loaded.rules is not None:
            # With a tower from another folder, image tokens have different ids.
            given = image_rules.get("token_ids", {})
            for name, i in loaded.rules.token_ids.items():
                if given.get(name, i) != i:
                    found.append(f"the id of {name} is {given[name]}, but the folder's is {i}")
        if not found:
            return []
        return [
            f"{where} was built with different image rules from {flag} {loaded.folder}: "
            f"{'; '.join(found)}. Rebuild it with the folder's rules (without these flags), or set "
            "the values in the folder's files to those of the dataset"
        ]

    def keep(self, folder: Place) -> None:
        """Store the tokenizer and the generation settings next to the run's checkpoints."""
        with tempfile.TemporaryDirectory() as own:
            # Files for a URL are written locally first.
            local = folder if isinstance(folder, Path) else Path(own)
            copy_tokenizer(self.loaded, local)
            keep_generation(self.loaded, local)
            for path in sorted(Path(own).rglob("*")):
                if isinstance(folder, Url) and path.is_file():
                    (folder / str(path.relative_to(local))).upload(path)


def _adapter(config: RunConfig, loaded: Loaded, given: Collection[str]) -> Adapter:
    """Return the adapter of --load-adapter.

    Raise ValueError if it is invalid, or if one of the flags `given` contradicts it.
    """
    path = config.checkpoint.load_adapter
    folder = Path(str(path))
    if not folder.is_dir():
        raise ValueError(f"--load-adapter {path}: {no_such_folder(folder)}")
    if not (folder / ADAPTER_CONFIG).exists():
        raise ValueError(
            f"--load-adapter {path}: the folder has no {ADAPTER_CONFIG}, so it is not an adapter "
            "of peft"
        )
    try:
        adapter = Adapter(folder, loaded.family, loaded.values)
    except (ValueError, OSError) as error:
        raise ValueError(f"--load-adapter {path}: {error}") from error
    flags = flatten(config)
    requested = {
        name: flags[name] if name in given else value for name, value in adapter.flags.items()
    }
    # Different flags may describe the same pairs, so the pairs are compared.
    has = with_values(loaded.config, adapter.flags).model
    wanted = with_values(loaded.config, requested).model
    pairs_of_adapter = {kind: has.lora_pairs[kind] for kind in lora_kinds(has)}
    pairs_wanted = {kind: wanted.lora_pairs[kind] for kind in lora_kinds(wanted)}
    if pairs_wanted != pairs_of_adapter:
        words = " ".join(f"{flag(name)} {value}" for name, value in adapter.flags.items())
        raise ValueError(f"--load-adapter {path} corresponds to {words}; remove these flags")
    return adapter


def open_start(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, FolderStart, str]:
    """Open the folder of --load-hf, with --vision-from-hf and --load-adapter.

    Return the config with the folder's model (flags in `given` have priority), the start, and a
    message. Only headers are read. Raise ValueError for a folder that cannot be used.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ValueError("--load-hf requires the package safetensors: pip install -e '.[hf]'")
    folder = Path(str(config.checkpoint.load_hf))
    vision = config.checkpoint.vision_from_hf
    applied = config.checkpoint.load_adapter
    loaded = read_hf(folder, "--load-hf", None if applied is None else Path(applied))
    try:
        # --dtype has priority, then config.json for mixed weights, then the dtype of the weights.
        chosen = config.training.dtype if "dtype" in given else loaded.settled_dtype
        dtype = chosen or model_dtype(loaded.source)
        sha256 = ""
        if tokenizer_files(folder):
            sha256 = load_tokenizer(str(folder), "reference").sha256
    except ValueError as error:
        raise ValueError(f"--load-hf {folder}: {error}") from error
    stored = loaded.config
    source = loaded.source
    known: dict[str, int] = {}
    notes = loaded.notes("dtype" in given)
    if not sha256:
        notes.append(
            f"{folder} has no tokenizer files, so its token ids could not be compared with those "
            "of --data-path"
        )
    files = {f"--load-hf {name}": folder / name for name in loaded.files}
    tower: Loaded | None = None
    if vision is not None:
        if vision != "none":
            tower = read_hf(Path(vision), "--vision-from-hf")
        stored, source, known, note_of_tower = with_tower(loaded, tower, config, given)
        notes.append(note_of_tower)
        if tower is not None:
            notes += tower.notes(True)
            files |= {f"--vision-from-hf {name}": Path(vision) / name for name in tower.files}
    stored = with_values(stored, {"dtype": dtype})
    if applied is not None:
        adapter = _adapter(config, loaded, given)
        notes += adapter.notes
        files |= {f"--load-adapter {name}": Path(applied) / name for name in ADAPTER_FILES}
        # The adapter's flags become flags of the run and of the folder's model.
        config = with_values(config, adapter.flags)
        stored = with_values(stored, adapter.flags)
        places = {name: (source, name) for name in source.infos}
        places |= {name: (adapter, name) for name in adapter.infos}
        source = Together(places)
    # Flags that the user gave must agree with the folder's model.
    config, note = with_model_of(config, stored, folder, given, weights_only=True)
    # Pairs that are in no source are initialised, so no row of them is read.
    new_pairs = (pair.name for pair in pair_tensors(config.model) if pair.name not in source.infos)
    known |= dict.fromkeys(new_pairs, 0)
    tensors = {name: [list(info.shape), str(info.dtype)] for name, info in source.infos.items()}
    rules = loaded.rules.to_dict() if loaded.rules is not None else None
    # Ranks compare this fingerprint to find machines with different copies of the folder.
    described = [tensors, flatten(stored), sorted(files), rules]
    fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    start = FolderStart(
        loaded, folder, in_dtype(source, DTYPES[dtype]), sha256, fingerprint, files, known, tower
    )
    return config, start, "\n".join([note, *notes])
