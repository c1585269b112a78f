"""A build whose output is a URL: each shard is sent when it is finished, then its unit's file, the manifest last.

The disk needs room for one shard a worker. A dataset without its manifest is refused by whoever reads it. Where the
directory is lost, a build on another machine goes on from the units' files.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from megacp.core.data.manifest import MANIFEST_NAME, DatasetManifest, ShardEntry
from megacp.core.storage import files
from megacp.core.storage.url import Url

STATE = ".build"
"""Folder of what a build knows of itself."""
SETTINGS_NAME = "settings.json"
REJECTS_NAME = "rejects.jsonl"
TOKENIZER_DIRECTORY = "tokenizer"
_LARGEST = 1 << 30


class Upload:
    """One build's output below a URL, and the directory that it works in."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url, self._directory = Url(url), directory

    def prepare(self, overwrite: bool) -> None:
        """Fetch what a build on another machine knew. `overwrite` removes what builds write.

        ValueError when there is something else at the URL.
        """
        names = self._url.sizes_below()
        found = {name.partition("/")[0] for name in names}
        own = {MANIFEST_NAME, STATE, REJECTS_NAME, TOKENIZER_DIRECTORY}
        foreign = sorted(name for name in found - own if not name.startswith("shard_"))
        if foreign:
            raise ValueError(
                f"--output {self._url} holds what is no dataset ({', '.join(foreign[:5])}); nothing was overwritten, "
                "choose another URL"
            )
        if overwrite:
            self.withdraw()
            for name in found:
                (self._url / name).remove_below()
            return
        for name in names:
            path = self._directory / name
            if name.startswith(f"{STATE}/") and not path.exists():
                path.parent.mkdir(exist_ok=True)
                files.write_atomically(path, (self._url / name).content(_LARGEST))

    def sizes(self) -> Mapping[str, int]:
        """Bytes of all files that were sent, by their names in the dataset."""
        return self._url.sizes_below()

    def shard(self, entry: ShardEntry) -> None:
        """Send a finished shard, and remove it here."""
        folder = self._directory / entry.name
        for file in entry.files:
            (self._url / entry.name / file.name).upload(folder / file.name)
        shutil.rmtree(folder)

    def send(self, pattern: str) -> None:
        """Send the files of the directory that fit a pattern."""
        for path in sorted(self._directory.glob(pattern)):
            (self._url / path.relative_to(self._directory).as_posix()).upload(path)

    def withdraw(self) -> None:
        """Let it be no finished dataset."""
        (self._url / MANIFEST_NAME).unlink()

    def publish(self, manifest: DatasetManifest) -> None:
        """Send all that is beside the shards, then the manifest."""
        for pattern in (REJECTS_NAME, f"{TOKENIZER_DIRECTORY}/*"):
            self.send(pattern)
        (self._url / MANIFEST_NAME).write(manifest.to_text().encode())
