"""The numbers, layouts and flags that `megacp finetune` chooses, before anything is run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megacp.engine.config.cli import parse
from megacp.finetuning import layout, numbers
from megacp.finetuning.command import main, request_of
from megacp.finetuning.data import look_at
from megacp.finetuning.flags import divided
from megacp.finetuning.model import model_folder
from megacp.finetuning.run import commands_of, planned
from megacp.finetuning.steps import STEP, Command, progress_bar
from megacp.prepare.packs.lengths import Lengths
from megacp.programs import PROGRAMS
from megacp.programs import main as umbrella
from megacp.training.loop.finetuning import default_batch
from megacp.training.monitor.log import StepRecord, step_line
from tests.finetuning import folders
from tests.test_packaging import commands_of_setup

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

CHATS = Lengths(100, 30_000, 900, 900, 100, True, (300,) * 100, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_model(tmp_path_factory.mktemp("model") / "tiny")


# ---- numbers


def test_rows_hold_the_longest_conversation_and_are_a_power_of_two() -> None:
    assert numbers.rows(CHATS, "cpu", None).tokens == 2048
    long = dataclasses.replace(CHATS, longest=5000, longest_whole=5000)
    assert numbers.rows(long, "cpu", None) == numbers.RowChoice(
        8192, "error", "the longest document has 5,000 tokens"
    )


def test_documents_beyond_the_models_positions_are_left_out_and_named() -> None:
    long = dataclasses.replace(CHATS, longest=5000, longest_whole=5000)
    rows = numbers.rows(long, "cpu", 4096)
    assert (rows.tokens, rows.oversize) == (4096, "drop") and "5,000" in rows.reason


def test_a_row_that_the_user_gives_is_kept() -> None:
    rows = numbers.rows(CHATS, "cpu", 4096, 512)
    assert (rows.tokens, rows.oversize) == (512, "drop")


def test_a_long_text_is_cut_and_does_not_make_the_rows_longer() -> None:
    text = dataclasses.replace(CHATS, longest=1_000_000, longest_whole=0, talks=0)
    assert numbers.rows(text, "cpu", 4096).oversize == "split"
    mixed = dataclasses.replace(CHATS, longest=1_000_000)
    assert numbers.rows(mixed, "cpu", 4096) == numbers.RowChoice(
        2048, "split", "the longest document has 900 tokens"
    )


def test_a_large_data_set_that_was_measured_in_part_leaves_longer_documents_out() -> None:
    part = dataclasses.replace(CHATS, is_whole=False, share=0.01)
    rows = numbers.rows(part, "cuda", None)
    assert (rows.tokens, rows.oversize) == (8192, "drop")
    assert default_batch(part.all_tokens, rows.tokens) == 4


@pytest.mark.parametrize(
    ("parameters", "tokens", "uses_lora", "rate"),
    [
        (135_000_000, 5_000, False, 3e-4),
        (600_000_000, 5_000, False, 5e-5),
        (8_000_000_000, 5_000, False, 1e-5),
        (8_000_000_000, 5_000, True, 2e-4),
        (8_000_000_000, 50_000_000, True, 1e-4),
    ],
)
def test_larger_models_get_lower_learning_rates(
    parameters: int, tokens: int, uses_lora: bool, rate: float
) -> None:
    assert numbers.peak_rate(parameters, tokens, uses_lora) == rate


# ---- flags


def test_each_flag_goes_to_the_commands_that_have_it() -> None:
    words = divided(
        ["--lr", "1e-4", "--seq-length=512", "--valid-share", "0.1", "--export-dtype", "float16"]
    )
    assert words.build == ["--seq-length=512", "--valid-share", "0.1"]
    assert words.train == ["--lr", "1e-4", "--seq-length=512"]
    assert words.export == ["--dtype", "float16"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--lrr", "1"], "unknown flag --lrr"),
        (["--tokenizer", "byte"], "--tokenizer cannot be given here: the tokenizer comes with"),
        (["--save", "x"], "--save cannot be given here"),
        (["stray"], "stray: expected a flag"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_with_the_reason(
    words: list[str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        divided(words)


@pytest.mark.parametrize("arguments", [[], ["model"], ["--lr", "1", "model", "data"]])
def test_model_and_data_come_first(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        request_of(arguments)
    assert end.value.code == 2 and "give MODEL and at least one file" in capsys.readouterr().err


def test_the_commands_of_a_plan_have_its_choices_and_the_users_flags(
    model: Path, tmp_path: Path
) -> None:
    chats = folders.write_messages(tmp_path)
    request = request_of(
        [str(model), str(chats), "--output", "out", "--nproc", "2", "--lr", "1e-3", "--seed", "7"]
    )
    choices = planned(request)
    build, train, export = commands_of(request, choices)
    assert build.words[:7] == (
        *("build", "--input", str(chats), "--output", "out/packs", "--tokenizer", str(model)),
    )
    assert build.words[7:] == ("--seq-length", "1024", "--seed", "7")
    assert train.words[:2] == ("--nproc", "2")
    assert "--context-parallel-size 2" in " ".join(train.words)
    assert train.words[-4:] == ("--lr", "1e-3", "--seed", "7")
    assert "0.0003" not in train.words
    assert export.words[-1] == "--verify"
    assert ("lr", "0.001 (given)") in choices.lines


def test_a_long_run_saves_during_training_and_validates_if_records_are_held_out(
    model: Path, tmp_path: Path
) -> None:
    chats = folders.write_messages(tmp_path)
    flags = ["--output", "out", "--nproc", "1", "--train-iters", "500", "--valid-share", "0.1"]
    choices = planned(request_of([str(model), str(chats), *flags]))
    assert (choices.train["save_interval"], choices.train["keep_last"]) == (100, 1)
    assert choices.train["valid_data_path"] == "out/packs/valid"
    assert choices.train["eval_interval"] == 50
    assert "train_epochs" not in choices.train


def test_a_command_is_shown_in_lines_of_eighty_columns_that_a_shell_reads() -> None:
    words = ("build", "--input", "a b.json", "--output", "x" * 60, "--seq-length", "1024")
    shown = Command("megacp-preprocess", "", words).shown(80)
    assert shown.splitlines() == [
        "megacp-preprocess build --input 'a b.json' \\",
        f"    --output {'x' * 60} \\",
        "    --seq-length 1024",
    ]


# ---- data


@pytest.mark.parametrize("name", ["messages", "sharegpt", "alpaca", "csv"])
def test_every_format_of_a_hundred_answers_has_the_same_tokens(
    name: str, model: Path, tmp_path: Path
) -> None:
    path = getattr(folders, f"write_{name}")(tmp_path)
    data = look_at([str(path)], model, [], False)
    whole = look_at([str(folders.write_messages(tmp_path))], model, [], False)
    assert data.lengths == whole.lengths and data.lengths.talks == 100
    columns = {"csv": {"columns": "instruction=question,output=answer"}}
    assert data.build == columns.get(name, {})


def test_a_tokenized_dataset_is_measured_by_its_prefix(model: Path, tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = tmp_path / "book_text_document"
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in 5, 300, 1:
        builder.add_document(np.full(length, 7, np.int32), [length])
    builder.finalize(f"{prefix}.idx")
    for name in str(prefix), f"{prefix}.bin":
        lengths = look_at([name], model, ["--no-append-eod", "--no-prepend-bos"], False).lengths
        assert (lengths.documents, lengths.tokens, lengths.longest) == (3, 306, 300)


@pytest.mark.parametrize("content", ["", "[]"])
def test_a_file_without_records_is_refused_by_its_name(
    model: Path, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "empty.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.json contains no records"):
        look_at([str(path)], model, [], False)


def test_images_are_refused_for_a_model_without_a_vision_tower(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "images.jsonl"
    path.write_text(json.dumps({"image": "a.png", "caption": "A cat."}) + "\n")
    with pytest.raises(ValueError, match="has no vision tower"):
        look_at([str(path)], model, [], False)


# ---- models


def test_a_name_on_the_hub_is_found_in_the_cache_without_a_network(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--tiny--qwen3"
    snapshot = repository / "snapshots" / "0123"
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    assert model_folder("tiny/qwen3") == snapshot
    with pytest.raises(ValueError, match="hf download tiny/other --local-dir other"):
        model_folder("tiny/other")


@pytest.mark.parametrize("name", ["nowhere", "a/b/c"])
def test_a_model_that_is_neither_a_folder_nor_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"MODEL {name}: no such folder, and not a name"):
        model_folder(name)


# ---- layouts

SIZES = ["--num-layers", "2", "--hidden-size", "64", "--vocab-size", "512", "--seq-length", "128"]


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [(1, 2, {layout.CP: 2}), (4, 2, {}), (2, 4, {layout.CP: 2}), (1, 1, {})],
)
def test_cpu_ranks_take_rows_first_and_then_share_them(
    batch: int, ranks: int, expected: dict[str, int]
) -> None:
    config = parse([*SIZES, "--global-batch-size", str(batch)])
    assert layout.choose_layout(config, frozenset(), ranks, [64]).values == expected


def test_ranks_take_as_many_rows_at_once_as_the_user_wants() -> None:
    sizes = [*SIZES, "--micro-batch-size", "2"]
    for batch, expected in ("4", {}), ("2", {layout.CP: 2}):
        config = parse([*sizes, "--global-batch-size", batch])
        assert layout.choose_layout(config, frozenset(), 2, [64]).values == expected


def test_a_model_that_cannot_share_rows_gets_a_larger_batch() -> None:
    config = parse([*SIZES, "--global-batch-size", "1", "--seq-length", "3"])
    chosen = layout.choose_layout(config, frozenset(), 2, [3])
    assert chosen.values == {"global_batch_size": 2}


def test_a_model_that_does_not_fit_gets_lora_adapters_and_then_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse([*SIZES, "--global-batch-size", "2", "--hidden-size", "256"])
    for gib, values in (1.0, {}), (0.02, numbers.ADAPTERS):
        monkeypatch.setattr(layout.launch, "device_at_hand", lambda world, gib=gib: ("CPU", gib))
        assert layout.choose_layout(config, frozenset(), 2, [64]).values == values
    monkeypatch.setattr(layout.launch, "device_at_hand", lambda world: ("CPU", 0.001))
    with pytest.raises(ValueError, match="2 CPU ranks would not fit in memory"):
        layout.choose_layout(config, frozenset(), 2, [64])


def test_a_fault_of_the_flags_is_named_and_adapters_are_not_tried_for_it() -> None:
    config = parse([*SIZES, "--tensor-model-parallel-size", "3"])
    with pytest.raises(ValueError, match="2 ranks is not a multiple of tp 3") as refused:
        layout.choose_layout(config, frozenset({layout.TP}), 2, [64])
    assert "lora" not in str(refused.value) and "memory" not in str(refused.value)


def test_on_gpus_the_planner_chooses_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.launch, "device_type", lambda world: "cuda")
    monkeypatch.setattr(layout.launch, "device_at_hand", lambda world: ("NVIDIA H100", 79.1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = parse([*SIZES, "--global-batch-size", "2", "--dtype", "bfloat16"])
    given = frozenset({"context_parallel_size", "seq_length"})
    chosen = layout.choose_layout(config, given, None, [64])
    assert chosen.ranks == 2 and "79.1 GiB" in chosen.memory
    assert "context_parallel_size" not in chosen.values


# ---- the screen


def test_a_line_of_a_training_step_becomes_a_bar() -> None:
    record = StepRecord(12, 1.25, 0.5, 1e-5, 1000.0, None, 2**30, 0.1, 0.2, 12, 0.5, 48.0)
    found = STEP.match(step_line(record, 45))
    assert found is not None and found.groups() == ("12", "45", "1.2500", "0:48")
    for columns in 40, 80, 200:
        shown = progress_bar(12, 45, "1.2500", "0:48", columns)
        assert shown.endswith(" 12/45  loss 1.2500  0:48 left") and len(shown) < max(columns, 52)


@pytest.mark.parametrize(("rate", "is_warned"), [("5", True), ("0.01", False)])
def test_a_dry_run_warns_about_a_learning_rate_that_no_run_has(
    rate: str, is_warned: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = [str(model), str(folders.write_messages(tmp_path)), "--output", str(output)]
    assert main([*arguments, "--nproc", "1", "--lr", rate, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"lr        {rate} (given)" in shown
    assert ("warning: with --lr 5, AdamW will probably diverge" in shown) == is_warned


def test_an_output_folder_of_another_program_is_not_touched(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = folders.write_messages(tmp_path)
    assert main([str(model), str(chats), "--output", str(tmp_path)]) == 2
    assert "is not empty, and was not written by this command" in capsys.readouterr().err
    assert main([str(model), str(chats), "--output", str(chats)]) == 2
    assert f"--output {chats} is a file: give a folder" in capsys.readouterr().err


def test_the_command_megacp_lists_and_starts_every_installed_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed = commands_of_setup()
    assert set(PROGRAMS) == set(installed)
    for name, target in installed.items():
        assert PROGRAMS[name].module == target.partition(":")[0]
        assert importlib.util.find_spec(PROGRAMS[name].module) is not None
    assert umbrella(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in PROGRAMS)
    assert umbrella(["fine-tune"]) == 2 and "no command 'fine-tune'" in capsys.readouterr().err
