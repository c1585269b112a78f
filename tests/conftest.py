"""Settings of all tests. Property tests use the same examples every time, and a slow moment of the
machine does not fail a test.
"""

import gc
import json
import os
import random
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("megacp", deadline=None, derandomize=True)
settings.load_profile("megacp")

LEFT = 'read _; grep -ls "$0" /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r kill -KILL'
"""Kills all processes with a marker in their environment when the other end of stdin closes."""

# During collection: modules and their functions stay alive, and walking them takes a quarter of the
# time.
gc.disable()


def pytest_configure() -> None:
    """Kill the processes that tests have started when this process ends, however it ends.

    A stopped process would not notice a closed pipe.
    """
    os.environ["MEGACP_TESTS"] = word = secrets.token_hex(8)
    read, _ = os.pipe()
    end = [(os.POSIX_SPAWN_DUP2, read, 0)]
    os.posix_spawn(
        "/bin/sh", ["sh", "-c", LEFT, word], {"PATH": os.defpath}, file_actions=end, setsid=True
    )
    os.close(read)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: tests of faults mostly wait, so other tests run meanwhile, and none of the
    fault tests is left for the end.
    """
    items.sort(key=lambda item: "faults" not in str(item.path))


def pytest_collection_finish() -> None:
    """Freeze the imported objects: the garbage collector need not walk them in every test."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_walked_once() -> Iterator[None]:
    """Freeze the objects that the tests of a file have imported and cached."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def numbers_below_the_normal_ones() -> Iterator[None]:
    """Reset the variables of a CPU rank after a test whose process was one."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_disks() -> Iterator[None]:
    """Replace fsync: no test cuts the power, and thousands of files would take milliseconds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the number and the seed of random fault moments."""
    parser.addoption(
        "--fault-seed", type=int, default=0, help="first seed of the random moments in tests/faults"
    )
    parser.addoption(
        "--fault-repeat",
        type=int,
        default=1,
        help="seeds tried by each test that has random moments",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test per seed. `moments` is random.Random(seed), and the test's name has the seed.

    --fault-repeat sets the number of seeds.
    """
    if "moments" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(f"--fault-{name}") for name in ("seed", "repeat"))
        seeds = range(first, first + count)
        metafunc.parametrize(
            "moments", [random.Random(s) for s in seeds], ids=[f"seed{s}" for s in seeds]
        )


@pytest.fixture(scope="session")
def packed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return byte packs of 64 tokens of real text, vocabulary 257, built by the tool."""
    from megacp.prepare import command as preprocess

    folder = tmp_path_factory.mktemp("packed")
    records = [{"text": f"{i} times {i} is {i * i}. " * (1 + i % 7)} for i in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    build = [
        "build",
        "--input",
        str(folder / "text.jsonl"),
        "--output",
        str(folder / "data"),
        "--tokenizer",
        "byte",
    ]
    assert (
        preprocess.main([*build, "--seq-length", "64", "--oversize", "split", "--workers", "1"])
        == 0
    )
    return folder / "data"
