"""Embedding and head of a folder: for any tie in config and file, the model is the one that the
library loads.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.huggingface.convert.source import Loaded, read_hf
from megacp.huggingface.convert.tensors import whole
from megacp.huggingface.convert.text_part import TEXT_PARTS
from megacp.huggingface.convert_command import main
from megacp.train import main as train
from tests.huggingface.convert.models import save
from tests.huggingface.convert.text_parts import MADE, saved

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: test)"
)
safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed (extra: hf)"
)

ABSENT = "absent"
SAID = (ABSENT, True, False)
HEAD = "lm_head.weight"
FILES = ("equal", "different", "no head", "no embedding")
TEXTS = ("llama 2", "gemma3_text", "gpt_oss of 32", "mixtral stacked", "olmo2")
FAST = ("qwen3_5 with images", "gemma3", "llava")
SLOW = ("qwen3_5_moe with images, stacked", *(name for name in MADE if name not in FAST))
TOWERS = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


class Folder:
    """A folder of the library whose config and file are rewritten."""

    def __init__(self, name: str, path: Path) -> None:
        self.path = path
        if name in MADE:
            saved(name, path, save_original_format=False)
            self.cls = getattr(transformers, TEXT_PARTS[name].cls)
        else:
            self.cls = type(save(name, path))
        self.content = json.loads((path / "config.json").read_text())
        self.tensors = safetensors.load_file(path / "model.safetensors")
        self.table = next(name for name in self.tensors if name.endswith("embed_tokens.weight"))
        self.head = torch.randn_like(self.tensors[self.table])

    def write(self, what: str, outer: Any, inner: Any = ABSENT) -> None:
        """Write `outer` and `inner` ties to the config, and both tensors or one of them to the
        file.
        """
        content = json.loads(json.dumps(self.content))
        sections = [(content, outer)]
        if "text_config" in content:
            sections.append((content["text_config"], inner))
        for section, said in sections:
            section.pop("tie_word_embeddings", None)
            if said != ABSENT:
                section["tie_word_embeddings"] = said
        tensors = {**self.tensors, HEAD: self.head}
        if what == "equal":
            tensors[HEAD] = tensors[self.table].clone()
        if what == "no head":
            del tensors[HEAD]
        if what == "no embedding":
            del tensors[self.table]
        (self.path / "config.json").write_text(json.dumps(content))
        safetensors.save_file(tensors, self.path / "model.safetensors", {"format": "pt"})

    def of_library(
        self, path: Path | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
        """Return the library's embedding and head, and whether they are tied; None if the library
        initialises one of them.
        """
        dtype = self.tensors[self.table].dtype
        model, info = self.cls.from_pretrained(
            path or self.path, dtype=dtype, output_loading_info=True
        )
        if info["missing_keys"]:
            return None
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return table, head, head is table


def of_ours(loaded: Loaded) -> tuple[torch.Tensor, torch.Tensor, bool]:
    table = whole(loaded.source, "embedding.weight")
    tied = not loaded.values["untie_embeddings_and_output_weights"]
    return table, table if tied else whole(loaded.source, "head.weight"), tied


def require_same_model(folder: Folder) -> None:
    expected = folder.of_library()
    if expected is None:
        with pytest.raises(ValueError, match="is missing"):
            read_hf(folder.path)
        return
    found = of_ours(read_hf(folder.path))
    assert found[2] is expected[2]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_model_has_the_head_that_the_library_loads(name: str, tmp_path: Path) -> None:
    folder = Folder(name, tmp_path / "a")
    for said, what in itertools.product(SAID, FILES):
        folder.write(what, said)
        require_same_model(folder)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("what", FILES)
def test_all_nine_ties_of_a_model_with_a_tower_are_the_librarys(
    name: str, what: str, tmp_path: Path
) -> None:
    folder = Folder(name, tmp_path / "a")
    for outer, inner in itertools.product(SAID, SAID):
        folder.write(what, outer, inner)
        require_same_model(folder)


def test_a_molmo2_has_a_head_of_its_own_whatever_its_config_says(tmp_path: Path) -> None:
    folder = Folder("molmo2 native", tmp_path / "a")
    folder.head = folder.tensors[HEAD]
    for outer, inner in itertools.product(SAID, SAID):
        folder.write("different", outer, inner)
        expected = folder.of_library()
        assert expected is not None and torch.equal(expected[1], folder.head)
        loaded = read_hf(folder.path)
        assert torch.equal(of_ours(loaded)[1], folder.head)
        assert ("does not tie" in " ".join(loaded.notes(True))) is (True in (outer, inner))


@pytest.mark.parametrize("name", ["llama 2", "qwen3_5 with images"])
def test_an_export_says_what_the_library_made_of_the_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(name, tmp_path / "a")
    for what in FILES:
        folder.write(what, True, False)
        middle, out = tmp_path / f"{what} m", tmp_path / f"{what} h"
        assert (
            main(
                [
                    "--from",
                    "hf",
                    "--to",
                    "megacp",
                    "--input",
                    str(folder.path),
                    "--output",
                    str(middle),
                ]
            )
            == 0
        )
        told = capsys.readouterr().out
        assert (f"{HEAD} differs from {folder.table}: both are kept" in told) is (
            what == "different"
        )
        assert (f"{HEAD} is also used as the embedding" in told) is (what == "no embedding")
        flags = ["--from", "megacp", "--to", "hf", "--tokenizer", "none"]
        assert main([*flags, "--input", str(middle), "--output", str(out)]) == 0
        expected, found = folder.of_library(), folder.of_library(out)
        assert expected is not None and found is not None and found[2] is expected[2]
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_run_from_a_folder_trains_the_head_that_the_library_loads(tmp_path: Path) -> None:
    folder = Folder("qwen3_5 with images", tmp_path / "a")
    folder.write("different", True, True)
    flags = [
        "--load-hf",
        str(folder.path),
        "--seq-length",
        "32",
        "--train-iters",
        "1",
        "--lr",
        "1e-30",
    ]
    run, out = str(tmp_path / "run"), tmp_path / "out"
    assert train([*flags, "--save", run, "--log-file", "/dev/null"]) == 0
    assert (
        main(
            [
                "--from",
                "megacp",
                "--to",
                "hf",
                "--tokenizer",
                "none",
                "--input",
                run,
                "--output",
                str(out),
            ]
        )
        == 0
    )
    found = folder.of_library(out)
    assert found is not None and torch.equal(found[1], folder.head)


@pytest.mark.parametrize("said", [None, 1, "true"])
def test_a_tie_that_is_neither_true_nor_false_is_refused_as_by_the_library(
    said: Any, tmp_path: Path
) -> None:
    folder = Folder("qwen3_5 with images", tmp_path / "a")
    for outer, inner in ((said, ABSENT), (False, said)):
        folder.write("different", outer, inner)
        with pytest.raises(Exception, match="tie_word_embeddings"):
            folder.of_library()
        with pytest.raises(ValueError, match="tie_word_embeddings is .*expected true or false"):
            read_hf(folder.path)
