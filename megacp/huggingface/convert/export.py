"""Runs a conversion: reads the input, then writes and verifies a complete Hugging Face folder or a
checkpoint for a new run.

The result is written to a temporary folder next to the output, which is renamed at the end. The
library's `save_pretrained` is not used: it needs the whole model in memory, and it splits the
embedding of Molmo2 at the wrong row.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacp.distributed.collectives import gather_objects
from megacp.distributed.grid import Axis, single_axis
from megacp.engine.backends.native import DTYPES
from megacp.engine.config.run import with_values
from megacp.engine.config.yaml_file import to_yaml
from megacp.engine.data_parallel.boxes import MODEL
from megacp.huggingface.convert import hf_files, processor
from megacp.huggingface.convert.card import CARD, model_card
from megacp.huggingface.convert.chat import other_form, write_chat_template
from megacp.huggingface.convert.hf_files import files_of, mine, on_each, on_first
from megacp.huggingface.convert.lora import write_adapter
from megacp.huggingface.convert.source import (
    GENERATION,
    SPECIAL,
    Loaded,
    copy_companions,
    copy_tokenizer,
    keep_generation,
    model_dtype,
    read_checkpoint,
    read_generation,
    read_hf,
    refuse_other_input,
    require_all,
)
from megacp.huggingface.convert.tables import NATIVE
from megacp.huggingface.convert.tensors import Info, Mapped, in_dtype, num_bytes, one_dtype
from megacp.huggingface.convert.text_part import PROCESSORS
from megacp.huggingface.convert.tokenizer import Given, write_tokenizer
from megacp.prepare.records.chat_template import THINKS, templates_of
from megacp.prepare.records.conversation import answer_ends
from megacp.prepare.tokenize.kept import own_tokenizer
from megacp.prepare.tokenize.tokenizer import PROBE, Tokenizer, load_tokenizer
from megacp.storage.files import sha256_of, write_new
from megacp.training.checkpoint.commit import LoadedCheckpoint
from megacp.training.checkpoint.directory import (
    CONFIG_FILE,
    MANIFEST_FILE,
    CheckpointManifest,
    FileRecord,
    point_and_prune,
    to_json,
)
from megacp.training.checkpoint.storage import INDEX_FILE, GlobalTensor, Index, StoredBox, rank_file
from megacp.training.data.manifest import answers_told, thoughts_told
from megacp.training.loop.state import RunState, first_token, last_token, stored_state

# Files that are not copied, because they are rewritten or contain weights or code.
_NOT_COPIED = ("config.json", hf_files.INDEX)
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pth",
    ".pt",
    ".ckpt",
)
_NOT_COPIED_SUFFIXES = (*_WEIGHTS, ".py", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Request:
    """The settings of a conversion, named like the command's flags, whose help describes them."""

    source: str
    target: str
    input: Path
    output: Path
    verify: bool = False
    dtype: torch.dtype | None = None
    layout: str = NATIVE
    max_shard_mib: float = 5000
    tokenizer: str | None = None
    chat_template: str = "auto"
    base_model: str | None = None


def write_hf(loaded: Loaded, folder: Path, request: Request, world: Axis) -> dict[str, Info]:
    """Write the files of a Hugging Face folder; return the shape and dtype of each tensor.

    Collective over `world`: each rank writes some of the weight files. Raise ValueError with the
    settings that the library cannot express.
    """
    family = loaded.family
    layout = request.layout
    if layout != NATIVE and not family.sections:
        raise ValueError(f"--layout {layout}: {family.name} has only one layout; remove the flag")
    # Raises ValueError for a model that the family cannot express.
    content = family.config(loaded.values, layout)
    links = family.links(loaded.values, layout)
    # Views only: tensors are read and cast one at a time while they are written.
    mapped = in_dtype(Mapped(loaded.source, links, to_ours=False), request.dtype)
    source = family.closed(mapped, loaded.values)
    dtype = str(one_dtype(source)).removeprefix("torch.")
    content["dtype"] = dtype
    content["torch_dtype"] = dtype  # the field's name before version 5 of the library
    if family.token_fields:
        ids: Mapping[str, int] = loaded.rules.token_ids if loaded.rules is not None else {}
        if not ids:
            # Without rules, image tokens follow the vocabulary.
            first = loaded.values["vocab_size"]
            ids = {name: first + i for i, name in enumerate(family.token_order)}
        fields = {field: ids[name] for field, name in family.token_fields.items() if name in ids}
        content |= fields
        content |= {key: loaded.content[key] for key in fields if key in loaded.content}
    # The first rank writes the small files, then all ranks share the weights.
    special = on_first(world, lambda: _files_beside(loaded, folder, request))
    hf_files.write_tensors(source, folder, int(request.max_shard_mib * hf_files.MIB), world)

    def complete() -> None:
        hf_files.write_json(folder / "config.json", {**content, **special})
        if not (folder / GENERATION).is_file():
            ids = {key: special[key] for key in SPECIAL if key in special}
            hf_files.write_json(folder / GENERATION, ids)
        # A checkpoint of step 0 is a converted folder, which has its own card.
        if loaded.checkpoint is not None and loaded.checkpoint.step:
            card = model_card(loaded.checkpoint, family.name, "transformers")
            (folder / CARD).write_text(card, encoding="utf-8")
        # Read the headers back: the folder must have all tensors of its config.
        written = family.opened(hf_files.SafetensorsFolder(folder), loaded.values)
        require_all(written.infos, links, True, folder)

    on_first(world, complete)
    return dict(source.infos)


def _files_beside(loaded: Loaded, folder: Path, request: Request) -> dict[str, Any]:
    """Write all files except weights and config.json; return token ids for config.json."""
    if loaded.checkpoint is None:
        return _copy_files(loaded, folder)
    return _write_files_of_run(loaded, loaded.checkpoint, folder, request)


def _copy_files(loaded: Loaded, folder: Path) -> dict[str, Any]:
    """Copy the files of a Hugging Face folder; return the config.json fields to keep."""
    not_copied = set(_NOT_COPIED)
    if loaded.cls != loaded.family.cls:
        # The text model of a vision-language model processes no images.
        not_copied |= PROCESSORS
    for path in sorted(loaded.folder.iterdir()):
        is_copied = path.name not in not_copied and not path.name.endswith(_NOT_COPIED_SUFFIXES)
        if path.is_file() and is_copied:
            shutil.copyfile(path, folder / path.name)
    copy_companions(loaded.folder, folder)
    # Fields of the original config that conversion does not derive from flags.
    kept = (*SPECIAL, "use_cache", "pretraining_tp")
    return {key: loaded.content[key] for key in kept if key in loaded.content}


def _write_files_of_run(
    loaded: Loaded, checkpoint: LoadedCheckpoint, folder: Path, request: Request
) -> dict[str, Any]:
    """Write a run's processor, tokenizer and generation settings; return its special-token ids."""
    if loaded.rules is not None:
        processor.write_processor(loaded.rules, folder)
    # Refuse a wrong tokenizer before any of its files is written.
    tokenizer = given_tokenizer(loaded, checkpoint, request)
    progress = stored_state(checkpoint)
    _print_answer_forms(progress)
    # Null ids are written, too: otherwise the library uses defaults, such as 1 and 2 for Llama.
    ids: dict[str, int | None] = dict.fromkeys(SPECIAL)
    ends: list[int] = []  # tokens after which an answer is complete
    if tokenizer is not None:
        positions = loaded.config.model.max_position_embeddings or loaded.config.data.seq_length
        given = _given(loaded, tokenizer)
        written = write_tokenizer(given, folder, positions, PROBE)
        ids = {f"{name}_token_id": i for name, i in written.items()}
        outcome = write_chat_template(loaded, folder, tokenizer, request.chat_template)
        print(f"chat template: {outcome}")
        _print_first_token(tokenizer)
        template = progress.chat_template
        if template is not None:
            ends += answer_ends(template["default"], tokenizer)
            _print_ends(tokenizer, ends)
            _print_thoughts(template)
    ids["eos_token_id"] = last_token(progress, ids["eos_token_id"])
    own = last_token(progress, None)
    if own is not None:
        ends.append(own)
    # Generation settings are next to the tokenizer, or next to the run's checkpoints.
    places = [loaded.folder.parent / GENERATION]
    if tokenizer is not None:
        places = [file.parent / GENERATION for file in tokenizer.files[:1]] + places
    return _write_generation(folder, places, ids, ends)


def _print_answer_forms(progress: RunState) -> None:
    """Print the formats in which the run learned answers, if it learned any."""
    forms = answers_told(progress.answer_forms)
    if forms:
        print(forms.replace("are learned", "were learned", 1))


def _print_first_token(tokenizer: Tokenizer) -> None:
    """Print a note if the exported tokenizer begins texts differently from training.

    Only a tokenizer.json can differ, because its post-processor is copied.
    """
    by_files = tokenizer.surroundings.first(tokenizer.bos_id)
    if tokenizer.kind != "huggingface" or tokenizer.begins_with == by_files:
        return
    # A difference matters to callers that build prompts with the library.
    begins = [
        f"with token {i}" if i is not None else "without a first token"
        for i in (tokenizer.begins_with, by_files)
    ]
    print(
        f"first token: training documents began {begins[0]}, transformers begins texts {begins[1]}"
    )


def _print_ends(tokenizer: Tokenizer, ends: Sequence[int]) -> None:
    """Print the tokens that end an answer."""
    told = ", ".join(f"{tokenizer.decode([i])!r} (id {i})" for i in ends)
    # Without an end token, generation cannot stop by itself.
    if not told:
        told = (
            "unknown: with this chat template, no special token after an answer is learned; set "
            f"eos_token_id in {GENERATION}, or the model generates up to its limit"
        )
    print(f"end of answers: {told}")


def _print_thoughts(template: dict[str, Any]) -> None:
    """Print how to prompt a model that learned answers with or without thoughts."""
    before = template.get("before_answers")
    counts = thoughts_told(template)
    advice = ""
    if THINKS in template["default"]:
        both = " for the first kind, True for the other kinds" if counts else ""
        advice = f": prompt with {THINKS}=False{both}"
    elif before:
        first = " for the first kind" if counts else ""
        advice = f": end prompts with {before!r}{first}"
    # Nothing to print for data without thoughts.
    if before or counts:
        print(f"{counts or 'answers are learned without a thought'}{advice}")


def _write_generation(
    folder: Path, places: Sequence[Path], ids: Mapping[str, int | None], ends: Sequence[int]
) -> dict[str, Any]:
    """Write the generation settings, and return the special-token ids for config.json.

    The settings come from the first existing file in `places`. The run's special tokens `ids` and
    the tokens `ends`, which end answers, are added.
    """
    found: dict[str, Any] = {}
    for place in places:
        if place.is_file():
            found = read_generation(place)
            break
    generation = dict(found)
    for key, i in ids.items():
        # Ids of the file have priority; nulls are written only if there is no file.
        if found.get(key) is None and (i is not None or not found):
            generation[key] = i
    # config.json gets the run's ids, or else those of the file.
    special = {key: generation.get(key) if i is None else i for key, i in ids.items()}
    # Generation must stop at every token that ends an answer.
    before = generation.get("eos_token_id")
    if before is None:
        before = []
    elif not isinstance(before, list):
        before = [before]
    if not set(ends) <= set(before):
        # The run's tokens come first; some programs read only the first.
        all_ends = list(dict.fromkeys([*ends, *before]))
        generation["eos_token_id"] = all_ends[0] if len(all_ends) == 1 else all_ends
    if ends:
        special["eos_token_id"] = generation["eos_token_id"]
    hf_files.write_json(folder / GENERATION, generation)
    return special


def given_tokenizer(
    loaded: Loaded, checkpoint: LoadedCheckpoint, request: Request
) -> Tokenizer | None:
    """Return --tokenizer, set to begin and end texts as in training; None without a tokenizer.

    Raise ValueError if it is missing or differs from the run's. With a chat template, the end token
    from the tokenizer's files is kept, because the template may write it.
    """
    given = request.tokenizer
    expected = checkpoint.extra.get("tokenizer_sha256", "")
    if given is None and expected:
        raise ValueError(
            f"{checkpoint.path} was trained with a tokenizer: set it with --tokenizer, or use "
            "--tokenizer none to export without one"
        )
    if given is None or given == "none":
        return None
    tokenizer = load_tokenizer(given, engine="reference")
    if expected and tokenizer.sha256 != expected:
        raise ValueError(
            f"--tokenizer {given} differs from the tokenizer of the run {checkpoint.path}"
        )
    rows = loaded.config.model.embedding_rows
    # Ids without a row of the embedding would fail in training and generation.
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"--tokenizer {given} has {tokenizer.vocab_size} ids, but the embedding has {rows} rows"
        )
    progress = stored_state(checkpoint)
    tokenizer.begins_with = first_token(progress, tokenizer.begins_with)
    if progress.chat_template is None:
        tokenizer.eos_id = last_token(progress, tokenizer.eos_id)
    return tokenizer


def _given(loaded: Loaded, tokenizer: Tokenizer) -> Given:
    """Return a tokenizer together with the model's image tokens."""
    special: dict[str, int] = {}
    if loaded.rules is not None:
        texts = type(loaded.rules).token_texts
        special = {texts[name]: i for name, i in loaded.rules.token_ids.items()}
    templated = False
    if loaded.checkpoint is not None:
        templated = stored_state(loaded.checkpoint).chat_template is not None
    return Given(tokenizer, special, templated)


def write_checkpoint(
    loaded: Loaded, folder: Path, request: Request, world: Axis
) -> dict[str, Info]:
    """Write a step-0 checkpoint and the tokenizer's files; return each tensor's shape and dtype.

    Collective over `world`.
    """
    # Reads nothing yet.
    source = in_dtype(loaded.source, request.dtype)
    # A run that loads this checkpoint takes its model from this config.
    config = to_yaml(with_values(loaded.config, {"dtype": model_dtype(source)}))
    rules = loaded.rules.to_dict() if loaded.rules is not None else None
    # Step 0: the weights of a run before its first update.
    step = folder / "step_0000000"

    def begin() -> str:
        step.mkdir()
        keep_generation(loaded, folder)
        return copy_tokenizer(loaded, folder)

    extra = {"tokenizer_sha256": on_first(world, begin), "image_rules": rules}
    # A file contains whole tensors up to the maximum size, or one larger tensor.
    filled = {f"{MODEL}.{name}": info for name, info in source.infos.items() if num_bytes(info)}
    boxes = {}
    tensors = {}
    for name, info in filled.items():
        boxes[name] = StoredBox(name, (0,) * len(info.shape), info.shape)
        tensors[name] = GlobalTensor(info.shape, info.dtype)
    boxes_of_files = {}
    for i, in_file in enumerate(files_of(filled, int(request.max_shard_mib * hf_files.MIB))):
        boxes_of_files[rank_file(i)] = [boxes[name] for name in in_file]
    index = Index(tensors, boxes_of_files)
    names = mine(list(index.files), world)

    def write() -> dict[str, FileRecord]:
        for name in names:
            own = [box.name.removeprefix(f"{MODEL}.") for box in index.files[name]]
            hf_files.write_file(source, own, step / name, index.header(name))
        return {name: FileRecord(*sha256_of(step / name)) for name in names}

    # The hashes of all ranks' files go into one manifest.
    of_ranks = gather_objects(on_each(world, write), world)

    def complete() -> None:
        # On a shared file system, files of other machines may appear late.
        hf_files.require_seen([step / name for name in index.files])
        written: dict[str, FileRecord] = {}
        for of_rank in of_ranks:
            written |= of_rank
        # The manifest is written last; it commits the checkpoint.
        for name, content in ((INDEX_FILE, index.to_json()), (CONFIG_FILE, config.encode())):
            write_new(step / name, content)
            written[name] = FileRecord(*sha256_of(step / name))
        manifest = CheckpointManifest(0, 1, 1, {}, dict(sorted(written.items())), extra)
        write_new(step / MANIFEST_FILE, to_json(manifest).encode())
        point_and_prune(step, 0)

    on_first(world, complete)
    return dict(source.infos)


class OtherModelError(Exception):
    """Raised if --verify finds that the written model differs from the input."""


def convert(request: Request, world: Axis) -> None:
    """Run a conversion on the ranks of `world`, whose number does not affect the result.

    Raise ValueError on all ranks if the request is refused, and OtherModelError if --verify finds a
    difference.
    """
    path = request.input
    try:
        if request.source == "megacp":
            on_each(world, lambda: refuse_other_input(path, "megacp"))
            loaded = read_checkpoint(path, world)
        else:
            loaded = on_each(world, lambda: read_hf(path))
    except (ValueError, OSError) as error:
        # The checkpoint loader writes --load in its messages; here the flag is --input.
        message = str(error).removeprefix(f"--load {path}: ")
        if request.source == "megacp":
            message = f"--input {path}: {message}"
        raise ValueError(message) from error
    # An adapter is small, so only the first rank writes it.
    if request.target == "peft":
        on_first(world, lambda: _export_pairs(loaded, request))
        return
    # All ranks resolve the same values; the command shows only the output of rank 0.
    loaded, request = on_each(world, lambda: _resolved(loaded, request))
    # The output appears only if writing and verification succeed.
    with hf_files.new_folder(request.output, world) as folder:
        write = write_hf if request.target == "hf" else write_checkpoint
        written = write(loaded, folder, request, world)
        if request.verify and not on_first(world, lambda: _verified(loaded, folder, request)):
            raise OtherModelError
    # Counted without a tied head.
    size = sum(math.prod(info.shape) for info in written.values())
    print(f"{request.output}: {loaded.family.name}, {len(written)} tensors, {size:,} parameters")


def _resolved(loaded: Loaded, request: Request) -> tuple[Loaded, Request]:
    """Choose and print the dtype, sequence length and tokenizer if no flag sets them."""
    if loaded.pairs is not None:
        print(f"merged into the weights: {loaded.pairs}")
    for note in loaded.notes(request.dtype is not None):
        print(note)
    # Weights in mixed dtypes are converted to the dtype of config.json unless --dtype is set.
    if request.dtype is None and loaded.settled_dtype is not None:
        request = dataclasses.replace(request, dtype=DTYPES[loaded.settled_dtype])
    if request.target == "hf" and loaded.checkpoint is not None:
        length = loaded.config.model.max_position_embeddings
        if not length:
            length = loaded.config.data.seq_length
            print(f"max_position_embeddings is {length}, the run's --seq-length")
        expected = loaded.checkpoint.extra.get("tokenizer_sha256", "")
        config = with_values(loaded.config, {"max_position_embeddings": length})
        loaded = dataclasses.replace(loaded, config=config)
        if request.tokenizer is None:
            data_path = loaded.config.data.data_path
            own = own_tokenizer(loaded.folder.parent, expected, data_path)
            if own is not None:
                print(f"tokenizer: {own}, from the run")
                request = dataclasses.replace(request, tokenizer=own)
    if request.chat_template == "messages" and request.tokenizer is None:
        raise ValueError(
            "--chat-template messages requires --tokenizer: there is no tokenizer next to the "
            "checkpoints of --input"
        )
    return loaded, request


def _verified(loaded: Loaded, folder: Path, request: Request) -> bool:
    """Return whether the written folder contains the same model as the input."""
    from megacp.huggingface.convert.verify import verify_conversion

    if request.target == "hf":
        after = read_hf(folder)
    else:
        after = read_checkpoint(folder, single_axis("world"))
    tokenizer = None
    if loaded.checkpoint is not None and request.tokenizer not in (None, "none"):
        own = load_tokenizer(request.tokenizer, engine="reference")
        tokenizer = _given(loaded, own)
    return verify_conversion(loaded, after, request.dtype, tokenizer)


def _export_pairs(loaded: Loaded, request: Request) -> None:
    """Write the LoRA adapters of a checkpoint as a peft folder."""
    if loaded.pairs is None:
        raise ValueError(
            f"--to peft: {loaded.folder} has no LoRA adapters, because it was trained with "
            "--lora-rank 0; use --to hf"
        )
    assert loaded.checkpoint is not None
    state = stored_state(loaded.checkpoint)
    # peft finds the base model by this name, a path or a name on a hub.
    base = request.base_model or state.base
    _print_answer_forms(state)
    if base is not None and Path(base).is_dir():
        differs = other_form(state, templates_of(Path(base)))
        if differs:
            print(f"chat template: the template of {base}{differs}")
    with hf_files.new_folder(request.output, single_axis("world")) as folder:
        elements = write_adapter(
            loaded.pairs, loaded.family, loaded.values, folder, base, request.dtype
        )
        card = model_card(loaded.checkpoint, loaded.family.name, "peft", request.base_model)
        (folder / CARD).write_text(card, encoding="utf-8")
    print(
        f"{request.output}: {loaded.pairs}; {elements:,} parameters for "
        f"{base or 'an unnamed base model'}"
    )
