"""Command `megacp`, which runs the other commands: `megacp finetune ...`, `megacp train ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megacp import __version__


@dataclass(frozen=True)
class Program:
    """A command."""

    module: str
    """Module that contains the command's `main`."""
    text: str
    """Description of the command in `megacp --help`."""


PROGRAMS = {
    "finetune": Program("megacp.finetuning.command", "fine-tune a model on a file, and export it"),
    "preprocess": Program("megacp.prepare.command", "build packs from records, and inspect them"),
    "train": Program("megacp.train", "train on packs"),
    "generate": Program("megacp.huggingface.generate_command", "answer prompts, or chat"),
    "convert": Program(
        "megacp.huggingface.convert_command", "export to and import from Hugging Face format"
    ),
    "plan": Program("megacp.plan.command", "find the fastest parallel layout that fits"),
    "parity": Program("megacp.verify.command", "compare a parallel layout with a single process"),
    "plot": Program("megacp.verify.plot", "plot the log of a run"),
}
"""Commands by name. Each is also installed as `megacp-NAME`."""


def usage() -> str:
    """Return the text of `megacp --help`."""
    lines = ["usage: megacp COMMAND ...", ""]
    lines += [f"  {name:<12}{row.text}" for name, row in PROGRAMS.items()]
    lines += ["", "`megacp COMMAND --help` describes a command. A first run:", ""]
    lines.append("  megacp finetune MODEL chats.json --output my-model")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; 2 if the command is unknown."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    arguments = words[1:]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"megacp {__version__}")
        return 0
    if name not in PROGRAMS:
        print(f"error: megacp has no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    # argparse reads the program name for --help from sys.argv[0].
    sys.argv = [f"megacp-{name}", *arguments]
    module = importlib.import_module(PROGRAMS[name].module)
    # A training run must exit without waiting for library threads.
    if hasattr(module, "program"):
        module.program()
    return module.main(arguments)
