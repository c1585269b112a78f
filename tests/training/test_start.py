"""Checks before the first step: datasets, the model of a checkpoint, ranks that agree."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import re
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp import train
from megacp.distributed.shape import GridShape
from megacp.engine.config.cli import given_names, parse
from megacp.engine.config.run import RunConfig, fields, flag, with_values
from megacp.engine.config.training import TrainingConfig
from megacp.plan import command
from megacp.train import main, plan_of
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.checkpoint.directory import MANIFEST_FILE, checksum_of
from megacp.training.loop.equal_start import MAY_DIFFER, require_equal_start, statement
from megacp.training.loop.reporting import heading, rate_warning
from megacp.training.loop.sources import open_sources, with_stored_length
from megacp.training.loop.stored import stored_config, with_stored_model
from megacp.training.start import processes, script
from megacp.training.start.help import FIRST_FIELDS
from megacp.training.start.launch import Rendezvous, World
from tests.distributed.test_grid import at_once
from tests.ranks import grid
from tests.training.checkpoint.test_commit import WORLD
from tests.training.data.datasets import random_packs, write_dataset
from tests.training.runs import TINY, losses, run


def config_of(path: Path, layout: str, cp: int) -> RunConfig:
    values = {
        "data_path": str(path),
        "cp_layout": layout,
        "context_parallel_size": cp,
        "vocab_size": 0,
    }
    return with_values(RunConfig(), values)


def test_stored_padding_of_another_degree_is_refused_for_zigzag_in_documents(
    tmp_path: Path,
) -> None:
    manifest = write_dataset(
        tmp_path / "four", [random_packs(np.random.default_rng(0), 3)], pad_multiple=4
    )
    base = {"seq_length": manifest.seq_length}

    def opened(layout: str, cp: int) -> None:
        open_sources(with_values(config_of(tmp_path / "four", layout, cp), base))

    opened("zigzag_document", 2)
    opened("zigzag_document", 1)
    opened("balanced", 4)
    with pytest.raises(
        ValueError,
        match="multiples of 4, but --cp-layout zigzag_document at --context-parallel-size 4 needs",
    ):
        opened("zigzag_document", 4)
    write_dataset(tmp_path / "one", [random_packs(np.random.default_rng(0), 3)], pad_multiple=1)
    open_sources(with_values(config_of(tmp_path / "one", "zigzag_document", 4), base))


def test_what_is_wrong_with_both_datasets_is_told_at_once(tmp_path: Path) -> None:
    packs = [random_packs(np.random.default_rng(0), 3)]
    write_dataset(tmp_path / "older", packs)
    manifest = write_dataset(tmp_path / "newer", packs)
    values = {
        "data_path": str(tmp_path / "older"),
        "valid_data_path": str(tmp_path / "newer"),
        "vocab_size": 0,
        "seq_length": 32,
    }
    _, sources = open_sources(with_values(RunConfig(), values))
    assert sources.fingerprint == sources.train.manifest.fingerprint
    assert sources.valid.manifest == manifest
    for name in ("older", "newer"):
        (tmp_path / name / "shard_00000/tokens.bin").unlink()
    with pytest.raises(ValueError) as error:
        open_sources(with_values(RunConfig(), values))
    first, second = str(error.value).splitlines()
    assert (
        first.startswith(f"--data-path {tmp_path / 'older'}: ")
        and "tokens.bin: no such file" in first
    )
    assert second.startswith(f"--valid-data-path {tmp_path / 'newer'}: ")


@pytest.mark.parametrize(
    ("ends", "differ"),
    [
        ([(1, {"token": 1}), (1, {"token": None})], True),
        ([(1, {"token": 1}), (2, {"token": 2})], True),
        ([(1, None), (2, None)], True),
        ([(1, None), (1, {"token": 1})], False),
        ([(1, {"token": None}), (2, {"token": None})], False),
    ],
)
def test_validation_documents_end_as_those_of_training(
    tmp_path: Path, ends: list[tuple[int, dict[str, int | None] | None]], differ: bool
) -> None:
    for name, (eos, end) in zip("ab", ends, strict=True):
        manifest = write_dataset(tmp_path / name, [random_packs(np.random.default_rng(0), 3)])
        tokenizer = dataclasses.replace(manifest.tokenizer, eos_id=eos)
        dataclasses.replace(manifest, tokenizer=tokenizer, document_end=end).write(tmp_path / name)
    paths = {"data_path": str(tmp_path / "a"), "valid_data_path": str(tmp_path / "b")}
    config = with_values(RunConfig(), {**paths, "vocab_size": 0, "seq_length": 32})
    if not differ:
        assert open_sources(config)[1].document_end == ends[1][1]
        return
    with pytest.raises(ValueError, match="--valid-data-path .*--eod-token"):
        open_sources(config)


REST = [
    *("--seq-length", "64", "--global-batch-size", "4", "--train-iters", "4", "--lr", "0.01"),
    *("--lr-warmup-iters", "2", "--lr-decay-iters", "4"),
]
"""TINY without the flags that a checkpoint determines: model and dtype."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train TINY for two steps."""
    folder = tmp_path_factory.mktemp("base") / "out"
    run(1, [*TINY, "--lr-decay-iters", "4", "--train-iters", "2", "--save", str(folder)])
    return folder


def copied(base: Path, target: Path) -> Path:
    """Copy the checkpoint; return the copy's directory."""
    (target / "step_0000002").mkdir(parents=True)
    for path in (base / "step_0000002").iterdir():
        (target / "step_0000002" / path.name).write_bytes(path.read_bytes())
    return target


def change(folder: Path, content: dict[str, Any] | None = None, config: str | None = None) -> None:
    """Write a crafted manifest with a right checksum, and a config with a right hash."""
    step = folder / "step_0000002"
    manifest = json.loads((step / MANIFEST_FILE).read_text())
    manifest.pop("checksum")
    if config is not None:
        (step / "config.yaml").write_text(config)
        record = {
            "size": len(config.encode()),
            "sha256": hashlib.sha256(config.encode()).hexdigest(),
        }
        manifest["files"]["config.yaml"] = record
    for key, value in (content or {}).items():
        manifest["extra"][key] = value
        if value is Ellipsis:
            del manifest["extra"][key]
    (step / MANIFEST_FILE).write_text(json.dumps(manifest | {"checksum": checksum_of(manifest)}))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--load", "--auto-resume"])
def test_a_run_is_resumed_without_a_flag_of_its_model(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    folders = [copied(base, tmp_path / name) for name in ("with", "without")]
    for folder, flags in zip(folders, (TINY, REST), strict=True):
        save = ["--save", str(folder), "--lr-decay-iters", "4"]
        run(
            1, [*flags, *save, *(["--load", str(folder)] if how == "--load" else ["--auto-resume"])]
        )
    assert losses(folders[0]) == losses(folders[1]) and sorted(losses(folders[0])) == [3, 4]
    told = capsys.readouterr().out
    assert (
        f"model flags from {folders[1] / 'step_0000002'}: --hidden-size 32, --ffn-hidden-size "
        "48" in told
    )
    assert (
        "--vocab-size 61, --hidden-dropout 0.1, --dtype float64" in told and str(folders[0]) in told
    )
    assert "changed since the checkpoint" not in told


@pytest.mark.slow
def test_a_finetuning_takes_the_model_and_leaves_dropout_rates_and_frozen_parts(
    base: Path, tmp_path: Path
) -> None:
    explicit = [*TINY, "--hidden-dropout", "0", "--lr-decay-iters", "4"]
    for name, flags in (("with", explicit), ("without", REST)):
        run(1, [*flags, "--load", str(base), "--finetune", "--save", str(tmp_path / name)])
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    stored = load_checkpoint(base, WORLD).config_yaml
    crafted = stored.replace("freeze: null", "freeze: text").replace(
        "vision_lr_multiplier: 1.0", "vision_lr_multiplier: 7.0"
    )
    assert crafted != stored
    change(copied(base, tmp_path / "frozen"), config=crafted)
    argv = [*REST, "--load", str(tmp_path / "frozen")]
    tuned, _ = with_stored_model(parse([*argv, "--finetune"]), given_names(argv))
    assert (tuned.vision.freeze, tuned.vision.vision_lr_multiplier, tuned.model.hidden_dropout) == (
        None,
        1.0,
        0,
    )
    resumed, _ = with_stored_model(parse(argv), given_names(argv))
    assert (resumed.vision.freeze, resumed.model.hidden_dropout) == ("text", 0.1)


@pytest.mark.parametrize("finetune", [[], ["--finetune"]])
@pytest.mark.parametrize("where", ["flag", "file"])
@pytest.mark.slow
def test_a_flag_that_is_given_and_contradicts_is_refused_by_its_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], finetune: list[str], where: str
) -> None:
    (tmp_path / "c.yaml").write_text("num_layers: 3\nhidden_size: 256\n")
    given = (
        ["--num-layers", "3", "--hidden-size", "256"]
        if where == "flag"
        else ["--config", str(tmp_path / "c.yaml")]
    )
    assert main([*REST, *given, "--load", str(base), *finetune]) == 2
    lines = capsys.readouterr().err.splitlines()
    step = base / "step_0000002"
    assert lines == [
        f"error: {step} has --num-layers 4, but this run has 3",
        f"{step} has --hidden-size 32, but this run has 256",
    ]


def test_ranks_that_a_layout_does_not_allow_are_told_how_to_plan_another(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the command, and check that the run starts."""
    layout, mixed = tmp_path / "layout.yaml", tmp_path / "mixed.yaml"
    layout.write_text("context_parallel_size: 2\ncp_layout: balanced\n")
    mixed.write_text("seq_length: 64\nmicro_batch_size: 1\n")
    flags = [*REST, "--load", str(base), "--save", str(tmp_path / "out")]
    grid = ["--tensor-model-parallel-size=2", "--config", str(layout)]
    for starts in (["--nproc", "6"], ["--dry-run", "--world-size", "6"]):
        assert main([*starts, *flags, *grid]) == 2
        said = capsys.readouterr().err
        assert (
            "--tensor-model-parallel-size 2, --pipeline-model-parallel-size 1" in said
            and "not allow 6 ranks" in said
        )
        assert f"{base / 'step_0000002'} was saved by 1 rank" in said
        plan, start = (line.strip() for line in said.splitlines() if line.startswith("    "))
        assert plan == shlex.join(
            ["megacp-plan", "--gpu", "here", "--world-size", "6", *flags, "--output", "best.yaml"]
        )
        assert start == shlex.join([*flags, "--config", "best.yaml"]) and "first remove" not in said
    best = str(tmp_path / "best.yaml")
    words = [best if word == "best.yaml" else word for word in shlex.split(plan)]
    # six ranks take a batch of six, but not one of four
    assert command.main([*words[1:], "--global-batch-size", "6"]) == 0
    started = [*flags, "--global-batch-size", "6", "--config", best]
    assert plan_of(started, World(size=6, local_size=6)) is not None
    capsys.readouterr()
    assert main(["--nproc", "3", *flags, "--config", str(mixed)]) == 2
    assert f"first remove --micro-batch-size from {mixed}" in capsys.readouterr().err
    assert main(["--nproc", "2", *flags, "--min-lr", "1"]) == 2, "whatever the number of ranks is"
    assert "megacp-plan" not in capsys.readouterr().err


def test_a_run_without_a_checkpoint_keeps_its_flags(tmp_path: Path) -> None:
    for flags in (
        [],
        ["--load", str(tmp_path)],
        ["--load", str(tmp_path / "none")],
        ["--save", str(tmp_path)],
    ):
        config = parse(flags)
        assert with_stored_model(config, given_names(flags)) == (config, "")


def test_the_whole_config_comes_back(base: Path) -> None:
    loaded = load_checkpoint(base, WORLD)
    assert (
        isinstance(stored_config(loaded), RunConfig) and stored_config(loaded).model.num_layers == 4
    )


HOST = socket.gethostname()


def stated(*flags: str) -> dict[str, str]:
    config, sources = open_sources(parse([*TINY, *flags]))
    return statement(config, sources, "cpu")


@pytest.mark.slow
def test_every_flag_is_stated_but_those_that_may_differ() -> None:
    told = stated()
    assert {name for name in fields() if flag(name) not in told} == set(MAY_DIFFER)


@pytest.mark.slow
def test_data_and_software_are_stated() -> None:
    assert (
        stated("--seq-length", "128")["the fingerprint of --data-path"]
        != stated()["the fingerprint of --data-path"]
    )
    named = (
        "the version of megacp",
        "the source of megacp (sha256)",
        "the version of torch",
        "the version of Python",
    )
    assert all(stated()[name] for name in (*named, "the device"))


def agreed(statements: list[dict[str, str]], problems: dict[int, str] | None = None) -> list[str]:
    def action(rendezvous: Rendezvous) -> str:
        require_equal_start(
            rendezvous, statements[rendezvous.rank], (problems or {}).get(rendezvous.rank, "")
        )
        return "agreed"

    return at_once(len(statements), action)


def test_equal_statements_agree_also_where_machines_read_their_own_copy() -> None:
    assert agreed([stated(), stated("--num-workers", "3"), stated()]) == ["agreed"] * 3


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            [0.01, 0.01, 0.5, 0.01],
            f"0.5 on rank 2 (host {HOST}); 0.01 on ranks 0, 1, 3 (host {HOST})",
        ),
        (
            [0.5, 0.01, 0.01, 0.01],
            f"0.5 on rank 0 (host {HOST}); 0.01 on ranks 1, 2, 3 (host {HOST})",
        ),
        (
            [0.01, 0.5, 0.7, 0.01],
            f"0.5 on rank 1 (host {HOST}), 0.7 on rank 2 (host {HOST}); 0.01 on ranks 0, 3 (host "
            f"{HOST})",
        ),
    ],
)
@pytest.mark.slow
def test_a_difference_is_told_with_its_ranks_on_every_rank(values: list[float], told: str) -> None:
    refusals = agreed([stated("--lr", str(value)) for value in values])
    assert len(set(refusals)) == 1
    assert refusals[0].endswith(f"\n  - --lr: {told}")


def test_every_difference_is_told_at_once() -> None:
    (refusal, _) = agreed(
        [stated(), stated("--seed", "2", "--num-layers", "2") | {"the version of torch": "1.0"}]
    )
    assert all(
        f"\n  - {name}: " in refusal for name in ("--seed", "--num-layers", "the version of torch")
    )
    assert refusal.count("  - ") == 3


def test_a_problem_of_one_rank_is_told_by_all_of_them() -> None:
    refusals = agreed([stated(), {}], {1: "--data-path is not here"})
    assert refusals == [f"refused: rank 1 (host {HOST}): --data-path is not here"] * 2


def test_a_problem_of_all_ranks_is_told_as_it_is() -> None:
    assert agreed([{}, {}], dict.fromkeys((0, 1), "no such flag")) == ["refused: no such flag"] * 2


# ---- the command


def test_help_shows_what_most_runs_have_and_help_all_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("lr: 0.125\n")
    texts = []
    for asked in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            main(["--nproc", "2", asked, "--config", str(tmp_path / "a.yaml")])
        texts.append(capsys.readouterr().out)
        assert end.value.code == 0
        # The default comes from the file of --config; a line may end inside it.
        assert "(default: 0.125)" in " ".join(texts[-1].split())
    first, whole = (
        {name for name in fields() if re.search(rf"^\W+{flag(name)}\b(?!-)", text, re.M)}
        for text in texts
    )
    assert first == {*FIRST_FIELDS} and whole == {*fields()}
    assert "--nproc N" in texts[0] and main(["--help", "--lrr", "1"]) == 2


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("80", 80), ("300", 100)])
def test_help_is_one_column_on_a_terminal_of_any_width(
    columns: str, widest: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(["--help"])
    usage, about, *lines, advice = capsys.readouterr().out.splitlines()
    assert usage.startswith("usage: ") and "--config FILE.yaml" in about and "--help-all" in advice
    titles = [line for line in lines if line and line[0] != " "]
    assert titles[:2] == ["options", "parallel options"] and titles[-1] == "checkpoint options"
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(shown) == sorted(
        flag(name) + "," * (fields()[name].hint is bool) for name in FIRST_FIELDS
    )
    help_of_a_flag = [line for line in lines if line.startswith(8 * " ")]
    assert widest - 12 < max(map(len, help_of_a_flag)) <= widest and len(help_of_a_flag) > len(
        shown
    )


def test_nproc_checks_in_one_process_and_then_starts_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], int]] = []
    monkeypatch.setattr(
        train, "start_and_wait", lambda arguments, count: started.append((arguments, count)) or 3
    )
    flags = ["--nproc", "2", "--context-parallel-size", "2", "--vocab-size", "64"]
    assert main([*flags, "--data-path", str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err
    assert f"--data-path {tmp_path / 'none'} does not exist: there is no such folder" in told
    assert not started
    assert main([*flags, "--data-path", str(tmp_path)]) == 2
    assert f"--data-path {tmp_path} has no manifest.json, so it is" in capsys.readouterr().err
    assert not started
    assert (
        main([*flags, "--num-attention-heads", "3"]) == 2
        and main(["--nproc", "two"]) == 2
        and not started
    )
    capsys.readouterr()
    assert main([*flags, "--dry-run"]) == 0 and "Dry run: 2 ranks" in capsys.readouterr().out
    assert main(flags) == 3 and started == [(flags[2:], 2)] and capsys.readouterr().out == ""


SAVES = "trap 'exit 3' TERM; touch $READY/$$; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("ranks", "status", "said"),
    [
        (["exit 0", "exit 0"], 0, ""),
        (["exit 3", "exit 3"], 3, ""),
        (["exit 2", "sleep 0.2; exit 1"], 2, ""),
        (["exit 3", "sleep 0.2; exit 1"], 1, ""),
        (["sleep 0.3; exit 1", "kill -KILL $$"], 1, "error: rank 1 was ended by SIGKILL\n"),
        (["exit 1", "exec sleep 60"], 1, ""),
        ([SAVES, SAVES], 3, ""),
        ([SAVES, "touch $READY/$$; exec sleep 60"], 130, "interrupted before the first step\n"),
        (
            ["touch $READY/$$; exec sleep 60", "touch $READY/$$; exec sleep 60"],
            130,
            "interrupted before the first step\n",
        ),
    ],
)
def test_the_status_of_nproc_is_that_of_its_ranks(
    ranks: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleep, start, handlers = time.sleep, subprocess.Popen, dict[int, Any]()

    def wait(seconds: float) -> None:
        sleep(seconds)
        if len([*tmp_path.iterdir()]) == 2:  # ranks that can be stopped
            handlers[signal.SIGINT](signal.SIGINT, None)

    home = "megacp.training.start.processes"
    monkeypatch.setattr(processes, "_SECONDS_AFTER_A_FAILURE", 0.5)
    monkeypatch.setattr(f"{home}.time.sleep", wait)
    monkeypatch.setattr(f"{home}.signal.signal", handlers.__setitem__)
    monkeypatch.setattr(
        f"{home}.subprocess.Popen", lambda command, env, **_: start(["sh", "-c", env])
    )
    monkeypatch.setattr(f"{home}.launch.ranks_of_one_machine", lambda count: (None, ranks))
    monkeypatch.setenv("READY", str(tmp_path))
    assert processes.start_and_wait([], len(ranks)) == status
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ('echo "$@"', "0"),
        (f"{SAVES.replace('touch $READY/$$', 'echo begun')}", "3"),
        ("echo 'error: --lr: no number' >&2; exit 2", "ValueError('--lr: no number')"),
        ("echo 'error: step 7: no update'; exit 1", "RuntimeError('step 7: no update')"),
    ],
)
def test_a_script_starts_a_run_from_any_thread_and_sees_what_it_says(
    told: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def show(line: str, **how: Any) -> None:
        said.append(line)
        if line == "begun\n":
            raise KeyboardInterrupt

    (tmp_path / "python").write_text(f"#!/bin/sh\n{told}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(script.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(script, "print", show, raising=False)
    values = {"data_path": [0.5, "a"], "lr": 1e-5, "auto_resume": True, "sequence_parallel": False}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        ended = threads.submit(train.train, values, 2)
    assert repr(ended.exception() or ended.result()) == outcome
    flags = "--nproc 2 --data-path 0.5 a --lr=1e-05 --auto-resume --no-sequence-parallel\n"
    assert outcome != "0" or said == [f"-m megacp.train {flags}"]


BATCH = TINY.index("--train-iters")
LONG = [*TINY[:BATCH], *TINY[BATCH + 2 :]]
"""TINY without its length."""


def packed(folder: Path, count: int) -> str:
    write_dataset(folder, [random_packs(np.random.default_rng(0), count, 64, 61)], 61, 64)
    return str(folder)


def test_epochs_are_steps_of_the_packs_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*LONG, "--data-path", packed(tmp_path / "d", 10)]
    resumed = [*flags, "--auto-resume", "--save", str(tmp_path / "run"), "--lr", "0.1"]
    assert main([*resumed, "--train-epochs", "1.5"]) == 0
    said = capsys.readouterr().out
    assert (
        "--train-iters 4, from the manifest of --data-path" in said
        and "step 4/4  epoch 1.50" in said
    )
    assert said.count("4 updates of 4 packs, 2 of them") == 1
    assert main([*resumed, "--train-epochs", "3", "--global-batch-size", "8"]) == 0
    assert (
        "step 6/6  epoch 3.00" in (said := capsys.readouterr().out)
        and "updates of 8 packs" not in said
    ), "15 more"
    assert main([*flags, "--train-epochs", "0.4", "--lr-warmup-iters", "0"]) == 0
    assert "step 1/1  epoch 0.40" in (said := capsys.readouterr().out) and "lr 1.00e-02" in said, (
        "the whole rate"
    )
    assert main([*flags, "--train-epochs", "0.04"]) == 2
    assert "--train-epochs 0.04 of 10 packs" in capsys.readouterr().err
    assert (
        main([*LONG, "--train-epochs", "2"]) == 2
        and "--train-epochs 2 needs --data-path" in capsys.readouterr().err
    )
    assert main([*flags, "--train-epochs", "2", "--train-iters", "4"]) == 2
    assert "--train-epochs 2 and --train-iters 4 both set the length" in capsys.readouterr().err
    for name, text in (("steps", "train-iters: 5"), ("epochs", "train-epochs: 2")):
        (tmp_path / f"{name}.yaml").write_text(text)
    for file, one, value in (("steps", "--train-epochs", "2"), ("epochs", "--train-iters", "5")):
        assert main([*flags, "--config", str(tmp_path / f"{file}.yaml"), one, value]) == 0, (
            "a flag wins over a file"
        )
        assert "step 5/5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("epochs", "steps"), [("1.1", 11), ("1.04", 10), ("1.06", 11), ("2", 20), ("0.9999", 10)]
)
def test_an_epoch_is_as_many_samples_as_there_are_packs_in_all_parts(
    tmp_path: Path, epochs: str, steps: int
) -> None:
    """1.1 x 10 is 11.000000000000002 in floating point."""
    flags = ["--train-epochs", epochs, "--global-batch-size", "1"]
    flags += ["--data-path", "0.9", packed(tmp_path / "a", 3), "0.1", packed(tmp_path / "b", 7)]
    config, note = with_stored_length(parse(flags), given_names(flags), given_names(flags))
    assert config.training.train_iters == steps and (
        f"{steps} updates of 1 pack, too few" in note
    ) == (steps < 20)
    longer = with_values(config, {"train_epochs": None, "train_iters": 40})
    notes = [
        with_stored_length(with_values(longer, {"lr_warmup_iters": n}), (), ())[1] for n in (20, 21)
    ]
    assert (
        "to warm up" not in notes[0] and "40 updates of 1 pack, 21 of them to warm up" in notes[1]
    )
    assert notes[1].endswith(
        "too few to train a model: lower the warm-up, or raise --train-epochs or --train-iters"
    )
    one = with_values(config, {"train_epochs": None, "train_iters": 1, "lr_warmup_iters": 0})
    assert (
        "1 update of 1 pack, too few" in (few := with_stored_length(one, (), ())[1])
        and "lower" not in few
    )


def test_a_dataset_folder_that_does_not_exist_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, words in (("none", "there is no such folder"), ("empty", "not a finished dataset")):
        with pytest.raises(ValueError, match=f"--data-path {tmp_path / name}: .*{words}"):
            open_sources(config_of(tmp_path / name, "balanced", 1))


@pytest.mark.parametrize(("rate", "is_warned"), [(5.0, True), (0.11, True), (0.1, False)])
def test_a_learning_rate_that_no_run_has_is_warned_about(rate: float, is_warned: bool) -> None:
    lines = rate_warning(TrainingConfig(lr=rate))
    assert [f"--lr {rate:g}, AdamW will probably diverge" in line for line in lines] == (
        [True] * is_warned
    )


def test_the_first_line_of_a_run_has_the_number_of_ranks_that_share_experts() -> None:
    routed = {"num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2}
    place = dataclasses.replace(grid(), shape=GridShape(dp=2, ep=2))
    told = heading(with_values(RunConfig(), {"vocab_size": 64, **routed}), place)
    assert told.startswith("2 ranks = pp 1 x dp 2 x cp 1 x tp 1, ep 2 on cpu")
    told = heading(with_values(RunConfig(), {"vocab_size": 64}), grid())
    assert told.startswith("1 rank = pp 1 x dp 1 x cp 1 x tp 1 on cpu")
