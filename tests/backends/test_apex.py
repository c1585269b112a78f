"""NVIDIA's apex is told from the web toolkit of the same name without importing either."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megacp.core.backends.apex import apex_status, describe_apex


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Put packages on the path whose import would raise."""
    for module in modules:
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "apex", raising=False)


@pytest.mark.parametrize(
    ("modules", "status"),
    [
        (("apex",), "impostor"),
        (("apex", "apex/multi_tensor_apply"), "nvidia without extensions"),
        (("apex", "apex/multi_tensor_apply", "amp_C"), "nvidia"),
    ],
)
def test_the_kind_of_apex_is_found_without_running_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], status: str
) -> None:
    install(tmp_path, monkeypatch, *modules)
    assert apex_status() == status


def test_an_impostor_is_named_with_the_way_to_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "apex")
    assert "pip uninstall apex" in describe_apex()
    assert "NVIDIA/apex" in describe_apex()


def test_without_apex_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacp.core.backends.apex.find_spec", lambda name: None)
    assert describe_apex() == "apex: not installed, and not needed"
