"""Builds a packed dataset: cuts the input into units, has workers build each into a shard, writes
the manifest.

The bytes are the same for any number of workers, of parts (`--units 3/16` builds every sixteenth
unit) and of interruptions. Only units that are not finished are built.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from megacp.prepare.packs.settings import HOUSE_FORM, BuildSettings, problems, tokenizer_problem
from megacp.prepare.packs.unit import WINDOW_DOCUMENTS, UnitBuilder, UnitResult, writer_of
from megacp.prepare.packs.workers import run_tasks
from megacp.prepare.records.chat_template import ChatTemplate, Template, loaded
from megacp.prepare.records.read import (
    SAMPLED_BYTES,
    Extent,
    identity,
    is_plain,
    plan_units,
    read_extent,
)
from megacp.prepare.records.record import ALPACA, AS_MESSAGES
from megacp.prepare.tokenize.kept import TOKENIZER_DIRECTORY
from megacp.prepare.tokenize.tokenizer import Tokenizer
from megacp.storage import files
from megacp.storage.place import expanded, place_of, size_of
from megacp.storage.wording import counted, for_terminal, listed
from megacp.training.data.manifest import MANIFEST_NAME, THOUGHTS, DatasetManifest

RECORD_RULES = 6
"""What records mean: raised when a record becomes other tokens or weights, so that no dataset is
half of each.
"""
RECORDS_OF_A_SHARD = 1024


def build(
    settings: BuildSettings,
    stream: TextIO,
    overwrite: bool = False,
    part: tuple[int, int] | None = None,
    builds_missing: bool = True,
) -> BuildSummary:
    """Build, or finish, the dataset in settings.output; progress goes to `stream`.

    `part` (i, n): only the units whose number leaves the remainder i, beside other processes that
    build other parts. ValueError: settings, input, tokenizer, a refused record, a directory begun
    with other settings or in use, units that no part has built where `builds_missing` is false, or
    a full disk. workers.WorkerFailed: a worker died. What is finished stays, and the next run goes
    on from there.
    """
    try:
        found = [path for text in settings.input for path in expanded(text)]
    except ValueError as error:
        raise ValueError(f"--input: {error}") from error
    settings = dataclasses.replace(settings, input=tuple(found))
    if wrong := problems(settings):
        raise ValueError("; ".join(wrong))
    tokenizer = settings.load_tokenizer()
    if (problem := tokenizer_problem(settings, tokenizer)) is not None:
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
        if len(empty) < len(settings.input):
            stream.writelines(f"note: --input {path} is empty\n" for path in empty)
        with locked(directory, shared=part is not None):
            return _build(settings, tokenizer, template, stream, part, builds_missing)
    except OSError as error:
        there = next(
            folder for folder in (directory, *directory.absolute().parents) if folder.exists()
        )
        name = (
            f"{os.fsdecode(error.filename)}: " if error.filename else ""
        )  # after `write` there is none
        raise ValueError(
            f"--output {directory}: {name}{error.strerror or error}; "
            f"{shutil.disk_usage(there).free:,} bytes are free "
            "there, what is finished stays: run the same command again"
        ) from error


def _build(
    settings: BuildSettings,
    tokenizer: Tokenizer,
    template: Template | None,
    stream: TextIO,
    part: tuple[int, int] | None,
    builds_missing: bool,
) -> BuildSummary:
    """The units that are missing, and a dataset of all where no `part` is asked for; the directory
    is locked.
    """
    directory, started = Path(settings.output), time.monotonic()
    journal = Journal(directory, _decisive(settings, tokenizer, template))
    index, count = part or (0, 1)
    units = [
        unit
        for unit in plan_units(settings.input, settings.bytes_per_unit)
        if unit.index % count == index
    ]
    sizes = {
        unit.index: sum(extent.stop - extent.start for extent in unit.extents) for unit in units
    }
    missing = [unit for unit in units if unit.index not in journal.results]
    resumed, total = len(units) - len(missing), sum(sizes.values())
    progress = BuildProgress(stream, total, total - sum(sizes[unit.index] for unit in missing))
    if missing and not builds_missing:
        numbers = listed([unit.index for unit in missing], 20)
        raise ValueError(
            f"{directory} lacks {len(missing)} of {len(units)} units, {numbers} (part I/N builds "
            "those that leave the remainder I): run their parts again, or build without --units"
        )
    is_there = part is None and not missing and (directory / MANIFEST_NAME).exists()
    if part is None:
        remove_partial(directory)
        if missing:  # a shard has gone: it is no finished dataset now
            (directory / MANIFEST_NAME).unlink(missing_ok=True)
    done = [journal.results[unit.index] for unit in units if unit.index in journal.results]
    _check_results(settings, template, done)
    run: Callable[..., Iterator[Any]] = run_tasks
    if settings.executor == "ray":
        from megacp.prepare.packs.ray_workers import run_on_ray

        run = functools.partial(run_on_ray, address=settings.ray_address)
    try:
        for result in run(UnitBuilder, settings, missing, settings.workers):
            journal.add(result)
            done.append(result)
            _check_results(settings, template, done)
            progress.add(result, sizes[result.unit])
    finally:
        progress.finish()
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
    took = time.monotonic() - started
    named = settings.chat_template is not None or tokenizer.asked_as_messages
    return BuildSummary(
        manifest, results, progress.bytes, took, resumed, tokenizer.engine, settings.is_valid, named
    )


def _unit_bytes_of_images(settings: BuildSettings) -> int:
    """Input bytes of a shard: about 1024 records, estimated from the start of the first plain file
    that is not empty.

    A record that names a file is far smaller than its image, so the rule for text would put all
    into one shard.
    """
    plain = (
        (path, size)
        for path in settings.input
        if is_plain(path) and (size := size_of(place_of(path)))
    )
    if (first := next(plain, None)) is None:
        return settings.bytes_per_unit
    begins = (item.offset for item in read_extent(Extent(0, first[0], 0, first[1])))
    count = sum(begin > 0 for begin in itertools.takewhile(SAMPLED_BYTES.__ge__, begins))
    return RECORDS_OF_A_SHARD * max(1, min(first[1], SAMPLED_BYTES) // max(1, count))


def _decisive(
    settings: BuildSettings, tokenizer: Tokenizer, template: Template | None
) -> dict[str, Any]:
    """All that decides the bytes of the dataset, by the names of the flags; of images that lie in
    files, their root.
    """
    same = "ignore_keys context_roles roles columns tokenizer_engine seq_length oversize"
    same += " pad_multiple append_eod seed text_key max_record_bytes window_tokens"
    same += " cp_degrees valid_share is_valid prefix_tree"
    images: tuple[str, ...] = ()
    if settings.image_rules is not None:
        images = ("image_root", "max_crops_per_pack", "max_image_bytes", "max_video_bytes")
    values = {name: getattr(settings, name) for name in (*same.split(), *images)}
    if settings.image_rules is not None:
        values["image_rules"] = settings.image_rules.to_dict()
    return values | {
        "record_rules": RECORD_RULES,
        "chat_template": template.decisive
        if isinstance(template, ChatTemplate)
        else settings.chat_template,
        "input": [identity(path) for path in settings.input],
        "tokenizer": asdict(tokenizer.info()),
        "unit_bytes": settings.bytes_per_unit,
        "window_documents": WINDOW_DOCUMENTS,
    }


def _check_results(
    settings: BuildSettings, template: Template | None, done: Sequence[UnitResult]
) -> None:
    """ValueError where there are too many refusals, or messages of other units were written
    otherwise than now.
    """
    writers = {result.written_by for result in done if result.written_by is not None}
    if writers and writers != {writer_of(template)}:
        raise ValueError(
            f"{settings.output} was begun with another chat template than --tokenizer "
            f"{settings.tokenizer} has now; "
            "nothing was overwritten, --overwrite starts again"
        )
    forms = _forms_of(done)
    if forms[AS_MESSAGES] and forms[ALPACA]:
        alpaca = counted(forms[ALPACA], "record")
        others = counted(forms[AS_MESSAGES], "conversation")
        raise ValueError(
            f"--input: answers would be learned in two forms: {alpaca} of `instruction` with "
            "`output` after Alpaca's "
            f"prompt of 2023, and {others} (messages, or with `history` or `system`) as messages. "
            "Choose one: "
            f"--chat-template {HOUSE_FORM} writes all in megacp's own form, --chat-template NAME "
            "or FILE.jinja by a "
            "template"
        )
    refusals = [result.refusals for result in done if result.refusals]
    count = sum(map(len, refusals))
    if refusals and settings.on_error == "fail":
        raise ValueError(f"{refusals[0][0]}; an earlier run skipped it, give --on-error skip again")
    if settings.max_errors is not None and count > settings.max_errors:
        raise ValueError(
            f"{count} bad records, more than --max-errors {settings.max_errors}; the last is "
            f"{refusals[-1][-1]}"
        )


def _forms_of(results: Sequence[UnitResult]) -> Counter[str]:
    """Count the records of units by the form in which their answers are learned."""
    forms = Counter[str]()
    for result in results:
        forms.update(result.forms)
    return forms


def _check_use(settings: BuildSettings, results: Sequence[UnitResult]) -> None:
    """ValueError when there is nothing in the dataset, or nothing that could be learned from it."""
    documents = sum(result.documents for result in results)
    if settings.valid_share and not documents and not any(result.refusals for result in results):
        raise ValueError(
            f"--valid-share {settings.valid_share:g} leaves no record for {settings.output}: "
            "choose another"
        )
    if not any(result.entry for result in results):
        refused = [refusal for result in results for refusal in (*result.refusals, *result.dropped)]
        raise ValueError(
            f"--input: no usable record in {', '.join(settings.input)} ({len(refused)} refused); "
            f"no dataset was made{f'; {refused[0]}' if refused else ''}"
        )
    if not any(result.learned_tokens for result in results):
        raise ValueError(
            f"--input: {counted(documents, 'document')}, and none of their tokens is learned: no "
            "assistant says "
            "anything, or all weights are 0; no dataset was made"
        )


def _write(
    settings: BuildSettings,
    tokenizer: Tokenizer,
    template: Template | None,
    fingerprint: str,
    results: Sequence[UnitResult],
) -> DatasetManifest:
    """The files that make the directory a dataset, manifest last."""
    directory, order = Path(settings.output), {path: i for i, path in enumerate(settings.input)}
    rejected = sorted(
        (refusal for result in results for refusal in (*result.refusals, *result.dropped)),
        key=lambda refusal: (order[refusal.file], refusal.line, refusal.offset),
    )
    lines = [json.dumps(vars(refusal), ensure_ascii=False).encode() + b"\n" for refusal in rejected]
    files.write_atomically(directory / REJECTS_NAME, b"".join(lines))
    for path in tokenizer.files:  # so that a dataset can be read as text wherever it goes
        (directory / TOKENIZER_DIRECTORY).mkdir(exist_ok=True)
        files.write_atomically(directory / TOKENIZER_DIRECTORY / path.name, path.read_bytes())
    before = max(result.before_answers or "" for result in results)  # None: of an earlier version
    said = {name: sum(getattr(result, name) for result in results) for name in THOUGHTS} | {
        "before_answers": before
    }
    kept = None
    if isinstance(template, ChatTemplate) or any(
        result.written_by is not None for result in results
    ):
        text = "" if template is None else loaded(template).text
        kept = {"default": text, **{k: v for k, v in said.items() if v}}
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
