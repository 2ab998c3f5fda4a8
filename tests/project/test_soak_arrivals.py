"""The soak run of rounds one by one in short, and that it notices what it is there to notice."""

from __future__ import annotations

import pytest
import torch

from benchmarks import soak_arrivals
from benchmarks.killed_rounds import Kill, rounds_of
from fastagg._engine.arrivals.round import Round
from helpers.cohort import assert_same_bits


def test_thirty_rounds_and_two_kills(capsys):
    assert soak_arrivals.main(["--rounds", "30", "--kills", "2", "--growth", "20"]) == 0
    said = capsys.readouterr().out
    assert "nothing failed" in said
    assert "2 kills in " in said
    for fate in ("well", "twice", "late", "damaged", "never", "discarded"):
        assert f" {fate}" in said


add = Round.add


def second_counts(self, client_id, model=None, **given):
    self.discard(client_id)
    return add(self, client_id, model, **given)


def nobody_is_looked_at(self, *_):
    return []


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [("add", second_counts, "AssertionError"), ("_not_finite", nobody_is_looked_at, "AssertionError")],
)
def test_a_round_that_goes_wrong_is_noticed(monkeypatch, name, broken, words):
    monkeypatch.setattr(Round, name, broken)
    assert any(words in text for text in soak_arrivals.soak(20, 0, 1.0))


def test_other_bits_are_noticed(monkeypatch):
    finish = Round.finish

    def wrong(self, **given):
        result = finish(self, **given)
        result["a.bias"] = result["a.bias"] + 1e-5
        return result

    monkeypatch.setattr(Round, "finish", wrong)
    assert soak_arrivals.soak(3, 0, 1.0)


def test_kills_that_change_the_model_are_noticed(monkeypatch):
    models = iter([({"w": torch.zeros(2)}, []), ({"w": torch.ones(2)}, [Kill(0.1, 1, 1)])])
    monkeypatch.setattr(soak_arrivals, "rounds_of", lambda *_: next(models))
    assert soak_arrivals.kill(1, 30, 8, 0) == ["run 1, with 1 kills: another model"]


def test_kill_9(tmp_path):
    """python -m benchmarks.soak_arrivals has fifty of them"""
    whole, _ = rounds_of(tmp_path / "whole", 30, 6, [])
    killed, kills = rounds_of(tmp_path / "killed", 30, 6, [0.02, 0.2, 0.1, 0.05])
    assert_same_bits(whole, killed)
    assert len(kills) >= 1
