"""Print the size of each package, the imports of each entry point, and the files that contain or
compare the values of an option.

    python tools/structure.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRANCES = (
    "megacp.train",
    "megacp.attention",
    "megacp.integrations",
    "megacp.prepare.command",
    "megacp.plan.command",
)
"""Entry points: modules and packages whose imports are followed, directly and indirectly."""
VALUES = (
    "p2p",
    "all_gather",
    "a2a",
    "kv_exchange",
    "full",
    "selective",
    "optim_grads_params",
    "zero_bubble",
)
"""Flag values for which the files that contain them are counted."""


@dataclass(frozen=True)
class Choice:
    """An option with several values. Everything that depends on the value should be in the row of
    its table, so that other code need not compare values.
    """

    flag: str
    """The config field."""
    words: tuple[str, ...]
    """Its values except `auto`."""
    shared: tuple[str, ...] = ()
    """Values that other options have, too. They count only next to a name of this option."""
    names: tuple[str, ...] = ()
    """Names of other variables and fields that contain the value."""
    rows: tuple[str, ...] = ()
    """Constants that are compared by identity."""


CHOICES = {
    "transport": Choice("cp_comm_type", ("p2p", "all_gather", "a2a", "a2a+p2p", "kv_exchange")),
    "layout": Choice(
        "cp_layout",
        ("zigzag", "zigzag_document", "contiguous", "balanced"),
        shared=("contiguous",),
        names=("layout",),
    ),
    "recomputation": Choice(
        "recompute_granularity",
        ("none", "selective", "full"),
        shared=("none",),
        names=("recompute", "granularity"),
    ),
    "sharding": Choice(
        "data_parallel_sharding_strategy", ("optim", "optim_grads", "optim_grads_params")
    ),
    "schedule": Choice("pipeline_schedule", ("1f1b", "zero_bubble")),
    "norm position": Choice(
        "norm_position",
        ("before", "after", "both"),
        shared=("before", "after", "both"),
    ),
    "kind of layer": Choice(
        "linear_attention_rule",
        ("gated_delta", "mamba2"),
        rows=("ATTENTION", "GATED_DELTA", "MAMBA2", "DENSE", "MOE", "SHARED"),
    ),
}
"""Options whose values should be compared in one file; `tests/test_architecture.py` checks this."""
CONFIGURATION = "megacp.engine.config."
"""Prefix of the modules that define the values of flags and may compare them."""


def sources() -> dict[str, Path]:
    """Return the files of the megacp package by module name."""
    found = {}
    for path in sorted((ROOT / "megacp").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, including imports inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def closure(starts: set[str], files: dict[str, Path]) -> set[str]:
    """Return the modules in `starts` and all modules that they import, directly or indirectly."""
    found = set(starts)
    waiting = list(starts)
    while waiting:
        for name in imported(files[waiting.pop()]):
            if name in files and name not in found:
                found.add(name)
                waiting.append(name)
    return found


def lines_of(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def purpose(package: Path) -> str:
    """Return the first sentence of a package's docstring."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def print_packages(files: dict[str, Path]) -> None:
    # Lines include docstrings, comments and blank lines.
    whole = lines_of(list(files.values()))
    print(f"{'package':<22}{'files':>6}{'lines':>8}{'share':>7}  purpose")
    for package in sorted(path.parent for path in (ROOT / "megacp").glob("*/__init__.py")):
        inside = [path for path in files.values() if package in path.parents]
        lines = lines_of(inside)
        print(
            f"megacp.{package.name:<15}{len(inside):>6}{lines:>8,}{lines / whole:>7.0%}  "
            f"{purpose(package)}"
        )
    print(f"{'megacp':<22}{len(files):>6}{whole:>8,}")


def print_closures(files: dict[str, Path]) -> None:
    print(f"\n{'imported by':<26}{'files':>6}{'lines':>8}")
    for start in ENTRANCES:
        # A package stands for all its modules.
        starts = {name for name in files if name == start or name.startswith(start + ".")}
        reached = closure(starts, files)
        print(f"{start:<26}{len(reached):>6}{lines_of([files[name] for name in reached]):>8,}")


def print_choices(files: dict[str, Path]) -> None:
    print(f"\n{'value':<22}{'named in files':>15}")
    everywhere = set()
    for value in VALUES:
        # Only a quoted value counts, so prose that mentions it does not.
        naming = {
            path for path in files.values() if f'"{value}"' in path.read_text(encoding="utf-8")
        }
        everywhere |= naming
        print(f"{value:<22}{len(naming):>15}")
    print(f"{'any of them':<22}{len(everywhere):>15}")


def compared_parts(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a node compares, including the elements of literals.

    The list is empty if the node is not a comparison.
    """
    compared: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        compared = [node.left, *node.comparators]
    elif isinstance(node, ast.Match):
        patterns = [inner for case in node.cases for inner in ast.walk(case.pattern)]
        compared = [
            node.subject,
            *(inner.value for inner in patterns if isinstance(inner, ast.MatchValue)),
        ]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("index", "startswith", "endswith"):
            compared = [node.func.value, *node.args]
    parts: list[ast.expr] = []
    for one in compared:
        parts += one.elts if isinstance(one, ast.Tuple | ast.List | ast.Set) else [one]
    return parts


def compares(tree: ast.Module, choice: Choice) -> bool:
    """Return whether a file compares values or rows of an option, or has a table of its values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            # A table has at least two rows; a single key names something else.
            if len(keys & set(choice.words)) > 1:
                return True
        parts = compared_parts(node)
        if not parts:
            continue
        words = {part.value for part in parts if isinstance(part, ast.Constant)} & set(choice.words)
        rows = {part.id for part in parts if isinstance(part, ast.Name)} & set(choice.rows)
        if rows or words - set(choice.shared):
            return True
        # A shared value counts only next to the flag or a variable of this option.
        named = set[object]()
        for part in parts:
            for inner in ast.walk(part):
                if isinstance(inner, ast.Name):
                    named.add(inner.id)
                elif isinstance(inner, ast.Attribute):
                    named.add(inner.attr)
                elif isinstance(inner, ast.Constant):
                    named.add(inner.value)
        if words and not named.isdisjoint((choice.flag, *choice.names)):
            return True
    return False


def trees(files: dict[str, Path]) -> dict[str, ast.Module]:
    """Return the syntax trees of the files by module name."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}


def comparing(choice: Choice, modules: dict[str, ast.Module]) -> list[str]:
    """Return the modules outside the configuration that compare values or rows of an option."""
    outside = {name: tree for name, tree in modules.items() if not name.startswith(CONFIGURATION)}
    return [name for name, tree in outside.items() if compares(tree, choice)]


def print_comparisons(files: dict[str, Path]) -> None:
    print(f"\n{'choice':<22}compared in, except {CONFIGURATION}*")
    modules = trees(files)
    for name, choice in CHOICES.items():
        print(f"{name:<22}{', '.join(comparing(choice, modules)) or '-'}")


def main() -> None:
    files = sources()
    print_packages(files)
    print_closures(files)
    print_choices(files)
    print_comparisons(files)


if __name__ == "__main__":
    main()
