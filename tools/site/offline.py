"""The built site loads nothing from elsewhere: no font, no script, no style, no picture. Links may lead away."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

AWAY = re.compile(r"(?:https?:)?//")
IN_STYLES = re.compile(r"(?:@import\s+|url\()\s*['\"]?((?:https?:)?//[^'\")\s]+)")
LINKS = {"canonical", "next", "prev", "alternate", "edit", "author", "license"}  # which are not loaded


class Loads(HTMLParser):
    """Addresses elsewhere that a page loads as it opens"""

    def __init__(self) -> None:
        super().__init__()
        self.away: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        names = ["src", "srcset", "data", "poster"]
        if tag == "link" and not LINKS & set(given.get("rel", "").split()):
            names.append("href")
        if given.get("data-md-component") == "source":  # for which the theme's script asks GitHub
            names.append("href")
        self.away += [given[name] for name in names if AWAY.match(given.get(name, ""))]


def loads(path: Path) -> list[str]:
    """The addresses elsewhere that a file of the site loads"""
    page, text = Loads(), path.read_text()
    if path.suffix != ".css":
        page.feed(text)
    return page.away + IN_STYLES.findall(text)


def on_post_build(config: Any) -> None:
    from mkdocs.exceptions import PluginError  # is not where the tests are

    files = (path for path in Path(config.site_dir).rglob("*") if path.suffix in (".html", ".svg", ".css"))
    found = [f"{path} loads {address}" for path in files for address in loads(path)]
    if found:
        raise PluginError("\n".join(found))
