"""Write the table of rooms and their lines into docs/decisions.md, between its marks (`make format`)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- rooms: made by tools/rooms.py -->", "<!-- end of rooms -->"
ROOMS = (
    "megacp",
    "megacp/core",
    *(f"megacp/core/{p.name}" for p in sorted((ROOT / "megacp/core").iterdir()) if p.is_dir()),
)
ROOMS += ("megacp/prepare", "megacp/huggingface", "megacp/plan", "megacp/verify", "bench", "tools", "tests")


def purpose(room: Path) -> str:
    """The first sentence of a room's docstring."""
    init = room / "__init__.py"
    text = (ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "") if init.exists() else "Commands"
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def table() -> str:
    """The rows, sub-rooms of the core indented."""
    lines = ["|room|what|lines|", "|---|---|---|"]
    for name in ROOMS:
        room = ROOT / name
        files = [path for path in sorted(room.rglob("*.py"))]
        if files:
            count = sum(path.read_bytes().count(b"\n") for path in files)
            lines.append(f"|{name.replace('megacp/core/', '… ')}|{purpose(room)}|{count / 1000:.1f}k|")
    return "\n".join(lines)


def main() -> int:
    """Replace the table of the page."""
    page = ROOT / "docs/decisions.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
