"""What a checkpoint says of its model and its run: taken over by a run that says nothing, and never trusted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megacp.core.checkpoint.commit import load_checkpoint
from megacp.core.checkpoint.directory import MANIFEST_FILE, checksum_of
from megacp.core.config.cli import given_names, parse
from megacp.core.config.run import RunConfig
from megacp.core.training.stored import stored_config, with_stored_model
from megacp.train import main
from tests.checkpoint.test_commit import WORLD
from tests.training.runs import TINY, losses, run

REST = [
    *("--seq-length", "64", "--global-batch-size", "4", "--train-iters", "4", "--lr", "0.01"),
    *("--lr-warmup-iters", "2", "--lr-decay-iters", "4"),
]
"""TINY without what a checkpoint says: model and dtype."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of TINY after two steps."""
    folder = tmp_path_factory.mktemp("base") / "out"
    run(1, [*TINY, "--lr-decay-iters", "4", "--train-iters", "2", "--save", str(folder)])
    return folder


def copied(base: Path, target: Path) -> Path:
    """A copy of the checkpoint; its directory."""
    (target / "step_0000002").mkdir(parents=True)
    for path in (base / "step_0000002").iterdir():
        (target / "step_0000002" / path.name).write_bytes(path.read_bytes())
    return target


def change(folder: Path, content: dict[str, Any] | None = None, config: str | None = None) -> None:
    """Craft the manifest, with a right checksum, and the config, with a right hash."""
    step = folder / "step_0000002"
    manifest = json.loads((step / MANIFEST_FILE).read_text())
    manifest.pop("checksum")
    if config is not None:
        (step / "config.yaml").write_text(config)
        record = {"size": len(config.encode()), "sha256": hashlib.sha256(config.encode()).hexdigest()}
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
    """Would catch defaults of flags that take the place of what the checkpoint says."""
    folders = [copied(base, tmp_path / name) for name in ("with", "without")]
    for folder, flags in zip(folders, (TINY, REST), strict=True):
        save = ["--save", str(folder), "--lr-decay-iters", "4"]
        run(1, [*flags, *save, *(["--load", str(folder)] if how == "--load" else ["--auto-resume"])])
    assert losses(folders[0]) == losses(folders[1]) and sorted(losses(folders[0])) == [3, 4]
    told = capsys.readouterr().out
    assert f"the model is that of {folders[1] / 'step_0000002'}: --hidden-size 32, --ffn-hidden-size 48" in told
    assert "--vocab-size 61, --hidden-dropout 0.1, --dtype float64" in told and str(folders[0]) in told
    assert "changed since the checkpoint" not in told


@pytest.mark.slow
def test_a_finetuning_takes_the_model_and_leaves_dropout_rates_and_frozen_parts(base: Path, tmp_path: Path) -> None:
    """Would catch a run that needs `--config` of a folder inside the checkpoint, and one that takes too much."""
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
    assert (tuned.vision.freeze, tuned.vision.vision_lr_multiplier, tuned.model.hidden_dropout) == (None, 1.0, 0)
    resumed, _ = with_stored_model(parse(argv), given_names(argv))
    assert (resumed.vision.freeze, resumed.model.hidden_dropout) == ("text", 0.1)


@pytest.mark.parametrize("finetune", [[], ["--finetune"]])
@pytest.mark.parametrize("where", ["flag", "file"])
@pytest.mark.slow
def test_a_flag_that_is_given_and_contradicts_is_refused_by_its_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], finetune: list[str], where: str
) -> None:
    """Would catch a flag that is quietly replaced, also one that is given with its default."""
    (tmp_path / "c.yaml").write_text("num_layers: 3\nhidden_size: 256\n")
    given = ["--num-layers", "3", "--hidden-size", "256"] if where == "flag" else ["--config", str(tmp_path / "c.yaml")]
    assert main([*REST, *given, "--load", str(base), *finetune]) == 2
    lines = capsys.readouterr().err.splitlines()
    step = base / "step_0000002"
    assert lines == [f"error: {step} has --num-layers 4, this run 3", f"{step} has --hidden-size 32, this run 256"]


def test_a_run_without_a_checkpoint_keeps_its_flags(tmp_path: Path) -> None:
    for flags in ([], ["--load", str(tmp_path)], ["--load", str(tmp_path / "none")], ["--save", str(tmp_path)]):
        config = parse(flags)
        assert with_stored_model(config, given_names(flags)) == (config, "")


def test_the_whole_config_comes_back(base: Path) -> None:
    loaded = load_checkpoint(base, WORLD)
    assert isinstance(stored_config(loaded), RunConfig) and stored_config(loaded).model.num_layers == 4
