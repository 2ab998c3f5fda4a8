"""The soak run in short, and that it notices what it is there to notice."""

from __future__ import annotations

import pytest

from benchmarks import soak
from fastagg.methods.fedadp import FedAdp
from fastagg.methods.fedopt import FedAdam


def test_a_hundred_rounds(capsys):
    # 20 %, not 5: in so few rounds memory is not yet level. Dtypes and numbers of clients come for the first time, and
    # with them kernels of torch and blocks of the allocator that are kept.
    assert soak.main(["--rounds", "100", "--growth", "20"]) == 0
    said = capsys.readouterr().out
    assert "nothing failed" in said
    for label in soak.STATEFUL:
        assert f"| {label} | 0 |" in said
    assert "memory: " in said


@pytest.mark.skipif(soak.resident() is None, reason="this system does not say how much memory a process has")
def test_a_leak_is_noticed(monkeypatch):
    monkeypatch.setattr(soak, "resident", iter([1e8, 1.06e8]).__next__)
    assert "memory grew by 6.0 %" in soak.soak(20, 0, 0.05)


def test_a_state_that_drifts_is_noticed(monkeypatch):
    second, load = FedAdam._second, FedAdp.load_state_dict

    def forgetful(self, state):
        load(self, state)
        self.state = {name: (angle * (1 + 1e-12), t) for name, (angle, t) in self.state.items()}

    monkeypatch.setattr(FedAdam, "_second", lambda self, delta, v: second(self, delta, v) * (1 + 1e-5))
    monkeypatch.setattr(FedAdp, "load_state_dict", forgetful)
    failed = soak.soak(20, 0, 1.0)
    assert "fedadam: the state has drifted" in failed
    assert any(text.startswith("fedadp: ") and "of the twin differ" in text for text in failed)
    assert len(failed) == 2
