"""Choose, build, train, export and verify: the steps of `megacp finetune`."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacp.engine.config.cli import given_names, parse
from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.engine.models.costs import run_parameters, trained_parameters
from megacp.finetuning import layout, numbers
from megacp.finetuning.data import Data, look_at
from megacp.finetuning.flags import WordsByCommand, divided, flag_words
from megacp.finetuning.model import model_folder
from megacp.finetuning.request import FinetuneRequest
from megacp.finetuning.steps import Command, run_command
from megacp.huggingface.convert.start import open_start
from megacp.prepare.packs.settings import VALID_FOLDER
from megacp.storage.files import write_result
from megacp.storage.wording import counted, human_count
from megacp.training.checkpoint.commit import peek
from megacp.training.loop.finetuning import EPOCHS, default_batch
from megacp.training.loop.reporting import rate_warning
from megacp.training.monitor.console import say
from megacp.training.start.status import STOPPED

PACKS, CHECKPOINTS, RESULT = "packs", "checkpoints", "model"
# File in the output folder with the model and the data that it was made from.
RECORD = "finetune.json"
# Number of checkpoints during a run, and the fewest steps between two of them.
_SAVES = 5
_FEWEST_STEPS_BETWEEN_SAVES = 20
# Validations of a run with --valid-share.
_VALIDATIONS = 10
_COLUMNS = 80


@dataclass
class Choices:
    """All choices of a fine-tuning."""

    folder: Path
    """Folder of the model."""
    words: WordsByCommand
    """Flags that the user gave, by command."""
    given: frozenset[str]
    """Fields of training that these flags set."""
    config: RunConfig
    """Configuration of training."""
    data: Data
    build: dict[str, object] = field(default_factory=dict)
    """Chosen fields of the build."""
    train: dict[str, object] = field(default_factory=dict)
    """Chosen fields of training."""
    ranks: int = 1
    lines: list[tuple[str, str]] = field(default_factory=list)
    """The screen: a name and a sentence for each choice."""

    def choose(self, values: dict[str, Value]) -> None:
        """Set fields of training that the user did not set."""
        free = {name: value for name, value in values.items() if name not in self.given}
        self.train.update(free)
        self.config = with_values(self.config, free)

    def show(self, name: str, text: str, *fields: str) -> None:
        """Add a line to the screen; it says if the user has given one of the fields."""
        if self.given & set(fields):
            text += " (given)"
        self.lines.append((name, text))


def run_finetuning(request: FinetuneRequest) -> int:
    """Fine-tune a model, and return the exit status: 0, or 3 if training stopped early and saved.

    Raise ValueError if the request cannot be run, and Failure if one of the commands fails.
    """
    output = request.output
    exported = _exported(request)
    choices = planned(request)
    build, train, export = commands_of(request, choices)
    for name, text in choices.lines:
        say(f"{name:<9} {text}")
    say("\nThe same by hand, in three commands:\n")
    for command in (build, train, export):
        say(f"{command.shown(_COLUMNS)}\n")
    if request.dry_run:
        return 0
    # The record is written first: an interrupted run must be able to resume in this folder.
    _write_record(request, exported)
    run_command(build)
    if run_command(train) == STOPPED:
        say("training stopped and saved its state; the same command resumes")
        return STOPPED
    # A longer training than in an earlier run leaves a newer checkpoint than the exported one.
    found = peek(output / CHECKPOINTS)
    step = 0 if found is None else found[1].step
    model = output / RESULT
    # Other flags of the export, such as --export-dtype, make another model of the same step.
    wanted = {"step": step, "flags": list(export.words)}
    if exported == wanted and (model / "config.json").is_file():
        say(f"{model} already has the model of step {step}")
    else:
        # An earlier model was written by this command, so it may be replaced.
        shutil.rmtree(model, ignore_errors=True)
        run_command(export)
        _write_record(request, wanted)
    for line in _closing(request, choices):
        say(line)
    return 0


def commands_of(request: FinetuneRequest, choices: Choices) -> tuple[Command, Command, Command]:
    """Return the commands that build, train and export."""
    output = request.output
    packs = str(output / PACKS)
    checkpoints = str(output / CHECKPOINTS)
    folder = str(choices.folder)
    words = choices.words
    # Flags of the user come last, because the last value of a flag wins.
    build = ["build", "--input", *request.data, "--output", packs, "--tokenizer", folder]
    build += [*flag_words(choices.build), *words.build]
    train = []
    if choices.ranks > 1:
        train += ["--nproc", str(choices.ranks)]
    train += ["--load-hf", folder, "--data-path", packs, "--save", checkpoints, "--auto-resume"]
    train += [*flag_words(choices.train), *words.train]
    export = ["--from", "megacp", "--to", "hf", "--input", checkpoints]
    export += ["--output", str(output / RESULT), *words.export]
    if request.verify:
        export.append("--verify")
    return (
        Command("megacp-preprocess", "megacp.prepare.command", tuple(build)),
        Command("megacp-train", "megacp.train", tuple(train)),
        Command("megacp-convert", "megacp.huggingface.convert_command", tuple(export)),
    )


# ---- choices


def planned(request: FinetuneRequest) -> Choices:
    """Return all choices for a request. Nothing is written."""
    folder = model_folder(request.model)
    words = divided(request.words)
    given = given_names(words.train)
    checkpoints = str(request.output / CHECKPOINTS)
    places = ["--load-hf", str(folder), "--save", checkpoints, "--auto-resume"]
    config = parse([*words.train, *places], "megacp finetune")
    # Only the headers of the weights are read here.
    config, _, _ = open_start(config, given)
    has_tower = config.vision.vision_num_layers > 0
    data = look_at(request.data, folder, words.build, has_tower)
    choices = Choices(folder, words, given, config, data, build=dict(data.build))
    size = human_count(run_parameters(config))
    choices.show("model", f"{folder}: {config.model.hf_model_type}, {size} parameters")
    choices.show("data", data.sentence)
    _choose_rows(choices)
    _choose_steps(choices, request)
    _choose_layout(choices, request)
    _choose_rate(choices)
    return choices


def _choose_rows(choices: Choices) -> None:
    """Choose the row length, and what happens to longer documents."""
    lengths = choices.data.lengths
    given = None
    if "seq_length" in choices.given:
        given = choices.config.data.seq_length
    positions = choices.config.model.max_position_embeddings
    rows = numbers.rows(lengths, layout.this_device_type(), positions, given)
    if given is None:
        # Training takes the length of a row from the packs, so only the build needs the flag.
        choices.build["seq_length"] = rows.tokens
        choices.config = with_values(choices.config, {"seq_length": rows.tokens})
    flags = {word.partition("=")[0] for word in choices.words.build}
    if "--oversize" not in flags and rows.oversize != "error":
        choices.build["oversize"] = rows.oversize
    choices.show("rows", f"{rows.tokens:,} tokens: {rows.reason}", "seq_length")


def _choose_steps(choices: Choices, request: FinetuneRequest) -> None:
    """Choose the batch and the number of steps."""
    lengths = choices.data.lengths
    row_tokens = choices.config.data.seq_length
    at_once = choices.config.training.micro_batch_size
    batch = default_batch(lengths.all_tokens, row_tokens, at_once)
    choices.choose({"global_batch_size": batch})
    batch = choices.config.training.global_batch_size
    # An update sees several documents per row; a small data set may have fewer of them.
    documents = max(1, round(lengths.all_documents * batch * row_tokens / lengths.all_tokens))
    documents = min(documents, lengths.all_documents)
    text = f"{counted(batch, 'row')} per update, about {counted(documents, 'document')}"
    choices.show("batch", text, "global_batch_size")
    # A run has either a number of steps or a number of epochs.
    steps = choices.config.training.train_iters
    if "train_iters" in choices.given:
        choices.lines.append(("steps", f"{counted(steps, 'update')} (given)"))
    else:
        choices.choose({"train_epochs": EPOCHS})
        epochs = float(choices.config.training.train_epochs or 0)
        # The packs do not exist yet: their number is an estimate.
        packs = max(1, round(lengths.all_tokens / row_tokens))
        steps = max(1, round(epochs * packs / batch))
        choices.show("epochs", f"{epochs:g}, about {counted(steps, 'update')}", "train_epochs")
    # A short run saves only at its end.
    if steps >= _SAVES * _FEWEST_STEPS_BETWEEN_SAVES:
        choices.choose({"save_interval": steps // _SAVES, "keep_last": 1})
    flags = {word.partition("=")[0] for word in choices.words.build}
    if "--valid-share" in flags:
        folder = str(request.output / PACKS / VALID_FOLDER)
        choices.choose({"valid_data_path": folder})
        choices.choose({"eval_interval": max(1, steps // _VALIDATIONS)})


def _choose_layout(choices: Choices, request: FinetuneRequest) -> None:
    """Choose the dtype, the parallel layout, and full training or LoRA."""
    # Processors compute fastest in float32, GPUs in bfloat16.
    dtypes = {"cpu": "float32", "cuda": "bfloat16"}
    device_type = layout.this_device_type()
    choices.choose({"dtype": dtypes[device_type]})
    # Documents that are longer than a row are cut or left out by the build.
    lengths = list(choices.data.lengths.some)
    row_tokens = choices.config.data.seq_length
    documents = [min(length, row_tokens) for length in lengths]
    chosen = layout.choose_layout(choices.config, choices.given, request.nproc, documents)
    choices.choose(chosen.values)
    choices.ranks = chosen.ranks
    choices.lines.append(("layout", f"{chosen.name}; {chosen.memory}"))
    trained = trained_parameters(choices.config)
    share = f"{human_count(trained)} of {human_count(run_parameters(choices.config))} parameters"
    if choices.config.model.lora_rank:
        why = "" if "lora_rank" in choices.given else ", as full training would not fit in memory"
        text = f"LoRA adapters of rank {choices.config.model.lora_rank}{why}: {share}"
    elif choices.config.vision.freeze:
        text = f"part of the model: {share}"
    else:
        text = "the whole model"
    choices.show("training", text, "lora_rank", "freeze")


def _choose_rate(choices: Choices) -> None:
    """Choose the learning rate and its warm-up."""
    tokens = choices.data.lengths.all_tokens
    uses_lora = choices.config.model.lora_rank > 0
    parameters = run_parameters(choices.config)
    choices.choose({"lr": numbers.peak_rate(parameters, tokens, uses_lora)})
    rate = choices.config.training.lr
    if "lr_warmup_iters" not in choices.given:
        choices.choose({"lr_warmup_fraction": numbers.WARMUP})
    # Fine-tuning starts from good weights, so nothing pulls them towards zero.
    choices.choose({"weight_decay": 0.0})
    choices.show("lr", f"{rate:g}", "lr")
    # A dry run prints this screen and no line of the training log.
    choices.lines += [("", line) for line in rate_warning(choices.config.training)]


# ---- the output folder


def _exported(request: FinetuneRequest) -> dict[str, Any] | None:
    """Return step and flags of the model that an earlier run has exported, or None.

    Raise ValueError if the folder belongs to another model, other data, or another program.
    """
    output = request.output
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file: give a folder")
    # An empty folder is as good as none.
    if not output.exists() or not any(output.iterdir()):
        return None
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"--output {output} is not empty, and was not written by this command: give another "
            "folder"
        ) from None
    # Other flags may change between runs, and each step checks its own.
    for name, value in _identity(request).items():
        if record.get(name) != value:
            raise ValueError(
                f"--output {output} was made with the {name} {record.get(name)}, not {value}: give "
                "the same to resume, or another folder"
            )
    return record["exported"]


def _identity(request: FinetuneRequest) -> dict[str, Any]:
    """Return what must be equal to resume in an output folder."""
    # The build compares the names of its files, too.
    return {"model": request.model, "data": list(request.data)}


def _write_record(request: FinetuneRequest, exported: dict[str, Any] | None) -> None:
    """Write the model, the data, and step and flags of the export to the output folder."""
    content = {**_identity(request), "exported": exported}
    path = request.output / RECORD
    write_result("--output", path, (json.dumps(content, indent=1) + "\n").encode(), overwrite=True)


def _closing(request: FinetuneRequest, choices: Choices) -> list[str]:
    """Return the last lines: the result, and how to use it."""
    model = request.output / RESULT
    checkpoints = request.output / CHECKPOINTS
    talks = choices.data.lengths.talks > 0
    ask = "--chat" if talks else '--prompt "..."'
    verified = ", and transformers computes the same logits" if request.verify else ""
    lines = [
        "",
        f"done: {model} is a model for transformers{verified}",
        f"  try it       megacp-generate --checkpoint {checkpoints} {ask}",
        f"  serve it     vllm serve {model}",
        f"  publish it   hf upload USER/NAME {model}",
    ]
    if choices.config.model.lora_rank:
        # The model has the adapters merged into it; peft needs them apart.
        export = f"megacp-convert --from megacp --to peft --input {checkpoints}"
        lines.append(f"  adapter      {export} --output {request.output / 'adapter'}")
    return lines
