"""A conversion: read the input, write a complete Hugging Face folder or a checkpoint that begins a
run, verify it.

Everything is written to a folder beside the output, which is renamed when all is well. The
library's `save_pretrained` would need the whole model in memory, and cuts a Molmo2's embedding in
the middle.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
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
from megacp.training.loop.state import first_token, last_token, stored_state

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
    """A conversion; the names are those of the flags, whose help says what they do."""

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
    """Fill an empty folder; shape and dtype of its tensors. ValueError names what the library
    cannot express.

    Collective over `world`: each rank writes weight files of its own.
    """
    family, layout = loaded.family, request.layout
    if layout != NATIVE and not family.sections:
        raise ValueError(f"--layout {layout}: {family.name} has one layout")
    content = family.config(loaded.values, layout)
    links = family.links(loaded.values, layout)
    mapped = in_dtype(Mapped(loaded.source, links, to_ours=False), request.dtype)
    source = family.closed(mapped, loaded.values)
    content["dtype"] = content["torch_dtype"] = str(one_dtype(source))[
        6:
    ]  # the second name: before version 5
    if family.token_fields:
        known = loaded.rules.token_ids if loaded.rules is not None else {}
        ids = known or {
            name: loaded.values["vocab_size"] + i for i, name in enumerate(family.token_order)
        }
        fields = {field: ids[name] for field, name in family.token_fields.items() if name in ids}
        content |= fields | {key: loaded.content[key] for key in fields if key in loaded.content}
    special = on_first(world, lambda: _files_beside(loaded, folder, request))
    hf_files.write_tensors(source, folder, int(request.max_shard_mib * hf_files.MIB), world)

    def complete() -> None:
        hf_files.write_json(folder / "config.json", {**content, **special})
        if not (folder / GENERATION).is_file():
            hf_files.write_json(
                folder / GENERATION, {key: special[key] for key in SPECIAL if key in special}
            )
        if loaded.checkpoint is not None and loaded.checkpoint.step:
            (folder / CARD).write_text(
                model_card(loaded.checkpoint, family.name, "transformers"), encoding="utf-8"
            )
        written = family.opened(hf_files.SafetensorsFolder(folder), loaded.values)
        require_all(written.infos, links, True, folder)

    on_first(world, complete)
    return dict(source.infos)


def _files_beside(loaded: Loaded, folder: Path, request: Request) -> dict[str, Any]:
    """Write or copy tokenizer, processor and generation settings; special ids for config.json."""
    if loaded.checkpoint is None:
        # a text model that was taken out of a whole one has no images
        not_copied = set(_NOT_COPIED)
        if loaded.cls != loaded.family.cls:
            not_copied |= PROCESSORS
        for path in sorted(loaded.folder.iterdir()):
            if (
                path.is_file()
                and path.name not in not_copied
                and not path.name.endswith(_NOT_COPIED_SUFFIXES)
            ):
                shutil.copyfile(path, folder / path.name)
        copy_companions(loaded.folder, folder)
        kept = (*SPECIAL, "use_cache", "pretraining_tp")
        return {key: loaded.content[key] for key in kept if key in loaded.content}
    if loaded.rules is not None:
        processor.write_processor(loaded.rules, folder)
    tokenizer = given_tokenizer(loaded, loaded.checkpoint, request)
    progress = stored_state(loaded.checkpoint)
    if forms := answers_told(progress.answer_forms):
        print(forms.replace("are learned", "were learned", 1))
    ids: dict[str, int | None] = dict.fromkeys(
        SPECIAL
    )  # else the library takes its own, 1 and 2 for a Llama
    ends: list[int] = []
    if tokenizer is not None:
        positions = loaded.config.model.max_position_embeddings or loaded.config.data.seq_length
        given = _given(loaded, tokenizer)
        ids = {
            f"{name}_token_id": i
            for name, i in write_tokenizer(given, folder, positions, PROBE).items()
        }
        print(
            "chat template: "
            f"{write_chat_template(loaded, folder, tokenizer, request.chat_template)}"
        )
        by_files = tokenizer.surroundings.first(tokenizer.bos_id)
        if (
            tokenizer.kind == "huggingface" and tokenizer.begins_with != by_files
        ):  # its post-processor is copied
            begins = [
                f"with token {i}" if i is not None else "with none"
                for i in (tokenizer.begins_with, by_files)
            ]
            print(
                f"first token: documents of training began {begins[0]}, the library begins texts "
                f"{begins[1]}"
            )
        if (written := progress.chat_template) is not None:
            ends += answer_ends(written["default"], tokenizer)
            unknown = (
                "not known: the chat template has learned no special token behind an answer; set eos_token_id in "
                f"{GENERATION}, or the model generates to its limit"
            )
            print(
                "end of answers: "
                f"{', '.join(f'{tokenizer.decode([i])!r} (id {i})' for i in ends) or unknown}"
            )
            before, told, how = written.get("before_answers"), thoughts_told(written), ""
            if THINKS in written["default"]:
                others = " for the first, True for the others" if told else ""
                how = f": ask with {THINKS}=False{others}"
            elif before:
                first = " for the first" if told else ""
                how = f": let prompts end with {before!r}{first}"
            if before or told:
                print(f"{told or 'answers are learned without a thought'}{how}")
    ids["eos_token_id"] = last_token(progress, ids["eos_token_id"])
    if (own := last_token(progress, None)) is not None:
        ends.append(own)
    beside = [file.parent for file in tokenizer.files[:1]] if tokenizer is not None else []
    places = [place / GENERATION for place in (*beside, loaded.folder.parent)]
    said = next((read_generation(place) for place in places if place.is_file()), dict[str, Any]())
    missing = {
        key: i for key, i in ids.items() if said.get(key) is None and (i is not None or not said)
    }
    generation = {**said, **missing}
    special = {key: generation.get(key) if i is None else i for key, i in ids.items()}
    before = generation.get("eos_token_id")
    before = before if isinstance(before, list) else [] if before is None else [before]
    if not set(ends) <= set(before):
        found = list(dict.fromkeys([*ends, *before]))
        generation["eos_token_id"] = found[0] if len(found) == 1 else found
    if ends:
        special["eos_token_id"] = generation["eos_token_id"]
    hf_files.write_json(folder / GENERATION, generation)
    return special


def given_tokenizer(
    loaded: Loaded, checkpoint: LoadedCheckpoint, request: Request
) -> Tokenizer | None:
    """The tokenizer of a checkpoint, beginning and ending texts as training did. ValueError for
    another one or none.

    Where a chat template wrote the messages, the end token stays that of the files: a template may
    write it.
    """
    given, expected = request.tokenizer, checkpoint.extra.get("tokenizer_sha256", "")
    if given is None and expected:
        raise ValueError(
            f"{checkpoint.path} was trained with a tokenizer: give it with --tokenizer, or "
            "`--tokenizer none` for a "
            "folder without one"
        )
    if given is None or given == "none":
        return None
    tokenizer = load_tokenizer(given, engine="reference")
    if expected and tokenizer.sha256 != expected:
        raise ValueError(
            f"--tokenizer {given} is not the one that {checkpoint.path} was trained with"
        )
    rows = loaded.config.model.embedding_rows
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"--tokenizer {given} has {tokenizer.vocab_size} ids, the model has {rows} rows"
        )
    progress = stored_state(checkpoint)
    tokenizer.begins_with = first_token(progress, tokenizer.begins_with)
    if progress.chat_template is None:
        tokenizer.eos_id = last_token(progress, tokenizer.eos_id)
    return tokenizer


def _given(loaded: Loaded, tokenizer: Tokenizer) -> Given:
    """A tokenizer with the image tokens of a model, and what the run says of its messages."""
    images = loaded.rules.token_ids if loaded.rules is not None else {}
    templated = (
        loaded.checkpoint is not None and stored_state(loaded.checkpoint).chat_template is not None
    )
    texts = type(loaded.rules).token_texts if loaded.rules is not None else {}
    return Given(tokenizer, {texts[name]: i for name, i in images.items()}, templated)


def write_checkpoint(
    loaded: Loaded, folder: Path, request: Request, world: Axis
) -> dict[str, Info]:
    """Fill a folder with a checkpoint of step 0 and the tokenizer's files; its tensors. Collective
    over `world`.
    """
    source = in_dtype(loaded.source, request.dtype)
    config = to_yaml(with_values(loaded.config, {"dtype": model_dtype(source)}))
    rules = loaded.rules.to_dict() if loaded.rules is not None else None
    step = folder / "step_0000000"

    def begin() -> str:
        step.mkdir()
        keep_generation(loaded, folder)
        return copy_tokenizer(loaded, folder)

    extra = {"tokenizer_sha256": on_first(world, begin), "image_rules": rules}
    # whole tensors in files of at most this size, or of a single larger one
    filled = {f"{MODEL}.{name}": info for name, info in source.infos.items() if num_bytes(info)}
    boxes = {
        name: StoredBox(name, (0,) * len(info.shape), info.shape) for name, info in filled.items()
    }
    of_files = enumerate(files_of(filled, int(request.max_shard_mib * hf_files.MIB)))
    tensors = {name: GlobalTensor(info.shape, info.dtype) for name, info in filled.items()}
    index = Index(tensors, {rank_file(i): [boxes[name] for name in names] for i, names in of_files})
    names = mine(list(index.files), world)

    def write() -> dict[str, FileRecord]:
        for name in names:
            own = [box.name.removeprefix(f"{MODEL}.") for box in index.files[name]]
            hf_files.write_file(source, own, step / name, index.header(name))
        return {name: FileRecord(*sha256_of(step / name)) for name in names}

    of_ranks = gather_objects(on_each(world, write), world)

    def complete() -> None:
        hf_files.require_seen([step / name for name in index.files])
        written = {name: record for of_rank in of_ranks for name, record in of_rank.items()}
        for name, content in ((INDEX_FILE, index.to_json()), (CONFIG_FILE, config.encode())):
            write_new(step / name, content)
            written[name] = FileRecord(*sha256_of(step / name))
        manifest = CheckpointManifest(0, 1, 1, {}, dict(sorted(written.items())), extra)
        write_new(step / MANIFEST_FILE, to_json(manifest).encode())
        point_and_prune(step, 0)

    on_first(world, complete)
    return dict(source.infos)


class OtherModelError(Exception):
    """--verify has found another model."""


def convert(request: Request, world: Axis) -> None:
    """Do what the request says, with the bytes of one process. ValueError on all ranks of
    `world`.
    """
    path = request.input
    try:
        if request.source == "megacp":
            on_each(world, lambda: refuse_other_input(path, "megacp"))
        loaded = (
            read_checkpoint(path, world)
            if request.source == "megacp"
            else on_each(world, lambda: read_hf(path))
        )
    except (ValueError, OSError) as error:
        told = str(error).removeprefix(f"--load {path}: ")
        raise ValueError(told if request.source == "hf" else f"--input {path}: {told}") from error
    if request.target == "peft":
        on_first(world, lambda: _export_pairs(loaded, request))
        return
    loaded, request = on_each(world, lambda: _resolved(loaded, request))
    with hf_files.new_folder(request.output, world) as folder:
        write = write_hf if request.target == "hf" else write_checkpoint
        written = write(loaded, folder, request, world)
        if request.verify and not on_first(world, lambda: _verified(loaded, folder, request)):
            raise OtherModelError
    size = sum(math.prod(info.shape) for info in written.values())
    print(f"{request.output}: {loaded.family.name}, {len(written)} tensors, {size:,} parameters")


def _resolved(loaded: Loaded, request: Request) -> tuple[Loaded, Request]:
    if loaded.pairs is not None:
        print(f"folded into the weights: {loaded.pairs}")
    for note in loaded.notes(request.dtype is not None):
        print(note)
    if request.dtype is None and loaded.settled_dtype is not None:
        request = dataclasses.replace(request, dtype=DTYPES[loaded.settled_dtype])
    if request.target == "hf" and loaded.checkpoint is not None:
        folder, expected = loaded.folder.parent, loaded.checkpoint.extra.get("tokenizer_sha256", "")
        said = loaded.config.model.max_position_embeddings
        length = said or loaded.config.data.seq_length
        if not said:
            print(f"max_position_embeddings is {length}, the run's --seq-length")
        loaded = dataclasses.replace(
            loaded, config=with_values(loaded.config, {"max_position_embeddings": length})
        )
        own = (
            own_tokenizer(folder, expected, loaded.config.data.data_path)
            if request.tokenizer is None
            else None
        )
        if own is not None:
            print(f"tokenizer: {own}, the run's own")
            request = dataclasses.replace(request, tokenizer=own)
    if request.chat_template == "messages" and request.tokenizer is None:
        raise ValueError(
            "--chat-template messages goes with --tokenizer: none lies beside the checkpoints of --input"
        )
    return loaded, request


def _verified(loaded: Loaded, folder: Path, request: Request) -> bool:
    from megacp.huggingface.convert.verify import verify_conversion

    after = (
        read_hf(folder) if request.target == "hf" else read_checkpoint(folder, single_axis("world"))
    )
    tokenizer = None
    if loaded.checkpoint is not None and request.tokenizer not in (None, "none"):
        own = load_tokenizer(request.tokenizer, engine="reference")
        tokenizer = _given(loaded, own)
    return verify_conversion(loaded, after, request.dtype, tokenizer)


def _export_pairs(loaded: Loaded, request: Request) -> None:
    if loaded.pairs is None:
        raise ValueError(
            f"--to peft: {loaded.folder} has no low-rank pairs, it was trained with --lora-rank 0"
        )
    assert loaded.checkpoint is not None
    state = stored_state(loaded.checkpoint)
    base = request.base_model or state.base
    if forms := answers_told(state.answer_forms):
        print(forms.replace("are learned", "were learned", 1))
    if (
        base is not None
        and Path(base).is_dir()
        and (differs := other_form(state, templates_of(Path(base))))
    ):
        print(f"chat template: that of {base}{differs}")
    with hf_files.new_folder(request.output, single_axis("world")) as folder:
        elements = write_adapter(
            loaded.pairs, loaded.family, loaded.values, folder, base, request.dtype
        )
        card = model_card(loaded.checkpoint, loaded.family.name, "peft", request.base_model)
        (folder / CARD).write_text(card, encoding="utf-8")
    print(
        f"{request.output}: {loaded.pairs}; {elements:,} parameters beside "
        f"{base or 'a model that is not named'}"
    )
