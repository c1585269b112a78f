"""The directory of a build: one build at a time, whatever races, and a journal that may be damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megacp.prepare.build.journal import locked


def test_a_second_build_in_one_process_is_refused_and_does_not_end_the_lock_of_the_first(tmp_path: Path) -> None:
    """Would catch POSIX record locks alone, which one process may take twice and lets go of by closing either."""
    with locked(tmp_path):
        with pytest.raises(ValueError, match="another build is writing to it"), locked(tmp_path):
            pass
        code = "import sys; from pathlib import Path; from megacp.prepare.build.journal import locked"
        command = [sys.executable, "-c", f"{code}\nwith locked(Path(sys.argv[1])): print('in')"]
        other = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert other.returncode == 1 and "another build is writing to it" in other.stderr
    with locked(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused_and_what_it_points_at_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"\.lock is a link"), locked(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "kept"
