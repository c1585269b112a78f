r"""Convert megacp checkpoints to Hugging Face folders and back, tensor by tensor, on one CPU
process or on several ranks.

    python tools/convert_checkpoint.py --from megacp --to hf --input run/checkpoints \
        --output model --tokenizer byte --verify
    python tools/convert_checkpoint.py --from hf --to megacp --input Qwen3-0.6B \
        --output start --verify
    python tools/convert_checkpoint.py --from megacp --to peft --input run/checkpoints \
        --output adapter
    python tools/convert_checkpoint.py --from hf --to hf --input Molmo2-8B \
        --output native --layout native
    torchrun --nproc-per-node 4 tools/convert_checkpoint.py --from hf --to megacp \
        --input Llama-3-70B --output start

Supported families: Llama, Mistral, Mixtral, Phi-3, Qwen2, Qwen3, Qwen3.5, Qwen3-MoE, Qwen3.5-MoE,
GLM-4.5, gpt-oss, OLMo2, OLMo3, OLMoE, Gemma 3, SmolLM3 and Molmo2. The result is written to a
temporary folder next to --output, which is renamed once the conversion succeeds. Exit status: 0 for
success, 1 if --verify finds a difference, 2 if the request is refused (with one message).
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
# Minutes for which idle ranks wait while another rank compares or copies.
_MINUTES = 24 * 60.0


def convert_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = OneLineParser(
        description="Convert checkpoints between megacp and Hugging Face folders."
    )
    add = parser.add_argument
    add(
        "--from",
        required=True,
        choices=("hf", "megacp"),
        dest="source",
        help="format of --input: a Hugging Face folder or a megacp checkpoint",
    )
    add(
        "--to",
        required=True,
        choices=("hf", "megacp", "peft"),
        dest="target",
        help="format of --output; for a run with --lora-rank, hf merges the adapters into the "
        "model and peft exports only the adapters",
    )
    add(
        "--input",
        required=True,
        type=Path,
        metavar="DIR",
        help="Hugging Face folder, or the --save directory of a run or one of its steps",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="folder to create")
    add(
        "--verify",
        action="store_true",
        help="check --output: compare its tensors with those of --input, and its logits with those "
        "of transformers",
    )
    add(
        "--tokenizer",
        metavar="KIND_OR_PATH",
        type=path_texts,
        help="the run's tokenizer, as passed to preprocess_data.py build; `none` exports no "
        "tokenizer (default: find it next to the checkpoints or in the run's --data-path)",
    )
    add(
        "--chat-template",
        choices=CHOICES,
        default="auto",
        help="chat template to export: `messages` for the format of `messages` records, `none` for "
        "the tokenizer's template, or `auto` for the template used in training, else the "
        "tokenizer's, or `messages` for a vision model trained without a template (default: auto)",
    )
    add(
        "--layout",
        choices=NAMINGS,
        help="tensor names in --output, for families with two naming schemes (default: native)",
    )
    add(
        "--max-shard-size",
        type=int,
        default=5000,
        dest="max_shard_mib",
        metavar="MIB",
        help="maximum size of a weight file (default: 5000)",
    )
    add(
        "--base-model",
        metavar="NAME",
        help="base model to name in the adapter's config, for --to peft (default: the run's "
        "--load-hf)",
    )
    add(
        "--dtype",
        choices=tuple(_DTYPES),
        help="dtype of the written weights (default: unchanged)",
    )
    return parser


def flag_reasons(a: argparse.Namespace) -> list[str]:
    """Return an error for each invalid combination of flags and each missing package."""
    # Collect all faults; one message lists them.
    way = (a.source, a.target)
    reasons = []
    if way == ("megacp", "megacp"):
        reasons.append(
            "--from megacp --to megacp: not needed, because any device grid can load a "
            "megacp checkpoint"
        )
    if a.target == "megacp" and a.dtype == "float16":
        reasons.append("--dtype float16: megacp supports float32, bfloat16 and float64")
    if a.target == "megacp" and a.layout is not None:
        reasons.append("--layout requires --to hf")
    if a.chat_template == "messages" and a.tokenizer == "none":
        reasons.append("--chat-template messages requires a tokenizer; remove --tokenizer none")
    if a.tokenizer is not None and way != ("megacp", "hf"):
        reasons.append("--tokenizer requires --from megacp --to hf")
    if way == ("hf", "peft"):
        reasons.append("--to peft requires --from megacp")
    if a.target == "peft" and a.verify:
        reasons.append("--verify compares whole models and cannot check --to peft; use --to hf")
    if a.target != "peft" and a.base_model is not None:
        reasons.append("--base-model requires --to peft")
    if a.max_shard_mib < 1:
        reasons.append(f"--max-shard-size {a.max_shard_mib}: must be at least 1")
    # Packages of the optional extra `hf`.
    needed = ["safetensors", "jinja2"]
    if a.verify:
        needed.append("transformers")
    for name in needed:
        if importlib.util.find_spec(name) is None:
            reasons.append(f"the package {name} is not installed: pip install -e '.[hf]'")
    return reasons


class _Lasting(io.TextIOBase):
    """Standard output that survives a closed reader (`| head`): the conversion completes anyway."""

    def __init__(self) -> None:
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        try:
            print(for_terminal(text), end="", file=self._stream, flush=True)
        except (OSError, ValueError):
            # Later output is dropped, and no error at exit is reported.
            to_nowhere(1, self._stream)
        return len(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, convert, and return the exit status."""
    parser = convert_parser()
    arguments = parser.parse_args(argv)
    if reasons := flag_reasons(arguments):
        parser.error("; ".join(reasons))
    # The remaining fields of the request have the names of the flags.
    given = vars(arguments)
    given["dtype"] = _DTYPES[arguments.dtype] if arguments.dtype else None
    request = Request(**{**given, "layout": arguments.layout or NAMINGS[0]})
    place = world_from_environment()
    # Exit through an exception, so that the partly written folder is removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        # All ranks print the same lines, so only the output of rank 0 is shown.
        prints = sys.stdout is not None and place.rank == 0
        with contextlib.redirect_stdout(_Lasting() if prints else io.StringIO()):
            status, words = _converted(request, place)
    finally:
        signal.signal(signal.SIGTERM, before)
    # Ranks fail together with the same message.
    if words and place.rank == 0:
        warn(f"error: {words}")
    return status


def _converted(request: Request, place: World) -> tuple[int, str]:
    """Convert on this process, or together with the ranks that torchrun started.

    Return the exit status and the error message ("" if there is none).
    """
    try:
        # Without torchrun, the process is the only rank.
        world = single_axis("world")
        if place.size > 1:
            store = rendezvous(place, 60.0 * _MINUTES)
            world = join(store, GridShape(dp=place.size), _MINUTES).world
        convert(request, world)
    except (ValueError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            # Read errors are ValueErrors with the file's name. A full disk names no file.
            message = f"--output {request.output} cannot be written: {error}"
        return 2, " ".join(message.split())
    except OtherModelError:
        message = f"{request.output} was not written: it would differ from the model in --input"
        return 1, message
    finally:
        stop()
    return 0, ""


if __name__ == "__main__":
    sys.exit(main())
