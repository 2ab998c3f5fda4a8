"""The code blocks of a page of the documentation, and how each language is run.

A block that cannot run everywhere says so in a comment before it:

    <!-- not run: why -->
    <!-- needs flwr: why -->      runs in tests/integrations, in the framework's environment
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"<!-- (not run|needs (\w+)): (.+) -->")
INDENTED = re.compile(r"\s*([-*]|\d+\.|:::) |\s")  # what follows may be, and is no code
PROSE = ("text", "math")  # diagrams, outputs and formulas


@dataclass
class Block:
    page: Path
    line: int  # of the first line of its code, from 1
    language: str
    code: str
    mark: re.Match[str] | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks by their language; indented ones are commands. Of a notebook, its cells"""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        yield from (Block(page, 1, "python", each, None) for each in code)
        return
    lines = page.read_text().splitlines()
    text, at = "", 0  # the last line before that is not empty
    while at < len(lines):
        fence = re.match(r"( *)(`{3,})(\S*)", lines[at])
        begin = at + bool(fence)
        if fence:
            at = next(i for i in range(begin, len(lines)) if lines[i].strip() == fence[2])
        elif lines[at].startswith("    ") and not INDENTED.match(text):
            at = next((i for i in range(begin, len(lines)) if not lines[i].startswith("    ")), len(lines))
        else:
            text = lines[at] or text
            at += 1
            continue
        indent = len(fence[1]) if fence else 4
        code = "\n".join(line[indent:] for line in lines[begin:at])
        yield Block(page, begin + 1, fence[3] if fence else "sh", code, MARK.fullmatch(text.strip()))
        text, at = "(code)", at + bool(fence)


def run(block: Block, names: dict[str, Any]) -> None:
    """Runs a block in the current folder; Python with these names, which it may add to"""
    if block.language == "python":
        exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec", dont_inherit=True), names)
    elif block.language == "sh":
        before = names.setdefault("scripts", [])  # on this page: variables stay
        for name, *arguments in commands("\n".join([*before, block.code]))[len(commands("\n".join(before))) :]:
            COMMANDS[name](arguments)
        before.append(block.code)
    elif block.language == "toml":
        _toml(block.code)
    else:
        assert block.language in PROSE, f"nothing runs blocks of {block.language!r}"


def commands(script: str) -> list[list[str]]:
    """The commands that a script would run, with variables and patterns replaced by what they stand for"""
    define = "".join(f'{name}() {{ printf "%s\\0" "$FUNCNAME" "$@"; printf "\\036"; }}\n' for name in COMMANDS)
    said = subprocess.run(
        ["/bin/bash", "-euc", define + script], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    return [call.removesuffix("\0").split("\0") for call in said.stdout.split("\036") if call]


def _fastagg(arguments: list[str]) -> None:
    """What takes long is checked as far as it can be without work"""
    from fastagg import cli
    from fastagg.sim import command, recipe, reproduce

    what, rest = arguments[0], arguments[1:]
    if "--help" in rest:
        return
    if what in ("sim", "compare"):
        command.plan(what, vars(command.parser_of(what).parse_args(rest)))
    elif what == "reproduce":
        given = reproduce.parser_of().parse_args(rest)
        assert given.name is None or recipe.find(given.name)
    else:
        assert cli.main(arguments) == 0


def _python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file()
    elif arguments[1] == "fastagg":
        _fastagg(arguments[2:])
    else:
        assert importlib.util.find_spec(arguments[1])


def _torchrun(arguments: list[str]) -> None:
    _python(arguments[arguments.index("-m") :])


def _make(arguments: list[str]) -> None:
    given = [argument.replace("<commit>", "HEAD") for argument in arguments]
    subprocess.run(["make", "-n", *given], cwd=ROOT, env=os.environ, capture_output=True, check=True)


def _pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for wanted in re.findall(r"\.\[(\w+)\]", " ".join(arguments)):
        assert wanted in extras


def _toml(code: str) -> None:
    """The options of a run, or a recipe"""
    from fastagg.sim import config, recipe

    given = tomllib.loads(code)
    if "paper" in given:
        Path("recipe.toml").write_text(code)
        assert recipe.read(Path("recipe.toml"))
    else:
        assert config.from_dict(given)


COMMANDS = {"fastagg": _fastagg, "python": _python, "torchrun": _torchrun, "make": _make, "pip": _pip}
