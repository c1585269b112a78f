"""Three simulated nodes of Ray write the bytes of one run, even if a node or the driver is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.prepare.packs.builds import run, visible, write_records

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]
RECORDS, UNIT_BYTES = 12_000, 12_000
FLAGS = [
    "--tokenizer",
    "byte",
    "--seq-length",
    "128",
    "--unit-bytes",
    str(UNIT_BYTES),
    "--seed",
    "3",
]
MAIN = "import sys; from megacp.prepare.command import main; sys.exit(main())"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Return records, and the files of their build by one worker."""
    folder = tmp_path_factory.mktemp("ray")
    write_records(folder / "a.jsonl", RECORDS)
    run([folder / "a.jsonl"], folder / "one", unit_bytes=UNIT_BYTES, seed=3)
    return folder / "a.jsonl", visible(folder / "one")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start three nodes on this machine, with a CPU each."""
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(2):
            nodes.add_node(**NODE)
        yield nodes
    finally:
        nodes.shutdown()


def started(source: Path, output: Path, address: str) -> subprocess.Popen[str]:
    """Start a build on the cluster, in a separate process."""
    flags = [
        "--input",
        str(source),
        "--output",
        str(output),
        *FLAGS,
        "--executor",
        "ray",
        "--ray-address",
        address,
    ]
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "build", *flags], stderr=subprocess.PIPE, text=True
    )


def finished(build: subprocess.Popen[str]) -> str:
    """Return the standard error of a build that must end well."""
    _, told = build.communicate(timeout=240)
    assert build.returncode == 0, told
    return told


def wait_for_units(output: Path, count: int, build: subprocess.Popen[str]) -> None:
    """Wait until this number of units is finished, while the build runs."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and build.poll() is None:
        if len(list(output.glob(".build/[0-9]*.json"))) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"the build has not come to {count} units: {build.poll()}")


def test_three_nodes_make_the_bytes_of_one_run(
    corpus: tuple[Path, dict[str, bytes]], cluster: Any, tmp_path: Path
) -> None:
    source, expected = corpus
    finished(started(source, tmp_path / "d", cluster.address))
    assert visible(tmp_path / "d") == expected


def test_a_bad_record_ends_the_build_with_its_line(
    corpus: tuple[Path, dict[str, bytes]], cluster: Any, tmp_path: Path
) -> None:
    source, _ = corpus
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[7000] = '{"no": "text"}\n'
    (tmp_path / "bad.jsonl").write_text("".join(lines), encoding="utf-8")
    build = started(tmp_path / "bad.jsonl", tmp_path / "d", cluster.address)
    _, told = build.communicate(timeout=240)
    assert build.returncode == 2 and f"error: {tmp_path / 'bad.jsonl'}:7001: " in told


def test_a_driver_that_is_killed_goes_on_where_it_was(
    corpus: tuple[Path, dict[str, bytes]], cluster: Any, tmp_path: Path, moments: random.Random
) -> None:
    """Workers of the killed driver may still write when the next driver begins."""
    source, expected = corpus
    build = started(source, tmp_path / "d", cluster.address)
    wait_for_units(tmp_path / "d", moments.randrange(1, 20), build)
    os.kill(build.pid, signal.SIGKILL)
    build.communicate()
    assert not (tmp_path / "d/manifest.json").exists()
    finished(started(source, tmp_path / "d", cluster.address))
    assert visible(tmp_path / "d") == expected


def test_a_node_that_is_killed_costs_no_byte(
    corpus: tuple[Path, dict[str, bytes]], cluster: Any, tmp_path: Path, moments: random.Random
) -> None:
    source, expected = corpus
    build = started(source, tmp_path / "d", cluster.address)
    wait_for_units(tmp_path / "d", moments.randrange(1, 20), build)
    node = moments.choice(sorted(cluster.worker_nodes, key=lambda one: one.unique_id))
    cluster.remove_node(node, allow_graceful=False)
    assert build.poll() is None, "the node was killed too late"
    finished(build)
    cluster.add_node(**NODE)
    assert visible(tmp_path / "d") == expected
