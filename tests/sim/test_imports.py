"""Objects by name: what is found, and what is said where it is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastagg.sim.imports import is_reference, resolve


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that is the current one, and not on the path"""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_installed():
    import json.decoder

    assert resolve("json.decoder:JSONDecoder") is json.decoder.JSONDecoder
    assert resolve("json.decoder:JSONDecoder.decode") is json.decoder.JSONDecoder.decode
    assert resolve("json.decoder:NaN", call=False) != 0


def test_a_module_in_the_current_folder(here):
    (here / "own_net.py").write_text("def make(): return 7\n")
    (here / "own_package").mkdir()
    (here / "own_package" / "__init__.py").touch()
    (here / "own_package" / "nets.py").write_text("class A:\n    make = staticmethod(lambda: 8)\n")
    assert resolve("own_net:make")() == 7
    assert resolve("own_package.nets:A.make")() == 8
    assert sys.path.count(str(here)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_package.nets:make", "there is no module 'no_such_package'; install it, or run in the folder"),
        ("json.no_such:make", r"there is no module 'json\.no_such'"),
        ("json:Loads", "json has no attribute 'Loads'; did you mean 'loads'"),
        ("json:JSONDecoder.nothing", "json:JSONDecoder has no attribute 'nothing'"),
        ("json:__version__", "is a str, which cannot be called; name a function or class"),
        ("json", "is not of the form package.module:attribute"),
        ("json:", "is not of the form"),
        ("../json:loads", "is not of the form"),
        ("json:loads:x", "is not of the form"),
        ("broken:make", "importing broken failed: ZeroDivisionError"),
        ("lacks:make", "importing lacks failed: No module named 'no_such_thing'"),
        ("wrong:make", "importing wrong failed: SyntaxError"),
    ],
)
def test_errors(here, text, message):
    (here / "broken.py").write_text("1 / 0\n")
    (here / "lacks.py").write_text("import no_such_thing\n")
    (here / "wrong.py").write_text("def\n")
    with pytest.raises(ValueError, match=message) as caught:
        resolve(text, "--model")
    assert str(caught.value).startswith(f"--model: {text!r}")


def test_references():
    assert is_reference("a.b:c.d")
    assert is_reference("nets:make")
    for text in ("mlp", "fedavg:steps=5", "a b:c", "1a:b", ":c", None, 3):
        assert not is_reference(text)


def test_without_torch():
    code = "import sys, fastagg.sim.imports; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
