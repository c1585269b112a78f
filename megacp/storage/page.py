"""The head and style of a self-contained HTML page, which loads and runs nothing.

A page follows the reader's light or dark colour scheme, and fits a telephone's width.
"""

from __future__ import annotations

from html import escape

# Every colour of text, background and lines is a variable, so that one rule changes the scheme.
# `--soft` is for less important text; its contrast with the page is still above 4.5.
_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --soft: #5f6368; --line: #ccc;
  --panel: #eee; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e3e3; --page: #16181b; --soft: #a2a6ad;
  --line: #44484e; --panel: #2b2e33; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em;
  color: var(--text); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.3em; }
h2 { font-size: 1.05em; margin: 2em 0 .3em; border-top: 1px solid var(--line);
  padding-top: .6em; }
h3 { font-size: .95em; margin: .6em 0 .2em; font-weight: 600; }
.note, figcaption { color: var(--soft); font-weight: normal; } figure { margin: 0; }
.wide { overflow-x: auto; }
"""
# no scripts and no requests; images are embedded
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# without it, a telephone would lay the page out for a desktop and shrink it
_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'


def page_head(title: str, style: str) -> str:
    """Return a page up to its first paragraph; the caller ends the page with `</body></html>`.

    `style` is CSS that is added to the common style. An element that may be wider than the page,
    such as a table, belongs in an element of class `wide`, which scrolls.
    """
    title = escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{_VIEWPORT}'
        f"<style>{_STYLE}{style}</style></head><body>"
        f"<h1>{title}</h1>"
    )
