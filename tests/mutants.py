"""Break the code in one place at a time, and report the breaks that no fast test notices.

Every folder of tests has a file `breaks.py` with the breaks that its tests must notice:

    BREAKS = {
        (broken file, test files): [
            (text that is in the file exactly once, its replacement, the mistake in words),
        ],
    }

`make mutants` runs all of them in half an hour on two cores. `make mutants WORDS="ring mask"` runs
those whose file or mistake contains one of these words. Each break is made in a copy of the tree,
and the unbroken copy is tested first. The exit status is 1 if fewer than 97 % of the breaks are
noticed.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAST = "not slow and not faults and not gpu"
SECONDS = 240
LEAST = 0.97


class Break(NamedTuple):
    """One mistake: `new` replaces `old` in the file, and at least one of `tests` must fail."""

    file: str
    tests: str
    old: str
    new: str
    mistake: str


def all_breaks(root: Path = ROOT) -> list[Break]:
    """Return the breaks of all folders of tests."""
    found = []
    for path in sorted(root.glob("tests/**/breaks.py")):
        for (file, tests), rows in runpy.run_path(str(path))["BREAKS"].items():
            found += [Break(file, tests, *row) for row in rows]
    return found


def problems(breaks: list[Break], root: Path = ROOT) -> list[str]:
    """Return a line for every text that does not occur exactly once in its file, and for every
    missing test file.
    """
    found = []
    for row in breaks:
        path = root / row.file
        count = path.read_text(encoding="utf-8").count(row.old) if path.exists() else 0
        if count != 1:
            found.append(f"{row.file} contains {count} times: {row.old}")
        missing = [test for test in row.tests.split() if not (root / test).exists()]
        found += [f"{row.file} is to be tested by {test}, which does not exist" for test in missing]
    return found


def passes(tests: str, tree: Path) -> bool:
    """Return whether the fast tests of these files pass in a copy of the tree. A test that hangs
    does not pass.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", FAST]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=tree,
            env=environment,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    # 0: all pass, 1: a test fails, 2: a file cannot be imported, 5: no test is fast
    assert done.returncode in (0, 1, 2, 5), done.stdout.decode()[-2000:]
    return done.returncode in (0, 5)


def is_noticed(row: Break, tree: Path) -> bool:
    """Return whether a test fails with the break in a copy of the tree, which is then repaired."""
    path = tree / row.file
    whole = path.read_text(encoding="utf-8")
    broken = whole.replace(row.old, row.new)
    if path.suffix == ".py":
        compile(broken, row.mistake, "exec")  # any test would notice a syntax error
    path.write_text(broken, encoding="utf-8")
    try:
        return not passes(row.tests, tree)
    finally:
        path.write_text(whole, encoding="utf-8")


def copy_tree(root: Path, tree: Path) -> None:
    """Copy the files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, check=True, text=True
    ).stdout
    for file in listed.splitlines():
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, tree / file)


def main(words: list[str], root: Path = ROOT) -> int:
    """Run the chosen breaks on two copies of the tree and print which are noticed. Return the exit
    status.
    """
    breaks = all_breaks(root)
    if found := problems(breaks, root):
        print("\n".join(found))
        return 1
    chosen = [
        row
        for row in breaks
        if not words or any(word in f"{row.file} {row.mistake}" for word in words)
    ]
    suites = list(dict.fromkeys(row.tests for row in chosen))
    with tempfile.TemporaryDirectory() as above, concurrent.futures.ThreadPoolExecutor(2) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for name in ("a", "b"):
            copy_tree(root, Path(above, name))
            trees.put(Path(above, name))

        def on_a_tree(test, argument):
            tree = trees.get()
            try:
                return test(argument, tree)
            finally:
                trees.put(tree)

        whole = list(pool.map(lambda tests: on_a_tree(passes, tests), suites))
        if not all(whole):
            failing = [tests for tests, passed in zip(suites, whole, strict=True) if not passed]
            print(f"these tests fail, or hang, before anything is broken: {', '.join(failing)}")
            return 1
        survived = 0
        for row, noticed in zip(
            chosen, pool.map(lambda row: on_a_tree(is_noticed, row), chosen), strict=True
        ):
            print(f"{'noticed ' if noticed else 'SURVIVED'}  {row.file}: {row.mistake}", flush=True)
            survived += not noticed
    print(f"{len(chosen) - survived} of {len(chosen)} breaks were noticed")
    return int(survived > (1 - LEAST) * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
