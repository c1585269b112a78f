"""Folders of models that do not exist, but have the form of a name on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacp.storage.hub import is_hub_name, no_such_folder


def test_a_name_on_the_hub_is_answered_with_the_download_command() -> None:
    told = no_such_folder("Qwen/Qwen3-0.6B")
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`" in told
    assert told.endswith("give the folder Qwen3-0.6B")


@pytest.mark.parametrize("path", ["nowhere", "/a/b", "./Qwen", "../Qwen", "a/b/c", "a/"])
def test_a_path_that_is_no_name_on_the_hub_gets_no_command(path: str) -> None:
    assert no_such_folder(path) == "the folder does not exist"


def test_an_existing_folder_is_not_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/model")
    (tmp_path / "org/model").mkdir(parents=True)
    assert not is_hub_name("org/model")
