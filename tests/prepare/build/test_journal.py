"""The directory of a build: one build at a time, whatever races, and a journal that may be damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megacp.prepare.build.journal import locked

_RACE = """
import os, sys, time
from pathlib import Path
from megacp.prepare.build.journal import locked

directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
entered = overlaps = 0
deadline = time.monotonic() + seconds
while time.monotonic() < deadline:
    try:
        with locked(directory):
            entered += 1
            try:
                os.close(os.open(directory / "inside", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                overlaps += 1
            else:
                os.sched_yield()
                os.unlink(directory / "inside")
    except ValueError as error:
        assert "another build is writing to it" in str(error), error
print(entered, overlaps, flush=True)
"""


def test_of_many_builds_that_race_for_a_directory_one_at_a_time_is_in_it(tmp_path: Path) -> None:
    """Would catch a lock file that is removed while others hold it open: they lock a file without a name."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    racers = [
        subprocess.Popen([sys.executable, "-c", _RACE, str(tmp_path), "1.5"], text=True, **pipes) for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    found = [tuple(map(int, racer.communicate(timeout=60)[0].split())) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert sum(entered for entered, _ in found) > 100, found
    assert sum(overlaps for _, overlaps in found) == 0, found


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
