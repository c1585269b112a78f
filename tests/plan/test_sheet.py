"""Hand-written hardware sheets are read, or refused in one message that lists every error."""

from __future__ import annotations

import copy
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacp.plan import command
from megacp.plan.hardware import hardware, nominal_sheet

SIZES = [
    "--num-layers",
    "2",
    "--seq-length",
    "512",
    "--global-batch-size",
    "2",
    "--vocab-size",
    "4096",
]


def whole() -> dict[str, Any]:
    """Return a sheet as `calibrate` writes it.

    Its GPU has little memory, so the search for the longest row ends soon.
    """
    sheet = nominal_sheet()
    terms = {"dtype": "float32", "calls": 3e-4, "overlap": 0.0, "cores": 2.0, "beside": 1.0}
    return {**sheet, "gpus": {"here": {**sheet["gpus"]["h100"], "memory": 0.25}}, "terms": terms}


def planned(folder: Path, content: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return exit status, output and error message of a plan with a sheet.

    `content` is text, bytes, or a value for YAML.
    """
    path = folder / "here.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        path.write_text(yaml.safe_dump(content))
    status = command.main(["--gpu", str(path), "--world-size", "2", *SIZES])
    said = capsys.readouterr()
    return status, said.out, said.err


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each field, including fields of sections and lists."""
    keys = (
        value.keys()
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    found = []
    for key in keys:
        found += [(*before, key), *places(value[key], (*before, key))]
    return found


def changed(sheet: Any, place: tuple[Any, ...], value: Any) -> Any:
    sheet = copy.deepcopy(sheet)
    part = sheet
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return sheet


def removed(sheet: Any, place: tuple[Any, ...]) -> Any:
    sheet = copy.deepcopy(sheet)
    part = sheet
    for key in place[:-1]:
        part = part[key]
    del part[place[-1]]
    return sheet


WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "not a number": (
        ("gpus", "here", "flops"),
        math.nan,
        r"flops: got nan, expected at least 1 and at most 1e\+24",
    ),
    "without an end": (("reached", "latency"), math.inf, "reached.latency: got inf, expected"),
    "nothing": (("gpus", "here", "bandwidth"), 0, "gpus.bandwidth: got 0, expected at least 1"),
    "below nothing": (("reached", "fused", 1), -0.5, r"reached.fused\[1\]: got -0.5"),
    "a text": (("host",), "fast", "host: expected a number, got 'fast'"),
    "a truth": (("host_memory",), True, "host_memory: expected a number, got True"),
    "a list": (
        ("reached", "products"),
        [0.5],
        "reached.products: expected a number, got a list of 1",
    ),
    "one share": (
        ("reached", "flex"),
        0.5,
        "reached.flex: expected two numbers, for the forward and the backward pass, got 0.5",
    ),
    "three shares": (("reached", "flex"), [1, 1, 1], "reached.flex: expected two numbers"),
    "a long number": (
        ("gpus", "here", "link"),
        10**400,
        "gpus.link: got an integer of more than 64 bits",
    ),
    "another type": (
        ("terms", "dtype"),
        "float8",
        "terms.dtype: expected float32, bfloat16, float64, got 'float8'",
    ),
    "above one": (
        ("terms", "overlap"),
        1.5,
        "terms.overlap: got 1.5, expected at least 0 and at most 1",
    ),
    "a number as text": (("gpus", "here", "source"), 5, "gpus.source: expected text, got 5"),
    "no part": (
        ("terms",),
        None,
        "terms: expected the fields calls, overlap, cores, beside, dtype, got None",
    ),
    "no gpu": (
        ("gpus",),
        {},
        "gpus: expected one GPU name with its fields, got a mapping of 0",
    ),
    "another name": (("gpus", "here", "flop"), 1.0, "unknown field gpus.flop, did you mean flops?"),
    "another part": (("reach",), {}, "unknown field reach, did you mean reached?"),
    "another term": (("terms", "core"), 2, "unknown field terms.core, did you mean cores?"),
    "a strange name": (("reached", "z" * 10_000), 1, "unknown field reached.z{60}\n"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, value, message = WRONG[name]
    status, _, said = planned(tmp_path, changed(whole(), place, value), capsys)
    with pytest.raises(ValueError, match=message):
        assert status == 2 and said.startswith(f"error: --gpu {tmp_path}/here.yaml")
        raise ValueError(said)


@pytest.mark.parametrize("place", places(whole()), ids=lambda place: ".".join(map(str, place)))
def test_only_what_is_known_otherwise_may_be_missing(
    place: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, said = planned(tmp_path, removed(whole(), place), capsys)
    if place[0] == "terms" or place == ("networks", "ethernet"):
        assert status == 0 and "nan" not in out
    else:
        assert status == 2 and ("missing" in said or "two numbers" in said or "one GPU" in said), (
            said
        )


def test_all_that_is_wrong_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = changed(changed(whole(), ("host",), "fast"), ("terms", "overlap"), 2)
    status, _, said = planned(tmp_path, sheet, capsys)
    assert status == 2 and "host: expected" in said and "terms.overlap: got 2" in said


VALUES = [
    math.nan,
    math.inf,
    -1,
    0,
    1e308,
    5e-324,
    10**30,
    None,
    True,
    "",
    "1e12",
    "x" * 500,
    [],
    [1],
    {},
    {1: 2},
]
VALUES += [[0.5, 0.5], b"bytes", {"a": {"b": 1}}, 0.5, 3]


def test_random_fields_are_one_message_or_a_plan_of_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, taken = random.Random(0), []
    for _ in range(100):
        sheet = whole()
        for _ in range(draw.choice((1, 1, 3))):
            place = draw.choice(places(sheet))
            sheet = (
                removed(sheet, place)
                if draw.random() < 0.2
                else changed(sheet, place, draw.choice(VALUES))
            )
        path = tmp_path / "here.yaml"
        path.write_text(yaml.safe_dump(sheet))
        try:
            hardware(str(path), "infiniband")
        except ValueError as error:
            assert str(error).startswith(f"--gpu {path} is not a sheet") and len(str(error)) < 4000
        else:
            taken.append(sheet)
    assert 10 < len(taken) < 60
    for sheet in taken[:8]:
        status, out, said = planned(tmp_path, sheet, capsys)
        assert status in (0, 1) and "nan" not in out and not said


TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "no YAML": b"gpus: [",
    "no text": bytes(range(256)),
    "half a character": b"gpus: \xff",
    "a list": b"- 1",
    "an alias of itself": b"gpus: &a\n  b: *a\n",
    "two of a name": b"host: 1\nhost: 2\n",
    "deep": b"[" * 5000,
    "an object": b"!!python/object/apply:os.getcwd []",
    "a list as a name": b"? [1]\n: 2\n",
    "a long line of digits": b"host: " + b"9" * 10_000,
    "large": b"#" * (2 << 20),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_no_sheet_is_one_message(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, said = planned(tmp_path, TEXTS[name], capsys)
    assert (
        status == 2 and said.startswith("error: --gpu") and "here.yaml" in said and len(said) < 2000
    )


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "missing", "of a file"])
def test_only_a_regular_file_is_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = {"device": Path("/dev/zero"), "of a file": tmp_path / "file" / "x"}.get(
        kind, tmp_path / "here"
    )
    (tmp_path / "file").touch()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    assert command.main(["--gpu", str(path), "--world-size", "2", *SIZES]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --gpu") and str(path) in said


def test_numbers_without_a_dot_and_endless_cores_are_read(tmp_path: Path) -> None:
    """`3e12` is read as a number, as in other files of flags."""
    sheet = changed(whole(), ("terms", "cores"), math.inf)
    text = yaml.safe_dump(sheet).replace("989400000000000.0", "3e12")
    (tmp_path / "here.yaml").write_text(text)
    here = hardware(str(tmp_path / "here.yaml"), "infiniband")
    assert (here.peak, here.cores, here.dtype) == (3e12, math.inf, "float32")


def test_the_network_that_is_asked_for_must_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, said = planned(tmp_path, removed(whole(), ("networks", "infiniband")), capsys)
    assert status == 2 and "networks: infiniband is missing, which --network selects" in said
