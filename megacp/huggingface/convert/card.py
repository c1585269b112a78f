"""The model card beside an export: how the model came about, as a hub shows it, without a path of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

from megacp import __version__
from megacp.core.checkpoint.commit import LoadedCheckpoint
from megacp.core.config.run import RunConfig, Value, fields, flatten
from megacp.core.training.state import stored_state
from megacp.core.training.stored import stored_config

CARD = "README.md"
_TEXT = """---
{head}---

# {name}

{family}, step {step:,} of megacp {version} on {grid}: {packs:,} packs of up to {length:,} tokens{template}.

```yaml
# python -m megacp.train --nproc {ranks} --config run.yaml
{flags}```
"""


def write_card(folder: Path, loaded: LoadedCheckpoint, family: str, library: str, base: str | None = None) -> None:
    """Write the card of what `library` loads; `base` is what --base-model says."""
    config, state, run, room_of = stored_config(loaded), stored_state(loaded), loaded.manifest, fields()
    origin, kept = base or config.checkpoint.load_hf or "", (state.chat_template or {}).get("default")
    head: dict[str, Any] = {"library_name": library, "tags": ["megacp"], **_license(Path(origin, CARD))}
    cached = re.search(r"models--([^/]+)--([^/]+)/snapshots/", origin)  # where a hub's name stands in the path
    if name := cached or re.fullmatch(r"([\w.-]+)/([\w.-]+)", base or ""):
        head["base_model"] = f"{name[1]}/{name[2]}"
    usual = flatten(RunConfig())
    own = {
        name: value for name, value in flatten(config).items() if value != usual[name] and room_of[name].room != "log"
    }
    text = _TEXT.format(
        head=yaml.safe_dump(head),
        name=f"Finetuned from {head.get('base_model') or _shown(origin)}" if origin else family,
        family=family,
        step=run.step,
        version=__version__,
        grid=" x ".join(f"{axis} {size}" for axis, size in run.grid.items()),
        packs=state.consumed_samples,
        length=config.data.seq_length,
        template=f", chat template {hashlib.sha256(kept.encode()).hexdigest()[:12]}" if kept else "",
        ranks=run.world_size,
        flags=yaml.safe_dump({name: _shown(value) for name, value in own.items()}, sort_keys=False),
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def _shown(value: Value) -> Any:
    """A value whose paths are their last parts."""
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def _license(card: Path) -> dict[str, str]:
    """What the card of a model says of its license, where there is one."""
    with contextlib.suppress(OSError, ValueError, TypeError, yaml.YAMLError):  # no card, or no table at its head
        found = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.DOTALL)
        head = dict(yaml.safe_load(found[1])) if found else {}
        return {name: head[name] for name in ("license", "license_name", "license_link") if name in head}
    return {}
