"""The head and style of a self-contained HTML page, which loads and runs nothing."""

from __future__ import annotations

from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em;
  color: #222; }
h1 { font-size: 1.3em; }
h2 { font-size: 1.05em; margin: 2em 0 .3em; border-top: 1px solid #ccc; padding-top: .6em; }
h3 { font-size: .95em; margin: .6em 0 .2em; font-weight: 600; }
.note, figcaption { color: #666; } figure { margin: 0; }
"""
# no scripts and no requests; images are embedded
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page_head(title: str, style: str) -> str:
    """Return a page up to its first paragraph; the caller ends the page with `</body></html>`.

    `style` is CSS that is added to the common style.
    """
    title = escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{_STYLE}{style}</style></head><body>"
        f"<h1>{title}</h1>"
    )
