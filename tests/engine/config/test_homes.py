"""`~` means the home directory in all flags and files with paths, and only there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacp.engine.config.cli import OneLineParser, parse, path_texts
from megacp.engine.config.run import fields, flatten
from megacp.huggingface import generate_command
from megacp.huggingface.convert_command import convert_parser
from megacp.plan import command as plan_command
from megacp.prepare.command import preprocess_parser
from megacp.storage.place import at_home
from megacp.verify import plot

PATHS = {
    "data_path",
    "valid_data_path",
    "save",
    "load",
    "load_hf",
    "vision_from_hf",
    "load_adapter",
    "log_file",
}
PATHS |= {"tensorboard_dir"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a temporary home directory that is not the working directory."""
    folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(elsewhere)
    return folder


def test_the_fields_with_paths_are_these() -> None:
    assert {name for name, info in fields().items() if info.is_path} == PATHS


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_flag_and_a_file_of_flags_have_the_users_folder(name: str, home: Path) -> None:
    (home / "a.yaml").write_text(f"{name}: ~/x\n")
    flag = f"--{name.replace('_', '-')}"
    joined = [f"{flag}=~/x"] if "data" not in name else [flag, "~/x"]
    for arguments in ([flag, "~/x"], joined, ["--config", "~/a.yaml"], ["--config=~/a.yaml"]):
        assert flatten(parse(arguments))[name] in (f"{home}/x", (f"{home}/x",))


def test_a_blend_has_it_in_each_folder_and_a_url_stays(home: Path) -> None:
    config = parse(
        ["--data-path", "0.5", "~/a", "0.5", "~/b", "--save", "s3://bucket/~x", "--load", "a/~/b"]
    )
    assert config.data.data_path == ("0.5", f"{home}/a", "0.5", f"{home}/b")
    assert (config.checkpoint.save, config.checkpoint.load) == ("s3://bucket/~x", "a/~/b")
    (home / "a.yaml").write_text("data_path: [0.5, ~/a, 0.5, b]\nwandb_project: ~x\n")
    config = parse(["--config", str(home / "a.yaml")])
    assert config.data.data_path == ("0.5", f"{home}/a", "0.5", "b")
    assert config.log.wandb_project == "~x", "no path"


def test_a_user_that_is_not_known_is_refused_with_the_flag() -> None:
    with pytest.raises(
        ValueError, match=r"--save ~nobody-of-this-name/x: .*write \./~nobody-of-this-name/x"
    ):
        parse(["--save", "~nobody-of-this-name/x"])
    assert at_home("./~x") == "./~x"
    with pytest.raises(SystemExit):
        preprocess_parser().parse_args(["verify", "~nobody-of-this-name/x"])


def parsed(parser: argparse.ArgumentParser, words: str) -> dict[str, Any]:
    return vars(parser.parse_args(words.split()))


BUILD = "build --seq-length 8 --input ~/a ~/b/*.jsonl s3://b/~c --output ~/d --tokenizer ~/v.json,~/m.txt"
PARSERS: dict[str, tuple[Callable[[], argparse.ArgumentParser], str, dict[str, Any]]] = {
    "build": (
        preprocess_parser,
        f"{BUILD} --image-root ~/i --chat-template ~/t.jinja --text-key ~",
        {
            "input": ["H/a", "H/b/*.jsonl", "s3://b/~c"],
            "output": "H/d",
            "tokenizer": "H/v.json,H/m.txt",
            "image_root": "H/i",
            "chat_template": "H/t.jinja",
            "text_key": "~",
        },
    ),
    "inspect": (
        preprocess_parser,
        "inspect ~/d --html ~/p.html",
        {"dataset": "H/d", "html": "H/p.html"},
    ),
    "stats": (preprocess_parser, "stats ~/d", {"dataset": "H/d"}),
    "verify": (preprocess_parser, "verify ~/d ~", {"dataset": ["H/d", "H"]}),
    "converter": (
        convert_parser,
        "--from hf --to hf --input ~/a --output ~/b --tokenizer ~/t",
        {"input": Path("H/a"), "output": Path("H/b"), "tokenizer": "H/t"},
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_the_flags_of_other_commands_have_it_too(name: str, home: Path) -> None:
    parser, words, expected = PARSERS[name]
    found = parsed(parser(), words)

    def at(value: Any) -> Any:
        if isinstance(value, list):
            return [at(one) for one in value]
        return type(value)(str(value).replace("H", str(home)))

    assert {key: found[key] for key in expected} == {
        key: at(value) for key, value in expected.items()
    }


def test_generate_and_plot_have_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--checkpoint",
        "~/run",
        "--prompt",
        "~/stays",
        "--image",
        "~/a.png",
        "--tokenizer",
        "~/t",
    ]
    found = generate_command.parsed(flags)
    assert (found.checkpoint, found.prompt, found.tokenizer) == (
        f"{home}/run",
        ["~/stays"],
        f"{home}/t",
    )
    assert [one.value for one in found.media] == [f"{home}/a.png"]
    (home / "log.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
    assert plot.main(["--log", "~/log.jsonl", "--output", "~/new/loss.png"]) == 0
    assert (home / "new" / "loss.png").is_file() and not Path("~").exists()


def test_a_plan_has_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world-size", "1", "--num-layers", "2", "--vocab-size", "512", "--seq-length", "64"]
    assert plan_command.main([*sizes, "--output", "~/best.yaml"]) == 0
    assert (home / "best.yaml").is_file()
    assert plan_command.main([*sizes, "--gpu", "~/none.yaml"]) == 2
    assert f"--gpu {home}/none.yaml" in capsys.readouterr().err


def test_a_path_of_any_other_command_has_it(home: Path) -> None:
    parser = OneLineParser()
    parser.add_argument("--output", type=Path, default=Path("~/no flag"))
    assert parser.parse_args(["--output", "~/a"]).output == home / "a"
    assert path_texts("byte") == "byte"
