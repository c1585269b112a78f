"""Open an HTML page in headless Chromium, and measure how it looks on screens of given widths.

The page is shown in one frame per width: a frame may be narrower than Chromium's smallest window,
and the measuring script stays outside the page, whose policy forbids scripts.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Nothing is fetched: the page is a file, and every host name is unknown.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--dump-dom",
)
_DARK = "--blink-settings=preferredColorScheme=0"
# Seconds for a start of Chromium on a busy machine; usually it takes one or two.
_PATIENCE = 90

# Measures a frame after its page has loaded. The contrast of two colours is defined by WCAG 2.1,
# https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio.
_SCRIPT = r"""
const channels = text => text.match(/[\d.]+/g).map(Number);
const alpha = color => color.length > 3 ? color[3] : 1;
const over = (top, below) => below.map((value, i) => top[i] * alpha(top) + value * (1 - alpha(top)));
function luminance(color) {
  const linear = color.slice(0, 3).map(value => {
    const share = value / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}
function contrast(one, other) {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}
function behind(view, element) {
  const layers = [];
  for (let node = element; node; node = node.parentElement)
    layers.push(channels(view.getComputedStyle(node).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
}
function measure(frame) {
  const view = frame.contentWindow;
  const page = view.document;
  const texts = [];
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const parent = walker.currentNode.parentElement;
    if (!text) continue;
    const style = view.getComputedStyle(parent);
    const back = behind(view, parent);
    const ratio = contrast(over(channels(style.color), back), back);
    texts.push({text: text, contrast: ratio, pixels: parseFloat(style.fontSize)});
  }
  const tags = new Set([...page.body.querySelectorAll("*")].map(one => one.localName));
  return {
    width: view.innerWidth,
    overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    is_dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    page_luminance: luminance(behind(view, page.body)),
    text: page.body.innerText,
    tags: [...tags].sort(),
    texts: texts,
  };
}
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  const report = document.createElement("pre");
  report.id = "report";
  report.textContent = JSON.stringify(found);
  document.body.replaceChildren(report);
});
"""


@dataclass(frozen=True)
class Look:
    """A page as Chromium shows it in one frame."""

    width: int
    overflow: int
    """Pixels by which the contents are wider than the screen, so the whole page scrolls sideways."""
    is_dark: bool
    page_luminance: float
    """0 for a black page, 1 for a white one."""
    text: str
    """The visible text."""
    tags: list[str]
    """Names of the elements in the body."""
    texts: list[dict[str, float | str]]
    """Each piece of text with its contrast with the background, and its size in pixels."""

    def faint(self, least: float = 4.5) -> list[str]:
        """Return the texts with less contrast; 4.5 is WCAG's level AA for text of normal size."""
        return [str(one["text"]) for one in self.texts if float(one["contrast"]) < least]


def looks(page: str, folder: Path, widths: Sequence[int], *, dark: bool) -> list[Look]:
    """Return how a page looks at each width. Skip the test if there is no Chromium."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is on PATH")
    frames = ""
    for width in widths:
        frames += f'<iframe style="width:{width}px" srcdoc="{html.escape(page)}"></iframe>'
    # A frame has the colour scheme of the element that embeds it, so the wrapper has both.
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        '<!DOCTYPE html><html><head><meta charset="utf-8">'
        '<meta name="color-scheme" content="light dark">'
        "<style>iframe { border: 0; height: 800px; }</style>"
        f"<script>{_SCRIPT}</script></head><body>{frames}</body></html>",
        encoding="utf-8",
    )
    with tempfile.TemporaryDirectory() as profile:
        flags = [*_FLAGS, f"--user-data-dir={profile}"]
        if dark:
            flags.append(_DARK)
        done = subprocess.run(
            [program, *flags, wrapper.as_uri()],
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    shown = done.stdout.decode()
    report = re.search(r'<pre id="report">(.*?)</pre>', shown, re.DOTALL)
    assert report is not None, f"Chromium shows no report: {shown[-500:]}\n{done.stderr[-2000:]!r}"
    return [Look(**one) for one in json.loads(html.unescape(report[1]))]
