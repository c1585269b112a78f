"""Build a packed dataset: split the input into units, build a shard per unit, write the manifest.

The number of workers, parts (`--units 3/16` builds every sixteenth unit) and interruptions do not
affect the bytes of the dataset. Finished units are not built again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megacp.prepare.packs.journal import (
    REJECTS_NAME,
    Journal,
    locked,
    prepare_directory,
    remove_partial,
)
from megacp.prepare.packs.progress import BuildProgress, BuildSummary
from megacp.prepare.packs.settings import HOUSE_FORM, BuildSettings, checked, tokenizer_problem
from megacp.prepare.packs.unit import WINDOW_DOCUMENTS, UnitBuilder, UnitResult, writer_of
from megacp.prepare.packs.workers import run_tasks
from megacp.prepare.records.chat_template import ChatTemplate, Template, loaded
from megacp.prepare.records.indexed import count_empty, is_index
from megacp.prepare.records.read import (
    SAMPLED_BYTES,
    Extent,
    Unit,
    identity,
    is_plain,
    plan_units,
    read_extent,
)
from megacp.prepare.records.record import ALPACA, AS_MESSAGES, Refusal
from megacp.prepare.tokenize.kept import TOKENIZER_DIRECTORY
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.storage import files
from megacp.storage.place import place_of, size_of
from megacp.storage.wording import counted, for_terminal, listed
from megacp.training.data.manifest import MANIFEST_NAME, THOUGHTS, DatasetManifest

# Version of the rules that convert a record to tokens and weights. Increase it when a rule changes:
# an unfinished build with an earlier version is then refused, so a dataset never mixes versions.
RECORD_RULES = 6
# Records per shard of a dataset with images, on average.
RECORDS_OF_A_SHARD = 1024


def build(
    settings: BuildSettings,
    stream: TextIO,
    overwrite: bool = False,
    part: tuple[int, int] | None = None,
    builds_missing: bool = True,
) -> BuildSummary:
    """Build or finish the dataset in `settings.output`, and print the progress to `stream`.

    With `part` (i, n), build only the units whose number modulo n is i; other processes may build
    other parts at the same time. Finished units are kept after an error, and the next run builds
    only the remaining units.

    Raise ValueError for invalid settings, input or tokenizer, for a refused record, if the
    directory is in use or belongs to a build with other settings, if the disk is full, or if units
    are missing and `builds_missing` is false. Raise workers.WorkerFailed if a worker died.
    """
    settings = checked(settings)
    tokenizer = settings.load_tokenizer()
    problem = tokenizer_problem(settings, tokenizer)
    if problem is not None:
        raise ValueError(problem)
    template = settings.load_template(tokenizer)
    if settings.image_rules is not None:
        rules = settings.image_rules.with_token_ids(tokenizer)
        unit_bytes = settings.unit_bytes or _unit_bytes_of_images(settings)
        settings = dataclasses.replace(settings, image_rules=rules, unit_bytes=unit_bytes)
    directory = Path(settings.output)
    try:
        prepare_directory(directory, overwrite)
        empty = [path for path in settings.input if not size_of(place_of(path))]
        # If all files are empty, the build fails anyway, so these notes would be redundant.
        if len(empty) < len(settings.input):
            for path in empty:
                stream.write(f"note: --input {path} is empty\n")
        for path in filter(is_index, settings.input):
            if count := count_empty(path):
                what = counted(count, "document")
                stream.write(f"note: --input {path} has {what} without tokens (omitted)\n")
        with locked(directory, shared=part is not None):
            return _build(settings, tokenizer, template, stream, part, builds_missing)
    except OSError as error:
        # If the directory itself is missing, its nearest existing parent is on the same disk.
        candidates = (directory, *directory.absolute().parents)
        there = next(folder for folder in candidates if folder.exists())
        free = shutil.disk_usage(there).free
        # A failed `write` (a full disk) does not report a file name.
        name = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        raise ValueError(
            f"--output {directory}: {name}{error.strerror or error}; {free:,} bytes are free on "
            "this disk. Finished shards are kept: run the same command again to continue"
        ) from error


def _build(
    settings: BuildSettings,
    tokenizer: Tokenizer,
    template: Template | None,
    stream: TextIO,
    part: tuple[int, int] | None,
    builds_missing: bool,
) -> BuildSummary:
    """Build the missing units and, without `part`, write the manifest of the dataset.

    The caller must hold the lock of the directory.
    """
    started = time.monotonic()
    directory = Path(settings.output)
    journal = Journal(directory, _decisive(settings, tokenizer, template))
    index, count = part or (0, 1)
    all_units = plan_units(settings.input, settings.bytes_per_unit)
    units = [unit for unit in all_units if unit.index % count == index]
    sizes = {unit.index: _bytes_of(unit) for unit in units}
    missing = [unit for unit in units if unit.index not in journal.results]
    total = sum(sizes.values())
    missing_bytes = sum(sizes[unit.index] for unit in missing)
    progress = BuildProgress(stream, total, total - missing_bytes)
    if missing and not builds_missing:
        numbers = listed([unit.index for unit in missing], 20)
        raise ValueError(
            f"{directory} lacks {len(missing)} of {counted(len(units), 'unit')}, {numbers}: run "
            "their parts again (--units I/N builds the units whose number modulo N is I), or build "
            "without --units"
        )
    is_there = part is None and not missing and (directory / MANIFEST_NAME).exists()
    if part is None:
        remove_partial(directory)
        # If shards of a finished dataset were lost, its manifest is no longer valid.
        if missing:
            (directory / MANIFEST_NAME).unlink(missing_ok=True)
    # Check the units of earlier runs first: a build that must fail should fail before any work.
    done = [journal.results[unit.index] for unit in units if unit.index in journal.results]
    _check_results(settings, template, done)
    run: Callable[..., Iterator[Any]] = run_tasks
    # Ray is an optional dependency, so its module is imported only on request.
    if settings.executor == "ray":
        from megacp.prepare.packs.ray_workers import run_on_ray

        run = functools.partial(run_on_ray, address=settings.ray_address)
    try:
        for result in run(UnitBuilder, settings, missing, settings.workers):
            # Store the result first: if a check fails, a rerun does not build this unit again.
            journal.add(result)
            done.append(result)
            _check_results(settings, template, done)
            progress.add(result, sizes[result.unit])
    finally:
        progress.finish()
    # Workers finish in any order; the shards of the dataset are in the order of the input.
    results = tuple(journal.results[unit.index] for unit in units)
    manifest = None
    if is_there:
        manifest = DatasetManifest.read(directory)
    elif part is None:
        _check_use(settings, results)
        if callable(template) and any(result.written_by for result in results):
            note = f"note: {tokenizer.chat_template} writes the messages (--chat-template auto)"
            stream.write(f"{for_terminal(note)}\n")
        manifest = _write(settings, tokenizer, template, journal.fingerprint, results)
        remove_partial(directory)
    return BuildSummary(
        manifest=manifest,
        results=results,
        read_bytes=progress.bytes,
        seconds=time.monotonic() - started,
        units_resumed=len(units) - len(missing),
        tokenizer_engine=tokenizer.engine,
        form_named=settings.chat_template is not None or tokenizer.asked_as_messages,
    )


def _bytes_of(unit: Unit) -> int:
    """Return a unit's number of input bytes."""
    return sum(extent.stop - extent.start for extent in unit.extents)


def _unit_bytes_of_images(settings: BuildSettings) -> int:
    """Return the number of input bytes for a shard of about 1024 records.

    The size of a record is estimated from the start of the first plain file that is not empty. The
    rule for text does not apply here: a record is far smaller than the image files to which it
    refers, so one shard would contain all records.
    """
    for path in settings.input:
        if not is_plain(path):
            continue
        size = size_of(place_of(path))
        if size:
            break
    else:
        return settings.bytes_per_unit
    # Count the records that begin in the sampled bytes. Leaving out the first one, at offset 0,
    # gives the number of records that end there.
    count = 0
    for item in read_extent(Extent(0, path, 0, size)):
        if item.offset > SAMPLED_BYTES:
            break
        if item.offset > 0:
            count += 1
    record_bytes = min(size, SAMPLED_BYTES) // max(1, count)
    return RECORDS_OF_A_SHARD * max(1, record_bytes)


def _decisive(
    settings: BuildSettings, tokenizer: Tokenizer, template: Template | None
) -> dict[str, Any]:
    """Return everything that determines the bytes of the dataset, by flag name.

    Image files are represented only by their root directory: their contents are not compared.
    """
    same = "ignore_keys context_roles roles columns tokenizer_engine seq_length oversize"
    same += " pad_multiple append_eod seed text_key max_record_bytes window_tokens"
    same += " cp_degrees valid_share is_valid prefix_tree"
    names = same.split()
    if settings.image_rules is not None:
        names += ["image_root", "max_crops_per_pack", "max_image_bytes", "max_video_bytes"]
    values = {name: getattr(settings, name) for name in names}
    if settings.image_rules is not None:
        values["image_rules"] = settings.image_rules.to_dict()
    # A template that a flag selects is compared by content. The tokenizer's own template is
    # compared only if a unit uses it (see `_check_results`).
    chat_template: Any = settings.chat_template
    if isinstance(template, ChatTemplate):
        chat_template = template.decisive
    return values | {
        "record_rules": RECORD_RULES,
        "chat_template": chat_template,
        "input": [identity(path) for path in settings.input],
        "tokenizer": asdict(tokenizer.info()),
        "unit_bytes": settings.bytes_per_unit,
        "window_documents": WINDOW_DOCUMENTS,
    }


def _check_results(
    settings: BuildSettings, template: Template | None, done: Sequence[UnitResult]
) -> None:
    """Check the results of the finished units as a whole.

    Raise ValueError if more records were refused than allowed, if a unit was written with another
    chat template, or if the answers have two forms.
    """
    # Only units with messages have a writer; the template does not matter to the other units.
    writers = {result.written_by for result in done if result.written_by is not None}
    if writers and writers != {writer_of(template)}:
        raise ValueError(
            f"{settings.output} was started with a different chat template from the one that "
            f"--tokenizer {settings.tokenizer} has now; nothing was overwritten. Use --overwrite "
            "to start again"
        )
    forms = _forms_of(done)
    if forms[AS_MESSAGES] and forms[ALPACA]:
        alpaca = counted(forms[ALPACA], "record")
        conversations = counted(forms[AS_MESSAGES], "conversation")
        raise ValueError(
            f"--input: answers would be learned in two forms: {alpaca} with `instruction` and "
            f"`output` after the Alpaca prompt of 2023, and {conversations} (with messages, "
            f"`history` or `system`) as messages. Choose one form: --chat-template {HOUSE_FORM} "
            "writes all records in megacp's own form, --chat-template NAME or FILE.jinja with a "
            "template"
        )
    refusals = [result.refusals for result in done if result.refusals]
    count = sum(map(len, refusals))
    if refusals and settings.on_error == "fail":
        raise ValueError(
            f"{refusals[0][0]}; an earlier run skipped this record, so use --on-error skip again"
        )
    if settings.max_errors is not None and count > settings.max_errors:
        raise ValueError(
            f"{counted(count, 'bad record')}, more than --max-errors {settings.max_errors}; the "
            f"last one: {refusals[-1][-1]}"
        )


def _forms_of(results: Sequence[UnitResult]) -> Counter[str]:
    """Count the records per form of learned answers."""
    forms = Counter[str]()
    for result in results:
        forms.update(result.forms)
    return forms


def _check_use(settings: BuildSettings, results: Sequence[UnitResult]) -> None:
    """Raise ValueError if the dataset would be empty or contain no learned token."""
    documents = sum(result.documents for result in results)
    is_refused = any(result.refusals for result in results)
    if settings.valid_share and not documents and not is_refused:
        raise ValueError(
            f"--valid-share {settings.valid_share:g} leaves no record for {settings.output}: "
            "choose another share"
        )
    if not any(result.entry for result in results):
        refused = _all_refusals(results)
        example = f"{len(refused)} refused, the first one: {refused[0]}" if refused else ""
        raise ValueError(
            f"--input: no usable record in {', '.join(settings.input)}, so no dataset was written; "
            f"{example or 'the input has no record at all: check that its files are complete'}"
        )
    if not any(result.learned_tokens for result in results):
        raise ValueError(
            f"--input: {counted(documents, 'document')} without a learned token: no record has "
            "assistant text, or all weights are 0; no dataset was written. If answers have another "
            "role, use --roles assistant=NAME"
        )


def _all_refusals(results: Sequence[UnitResult]) -> list[Refusal]:
    """Return the refused and dropped records of all units."""
    found: list[Refusal] = []
    for result in results:
        found += result.refusals
        found += result.dropped
    return found


def _write(
    settings: BuildSettings,
    tokenizer: Tokenizer,
    template: Template | None,
    fingerprint: str,
    results: Sequence[UnitResult],
) -> DatasetManifest:
    """Write the rejected records, the tokenizer's files and, last, the manifest; return it."""
    directory = Path(settings.output)
    # Sort by position in the input, so the file does not depend on how the units finished.
    order = {path: i for i, path in enumerate(settings.input)}
    rejected = sorted(
        _all_refusals(results),
        key=lambda refusal: (order[refusal.file], refusal.line, refusal.offset),
    )
    lines = [json.dumps(vars(refusal), ensure_ascii=False).encode() + b"\n" for refusal in rejected]
    files.write_atomically(directory / REJECTS_NAME, b"".join(lines))
    # With a copy of the tokenizer, a dataset can still be decoded to text after it is moved.
    for path in tokenizer.files:
        (directory / TOKENIZER_DIRECTORY).mkdir(exist_ok=True)
        files.write_atomically(directory / TOKENIZER_DIRECTORY / path.name, path.read_bytes())
    has_messages = any(result.written_by is not None for result in results)
    kept: dict[str, Any] | None = None
    if isinstance(template, ChatTemplate) or has_messages:
        kept = {"default": "" if template is None else loaded(template).text}
        # Zero counts and an empty text are left out of the manifest.
        for name in THOUGHTS:
            count = sum(getattr(result, name) for result in results)
            if count:
                kept[name] = count
        # Results of an earlier version have None here.
        before = max(result.before_answers or "" for result in results)
        if before:
            kept["before_answers"] = before
    # Written last: a directory without a manifest is not a dataset.
    manifest = DatasetManifest(
        config_fingerprint=fingerprint,
        tokenizer=tokenizer.info(),
        seq_length=settings.seq_length,
        pad_multiple=settings.pad_multiple,
        sources=settings.input,
        shards=tuple(result.entry for result in results if result.entry),
        num_rejected=len(rejected),
        image_rules=None if settings.image_rules is None else settings.image_rules.to_dict(),
        cp_degrees=settings.cp_degrees,
        chat_template=kept,
        document_end={"token": tokenizer.eos_id if settings.append_eod else None},
        answer_forms=dict(sorted(_forms_of(results).items())) or None,
    )
    manifest.write(directory)
    return manifest
