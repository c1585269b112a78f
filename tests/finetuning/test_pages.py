"""The commands of all pages make the same number of updates of the same hundred chats."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from megacp.engine.config.cli import given_flags, given_names, parse
from megacp.finetuning.command import request_of
from megacp.finetuning.run import planned
from megacp.prepare.command import main as preprocess
from megacp.training.loop.sources import with_stored_length
from tests.finetuning import folders

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*/*.yaml"))
# A chat has about 300 tokens.
LONG = "Please add the numbers one by one, and explain every step of the addition. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    path = folders.write_messages(folder)
    path.write_text(path.read_text().replace("What is", f"{LONG} What is"))
    return path


def packs(model: Path, chats: Path, row_tokens: int, folder: Path) -> str:
    """Build the chats with rows of this length, and return the folder of the packs."""
    output = folder / str(row_tokens)
    words = ["--input", str(chats), "--output", str(output), "--tokenizer", str(model)]
    assert preprocess(["build", *words, "--seq-length", str(row_tokens)]) == 0
    return str(output)


def train_commands() -> list[tuple[str, str]]:
    """Return each page's commands that train a model folder, joined to one line."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                if "megacp.train" in line and "--load-hf" in line and "--dry-run" not in line:
                    found.append((page.name, line))
    return found


def updates(words: list[str], ranks: int) -> tuple[int, str]:
    """Return the updates of a training command, and its notes about them."""
    config = parse(words)
    rows_at_once = max(1, ranks // config.model_ranks) * config.training.micro_batch_size
    config, note = with_stored_length(config, given_names(words), given_flags(words), rows_at_once)
    return config.training.train_iters, note


def test_a_hundred_chats_make_the_same_updates_on_every_page(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    data = packs(model, chats, 2048, tmp_path)
    choices = planned(request_of([str(model), str(chats), "--output", str(tmp_path / "out")]))
    assert choices.build["seq_length"] == 2048
    of_finetune, note = updates(
        ["--load-hf", str(model), "--data-path", data, "--global-batch-size", "1"], 1
    )
    assert choices.train["global_batch_size"] == 1 and choices.train["train_epochs"] == 3
    assert 40 <= of_finetune <= 60 and "too few" not in note
    commands = train_commands()
    assert {"huggingface.md", "lora.md"} <= {page for page, _ in commands}
    for page, line in commands:
        words = shlex.split(line.partition("megacp.train")[2])
        ranks = 1
        if words[0] == "--nproc":
            ranks = int(words[1])
            words = words[2:]
        if "--config" in words:
            continue  # a recipe, or a planned layout for many GPUs
        places = {"--load-hf": str(model), "--data-path": data}
        for flag, value in places.items():
            words[words.index(flag) + 1] = value
        # Data-parallel ranks compute at least one row each.
        rows = max(1, ranks // parse(words).model_ranks)
        assert updates(words, ranks)[0] == math.ceil(of_finetune / rows), f"{page}: {line}"


def test_a_recipe_makes_three_epochs_and_says_if_a_hundred_chats_are_too_few(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    built: dict[int, str] = {}
    for recipe in RECIPES:
        text = recipe.read_text(encoding="utf-8")
        found = re.search(r"^seq_length: (\d+)", text, re.MULTILINE)
        if recipe.name == "model.yaml" or found is None:
            continue
        row_tokens = int(found[1])
        if row_tokens not in built:
            built[row_tokens] = packs(model, chats, row_tokens, tmp_path)
        words = ["--config", str(recipe), "--load-hf", str(model)]
        words += ["--data-path", built[row_tokens]]
        gpus = int(re.findall(r"(\d+)gpu", recipe.name)[0])
        count, note = updates(words, gpus)
        assert parse(words).training.train_epochs == 3
        assert count >= 20 or f"{count} update" in note and "too few to train" in note
