"""The directory of a build: one whole build at a time, parts beside each other, and a damaged file of a unit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megacp.prepare.build.journal import locked
from tests.prepare.build.builds import files, run, write_records


def test_a_whole_build_keeps_all_others_out_and_parts_share(tmp_path: Path) -> None:
    def other(shared: bool) -> subprocess.CompletedProcess[str]:
        code = "import sys; from pathlib import Path; from megacp.prepare.build.journal import locked"
        command = [sys.executable, "-c", f"{code}\nwith locked(Path(sys.argv[1]), {shared}): print('in')"]
        return subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)

    with locked(tmp_path):
        for shared in (False, True):
            assert "another build is writing to it" in other(shared).stderr
    with locked(tmp_path, shared=True):
        assert other(True).stdout == "in\n" and "another build is writing to it" in other(False).stderr
    assert other(False).returncode == 0


def test_a_damaged_file_of_a_unit_is_named_and_built_again_once_it_is_gone(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", 60)
    run([tmp_path / "a.jsonl"], tmp_path / "d")
    before, unit = files(tmp_path / "d"), tmp_path / "d/.build/00001.json"
    unit.write_bytes(unit.read_bytes()[:40])
    with pytest.raises(ValueError, match=f"{unit} is damaged"):
        run([tmp_path / "a.jsonl"], tmp_path / "d")
    unit.unlink()
    run([tmp_path / "a.jsonl"], tmp_path / "d")
    assert files(tmp_path / "d") == before
