"""The model card of an export, as huggingface_hub reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacp import __version__
from megacp.core.checkpoint.commit import LoadedCheckpoint
from megacp.core.checkpoint.directory import CheckpointManifest
from megacp.core.config.run import RunConfig, with_values
from megacp.core.config.yaml_file import from_yaml, to_yaml
from megacp.core.distributed.grid import single_axis
from megacp.huggingface.convert.card import write_card

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (extra: hf)")
CACHED = "hub/models--some--model/snapshots/0123"


@pytest.mark.parametrize(
    ("folder", "card", "named", "base", "license"),
    [
        ("model", "---\nlicense: mit\ntags: [a]\n---\n# It\n", None, None, "mit"),
        (CACHED, "no table\n---\nlicense: mit\n---\n", None, "some/model", None),
        ("model", "---\n- license\n---\n", "some/other", "some/other", None),
        ("model", None, "adapters/of a model", None, None),
    ],
)
def test_a_card_says_what_made_the_model_and_nothing_of_the_machine(
    folder: str, card: str | None, named: str | None, base: str | None, license: str | None, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    if card is not None:
        (tmp_path / folder / "README.md").write_text(card)
    places = {"load_hf": str(tmp_path / folder), "data_path": ("0.5", str(tmp_path / "a"), "2", str(tmp_path / "b/"))}
    values = {"lr": 1e-5, "context_parallel_size": 2, "train_iters": 7, "seq_length": 2048, "lora_rank": 4}
    config = with_values(RunConfig(), {**values, **places, "log_file": str(tmp_path / "log"), "save": str(tmp_path)})
    manifest = CheckpointManifest(7, 1, 4, {"tp": 1, "cp": 2, "dp": 2, "pp": 1}, {}, {"consumed_samples": 1400})
    write_card(
        tmp_path,
        LoadedCheckpoint(tmp_path, manifest, (), to_yaml(config), single_axis("world")),
        "qwen3",
        "peft",
        named,
    )
    found = hub.ModelCard.load(tmp_path / "README.md")
    assert (found.data.library_name, found.data.base_model, found.data.license) == ("peft", base, license)
    assert (
        f"qwen3, step 7 of megacp {__version__} on tp 1 x cp 2 x dp 2 x pp 1: 1,400 packs of up to 2,048" in found.text
    )
    assert str(tmp_path) not in found.content and "--nproc 4" in found.text and "log" not in found.text
    flags = found.text.partition("```yaml\n")[2].partition("```")[0]
    again = {"load_hf": folder.rpartition("/")[2], "data_path": ("0.5", "a", "2", "b"), "save": tmp_path.name}
    assert from_yaml(flags) == with_values(RunConfig(), {**values, **again})
