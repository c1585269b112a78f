"""List the CUDA-only lines that are executed on a CPU: `python tests/cuda_lines.py`.

The command is also `make cuda-lines`. A line counts if its file is only for CUDA (`WHOLE`), or if
it is in a branch for CUDA, NCCL or streams. Fake steps and tests with simulated devices run with
these lines marked. Each marked line reports itself, in any thread or process; backward runs in a
thread that Python's tracers do not see. Functions compiled by Dynamo are not marked, and count if
they are called.
"""

from __future__ import annotations

import ast
import collections
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("distributed", "attention", "engine", "training")
"""Packages with code for CUDA."""
WHOLE = (
    "attention/ops/flex.py",
    "engine/backends/transformer_engine.py",
    "engine/backends/thd.py",
    "engine/backends/apex.py",
)
WHOLE += ("attention/ops/cudnn.py", "attention/context_parallel/fused_states.py")
CUDA = (
    '"cuda"',
    "'cuda'",
    '"nccl"',
    "'nccl'",
    "is_compiled(",
    "on_gpu",
    "self.stream is None",
    "stream is not None",
)
CUDA += (".is_cuda",)
ELSEWHERE = (
    "!= 'cuda'",
    "== 'cpu'",
    "not is_compiled(",
    "self.stream is None",
    "backend == 'gloo'",
    "through_host",
    "not total.is_cuda",
)
CASES = [
    "4d",
    "a2a",
    "a2a+p2p",
    "interleaved",
    "on the host",
    "vision",
    "float32",
    "engine p2p",
    "engine a2a",
]
PARITY = "tests/tools/test_check_parity.py"
REFUSED = "test_a_torch_that_cannot_compile_the_backward_of_attention_is_refused_on_cuda"
RUNS = (
    [sys.executable, "-W", "ignore", "-m", "tests.verify.fake_cases", *CASES],
    [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "tests/engine/backends",
    ]
    + [
        "tests/attention/ops/test_flex.py",
        "tests/attention/ops/test_pointwise.py",
        "tests/distributed/test_grid.py",
    ]
    + ["tests/attention/context_parallel/test_fused_states.py", f"{PARITY}::{REFUSED}"],
)


def cuda_lines(source: str, whole: bool) -> dict[int, str]:
    """Return the CUDA-only statements as a map from line to function."""
    found: dict[int, str] = {}

    def add(statements: Sequence[ast.stmt], function: str) -> None:
        for statement in statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.stmt) and not isinstance(
                    node, (ast.FunctionDef, ast.ClassDef, ast.Import)
                ):
                    found[node.lineno] = function

    def visit(body: Sequence[ast.stmt], function: str) -> None:
        for place, statement in enumerate(body):
            if isinstance(statement, ast.FunctionDef):
                if whole:
                    add([s for s in statement.body if not _is_text(s)], statement.name)
                visit(statement.body, statement.name)
                continue
            if isinstance(statement, ast.If) and function:
                test = ast.unparse(statement.test)
                if any(word in test for word in ELSEWHERE):
                    leaves = isinstance(statement.body[-1], (ast.Return, ast.Raise))
                    add([*statement.orelse, *(body[place + 1 :] if leaves else ())], function)
                elif any(word in test for word in CUDA):
                    add(statement.body, function)
            for part in ("body", "orelse", "finalbody"):
                visit(getattr(statement, part, []), function)

    visit(ast.parse(source).body, "")
    return found


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def files() -> dict[Path, dict[int, str]]:
    """Return the files with such lines."""
    found = {}
    for path in sorted(
        [path for name in PACKAGES for path in (ROOT / "megacp" / name).rglob("*.py")]
    ):
        lines = cuda_lines(path.read_text(), str(path).endswith(WHOLE))
        if lines:
            found[path] = lines
    return found


class _Marked(importlib.machinery.SourceFileLoader):
    """Loads a module whose CUDA lines report themselves."""

    def source_to_code(self, data: Any, path: Any, **options: Any) -> Any:
        source, place = bytes(data).decode(), Path(path).resolve()
        lines, compiled = (
            cuda_lines(source, str(place).endswith(WHOLE)),
            set(_compiled(ast.parse(source))),
        )

        class Mark(ast.NodeTransformer):
            def generic_visit(self, node: ast.AST) -> ast.AST:
                super().generic_visit(node)
                for part in ("body", "orelse", "finalbody"):
                    if isinstance(body := getattr(node, part, None), list):
                        setattr(node, part, [marked for one in body for marked in _marked(one)])
                return node

        def _marked(statement: ast.AST) -> Iterator[ast.AST]:
            line = getattr(statement, "lineno", 0)
            if (
                isinstance(statement, ast.stmt)
                and line in lines
                and line not in compiled
                and not _is_text(statement)
            ):
                call = ast.parse(
                    f"__import__('tests.cuda_lines').cuda_lines.hit({str(place)!r}, {line})"
                ).body[0]
                yield ast.copy_location(call, statement)
            yield statement

        return compile(
            ast.fix_missing_locations(Mark().visit(ast.parse(source))),
            path,
            "exec",
            dont_inherit=True,
        )

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # never from a file of compiled code


def _compiled(tree: ast.Module) -> Iterator[int]:
    """Return the lines of functions that Dynamo compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (
            any("fused" in ast.unparse(one) for one in node.decorator_list)
            or node.name in ("rule", "_rule", "flex_backward", "trace")
        ):
            yield from range(node.lineno, (node.end_lineno or 0) + 1)


class _Finder:
    """Gives the marking loader to these files."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(tuple(f"megacp.{package}." for package in PACKAGES)):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin and Path(spec.origin).resolve() in _files():
            spec.loader = _Marked(name, spec.origin)
        return spec


_FOUND: dict[str, Any] = {"files": None, "hits": set(), "to": None}


def _files() -> dict[Path, dict[int, str]]:
    if _FOUND["files"] is None:
        _FOUND["files"] = files()
    return _FOUND["files"]


def hit(path: str, line: int) -> None:
    """Report that a marked line is about to run."""
    if (path, line) not in _FOUND["hits"]:
        _FOUND["hits"].add((path, line))
        with open(_FOUND["to"], "a") as out:  # at once: processes of ranks are killed
            out.write(f"{path}:{line}\n")


def install(folder: str) -> None:
    """Install the finder; every Python process of the runs calls it."""
    _FOUND["to"] = f"{folder}/{os.getpid()}.hits"
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


def main() -> int:
    """Run the tests; print a line per file: executed lines, all lines, and lines not reached."""
    with tempfile.TemporaryDirectory() as folder:
        start = (
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport tests.cuda_lines as "
            f"c\nc.install({folder!r})\n"
        )
        (Path(folder) / "sitecustomize.py").write_text(start)
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
        for command in RUNS:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            print(f"{' '.join(command[3:6])} ...: exit status {done.returncode}", flush=True)
            if done.returncode:
                print((done.stdout + done.stderr)[-2000:])
        hits = {
            tuple(line.rsplit(":", 1))
            for one in Path(folder).glob("*.hits")
            for line in one.read_text().split()
        }
    total: collections.Counter[str] = collections.Counter()
    for path, lines in files().items():
        compiled = set(_compiled(ast.parse(path.read_text())))
        called = {line for line in lines if (str(path), str(line)) in hits} | (
            compiled & set(lines)
        )
        missed = sorted(set(lines) - called)
        total.update(lines=len(lines), called=len(called))
        shown = f"; not {', '.join(map(str, missed))}" if missed else ""
        print(f"{len(called):4d} of {len(lines):4d}  {path.relative_to(ROOT)}{shown}")
    print(f"{100 * total['called'] / total['lines']:.1f} %")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
