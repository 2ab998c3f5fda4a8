"""Methods of other packages: registered at run time, or announced by an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import registry
from fastagg.extend import (
    ClusterAggregator,
    GlobalAggregator,
    PersonalisedAggregator,
    Range,
    RoundInput,
)
from helpers.cohort import assert_same_bits, make


@pytest.fixture
def known():
    """Whatever is registered in a test is forgotten after it"""
    before, names = dict(registry.registry()), set(dir(fastagg))
    yield registry.registry()
    registry._registered.clear()
    registry._registered.update(before)
    for name in vars(fastagg).keys() - names:
        del vars(fastagg)[name]
    fastagg._load()


class Evenly(GlobalAggregator):
    """Every client counts alike."""

    name = "evenly"
    paper = "a test"
    reads = "weights"
    round_inputs = (RoundInput("factors", low=0),)

    scale: Annotated[float, Range(above=0, high=2)] = 1.0

    def weigh(self, cohort, factors=None):
        return np.full(cohort.K, self.scale / cohort.K) * (1 if factors is None else factors)


def test_a_method_registered_at_run_time(known):
    assert fastagg.register(Evenly) is Evenly
    assert fastagg.register(Evenly) is Evenly  # a module that is loaded again
    g, clients = make(3, {"a.weight": (5, 4)})
    result = fastagg.evenly(g, clients, scale=0.5)
    assert result.weights.tolist() == [0.5 / 3] * 3
    assert fastagg.Evenly is Evenly
    assert isinstance(fastagg.aggregator("evenly"), Evenly)
    assert "evenly" in [method.name for method in fastagg.list_methods()]
    assert_same_bits(fastagg.fedavgm(g, clients, weights="evenly", momentum=0.0), fastagg.fedavg(g, clients))
    with pytest.raises(ValueError, match=r"evenly: scale=3; expected a number > 0 and <= 2"):
        fastagg.aggregator("evenly", scale=3)
    with pytest.raises(fastagg.BadClientError, match="client 1: its entry in factors is -1"):
        fastagg.evenly(g, clients, factors=[1, -1, 1])


def test_what_cannot_be_registered(known):
    fastagg.register(Evenly)
    with pytest.raises(ValueError, match=r"there is a method 'evenly' already: .*Evenly"):
        fastagg.register(type("Other", (GlobalAggregator,), {**facts("evenly"), "__doc__": "Another."}))
    for cls, message in (
        (int, "does not derive from"),
        (type("Nameless", (GlobalAggregator,), {"__doc__": "It."}), "expected a name"),
        (type("Odd", (GlobalAggregator,), {**facts("a b"), "__doc__": "It."}), "expected a name"),
        (type("NoPaper", (GlobalAggregator,), {**facts("x"), "paper": "", "__doc__": "It."}), "paper is empty"),
        (type("NoDoc", (GlobalAggregator,), facts("x")), "has no docstring"),
        (type("Idle", (PersonalisedAggregator,), {"name": "x", "paper": "p", "__doc__": "It."}), "neither weigh"),
        (
            type("Gramm", (GlobalAggregator,), {**facts("gram"), "__doc__": "It."}),
            "'gram' is the name of something else",
        ),
        (type("Gram", (GlobalAggregator,), {**facts("x"), "__doc__": "It."}), "'Gram' is the name of something else"),
        (type("M", (GlobalAggregator,), {**facts("methods"), "__doc__": "It."}), "'methods' is the name of something"),
        (
            type("same", (GlobalAggregator,), {**facts("same"), "__doc__": "It."}),
            "name of both the class and the method",
        ),
        (
            with_fact(reads="foo"),
            r"Odd\.reads is 'foo', expected one of 'weights', 'products', 'pairs', 'ranks', 'models'",
        ),
        (with_fact(buffers="mode"), r"Odd\.buffers is 'mode', expected one of 'mean', 'median'"),
        (with_fact(produces="two"), r"Odd\.produces is 'two', expected one of 'global', 'personalised', 'clusters'"),
        (with_fact(produces="clusters"), "has no property `clusters`"),
        (type("Odd", (ClusterAggregator,), {**facts("x"), "__doc__": "It."}), "has no property `clusters`"),
        (with_input("sizes"), "the round input 'sizes' has the name of another argument"),
        (with_input("params"), "the round input 'params' has the name"),
        (unreadable(), "annotations of Unreadable cannot be read: name 'Nope' is not defined"),
    ):
        with pytest.raises(TypeError, match=message):
            fastagg.register(cls)
    with pytest.raises(ValueError, match=r"there is a method 'fedavg' already: fastagg\.methods\.fedavg"):
        fastagg.register(type("Mine", (GlobalAggregator,), {**facts("fedavg"), "__doc__": "It."}))


def with_fact(**fact):
    return type("Odd", (GlobalAggregator,), {**facts("x"), **fact, "__doc__": "It."})


def with_input(name):
    return with_fact(round_inputs=(RoundInput(name),))


@pytest.mark.parametrize(("cls", "name"), [("Krum", "their_krum"), ("krum", "theirs"), ("Theirs", "Krum")])
def test_a_name_of_another_method_is_refused(known, cls, name):
    own = fastagg.Krum, fastagg.krum
    with pytest.raises(ValueError, match=r"there is a (class|method) '[Kk]rum' already: fastagg\.methods\.krum\.Krum"):
        fastagg.register(type(cls, (GlobalAggregator,), {**facts(name), "__doc__": "It."}))
    assert (fastagg.Krum, fastagg.krum) == own


@pytest.mark.parametrize("name", ["sys", "import_module", "Any", "_load", "_EXPORTS", "__getattr__"])
def test_a_name_that_the_package_uses_itself_is_refused(known, name):
    for cls in (
        type("Theirs", (GlobalAggregator,), {**facts(name), "__doc__": "It."}),
        type(name, (GlobalAggregator,), {**facts("theirs"), "__doc__": "It."}),
    ):
        with pytest.raises(TypeError, match=f"'{name}' is the name of something else in fastagg"):
            fastagg.register(cls)
    assert name in vars(fastagg)
    assert "fedavgm" in dir(fastagg)


def unreadable():
    class Unreadable(GlobalAggregator):
        """It."""

        name, paper = "x", "p"
        option: Nope | None = None  # noqa: F821

        def weigh(self, cohort):
            return cohort.shares

    return Unreadable


def test_a_class_that_has_changed_takes_the_place_of_the_former(known):
    def made(value):
        cls = type("Evenly", (Evenly,), {"scale": value, "__doc__": "It.", "__module__": "a_notebook"})
        cls.__qualname__ = "Evenly"
        return fastagg.register(cls)

    first = made(0.5)
    assert fastagg.Evenly is first
    second = made(0.25)
    assert fastagg.Evenly is second
    assert type(fastagg.aggregator("evenly")) is second


def test_threads_that_ask_first_at_once():
    code = """
import threading
import torch, fastagg
from fastagg._engine import registry
failed = []
def ask():
    try:
        fastagg.aggregator("weiavg"), fastagg.weiavg
    except Exception as error:
        failed.append(error)
import sys
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=ask) for _ in range(6)]
[t.start() for t in threads], [t.join() for t in threads]
assert not failed, failed
"""
    subprocess.run([sys.executable, "-c", code.replace("import torch, fastagg", "import fastagg")], check=True)


def facts(name):
    return {"name": name, "paper": "p", "weigh": lambda self, cohort: cohort.shares}


def test_the_checks_of_options_cannot_be_skipped():
    with pytest.raises(TypeError, match=r"check options in check_options\(\)"):
        type("Skips", (GlobalAggregator,), {"__post_init__": lambda self: None})


PLUGIN = """
import numpy as np
import fastagg
from fastagg.extend import GlobalAggregator

@fastagg.register
class Halves(GlobalAggregator):
    \"\"\"The first half of the clients.\"\"\"

    name = "halves"
    paper = "a plugin"
    reads = "weights"

    def weigh(self, cohort):
        w = (np.arange(cohort.K) < max(cohort.K // 2, 1)).astype(float)
        return w / w.sum()
"""


@pytest.fixture
def plugin(tmp_path):
    """Two installed packages that announce methods, one of them broken"""
    (tmp_path / "halves_plugin.py").write_text(PLUGIN)
    for name, value in (("halves", "halves_plugin"), ("broken", "broken_plugin:Missing")):
        info = tmp_path / f"{name}_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fastagg.methods]\n{name} = {value}\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}


def test_an_entry_point(plugin, tmp_path):
    code = (
        "import warnings, torch; warnings.simplefilter('ignore')\n"
        "import fastagg\n"
        "g = {'a': torch.ones(3)}\n"
        "assert fastagg.halves(g, [g, {'a': torch.zeros(3)}]).weights.tolist() == [1, 0]\n"
        "assert fastagg.aggregator('fedadam', weights='halves')\n"
    )
    subprocess.run([sys.executable, "-c", code], env=plugin, check=True)
    options = ["--clients", "4", "--rounds", "2", "--epochs", "1", "--samples", "300", "--out", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-m", "fastagg", "compare", "fedavg", "halves", *options],
        env=plugin,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "halves" in done.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "fastagg", "methods"], env=plugin, capture_output=True, text=True, check=True
    )
    assert "\nhalves " in listed.stdout
    assert "the method broken = broken_plugin:Missing cannot be loaded" in listed.stderr


def test_a_subclass_inherits_options_and_their_checks():
    class Twice(Evenly):
        """Twice."""

        name = "twice"
        more: Annotated[int, Range(1)] | None = None

    assert Twice(scale=0.5, more=3).more == 3
    for options in ({"more": 0}, {"scale": 0}, {"more": 1.5}):
        with pytest.raises(ValueError, match=f"twice: {next(iter(options))}="):
            Twice(**options)
    assert torch.equal(torch.tensor(Twice().scale), torch.tensor(1.0))
