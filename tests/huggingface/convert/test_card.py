"""The model card of an export, parsed by huggingface_hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacp.engine.config.run import RunConfig, with_values
from megacp.engine.config.yaml_file import from_yaml, to_yaml
from megacp.huggingface.convert.card import CARD, model_card
from megacp.training.checkpoint.commit import LoadedCheckpoint
from megacp.training.checkpoint.directory import CheckpointManifest
from tests.training.checkpoint.test_commit import WORLD

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (extra: hf)")


@pytest.mark.parametrize(
    ("folder", "card", "named", "base", "license"),
    [
        (
            "model",
            "---\nlicense: mit\ntags: [a]\n---\nlicense: none\n",
            "adapters/of a model",
            None,
            "mit",
        ),
        (
            "models--some--model/snapshots/01",
            "no table\n---\nlicense: mit\n---\n",
            None,
            "some/model",
            None,
        ),
        ("model", "", "some/other", "some/other", None),
        ("model", "", "../other", None, None),
        ("model", "", "megacp/engine", None, None),  # which is a folder here
    ],
)
def test_a_card_says_what_made_the_model_and_nothing_of_the_machine(
    folder: str, card: str, named: str | None, base: str | None, license: str | None, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / CARD).write_text(card)
    values = {
        "lr": 1e-5,
        "train_iters": 7,
        "load_hf": "model",
        "data_path": ("0.5", "a", "2", "b"),
        "save": "run",
    }
    places = {
        "load_hf": str(tmp_path / folder),
        "data_path": ("0.5", f"{tmp_path}/a", "2", f"{tmp_path}/b/"),
    }
    more = {"save": f"{tmp_path}/run", "log_file": f"{tmp_path}/log"}
    manifest = CheckpointManifest(
        7, 1, 4, {"tp": 1, "cp": 4}, {}, {"consumed_samples": 1400, "base": places["load_hf"]}
    )
    config = to_yaml(with_values(RunConfig(), {**values, **places, **more}))
    found = hub.ModelCard(
        model_card(LoadedCheckpoint(tmp_path, manifest, (), config, WORLD), "qwen3", "peft", named)
    )
    assert (found.data.library_name, found.data.base_model, found.data.license) == (
        "peft",
        base,
        license,
    )
    assert (
        "step 7" in found.text
        and "on tp 1 x cp 4: 1,400 packs" in found.text
        and "--nproc 4" in found.text
    )
    flags = from_yaml(found.text.partition("```yaml\n")[2].partition("```")[0])
    assert flags == with_values(RunConfig(), {**values, "load_hf": folder.rpartition("/")[2]})
    assert str(tmp_path) not in found.content
