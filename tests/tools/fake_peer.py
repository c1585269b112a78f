"""A trainer that computes nothing. It implements the protocol of tools/peers/stepping.py, and fails
on request.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--work", type=Path)
parser.add_argument("--rank", type=int)
parser.add_argument("--store")
arguments = parser.parse_args()
work = json.loads(arguments.work.read_text(encoding="utf-8"))
options = work["options"]


def answer(**values: object) -> None:
    print(json.dumps(values), flush=True)


if options.get("fails") == "build":
    answer(error="ModuleNotFoundError: no kernel")
    sys.exit(1)
assert Path(work["weights"], "model.safetensors").exists()
tokens = np.load(work["tokens"])["tokens"]
answer(ready=True)
for line in sys.stdin:
    step = json.loads(line)["step"]
    if options.get("fails") == "step" and step == 1 and arguments.rank == work["world_size"] - 1:
        print("the last words of a rank", file=sys.stderr)
        sys.exit(1)
    if options.get("fails") == "hang":
        time.sleep(600)
    loss = None if arguments.rank == 0 and work["world_size"] > 1 else 5.0 - step
    answer(
        wall=1.0 + arguments.rank, cpu=0.5, tokens=int(tokens[step].size), loss=loss, memory=1 << 20
    )
