"""Writes the model card of an export, which describes its training in the Hub's format.

The card contains no local paths.
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
    """Return a model card for use with `library`; `named` is the value of --base-model."""
    config = stored_config(loaded)
    state = stored_state(loaded)
    run = loaded.manifest
    # The folder of --load-hf; empty for a model trained from random weights.
    folder = state.base or ""
    hub_name = _hub_name(named, folder)
    base = hub_name or _shown(named or folder)
    # The YAML header, which a hub reads.
    head = [f"library_name: {library}", "tags: [megacp]"]
    if hub_name:
        head.append(f"base_model: {base}")
    head += _license_of(folder)
    # List only flags that differ from their defaults, without logging flags.
    usual = flatten(RunConfig())
    own = flatten(config)
    infos = fields()
    flags = {
        name: _shown(own[name])
        for name in own
        if own[name] != usual[name] and infos[name].room != "log"
    }
    template = (state.chat_template or {}).get("default")
    by_template = ""
    if template:
        by_template = f", chat template {hashlib.sha256(template.encode()).hexdigest()[:12]}"
    # The device grid of the run, such as "tp 2 x dp 4".
    grid = " x ".join(f"{axis} {size}" for axis, size in run.grid.items())
    title = f"Finetuned from {base}" if base else family
    beginning = "\n".join(["---", *head, "---", "", f"# {title}"])
    seen = (
        f"{state.consumed_samples:,} packs of up to\n{config.data.seq_length:,} tokens{by_template}"
    )
    return f"""{beginning}

{family}, step {run.step:,} of megacp {__version__} on {grid}: {seen}.

```yaml
# python -m megacp.train --nproc {run.world_size} --config run.yaml
{yaml.safe_dump(flags, sort_keys=False)}```
"""


def _hub_name(named: str | None, folder: str) -> str:
    """Return a base model's name on the hub, `owner/name`; empty if it is unknown.

    The name comes from --base-model, or from `folder` if it is in the hub's local cache.
    """
    # An existing path is a local folder, even if it looks like a name on a hub.
    name = named if named and not Path(named).exists() else ""
    hub = re.fullmatch(r"(\w[\w.-]*)/(\w[\w.-]*)", name)
    if hub is None:
        hub = re.search(r"models--([^/]+)--([^/]+)/snap", folder)
    return f"{hub[1]}/{hub[2]}" if hub else ""


def _license_of(folder: str) -> list[str]:
    """Return the license lines from the model card in a base model's folder."""
    # Only the header of the card counts, not its text.
    card = Path(folder, CARD)
    if not folder or not card.is_file():
        return []
    text = card.read_text(encoding="utf-8", errors="replace")
    known = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    return re.findall(r"^license\w*: .+$", known[1] if known else "", re.MULTILINE)


def _shown(value: Value) -> Any:
    """Return a flag's value with paths shortened to their last part."""
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    if isinstance(value, str):
        return value.rstrip("/").rpartition("/")[2]
    return value
