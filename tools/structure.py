"""Print the size of each package, what a module imports, and in how many files a choice is named.

python tools/structure.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRANCES = ("megacp.train", "megacp.attention", "megacp.integrations", "megacp.prepare.command", "megacp.plan.command")
"""Modules and packages whose imports are followed."""
CHOICES = ("p2p", "all_gather", "a2a", "kv_exchange", "full", "selective", "optim_grads_params", "zero_bubble")
"""Values of flags; a value should be compared in one file."""


def sources() -> dict[str, Path]:
    """Return the files of the package by module name."""
    found = {}
    for path in sorted((ROOT / "megacp").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def closure(starts: set[str], files: dict[str, Path]) -> set[str]:
    """Return the modules that some modules import, directly or indirectly, themselves included."""
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
    whole = lines_of(list(files.values()))
    print(f"{'package':<22}{'files':>6}{'lines':>8}{'share':>7}  purpose")
    for package in sorted(path.parent for path in (ROOT / "megacp").glob("*/__init__.py")):
        inside = [path for path in files.values() if package in path.parents]
        lines = lines_of(inside)
        print(f"megacp.{package.name:<15}{len(inside):>6}{lines:>8,}{lines / whole:>7.0%}  {purpose(package)}")
    print(f"{'megacp':<22}{len(files):>6}{whole:>8,}")


def print_closures(files: dict[str, Path]) -> None:
    print(f"\n{'imported by':<26}{'files':>6}{'lines':>8}")
    for start in ENTRANCES:
        starts = {name for name in files if name == start or name.startswith(start + ".")}
        reached = closure(starts, files)
        print(f"{start:<26}{len(reached):>6}{lines_of([files[name] for name in reached]):>8,}")


def print_choices(files: dict[str, Path]) -> None:
    print(f"\n{'value':<22}{'named in files':>15}")
    everywhere = set()
    for choice in CHOICES:
        naming = {path for path in files.values() if f'"{choice}"' in path.read_text(encoding="utf-8")}
        everywhere |= naming
        print(f"{choice:<22}{len(naming):>15}")
    print(f"{'any of them':<22}{len(everywhere):>15}")


def main() -> None:
    files = sources()
    print_packages(files)
    print_closures(files)
    print_choices(files)


if __name__ == "__main__":
    main()
