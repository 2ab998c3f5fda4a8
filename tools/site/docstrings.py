"""What griffe reads of fastagg, made fit for a page: docstrings as Markdown, shared options once and not 42 times."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ENTRY = re.compile(r"(\S(?:.*?\S)?)( {2,})(\S.*)")  # of a list of arguments: a name, spaces, what it is
SHARED = "\n\nArguments of every method:\n\n"


class Docstrings(griffe.Extension):
    """Aligned lists become Markdown's. A method's function keeps its own options; `**shared` stands for the others"""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text, _, shared = obj.docstring.value.partition(SHARED)
            obj.docstring.value = markdown(text)
            if shared:
                _shorten(obj, shared)


def _shorten(function: griffe.Object, shared: str) -> None:
    assert isinstance(function, griffe.Function)
    names = {match[1] for match in map(ENTRY.fullmatch, shared.splitlines()) if match}
    kept = [p for p in function.parameters if p.name not in names or p.name in ("global_sd", "client_sds", "sizes")]
    rest = griffe.Parameter("shared", kind=griffe.ParameterKind.var_keyword, annotation=None, default=None)
    function.parameters = griffe.Parameters(*kept, rest)
    assert function.docstring is not None
    function.docstring.value += "\n\n" + shared.split("\n\n")[-1]


def markdown(text: str) -> str:
    """A docstring's paragraphs, its aligned lists as lists, and indented lines as code"""
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    if text.startswith(("    ", ">>>")):
        return f"```python\n{textwrap.dedent(text)}\n```"
    found: list[str] = []
    column = 0  # where descriptions begin, while in a list
    for line in text.splitlines():
        entry = ENTRY.fullmatch(line)
        if column and line[:column].isspace():
            found[-1] += " " + _escaped(line.strip())
        elif entry:
            column = entry.start(3)
            first = "" if found and found[-1].startswith("- ") else "\n"
            found.append(f"{first}- `{entry[1]}`: {_escaped(entry[3])}")
        else:
            found.append(("\n" if column else "") + _escaped(line))
            column = 0
    return "\n".join(found)


def _escaped(text: str) -> str:
    """Markdown of plain text, but for code in backticks"""
    return re.sub(r"`[^`]+`|[*<\[\]|`]", lambda m: m[0] if len(m[0]) > 1 else f"&#{ord(m[0])};", text)
