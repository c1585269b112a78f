"""Time and memory of conversions on one process and on ranks, beside the library's own load and save, by turns.

    python tools/bench_convert.py [--rounds 3] [--layers 28] [--ranks 2] [--folder DIR]

The model is a Qwen3 of the width of Qwen3-0.6B with random weights in bf16: 1.2 GB in files of 300 MiB. A conversion
hashes and syncs what it writes; the library does neither. Seconds are without the start of Python and imports.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TOOL = Path(__file__).with_name("convert_checkpoint.py")
SHARD = 300
"""MiB of a weight file."""
MAKE = """
import sys, torch, transformers
sizes = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
config = transformers.Qwen3Config(num_hidden_layers=int(sys.argv[2]), tie_word_embeddings=True, **sizes)
torch.manual_seed(0)
transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1], max_shard_size=sys.argv[3])
"""
LIBRARY = """
import sys, time, transformers
from megacp.core.monitor.memory import peak_bytes
begun = time.monotonic()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size=sys.argv[3])
print(f"{time.monotonic() - begun:.1f} s; a process held at most {peak_bytes() >> 20:,} MiB")
"""


def measured(command: Sequence[str]) -> tuple[float, int]:
    """Seconds and MiB that a command says of itself in its last line."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"([\d.]+) s\b.* at most ([\d,]+) MiB", done.stdout.splitlines()[-1])
    assert found is not None, done.stdout
    return float(found[1]), int(found[2].replace(",", ""))


def main(argv: Sequence[str] | None = None) -> int:
    """Convert by turns and print medians."""
    parser = argparse.ArgumentParser(description="Conversions beside the library's load and save.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        given, start, out = root / "given", root / "start", root / "out"
        limit = f"{SHARD}MB"
        subprocess.run([sys.executable, "-c", MAKE, str(given), str(options.layers), limit], check=True)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]

        def tool(source: str, target: str, read: Path, written: Path = out) -> list[str]:
            flags = ["--from", source, "--to", target, "--input", str(read), "--output", str(written)]
            return [str(TOOL), *flags, "--max-shard-size", str(SHARD)]

        subprocess.run([sys.executable, *tool("hf", "megacp", given, start)], check=True, capture_output=True)
        ways = {"Hugging Face to megacp": ("hf", "megacp", given), "megacp to Hugging Face": ("megacp", "hf", start)}
        rows = {"the library's load and save": [sys.executable, "-c", LIBRARY, str(given), str(out), limit]}
        for way, (source, target, read) in ways.items():
            rows[f"{way}, one process"] = [sys.executable, *tool(source, target, read)]
            rows[f"{way}, {options.ranks} ranks"] = [*launch, *tool(source, target, read)]
        found: dict[str, list[tuple[float, int]]] = {row: [] for row in rows}
        for _ in range(options.rounds):
            for row, command in rows.items():
                found[row].append(measured(command))
                shutil.rmtree(out)
        size = sum(path.stat().st_size for path in given.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB of weights, medians of {options.rounds} rounds\n")
    print("| | seconds | peak a process |\n|---|---|---|")
    for row, values in found.items():
        seconds, peaks = zip(*values, strict=True)
        print(f"| {row} | {statistics.median(seconds):.1f} | {max(peaks):,} MiB |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
