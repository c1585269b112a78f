"""A build whose output is a URL: each shard is sent when it is finished, and the manifest last.

The directory of the build holds the journal and the shard at hand, so the disk needs room for one shard a worker. A
dataset without its manifest is refused by whoever reads it. The journal is sent now and then: where the directory is
lost, a build on another machine goes on from there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from megacp.core.data.manifest import MANIFEST_NAME, DatasetManifest, ShardEntry
from megacp.core.storage import files
from megacp.core.storage.url import Url

_EVERY_SECONDS = 60.0
_LARGEST = 1 << 32
"""Bytes of a journal."""
_SHARD = "shard_"


JOURNAL_NAME = "journal.jsonl"
REJECTS_NAME = "rejects.jsonl"
FAILED_IMAGES_NAME = "failed_images.jsonl"
TOKENIZER_DIRECTORY = "tokenizer"
_BESIDE_SHARDS = (JOURNAL_NAME, REJECTS_NAME, FAILED_IMAGES_NAME, TOKENIZER_DIRECTORY)


class Upload:
    """One build's output below a URL, and the directory that it works in."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url, self._directory = Url(url), directory
        self._sent = time.monotonic()

    def prepare(self, overwrite: bool) -> None:
        """Fetch the journal of a build that another machine began. `overwrite` removes what builds write.

        ValueError when there is something else at the URL.
        """
        found = {name.partition("/")[0] for name in self._url.sizes_below()}
        own = {MANIFEST_NAME, *_BESIDE_SHARDS}
        foreign = sorted(name for name in found - own if not name.startswith(_SHARD))
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
        journal = self._directory / JOURNAL_NAME
        if JOURNAL_NAME in found and not journal.exists():
            files.write_atomically(journal, (self._url / JOURNAL_NAME).content(_LARGEST))

    def sizes(self) -> Mapping[str, int]:
        """Bytes of all files that were sent, by their names in the dataset."""
        return self._url.sizes_below()

    def shard(self, entry: ShardEntry) -> None:
        """Send a finished shard, and remove it here."""
        folder = self._directory / entry.name
        for file in entry.files:
            (self._url / entry.name / file.name).upload(folder / file.name)
        shutil.rmtree(folder)

    def journal(self) -> None:
        """Send the journal when the last time is a minute ago."""
        if time.monotonic() - self._sent >= _EVERY_SECONDS:
            self._send(self._directory / JOURNAL_NAME)
            self._sent = time.monotonic()

    def withdraw(self) -> None:
        """Let it be no finished dataset."""
        (self._url / MANIFEST_NAME).unlink()

    def publish(self, manifest: DatasetManifest) -> None:
        """Send all that is beside the shards, then the manifest."""
        for name in _BESIDE_SHARDS:
            path = self._directory / name
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file():
                    self._send(file)
        (self._url / MANIFEST_NAME).write(manifest.to_text().encode())

    def _send(self, path: Path) -> None:
        (self._url / path.relative_to(self._directory).as_posix()).upload(path)
