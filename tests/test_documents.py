"""README and docs/: every page is short, and every link, file and flag in it exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "examples/README"))
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*TOP, *DOCS]
WITHOUT_COMMAND = {"comparison", "glossary"}
"""Pages that no command belongs to."""
MOST_WORDS = {"README.md": 1_200}
"""Limits of single pages; every other page has PAGE_WORDS."""
PAGE_WORDS = 1_500
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
"""Pages that explain the code of a package."""


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
    """Return all of our code. It contains each flag as the user types it, or as its field."""
    files = [
        path
        for top in ("megacp", "tools", "examples", "tests")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def anchors(page: Path) -> set[str]:
    """Return the names that the headings of a page have in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_a_page_can_be_read_in_minutes(page: Path) -> None:
    words = page.read_text(encoding="utf-8").split()
    assert len(words) <= MOST_WORDS.get(page.name, PAGE_WORDS)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_begins_with_one_title_and_a_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^# .*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    assert len(titles) == 1 and text.startswith(titles[0])
    before_sections, _, _ = text.partition("\n## ")
    assert page.stem in WITHOUT_COMMAND or "```" in before_sections


def test_every_page_is_linked_from_another_one() -> None:
    """A reader must be able to find each page of docs/ from README or from another page."""
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8")):
            linked.add((page.parent / target).resolve())
    assert [page.name for page in DOCS if page not in linked] == []


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
    """Paths are relative to the root, to the page, or to megacp/."""
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
