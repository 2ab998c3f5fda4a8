"""What former formats saved is read, and what a newer one saved is refused in words that help."""

from __future__ import annotations

import shutil

import pytest
import torch

import fastagg
from fastagg._engine import saved
from fastagg.sim import report, run
from fastagg.sim.simulation import Simulation
from helpers import saved_states
from helpers.every_method import cohort
from helpers.model_files import write_round
from helpers.saved_states import FOLDER, ROUNDS

FORMATS = [str(number) for number in range(1, saved.FORMAT + 1)]
KEPT = {number: sorted(path.stem for path in (FOLDER / number).glob("*.safetensors")) for number in FORMATS}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # float32, by the kernels and torch of another machine


def assert_close(a, b, at="state"):
    """Two trees"""
    assert type(a) is type(b), at
    if isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for key in a:
            assert_close(a[key], b[key], f"{at}[{key!r}]")
    elif isinstance(a, list):
        assert len(a) == len(b), at
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_close(*pair, f"{at}[{i}]")
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, **CLOSE, msg=lambda m: f"{at}: {m}")
    else:
        assert a == b, at


@pytest.mark.parametrize("number", FORMATS)
def test_every_method_with_a_state_has_one_that_is_kept(number):
    """PYTHONPATH=.:tests python -m helpers.saved_states adds what is missing of today's format"""
    if number == FORMATS[-1]:
        assert {*KEPT[number]} == saved_states.cases().keys()
    assert KEPT[number]
    for path in (FOLDER / number).glob("**/*.safetensors"):
        assert saved.read_saved(path)[1][saved.FORMAT_KEY] == number


@pytest.mark.parametrize(("number", "name"), [(number, name) for number in FORMATS for name in KEPT[number]])
def test_an_older_state_is_that_of_today(number, name):
    method, options = saved_states.case(name)
    server = fastagg.aggregator(method, **options)
    server.load(FOLDER / number / f"{name}.safetensors")
    today = saved_states.played(method, options)
    assert_close(server.state_dict(), today.state_dict())
    for each in (server, today):
        saved_states.played(method, options, each, seed=1)
    assert_close(server.state_dict(), today.state_dict())


@pytest.mark.parametrize("number", FORMATS)
def test_an_older_state_goes_on_with_files(number, tmp_path):
    g, paths = write_round(tmp_path / "in", *cohort(seed=1))
    shutil.copy(FOLDER / number / "fedadam.safetensors", tmp_path / "state")
    fastagg.aggregate_files("fedadam", g, paths, out_path=tmp_path / "new.safetensors", state=tmp_path / "state")
    server = fastagg.FedAdam()
    server.load(tmp_path / "state")
    expected = saved_states.played("fedadam", {}, saved_states.played("fedadam", {}), seed=1)
    assert_close(server.state_dict(), expected.state_dict())


@pytest.mark.parametrize("number", FORMATS)
def test_an_older_run_is_continued(number, tmp_path):
    shutil.copytree(FOLDER / number / "run", tmp_path / "run")
    run.simulate(saved_states.config(ROUNDS + 1), tmp_path / "run", resume=True)
    assert [record["round"] for record in report.read_run(tmp_path / "run").metrics] == [*range(ROUNDS + 2)]
    undisturbed = Simulation(saved_states.config(ROUNDS + 1))
    for _ in range(ROUNDS + 1):
        undisturbed.next_round()
    assert_close(saved.load(tmp_path / "run/checkpoint.safetensors"), undisturbed.state_dict())


@pytest.fixture
def newer(monkeypatch):
    """What is saved is of a format that is not known yet"""

    def save(path, tree):
        with monkeypatch.context() as patch:
            patch.setattr(saved, "FORMAT", saved.FORMAT + 1)
            saved.save(path, tree)

    return save


def test_a_newer_state_is_refused_in_words_that_help(tmp_path, newer):
    path = tmp_path / "state"
    newer(path, fastagg.FedAdam().state_dict())
    content = path.read_bytes()
    words = (
        f"state has format {saved.FORMAT + 1}, and fastagg {fastagg.__version__} reads formats up to {saved.FORMAT}: a "
        "newer fastagg wrote it. Install that version or a later one"
    )
    with pytest.raises(saved.NewerFormat, match=words):
        fastagg.FedAdam().load(path)
    g, paths = write_round(tmp_path / "in", *cohort())
    with pytest.raises(fastagg.InputError, match=words):
        fastagg.aggregate_files("fedadam", g, paths, out_path=tmp_path / "new.safetensors", state=path)
    assert path.read_bytes() == content
    assert not (tmp_path / "new.safetensors").exists()


def test_a_newer_run_is_not_to_be_deleted(tmp_path, newer):
    shutil.copytree(FOLDER / FORMATS[-1] / "run", tmp_path / "run")
    path = tmp_path / "run/checkpoint.safetensors"
    newer(path, saved.load(path))
    with pytest.raises(ValueError, match="newer fastagg wrote it") as caught:
        run.simulate(saved_states.config(ROUNDS + 1), tmp_path / "run", resume=True)
    assert "delete" not in str(caught.value)


@pytest.mark.parametrize("number", ["0", "-1", "", "one"])
def test_no_format_is_not_a_newer_one(number, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "FORMAT", number)
    saved.save(tmp_path / "x", {})
    monkeypatch.undo()
    with pytest.raises(fastagg.InputError, match="is not a file that fastagg saved, or is damaged"):
        saved.load(tmp_path / "x")
