"""Builds a packed dataset from text files: cuts the input into units, has workers build them, writes the manifest.

Every file of the result is the same for any number of workers and of interruptions. Only what is not in the journal is
built.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megacp.core.data.manifest import MANIFEST_NAME, DatasetManifest
from megacp.core.storage import files
from megacp.core.storage.place import fetched, open_input, place_of, size_of
from megacp.core.storage.url import Url
from megacp.prepare.build.faults import storage_faults
from megacp.prepare.build.identities import identity_file, repeated
from megacp.prepare.build.journal import Journal, locked, prepare_directory, remove_leftovers
from megacp.prepare.build.parts import BuildPart, entered, join_parts, missing_units
from megacp.prepare.build.progress import BuildProgress, BuildSummary, PartSummary
from megacp.prepare.build.settings import BuildSettings, problems, tokenizer_problem, with_place
from megacp.prepare.build.unit import (
    WINDOW_DOCUMENTS,
    BadRecord,
    UnitBuilder,
    UnitResult,
    UnitTask,
    where,
)
from megacp.prepare.build.upload import FAILED_IMAGES_NAME, REJECTS_NAME, TOKENIZER_DIRECTORY
from megacp.prepare.build.workers import run_tasks
from megacp.prepare.records.chat_template import ChatTemplate
from megacp.prepare.records.read import (
    SAMPLED_BYTES,
    Unit,
    identity,
    input_files,
    is_plain,
    plan_units,
    refuse_changed,
)
from megacp.prepare.records.record import Refusal
from megacp.prepare.tokenize.tokenizer import Tokenizer

RECORD_RULES = 4
"""What records mean: raised when a record becomes other tokens or weights, so that no dataset is half of each."""
RECORDS_OF_A_SHARD = 1024


def _unit_bytes_of_images(settings: BuildSettings) -> int:
    """Input bytes of a shard: about 1024 records, told from the beginning of the first plain file that is not empty.

    A record that names a file is far smaller than its image, so the rule for text would put all into one shard.
    """
    plain = (path for path in settings.input if is_plain(path) and size_of(place_of(path)))
    first = None if settings.unit_bytes else next(plain, None)
    if first is None:
        return settings.bytes_per_unit
    with open_input(first) as stream:
        data = stream.read(SAMPLED_BYTES)
    return RECORDS_OF_A_SHARD * max(1, len(data) // max(1, data.count(b"\n")))


def _decisive(settings: BuildSettings, tokenizer: Tokenizer, template: ChatTemplate | None) -> dict[str, Any]:
    """All that decides the bytes of the dataset, by the names of the flags; of images that lie in files, their root."""
    images = {}
    if settings.image_rules is not None:
        images = {
            "image_rules": settings.image_rules.to_dict(),
            "image_root": settings.image_root,
            "max_crops_per_pack": settings.max_crops_per_pack,
        }
    return images | {
        "record_rules": RECORD_RULES,
        "ignore_keys": settings.ignore_keys,
        "context_roles": settings.context_roles,
        "chat_template": settings.chat_template if template is None else template.decisive,
        "allow_unlearned": settings.allow_unlearned,
        "input": [identity(path) for path in settings.input],
        "tokenizer": asdict(tokenizer.info()),
        "tokenizer_engine": settings.tokenizer_engine,
        "seq_length": settings.seq_length,
        "oversize": settings.oversize,
        "pad_multiple": settings.pad_multiple,
        "append_eod": settings.append_eod,
        "seed": settings.seed,
        "text_key": settings.text_key,
        "max_record_bytes": settings.max_record_bytes,
        "unit_bytes": settings.bytes_per_unit,
        "window_tokens": settings.window_tokens,
        "window_documents": WINDOW_DOCUMENTS,
        "cp_degrees": settings.cp_degrees,
    }


def build(
    settings: BuildSettings, stream: TextIO, overwrite: bool = False, builds_missing: bool = True
) -> BuildSummary:
    """Build, or finish, the dataset in settings.output; progress goes to `stream`.

    ValueError: settings, input, tokenizer, a refused record, a directory begun with other settings or in use, or units
    that no part has built where `builds_missing` is false.
    workers.WorkerFailed: a worker died. What is finished stays, and the next run goes on from there.
    """
    settings, texts, decisive = _checked(settings, stream, overwrite)
    directory = Path(settings.output)
    with storage_faults(directory), locked(directory):
        stored = _stored(settings)
        journal = Journal(directory, decisive, stored=stored)
        join_parts(directory, decisive, journal, stored)
        units = plan_units(settings.input, settings.bytes_per_unit)
        run = _Build(settings, texts, journal, units, stream)
        if not builds_missing and (missing := run.missing()):
            raise ValueError(missing_units(missing, directory))
        return run.run()


def build_part(settings: BuildSettings, stream: TextIO, part: BuildPart) -> PartSummary:
    """Build the units of one part, beside other parts in other processes; `build` makes the dataset of them.

    ValueError and WorkerFailed as `build`.
    """
    started = time.monotonic()
    settings, texts, decisive = _checked(settings, stream, overwrite=False)
    directory = Path(settings.output)
    with storage_faults(directory), entered(directory, part, decisive, _stored(settings)) as journal:
        units = plan_units(settings.input, settings.bytes_per_unit)
        own = [unit for unit in units if part.holds(unit.index)]
        resumed = _Build(settings, texts, journal, own, stream).run_part()
        return PartSummary(part, tuple(journal.results.values()), resumed, time.monotonic() - started)


Texts = tuple[Tokenizer, ChatTemplate | None]


def _checked(settings: BuildSettings, stream: TextIO, overwrite: bool) -> tuple[BuildSettings, Texts, dict[str, Any]]:
    """The settings with all that they leave open, what writes texts as tokens, and what decides the bytes.

    The directory is there afterwards. ValueError.
    """
    settings = with_place(settings)
    try:
        settings = dataclasses.replace(settings, input=input_files(settings.input))
    except ValueError as error:
        raise ValueError(f"--input: {error}") from error
    if found := problems(settings):
        raise ValueError("; ".join(found))
    tokenizer = settings.load_tokenizer()
    if (problem := tokenizer_problem(settings, tokenizer)) is not None:
        raise ValueError(problem)
    template = settings.load_template(tokenizer)
    if settings.image_rules is not None:
        rules = settings.image_rules.with_token_ids(tokenizer)
        settings = dataclasses.replace(settings, image_rules=rules, unit_bytes=_unit_bytes_of_images(settings))
    directory = Path(settings.output)
    with storage_faults(directory):
        prepare_directory(directory, overwrite)
        if (upload := settings.upload) is not None:
            upload.prepare(overwrite)
    empty = [path for path in settings.input if not size_of(place_of(path))]
    if len(empty) < len(settings.input):
        stream.writelines(f"note: --input {path} is empty\n" for path in empty)
    return settings, (tokenizer, template), _decisive(settings, tokenizer, template)


def _stored(settings: BuildSettings) -> Mapping[str, int] | None:
    """Bytes of the files that a build to a URL has sent."""
    return settings.upload.sizes() if settings.upload else None


class _Build:
    """One run of a build, with the directory locked."""

    def __init__(
        self,
        settings: BuildSettings,
        texts: Texts,
        journal: Journal,
        units: list[Unit],
        stream: TextIO,
    ) -> None:
        self._settings, self._journal, self._units = settings, journal, units
        self._tokenizer, self._template = texts
        self._directory, self._upload, self._stream = Path(settings.output), settings.upload, stream
        self._sizes = {unit.index: sum(extent.stop - extent.start for extent in unit.extents) for unit in units}
        self._resumed = sum(self._is_done(unit) for unit in units)
        done = sum(self._sizes[unit.index] for unit in units if self._is_done(unit))
        self._progress = BuildProgress(stream, sum(self._sizes.values()), done)

    def _is_done(self, unit: Unit) -> bool:
        result = self._journal.results.get(unit.index)
        if result is None:
            return False
        needs_ids = result.has_ids and not (self._directory / MANIFEST_NAME).exists()
        return not needs_ids or identity_file(self._directory, unit.index).exists()

    def missing(self) -> list[int]:
        """Numbers of the units that are still to be built."""
        return [unit.index for unit in self._units if not self._is_done(unit)]

    def run_part(self) -> int:
        """Build the units of a part and nothing else; how many were there."""
        self._check_refusals()
        try:
            self._build([UnitTask(unit) for unit in self._units if not self._is_done(unit)])
        finally:
            self._progress.finish()
        return self._resumed

    def run(self) -> BuildSummary:
        started = time.monotonic()
        if (self._directory / MANIFEST_NAME).exists() and self._resumed == len(self._units):
            manifest = DatasetManifest.read(self._directory)
            self._check_refusals()
            remove_leftovers(self._directory)
            return self._summary(manifest, time.monotonic() - started, already_complete=True)
        (self._directory / MANIFEST_NAME).unlink(missing_ok=True)  # a shard has gone: it is no finished dataset now
        if self._upload is not None:
            self._upload.withdraw()
        self._check_refusals()
        try:
            self._build([UnitTask(unit) for unit in self._units if not self._is_done(unit)])
            if duplicates := self._duplicates():  # at most once: dropping a record cannot make another a duplicate
                self._build([UnitTask(self._units[unit], again) for unit, again in sorted(duplicates.items())])
        finally:
            self._progress.finish()
        self._check_use()
        manifest = self._write()
        return self._summary(manifest, time.monotonic() - started, already_complete=False)

    def _build(self, tasks: list[UnitTask]) -> None:
        results = self._runner()(UnitBuilder, self._settings, tasks, self._settings.workers, _describe)
        for result in results:
            self._journal.add(result)
            if self._upload is not None:
                self._upload.journal()
            self._check_refusals()
            packs, tokens = (result.entry.num_packs, result.entry.num_tokens) if result.entry else (0, 0)
            size = self._sizes[result.unit]
            files = result.entry.files if result.entry else ()
            images = sum(file.size for file in files if file.name == "images.bin")
            self._progress.add(result.documents, size, tokens, packs * self._settings.seq_length, images)

    def _runner(self) -> Callable[..., Iterator[Any]]:
        """What runs the units."""
        if self._settings.executor == "local":
            return run_tasks
        from megacp.prepare.build.ray_workers import run_on_ray

        return functools.partial(run_on_ray, address=self._settings.ray_address)

    def _check_refusals(self) -> None:
        refusals = [refusal for result in self._journal.results.values() for refusal in result.refusals]
        settings = self._settings
        if refusals and settings.on_error == "fail":
            raise BadRecord(f"{refusals[0]}; an earlier run skipped it, give --on-error skip again")
        if settings.max_errors is not None and len(refusals) > settings.max_errors:
            raise ValueError(
                f"{len(refusals)} bad records, more than --max-errors {settings.max_errors}; the last is {refusals[-1]}"
            )

    def _check_use(self) -> None:
        """ValueError when there is nothing in the dataset, or nothing that could be learned from it."""
        results = self._journal.results.values()
        if not any(result.entry for result in results):
            empty = [path for path in self._settings.input if not size_of(place_of(path))]
            all_empty = f"; empty: {', '.join(empty)}" if empty else ""
            refused = [refusal for result in results for refusal in (*result.refusals, *result.dropped)]
            first = f"; {refused[0]}" if refused else ""
            raise ValueError(
                f"--input: no usable record in {', '.join(self._settings.input)} ({len(refused)} refused{all_empty}); "
                f"no dataset was made{first}"
            )
        if not sum(result.learned_tokens for result in results):
            documents = sum(result.documents for result in results)
            raise ValueError(
                f"--input: {documents} documents, and none of their tokens is learned: no assistant says anything, "
                "or all weights are 0; no dataset was made"
            )

    def _duplicates(self) -> dict[int, dict[bytes, str]]:
        """For each unit the ids in it that an earlier unit holds, with the reason to refuse them.

        BadRecord names the first pair under on_error "fail".
        """
        have = [unit.index for unit in self._units if self._journal.results[unit.index].has_ids]
        found: dict[int, dict[bytes, str]] = {}
        for unit, row, first in repeated({unit: identity_file(self._directory, unit) for unit in have}):
            there = self._place(first)
            if self._settings.on_error == "fail":
                raise BadRecord(f"{self._place(row)}: duplicate id, the first is at {there}")
            found.setdefault(unit, {})[bytes(row["digest"])] = there
        return found

    def _place(self, row: np.void) -> str:
        source, offset = int(row["source"]), int(row["offset"])
        extent = next(e for unit in self._units for e in unit.extents if e.source == source)
        return "{}:{}".format(*where(extent, int(row["line"]), offset))

    def _write(self) -> DatasetManifest:
        """The files that make the directory a dataset, manifest last."""
        results = [self._journal.results[unit.index] for unit in self._units]
        rejected = _in_order(results, self._settings.input)
        _write_lines(self._directory / REJECTS_NAME, rejected)
        if self._settings.fetches_images:
            _write_lines(self._directory / FAILED_IMAGES_NAME, [refusal for refusal in rejected if refusal.url])
        copy_tokenizer(self._tokenizer.files, self._directory)
        self._journal.settle()
        rules = self._settings.image_rules
        values = _decisive(self._settings, self._tokenizer, self._template)
        refuse_changed(values["input"], self._journal.inputs)
        decisive = json.dumps(values, sort_keys=True)
        manifest = DatasetManifest(
            config_fingerprint=hashlib.sha256(decisive.encode()).hexdigest(),
            tokenizer=self._tokenizer.info(),
            seq_length=self._settings.seq_length,
            pad_multiple=self._settings.pad_multiple,
            sources=self._settings.input,
            shards=tuple(result.entry for result in results if result.entry),
            num_rejected=len(rejected),
            image_rules=None if rules is None else rules.to_dict(),
            cp_degrees=self._settings.cp_degrees,
            chat_template=None if self._template is None else dict(self._template.texts),
            document_end={"token": self._tokenizer.eos_id if self._settings.append_eod else None},
        )
        if self._upload is not None:
            self._upload.publish(manifest)
        manifest.write(self._directory)
        remove_leftovers(self._directory)
        return manifest

    def _summary(self, manifest: DatasetManifest, seconds: float, already_complete: bool) -> BuildSummary:
        results, read = tuple(self._journal.results.values()), self._progress.read_bytes
        return BuildSummary(manifest, results, read, seconds, self._resumed, already_complete, self._tokenizer.engine)


def _write_lines(path: Path, refusals: Sequence[Refusal]) -> None:
    lines = [json.dumps(refusal.to_json(), ensure_ascii=False).encode() + b"\n" for refusal in refusals]
    files.write_atomically(path, b"".join(lines))


def _describe(task: UnitTask) -> str:
    parts = [f"{extent.path} (bytes {extent.start} to {extent.stop})" for extent in task.unit.extents]
    return f"while working on unit {task.unit.index}: {', '.join(parts)}"


def _in_order(results: list[UnitResult], paths: tuple[str, ...]) -> list[Refusal]:
    order = {path: i for i, path in enumerate(paths)}
    everything = [refusal for result in results for refusal in (*result.refusals, *result.dropped)]
    return sorted(everything, key=lambda refusal: (order[refusal.file], refusal.line, refusal.offset))


def copy_tokenizer(paths: Sequence[Path], directory: Path) -> None:
    """Keep the tokenizer's files in DIRECTORY/tokenizer, so that a dataset can be read as text wherever it goes."""
    target = directory / TOKENIZER_DIRECTORY
    for path in paths:
        target.mkdir(exist_ok=True)
        files.write_atomically(target / path.name, path.read_bytes())


def kept_tokenizer(directory: files.StrPath | Url) -> str:
    """What to give to `load_tokenizer` to get the tokenizer a dataset was made with.

    ValueError when its files are not in DIRECTORY/tokenizer.
    """
    manifest, place = DatasetManifest.read(directory), place_of(directory)
    if manifest.tokenizer.kind == "byte":
        return "byte"
    folder = (
        Path(place / TOKENIZER_DIRECTORY)
        if isinstance(place, Path)
        else fetched(place / TOKENIZER_DIRECTORY, manifest.tokenizer.sha256)
    )
    names = sorted(str(path) for path in folder.glob("*") if path.name != "tokenizer_config.json")
    # vocab.json before merges.txt
    names.sort(key=lambda name: name.endswith(".txt"))
    if not names:
        raise ValueError(f"{folder}: the {manifest.tokenizer.kind} tokenizer of this dataset is not there")
    return ",".join(names)
