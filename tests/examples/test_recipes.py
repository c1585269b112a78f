"""The recipes: each is a layout that is checked and fits the GPU its first line names; the tiny one takes a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megacp.core.config.cli import parse
from megacp.core.config.run import RunConfig, flatten
from megacp.core.models.build import stage_layers
from megacp.core.models.costs import run_parameters
from megacp.huggingface.convert.families import of_values
from megacp.plan.memory import stage_memory
from megacp.train import dry_run, main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "molmo2_4b": 4_851_000_000,
    "molmo2_8b": 8_660_000_000,
}
"""Published, or within 1 % of the sum of the published parts."""
GRIDS = {"1gpu": 1, "8gpus": 8, "64gpus": 64}


def recipe(model: str, grid: str) -> RunConfig:
    files = [EXAMPLES / "recipes" / model / f"{name}.yaml" for name in ("model", grid)]
    flags = [text for file in files for text in ("--config", str(file))]
    return parse([*flags, "--dry-run", "--world-size", str(GRIDS[grid])])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("model", PARAMETERS)
def test_a_recipe_runs_and_fits_the_gpus_it_names(model: str, grid: str) -> None:
    """Would catch a flag that was renamed, a row that does not divide, and memory that a new term of the plan takes."""
    config = recipe(model, grid)
    assert f"Dry run: {GRIDS[grid]} ranks" in dry_run(config)
    head = (EXAMPLES / "recipes" / model / f"{grid}.yaml").read_text().splitlines()[0]
    (gib,) = re.findall(r"(\d+) GiB", head)
    needed = max(
        stage_memory(config, stage, chunks, GRIDS[grid]).total
        for stage, chunks in enumerate(stage_layers(config, GRIDS[grid]))
    )
    assert needed <= 0.9 * float(gib) * 2**30, head


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_recipe_has_the_size_of_its_model_and_its_export_has_its_name(model: str) -> None:
    config = recipe(model, "8gpus")
    assert run_parameters(config) == pytest.approx(PARAMETERS[model], rel=0.01)
    architecture = of_values(flatten(config))
    assert model.startswith(architecture.name.rstrip("2")) and architecture.config(flatten(config))


def test_the_tiny_config_takes_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(EXAMPLES / "tiny.yaml"), "--train-iters", "2"]) == 0
    assert "step 2/2" in capsys.readouterr().out
