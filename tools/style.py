"""Count unnatural phrases in prose, and measure the density of the code.

python tools/style.py [FILE_OR_FOLDER ...] [--show]     (default: the whole repository)

Prose means documents, docstrings and comments. `tools/phrases.txt` lists the phrases.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROSE_OF_CODE = ("megacp", "tools", "examples", "bench", "tests")
DOCUMENTS = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md")
HIDDEN_CONDITIONS = (
    "product with a condition",
    "loop over a conditional expression",
    "splat of a conditional dict",
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
LAYOUT_TOKENS = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Tokens that are not counted as code."""


@functools.cache
def read_phrases() -> list[tuple[re.Pattern[str], str]]:
    """Return the unnatural phrases, each with its replacement."""
    phrases = []
    for line in (ROOT / "tools" / "phrases.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        pattern, _, replacement = line.partition("  ")
        phrases.append((re.compile(pattern, re.IGNORECASE), replacement))
    return phrases


@dataclass
class Style:
    """Counts over some files."""

    words: int = 0
    phrases: list[str] = field(default_factory=list)
    """A line per unnatural phrase, with its place and its replacement."""
    code_lines: int = 0
    comments: int = 0
    tokens: int = 0
    nodes: list[int] = field(default_factory=list)
    """Number of syntax-tree nodes in each simple statement."""
    idioms: list[tuple[str, str]] = field(default_factory=list)
    """The name and place of each dense idiom."""

    @property
    def phrases_per_1000(self) -> float:
        """Unnatural phrases per 1,000 words of prose."""
        return 1000 * len(self.phrases) / max(1, self.words)

    @property
    def tokens_per_line(self) -> float:
        """Tokens per line of code."""
        return self.tokens / max(1, self.code_lines)

    @property
    def comments_per_100(self) -> float:
        """Comments per 100 lines of code."""
        return 100 * self.comments / max(1, self.code_lines)

    @property
    def large_statement(self) -> int:
        """The 90th percentile of nodes per statement."""
        if not self.nodes:
            return 0
        return sorted(self.nodes)[int(0.9 * len(self.nodes))]

    def idiom(self, name: str) -> list[str]:
        """Return the places of one idiom."""
        return [place for found, place in self.idioms if found == name]


def string_statements(tree: ast.AST) -> Iterator[tuple[range, str]]:
    """Yield the lines and text of docstrings, including the strings that document fields."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            last = node.end_lineno or node.lineno
            yield range(node.lineno, last + 1), node.value.value


def dense_idioms(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each idiom that hides a condition or a loop."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                negation = isinstance(side, ast.UnaryOp) and isinstance(side.op, ast.Not)
                if negation or isinstance(side, (ast.Compare, ast.BoolOp)):
                    yield node.lineno, "product with a condition"
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.IfExp):
            yield node.lineno, "loop over a conditional expression"
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            splats = [value for key, value in pairs if key is None]
            if any(isinstance(value, (ast.Dict, ast.IfExp)) for value in splats):
                yield node.lineno, "splat of a conditional dict"
        elif isinstance(node, COMPREHENSIONS):
            inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
            if len(node.generators) > 1 or len(inner) > 1:
                yield node.lineno, "nested comprehension"


def count_prose(style: Style, place: str, line: int, text: str) -> None:
    """Add the words and the unnatural phrases of a text."""
    style.words += len(re.findall(r"\b[A-Za-z']+\b", text))
    for pattern, replacement in read_phrases():
        for found in pattern.finditer(text):
            style.phrases.append(f"{place}:{line}: {found[0]!r}: write {replacement}")


def count_code(style: Style, place: str, source: str) -> None:
    """Add the docstrings, comments, lines, tokens, statements and idioms of a Python file."""
    tree = ast.parse(source)
    prose_lines = set()
    for lines, text in string_statements(tree):
        count_prose(style, place, lines.start, text)
        prose_lines.update(lines)
    for line, name in dense_idioms(tree):
        style.idioms.append((name, f"{place}:{line}"))
    for node in ast.walk(tree):
        if isinstance(node, STATEMENTS):
            style.nodes.append(sum(1 for _ in ast.walk(node)))
    for number, line_text in enumerate(source.splitlines(), 1):
        stripped = line_text.strip()
        if stripped and not stripped.startswith("#") and number not in prose_lines:
            style.code_lines += 1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            style.comments += 1
            count_prose(style, place, token.start[0], token.string)
        elif token.type not in LAYOUT_TOKENS and token.start[0] not in prose_lines:
            style.tokens += 1


def measure(paths: Iterable[Path]) -> Style:
    """Return the counts for files, and for the Python and Markdown files in folders."""
    style = Style()
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix not in (".py", ".md"):
                continue
            source = file.read_text(encoding="utf-8")
            place = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
            if file.suffix == ".py":
                count_code(style, place, source)
            else:
                for number, line in enumerate(source.splitlines(), 1):
                    count_prose(style, place, number, line)
    return style


def main() -> None:
    """Print the counts and, with --show, the places."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help="files and folders to measure (default: the whole repository)",
    )
    parser.add_argument("--show", action="store_true", help="print the place of each finding")
    args = parser.parse_args()
    everything = [ROOT / name for name in (*PROSE_OF_CODE, *DOCUMENTS)]
    style = measure([path.resolve() for path in args.paths] or everything)
    if args.show:
        for line in style.phrases:
            print(line)
        for name, place in style.idioms:
            print(f"{place}: {name}")
    print(f"unnatural phrases per 1,000 words  {style.phrases_per_1000:6.1f}")
    print(f"tokens per line of code            {style.tokens_per_line:6.1f}")
    print(f"nodes per statement, 90th pct.     {style.large_statement:6d}")
    print(f"comments per 100 lines of code     {style.comments_per_100:6.1f}")
    for name, count in sorted(Counter(name for name, _ in style.idioms).items()):
        print(f"{name:34} {count:6d}")


if __name__ == "__main__":
    main()
