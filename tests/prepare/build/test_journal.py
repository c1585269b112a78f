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
