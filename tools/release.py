"""python -m tools.release v0.1.0: whether this tag is that of the tree's version, everywhere it is written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
NOT_THERE = "not on a package index yet"  # what pages say before the first release


def versions() -> dict[str, str]:
    """By the file that states it"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [cited] = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return {"pyproject.toml": project, "CITATION.cff": cited, "CHANGELOG.md": newest[1] if newest else "none"}


def why_not(tag: str) -> str:
    """What has to be changed before a release; empty if nothing"""
    stated = versions()
    wrong = [f"{file} has version {version}" for file, version in stated.items() if f"v{version}" != tag]
    if "(unreleased)" in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].splitlines()[0]:
        wrong.append("CHANGELOG.md says (unreleased), where the date belongs")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    early = sorted(str(page.relative_to(ROOT)) for page in pages if NOT_THERE in " ".join(page.read_text().split()))
    wrong += [f"{page} says that fastagg is {NOT_THERE}" for page in early]
    return "; ".join(wrong)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if problem := why_not(sys.argv[1]):
        sys.exit(f"{sys.argv[1]} cannot be released: {problem}")
    print(f"{sys.argv[1]} can be released")
