"""Foreign text in a message can neither control a terminal nor flood it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megacp.huggingface import convert_command, generate_command
from megacp.plan import command as plan_command
from megacp.prepare import command as preprocess
from megacp.storage.wording import escaped, for_terminal
from megacp.train import main as train
from megacp.training.monitor.console import Console, say, warn
from megacp.verify import command as parity
from megacp.verify import plot

STEERING = "\x1b[2J\x07\x08\r\x9b31m\x7f\x00\u202e\u2066\u2028"


def steers(text: str) -> bool:
    """Return whether a text contains a character that terminals interpret, except newline and tab."""
    return any(
        ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 or c in "\u202e\u2066\u2028"
        for c in text
    )


def test_what_steers_a_terminal_is_shown_escaped() -> None:
    assert escaped("a\x1b[31mb\rc\u202ed\x9b\x00") == r"a\x1b[31mb\rc\u202ed\x9b\x00"
    assert escaped("half \udce9") == r"half \udce9", "a name of a file that is no UTF-8"
    assert not steers(escaped(STEERING))


@pytest.mark.parametrize(
    "text",
    ["数据/模型.json", "émile 👩‍👩‍👧 🏴󠁧󠁢󠁥󠁮󠁧󠁿", "שלום עולם", "مرحبا", "two\nlines\tand a tab", r"C:\new"],
)
def test_every_language_and_new_lines_stay(text: str) -> None:
    assert escaped(text) == for_terminal(text) == text


def test_a_long_name_is_cut_in_its_middle() -> None:
    name = "model." + "a" * 10_000_000 + ".weight"
    shown = for_terminal(f"error: {name} is missing")
    assert (
        len(shown) < 1000
        and shown.startswith("error: model.aaa")
        and shown.endswith("a.weight is missing")
    )
    assert "(10,000,013 characters)" in shown
    assert len(for_terminal("a b " * 1_000_000)) < 9000, "a name with blanks is a long line"
    assert len(for_terminal("line\n" * 1_000_000)) < 100_000
    kept = "word " * 1000
    assert for_terminal(kept) == kept
    assert len(for_terminal("\x1b" * 10_000_000)) < 5000


def test_errors_lines_and_results_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Console(lambda reason: None).say(f"step {STEERING}")
    say(f"answer {STEERING}")
    warn(f"error: {STEERING}")
    out, err = capsys.readouterr()
    assert not steers(out) and not steers(err)
    assert out.count(r"\x1b[2J") == 2 and err.count(r"\x1b[2J") == 1


def tensors(folder: Path) -> list[str]:
    """Create a model folder whose tensors have such names."""
    folder.mkdir()
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8}
    (folder / "config.json").write_text(json.dumps({**kind, **sizes, "max_position_embeddings": 8}))
    names = (f"model.{STEERING}", "model." + "a" * 2_000_000)
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    out = str(folder.parent / "out")
    return ["--from", "hf", "--to", "megacp", "--input", str(folder), "--output", out]


NAMED = f"no{STEERING.replace(chr(0), '')}file"
PLAN = ["--world-size", "1", "--vocab-size", "8"]
BUILD = ["--tokenizer", "byte", "--seq-length", "8", "--input", "a.jsonl", "--output", "d"]
COMMANDS: dict[str, tuple[Callable[[list[str]], int], Callable[[Path], list[str]]]] = {
    "train": (train, lambda folder: ["--config", str(folder / NAMED)]),
    "train of no data": (train, lambda folder: ["--data-path", str(folder / NAMED)]),
    "plan": (plan_command.main, lambda folder: ["--gpu", str(folder / NAMED), *PLAN]),
    "build": (
        preprocess.main,
        lambda folder: [
            *("build", "--tokenizer", "byte", "--seq-length", "8"),
            *("--input", str(folder / f"{NAMED}.jsonl"), "--output", str(folder / "d")),
        ],
    ),
    "a flag": (preprocess.main, lambda folder: ["build", *BUILD, f"--{NAMED}"]),
    "verify": (preprocess.main, lambda folder: ["verify", str(folder / NAMED)]),
    "converter": (convert_command.main, lambda folder: tensors(folder / "hf")),
    "generate": (
        generate_command.main,
        lambda folder: ["--checkpoint", str(folder / NAMED), "--prompt", "a"],
    ),
    "plot": (
        plot.main,
        lambda folder: ["--log", str(folder / NAMED), "--output", str(folder / "a.png")],
    ),
    "parity": (parity.main, lambda folder: ["--world-size", "2", "--config", str(folder / NAMED)]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_what_steers_a_terminal(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, flags = COMMANDS[name]
    try:
        assert run(flags(tmp_path)) in (1, 2)
    except SystemExit as end:
        assert end.code == 2
    out, err = capfd.readouterr()
    said = out + err
    assert said and not steers(said) and len(said) < 20_000
    assert r"\x1b[2J" in said and "Traceback" not in said


def test_a_record_cannot_steer_the_terminal_of_a_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = f"{STEERING}{'k' * 1_000_000}"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", key: 1}) + "\n")
    flags = ["--tokenizer", "byte", "--seq-length", "8", "--workers", "1"]
    assert (
        preprocess.main(
            ["build", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "d"), *flags]
        )
        == 2
    )
    err = capfd.readouterr().err
    assert r"\x1b[2J" in err and not steers(err) and len(err) < 10_000


def test_a_file_name_that_is_no_text_is_shown(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    assert plot.main(["--log", str(tmp_path / name), "--output", str(tmp_path / "a.png")]) == 2
    assert r"caf\udce9.png" in capfd.readouterr().err
