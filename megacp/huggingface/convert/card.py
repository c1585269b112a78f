"""The model card beside an export: how the model came about, as a hub shows it, without a path of
this machine.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

from megacp import __version__
from megacp.engine.config.run import RunConfig, Value, fields, flatten
from megacp.training.checkpoint.commit import LoadedCheckpoint
from megacp.training.loop.state import stored_state
from megacp.training.loop.stored import stored_config

CARD = "README.md"


def model_card(
    loaded: LoadedCheckpoint, family: str, library: str, named: str | None = None
) -> str:
    """The card of what `library` loads; `named` is what --base-model says."""
    config, state, run = stored_config(loaded), stored_state(loaded), loaded.manifest
    folder, template = state.base or "", (state.chat_template or {}).get("default")
    # a hub's own name of the base is what --base-model says, or stands in the path of its cache
    name = named if named and not Path(named).exists() else ""
    hub = re.fullmatch(r"(\w[\w.-]*)/(\w[\w.-]*)", name) or re.search(
        r"models--([^/]+)--([^/]+)/snap", folder
    )
    base = f"{hub[1]}/{hub[2]}" if hub else _shown(named or folder)
    head = [f"library_name: {library}", "tags: [megacp]", *([f"base_model: {base}"] if hub else [])]
    if folder and (card := Path(folder, CARD)).is_file():
        known = re.match(
            r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL
        )
        head += re.findall(r"^license\w*: .+$", known[1] if known else "", re.MULTILINE)
    usual, own, rooms = flatten(RunConfig()), flatten(config), fields()
    flags = {
        name: _shown(own[name])
        for name in own
        if own[name] != usual[name] and rooms[name].room != "log"
    }
    by = f", chat template {hashlib.sha256(template.encode()).hexdigest()[:12]}" if template else ""
    grid = " x ".join(f"{axis} {size}" for axis, size in run.grid.items())
    beginning = "\n".join(
        ["---", *head, "---", "", f"# {f'Finetuned from {base}' if base else family}"]
    )
    return f"""{beginning}

{family}, step {run.step:,} of megacp {__version__} on {grid}: {state.consumed_samples:,} packs of up to
{config.data.seq_length:,} tokens{by}.

```yaml
# python -m megacp.train --nproc {run.world_size} --config run.yaml
{yaml.safe_dump(flags, sort_keys=False)}```
"""


def _shown(value: Value) -> Any:
    """A value whose paths are their last parts."""
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value
