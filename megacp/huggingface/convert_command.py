"""Checkpoints of megacp to Hugging Face folders and back, tensor by tensor, on one CPU process or
on several ranks.

    python tools/convert_checkpoint.py --from megacp --to hf --input run/checkpoints --output model
    --tokenizer byte \\
        --verify
    python tools/convert_checkpoint.py --from hf --to megacp --input Qwen3-0.6B --output start
    --verify python tools/convert_checkpoint.py --from megacp --to peft --input run/checkpoints
    --output adapter python tools/convert_checkpoint.py --from hf --to hf --input Molmo2-8B --output
    native --layout native torchrun --nproc-per-node 4 tools/convert_checkpoint.py --from hf --to
    megacp --input Llama-3-70B --output start

Llama, Mistral, Mixtral, Phi-3, Qwen2, Qwen3, Qwen3.5, Qwen3-MoE, Qwen3.5-MoE, GLM-4.5, gpt-oss,
OLMo2, OLMo3, OLMoE, Gemma 3, SmolLM3 and Molmo2. Everything is written to a folder beside --output,
which is renamed when all is well. Exit status: 0 done, 1 --verify found a difference, 2 refused
with one message.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megacp.distributed.grid import single_axis
from megacp.distributed.shape import GridShape
from megacp.engine.config.cli import OneLineParser, path_texts
from megacp.huggingface.convert.chat import CHOICES
from megacp.huggingface.convert.export import OtherModelError, Request, convert
from megacp.huggingface.convert.tables import NAMINGS
from megacp.storage.wording import for_terminal
from megacp.training.monitor.console import to_nowhere, warn
from megacp.training.start.launch import World, join, rendezvous, stop, world_from_environment

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_MINUTES = 24 * 60.0
"""Minutes that ranks wait for one that compares or copies alone."""


def convert_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = OneLineParser(
        description="Convert checkpoints between megacp and Hugging Face folders."
    )
    parser.add_argument(
        "--from", required=True, choices=("hf", "megacp"), dest="source", help="what --input is"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("hf", "megacp", "peft"),
        dest="target",
        help="what --output becomes; of a run with --lora-rank: its pairs folded into the model (hf), or alone (peft)",
    )
    parser.add_argument(
        "--input",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder; --save of a run or one of its steps",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="new folder")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare logits with those of the transformers library",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="KIND_OR_PATH",
        type=path_texts,
        help="the run's tokenizer, as given to preprocess_data.py build; `none` leaves it out",
    )
    parser.add_argument(
        "--chat-template",
        choices=CHOICES,
        default="auto",
        help="messages: that of records with `messages`; auto: the tokenizer's own, else messages for a vision model "
        "that was trained here (default)",
    )
    parser.add_argument(
        "--layout",
        choices=NAMINGS,
        help="names of tensors in --output, for a family that has two (default: native)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=int,
        default=5000,
        dest="max_shard_mib",
        metavar="MIB",
        help="of a weight file (5000)",
    )
    parser.add_argument(
        "--base-model",
        metavar="NAME",
        help="model that an adapter is for (--to peft; default: the run's --load-hf)",
    )
    parser.add_argument(
        "--dtype", choices=tuple(_DTYPES), help="of the weights (default: as they are)"
    )
    return parser


def flag_reasons(a: argparse.Namespace) -> list[str]:
    """All faults of the flags by themselves."""
    way = (a.source, a.target)
    faults = {
        "--from megacp --to megacp: a checkpoint is read by any grid as it is": way
        == ("megacp", "megacp"),
        "--dtype float16: runs of megacp have float32, bfloat16 or float64": a.target == "megacp"
        and a.dtype == "float16",
        "--layout is for --to hf": a.target == "megacp" and a.layout is not None,
        "--chat-template messages goes with a tokenizer": a.chat_template == "messages"
        and a.tokenizer == "none",
        "--tokenizer is for --from megacp --to hf": a.tokenizer is not None
        and way != ("megacp", "hf"),
        "--to peft is for --from megacp": way == ("hf", "peft"),
        "--verify compares whole models: give it with --to hf": a.target == "peft" and a.verify,
        "--base-model is for --to peft": a.target != "peft" and a.base_model is not None,
        "--max-shard-size: must be at least 1": a.max_shard_mib < 1,
    }
    needed = ["safetensors", "jinja2", *(["transformers"] if a.verify else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    reasons = [fault for fault, is_so in faults.items() if is_so]
    return reasons + [
        f"the package {name} is not installed: pip install 'megacp[hf]'" for name in missing
    ]


class _Lasting(io.TextIOBase):
    """Standard output, whose reader may go away (`| head`): what is written is whole all the
    same.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        try:
            print(for_terminal(text), end="", file=self._stream, flush=True)
        except (OSError, ValueError):
            to_nowhere(1, self._stream)
        return len(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and convert; returns the exit status."""
    parser = convert_parser()
    arguments = parser.parse_args(argv)
    if reasons := flag_reasons(arguments):
        parser.error("; ".join(reasons))
    given = vars(arguments)
    given["dtype"] = _DTYPES[arguments.dtype] if arguments.dtype else None
    request = Request(**{**given, "layout": arguments.layout or NAMINGS[0]})
    place = world_from_environment()
    before = signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the half-written folder goes
    try:
        heard = sys.stdout is not None and place.rank == 0  # other ranks say the same
        with contextlib.redirect_stdout(_Lasting() if heard else io.StringIO()):
            status, words = _converted(request, place)
    finally:
        signal.signal(signal.SIGTERM, before)
    if words and place.rank == 0:
        warn(f"error: {words}")
    return status


def _converted(request: Request, place: World) -> tuple[int, str]:
    """Convert on this process, or with the other ranks that torchrun has started; status, and what
    went wrong.
    """
    try:
        world = single_axis("world")
        if place.size > 1:
            world = join(
                rendezvous(place, 60.0 * _MINUTES), GridShape(dp=place.size), _MINUTES
            ).world
        convert(request, world)
    except (ValueError, OSError) as error:
        # a full disk names no file; what is read has been named before
        begin = (
            f"--output {request.output} cannot be written: " if isinstance(error, OSError) else ""
        )
        return 2, " ".join(f"{begin}{error}".split())
    except OtherModelError:
        return 1, f"{request.output} was not written: it would be another model"
    finally:
        stop()
    return 0, ""
