"""Puts what a benchmark measured into a document, between two comments that stay there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end -->"


def publish(path: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- name -->` and the next `<!-- end -->`"""
    page, begin = path.read_text(encoding="utf-8"), f"<!-- {name} -->\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{path} has no lines {begin.strip()} and {END} to write between")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{END}", page, count=1), encoding="utf-8")
