"""What prints for a reader ends when the reader has read enough."""

from __future__ import annotations

import io
import signal
import subprocess
import sys

import pytest

from megacp.core.monitor.console import Console

_LONG = "print('x' * (1 << 20))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        f"from megacp.core.monitor.console import ends_with_its_reader\nwith ends_with_its_reader():\n    {_LONG}",
        "from megacp.train import program\nimport sys\nsys.argv[1:] = ['--help']\nprogram()",
    ],
    ids=["report", "help of the training"],
)
def test_a_program_that_only_prints_ends_in_silence_with_its_reader(body: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.wait(60) == -signal.SIGPIPE
    assert child.stderr.read() == b""
    child.stderr.close()


def test_a_signal_is_what_it_was_after_the_print(capfd: pytest.CaptureFixture[str]) -> None:
    from megacp.core.monitor.console import ends_with_its_reader

    before = signal.getsignal(signal.SIGPIPE)
    with ends_with_its_reader():
        print("told")
    assert signal.getsignal(signal.SIGPIPE) == before and capfd.readouterr().out == "told\n"


def test_a_terminal_that_is_lost_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, lost = io.StringIO(), []
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(lost.append)
    stream.close()
    console.say("nobody reads it")
    console.say("nor this")
    console.close()
    assert len(lost) == 1
    monkeypatch.setattr(sys, "stdout", None)  # `>&-`
    console.say("nobody reads it")
