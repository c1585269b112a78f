"""What the flags of checkpoints ask of each other, and the directories and files that flags name.

A run never mixes its checkpoints with those of another one without having been told to go on with it. Dry runs look at
no directory, as the machine of the run may be another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megacp.core.config.blend import named_folders
from megacp.core.config.run import RunConfig, flag, flatten
from megacp.core.storage.place import place_of
from megacp.core.storage.url import Url, is_url

_NEED_SAVE = ("save_interval", "keep_last", "async_save", "auto_resume")
_READ = ("load", "load_hf")
"""Directories that a run reads."""
_WRITTEN = ("save", "tensorboard_dir", "profile_dir")
_MAY_BE_URLS = ("data_path", "valid_data_path", "load", "save")


def checkpoint_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """Flags that need --save or --load, and a --save that belongs to another run."""
    c, values = config.checkpoint, flatten(config)
    numbers = {name: float(str(values[name])) for name in _NEED_SAVE[:2]}
    given = [f"{flag(name)} {values[name]}" for name, number in numbers.items() if number > 0]
    given += [flag(name) for name in _NEED_SAVE[2:] if values[name]]
    if given and c.save is None:
        yield f"{', '.join(given)} needs --save, the directory for checkpoints"
    if c.finetune and c.load is None and c.load_hf is None:
        yield "--finetune needs --load, the checkpoint whose weights it starts from"
    if c.load is not None and c.load_hf is not None:
        yield f"--load {c.load} and --load-hf {c.load_hf} are two starts: give one of them"
    for name in ("ignore_field", "vision_from_hf"):
        if values[name] is not None and c.load_hf is None:
            yield f"{flag(name)} {values[name]} acts only with --load-hf"
    if not c.save or config.dry_run or c.auto_resume or not _has_steps(c.save):
        return
    folder, loaded = place_of(c.save).resolve(), place_of(c.load).resolve() if c.load else None
    if loaded is None or c.finetune or folder not in (loaded, loaded.parent):
        yield (
            f"--save {c.save} holds the checkpoints of a run: choose a new directory, or go on with that run by "
            f"--load {c.save}"
        )


def _has_steps(save: str) -> bool:
    """Whether checkpoints were committed below --save."""
    pattern = "step_*/manifest.json"
    return bool((Url(save) / pattern).matches()) if is_url(save) else any(Path(save).glob(pattern))


def folder_reasons(config: RunConfig, world: int) -> Iterator[str]:
    """Directories that are missing or cannot be written."""
    if config.dry_run:
        return
    values, data = flatten(config), config.data
    for name, path in (("data_path", data.data_path), ("valid_data_path", data.valid_data_path)):
        for folder in named_folders(path):
            if is_url(folder):
                yield from _unreachable(name, folder, "manifest.json")
            else:
                yield from _unreadable(flag(name), folder, "manifest.json")
    for name in _READ:
        if is_url(values[name]):
            yield from _unreachable(name, str(values[name]))
        elif values[name]:
            yield from _unreadable(flag(name), str(values[name]), "")
    for name in _WRITTEN:
        if is_url(values[name]):
            yield from _unreachable(name, str(values[name]))
        elif values[name]:
            yield from _unwritable(flag(name), str(values[name]))
    if config.log.profile and not config.log.profile_dir:
        yield from _unwritable(flag("profile_dir"), str(config.profile_path))
    if config.log_path.is_dir():
        yield f"--log-file {config.log_path}: is a directory, a file is needed"


def _unreachable(name: str, url: str, file_inside: str = "") -> Iterator[str]:
    """What is wrong with a URL: the flag takes none, it needs a package, or what is read is not there."""
    if name not in _MAY_BE_URLS:
        yield f"{flag(name)} {url}: is a URL, a local directory is needed"
        return
    try:
        place = Url(url) / file_inside if file_inside else Url(url)
        if not place.exists() and name != "save":
            yield f"{flag(name)} {url}: " + (f"holds no {file_inside}" if file_inside else "nothing is there")
    except ValueError as error:
        yield f"{flag(name)} {error}"


def _unreadable(name: str, path: str, file_inside: str) -> Iterator[str]:
    folder = Path(path)
    if not folder.exists() and len(path.replace(",", " ").split()) > 1:
        yield (
            f"{name} {path}: does not exist; several are given as WEIGHT FOLDER pairs, each a word of its own on the "
            "command line or in a list"
        )
    elif not folder.is_dir():
        yield f"{name} {path}: {'is not a directory' if folder.exists() else 'does not exist'}"
    elif file_inside and not (folder / file_inside).is_file():
        yield f"{name} {path}: holds no {file_inside}; build it with tools/preprocess_data.py build"


def _unwritable(name: str, path: str) -> Iterator[str]:
    folder = Path(path).absolute()
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    if folder.exists() and not folder.is_dir():
        yield f"{name} {path}: is a file, a directory is needed"
    elif not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        yield f"{name} {path}: cannot be written, {parent} does not allow it"
