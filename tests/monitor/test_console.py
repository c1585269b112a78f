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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run of two steps leaves on a stream."""
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(pytest.fail)
    console.progress(1, 2, "loss 0.5000  left 0:01")
    console.say("a line")
    console.progress(2, 2, "loss 0.2500  left 0:00")
    console.close()
    return stream.getvalue()


def test_a_terminal_shows_a_bar_with_loss_and_time_left_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    assert "| 1/2 loss 0.5000  left 0:01" in text and "100%|" in text and "| 2/2 loss 0.2500  left 0:00" in text
    assert "a line\n" in text, "a line of its own, not the end of a bar"


def test_a_file_or_pipe_gets_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), monkeypatch) == "a line\n"


def test_a_terminal_that_is_lost_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, lost = Terminal(), []
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(lost.append)
    console.progress(1, 3, "")
    stream.close()
    console.say("nobody reads it")
    console.progress(3, 3, "")
    console.close()
    assert len(lost) == 1 and "closed file" in lost[0]
