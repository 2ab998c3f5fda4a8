"""The stubs of the native modules say what was built: the same names, and the same arguments."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import fastagg

Names = list[str | None]


def arguments(function: ast.FunctionDef, named: bool) -> tuple[Names, list[str]]:
    """Those by position, and those by name alone. self does not count. None stands for one without a name to a caller,
    unless such arguments have names nevertheless (named)."""
    spec = function.args
    assert spec.vararg is None
    assert spec.kwarg is None
    by_position: Names = [a.arg if named else None for a in spec.posonlyargs] + [
        None if re.fullmatch(r"arg\d+", a.arg) else a.arg for a in spec.args if a.arg != "self"
    ]
    if spec.posonlyargs and spec.posonlyargs[0].arg == "self":
        del by_position[0]
    return by_position, [a.arg for a in spec.kwonlyargs]


def built_signatures(function: object) -> list[tuple[Names, list[str]]]:
    """From csrc/python.h, or from what pybind11 writes into a docstring: one line, or one for each overload"""
    doc, text = function.__doc__, getattr(function, "__text_signature__", None)
    if text is not None:
        return [arguments(ast.parse(f"def f{text}: ...").body[0], named=True)]
    lines = re.findall(r"^\d+\. (\w+\(.*)$", doc, re.MULTILINE) or [doc.splitlines()[0]]
    return [arguments(ast.parse(f"def {line}: ...").body[0], named=False) for line in lines]


def built(owner: object) -> dict[str, object]:
    """The public names of a module or class, and what they are"""
    found = {}
    for name, value in vars(owner).items():
        if name.startswith("_") and (name != "__init__" or not isinstance(owner, type)):
            continue
        if isinstance(value, type):
            found[name] = built(value)
        elif callable(value):
            found[name] = built_signatures(value)
        else:
            found[name] = "a value"
    return found


def stubbed(body: list[ast.stmt], named: bool) -> dict[str, object]:
    """The same from a stub"""
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = stubbed(node.body, named)
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = "a value"
        elif isinstance(node, ast.FunctionDef):
            if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
                found[node.name] = "a value"
            else:
                found.setdefault(node.name, []).append(arguments(node, named))
    return found


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_stub_is_current(name):
    module = pytest.importorskip(f"fastagg.{name}", reason=f"fastagg.{name} was not built")
    stub = Path(fastagg.__file__).with_name(f"{name}.pyi")
    assert stubbed(ast.parse(stub.read_text()).body, named=name == "_cpu") == built(module)


def test_a_wrong_stub_is_noticed():
    text = Path(fastagg.__file__).with_name("_cpu.pyi").read_text()
    right = built(importlib.import_module("fastagg._cpu"))
    changes = [
        ("client: NDArray[np.int64],", "clients: NDArray[np.int64],"),
        ("iterations: int, threads: int", "threads: int"),
        ("def simd_best() -> str: ...", ""),
        ("    handle: int,\n", ""),
    ]
    for old, new in changes:
        assert old in text
        assert stubbed(ast.parse(text.replace(old, new, 1)).body, named=True) != right
