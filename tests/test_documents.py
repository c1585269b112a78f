"""README and docs/: pages are short where they have to be, and all references in them exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "examples/README"))
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 1_000
OTHERS = {
    *("--nproc-per-node", "--nnodes", "--max-restarts", "--standalone"),  # torchrun
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf"),
    "--default-chat-template-kwargs",  # vLLM
    "--local-dir",  # hf download
}
"""Flags of other programs."""
MADE = {"demo_out/model.yaml", "scripts/base_train.py", "attention/cp_attention.py"}
"""Files that a command writes, or that belong to another project."""
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


TOURS = ("attention", "engine", "training")
"""Pages that explain a package step by step."""


@pytest.mark.parametrize("name", TOURS)
def test_the_code_on_a_page_about_a_package_runs(name: str) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert blocks
    for block in blocks:
        exec(block, {})


@cache
def sources() -> str:
    """Return all code, in which a flag occurs as it is typed or as the name of its field."""
    files = [
        path
        for top in ("megacp", "tools", "examples", "tests")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_can_be_read_in_five_minutes() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= MOST_WORDS


@pages
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = page if not name else (page.parent / name).resolve()
        if not target.startswith("http") and (
            not file.exists() or (anchor and anchor not in anchors(file))
        ):
            broken.append(target)
    assert broken == []


@pages
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Return whether a path exists from the root, next to the page, or below megacp/."""
    named = re.findall(
        r"(?<![\w/])(?:[\w]+/)+\w+\.(?:py|sh|yaml|sbatch)\b", page.read_text(encoding="utf-8")
    )
    places = ROOT, ROOT / "megacp", page.parent
    found = {name for name in named if any((place / name).exists() for place in places)}
    assert sorted(set(named) - found - MADE) == []


@pages
def test_flags_that_a_page_names_exist(page: Path) -> None:
    flags = (
        set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text(encoding="utf-8"))) - OTHERS
    )
    known = sources()

    def exists(flag: str) -> bool:
        field = flag[2:].removeprefix("no-").replace("-", "_")
        return flag in known or re.search(rf"\b{field}\b", known) is not None

    assert sorted(flag for flag in flags if not exists(flag)) == []
