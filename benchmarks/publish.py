"""Puts what a benchmark measured into a document, between two comments that stay there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def publish(page: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- name -->` and `<!-- end of name -->`"""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    content = page.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(content):
        raise ValueError(f"{page} has no lines {begin.strip()} and {end} to write between")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{text.strip()}\n\n{end}", content, count=1), encoding="utf-8")
