"""`megacp finetune` from a file to a folder that transformers opens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import megacp
from megacp.finetuning import run
from megacp.finetuning.command import main
from megacp.finetuning.steps import Command
from megacp.huggingface.generate_command import open_session
from tests.finetuning import folders

transformers = pytest.importorskip("transformers", reason="not installed (extra: test)")

FLAGS = ["--nproc", "2", "--train-iters", "30", "--lr", "0.01"]


@pytest.mark.slow
def test_one_command_trains_exports_and_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = folders.write_model(tmp_path / "tiny")
    chats = folders.write_messages(tmp_path)
    output = tmp_path / "out"
    arguments = [str(model), str(chats), "--output", str(output), *FLAGS]
    assert main([*arguments, "--dry-run"]) == 0
    assert not output.exists()
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    # The three commands, the verification, and the next steps.
    for text in "megacp-preprocess build", "megacp-train --nproc 2", "megacp-convert":
        assert text in shown
    assert "verify: random text" in shown and "--chat" in shown
    # The library answers as our own generation does.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(output / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "model")
    talk = [{"role": "user", "content": folders.PAIRS[7][0]}]
    given = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = theirs.generate(**given, max_new_tokens=64, do_sample=False)
    answer = tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    session = open_session(str(output / "checkpoints"))
    assert session.ask(folders.PAIRS[7][0]) == answer
    # The same command has nothing to do; more steps continue, and replace the model.
    assert main(arguments) == 0
    assert "already has the model of step 30" in capfd.readouterr().out
    longer = megacp.finetune(model, chats, output, nproc=1, train_iters=32, lr=0.01, verify=False)
    assert longer == output / "model"
    assert "step 32/32" in capfd.readouterr().out
    assert json.loads((output / "finetune.json").read_text())["exported"]["step"] == 32
    # Another dtype of the export is another model of the same step.
    megacp.finetune(model, chats, output, train_iters=32, lr=0.01, export_dtype="float16")
    content = json.loads((output / "model" / "config.json").read_text())
    assert content["dtype"] == "float16"


def test_a_second_run_exports_again_only_for_another_step_or_other_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.write_model(tmp_path / "tiny")
    chats = folders.write_messages(tmp_path)
    output = tmp_path / "out"
    started: list[str] = []
    steps = [30]

    def run_command(command: Command) -> int:
        started.append(command.program.removeprefix("megacp-"))
        if command.program == "megacp-train":
            assert "--auto-resume" in command.words
        if command.program == "megacp-convert":
            (output / "model").mkdir()
            (output / "model" / "config.json").write_text("{}")
        return 0

    monkeypatch.setattr(run, "run_command", run_command)
    monkeypatch.setattr(run, "peek", lambda place: (place, SimpleNamespace(step=steps[0]), ""))

    def programs(*flags: str) -> list[str]:
        started.clear()
        assert main([str(model), str(chats), "--output", str(output), "--nproc", "1", *flags]) == 0
        return list(started)

    everything = ["preprocess", "train", "convert"]
    assert programs() == everything
    assert programs() == ["preprocess", "train"]
    assert programs("--export-dtype", "float16") == everything
    assert programs("--export-dtype", "float16") == ["preprocess", "train"]
    steps[0] = 40
    assert programs("--export-dtype", "float16") == everything


def test_a_step_that_fails_ends_the_command_with_its_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = folders.write_model(tmp_path / "tiny")
    chats = folders.write_messages(tmp_path)
    flags = {"nproc": 1, "seq_length": 8, "oversize": "error"}
    with pytest.raises(ValueError, match="tokens, more than --seq-length 8"):
        megacp.finetune(model, chats, tmp_path / "out", **flags)
    other = folders.write_csv(tmp_path)
    with pytest.raises(ValueError, match="was made with the data"):
        megacp.finetune(model, other, tmp_path / "out")
