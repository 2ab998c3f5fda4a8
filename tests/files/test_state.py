"""The state of `--state` and the global model stay in step, wherever a run is stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fastagg
from fastagg import InputError
from fastagg._engine import atomic
from helpers.every_method import cohort
from helpers.model_files import assert_same_model, load_model, write_round

IDS = [f"c{k}" for k in range(7)]


class Stopped(BaseException):
    """As a killed process: nothing is cleaned up"""


def stopped_before(monkeypatch, name, run):
    """Ends when the file of this name was to take its place, as if the process had been killed"""
    really = Path.replace

    def replace(path, target):
        if target.name == name:
            raise Stopped
        return really(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr(atomic.Temporary, "discard", lambda self: self.close())
        with pytest.raises(Stopped):
            run()


def rounds_of(tmp_path, method="fedadam", **options):
    """A function that runs a round from the clients of a seed, on g.safetensors and s.state; the models after each"""
    center, paths = write_round(tmp_path / "in", *cohort())
    center = center.replace(tmp_path / "g.safetensors")
    server, expected = fastagg.aggregator(method, **options), []
    for seed in (0, 1):
        model = server.aggregate(expected[-1] if expected else load_file(center), cohort(seed=seed)[1], None, IDS)
        expected.append(dict(model))

    def run(seed, **more):
        for path, sd in zip(paths, cohort(seed=seed)[1], strict=True):
            if not path.exists() or not all(torch.equal(v, sd[key]) for key, v in load_file(path).items()):
                save_file(sd, path)
        more = {"out_path": center, "state": tmp_path / "s.state"} | more
        return fastagg.aggregate_files(method, center, paths, **options, **more)

    return run, center, expected


@pytest.mark.parametrize("round_", [0, 1])
def test_a_round_is_not_made_twice(round_, tmp_path, monkeypatch):
    run, center, expected = rounds_of(tmp_path)
    for seed in range(round_):
        run(seed)
    stopped_before(monkeypatch, "s.state", lambda: run(round_))
    assert_same_model(load_model(center), expected[round_])  # it is one round ahead of the state
    found = run(round_)
    assert found.made_before
    assert list(found.dropped) == []
    assert found.weights is not None
    assert_same_model(load_model(center), expected[round_])
    assert sorted(os.listdir(tmp_path)) == ["g.safetensors", "in", "s.state"]
    if round_ == 0:
        assert not run(1).made_before
        assert_same_model(load_model(center), expected[1])
    with safe_open(center, "pt") as file:
        assert file.metadata()["fastagg.round"] == "2"


def test_the_next_round_goes_on_from_the_completed_state(tmp_path, monkeypatch):
    run, center, expected = rounds_of(tmp_path)
    stopped_before(monkeypatch, "s.state", lambda: run(0))
    assert not run(1).made_before
    assert_same_model(load_model(center), expected[1])


def test_a_round_that_was_stopped_before_its_model_is_made_again(tmp_path, monkeypatch):
    run, center, expected = rounds_of(tmp_path)
    run(0)
    stopped_before(monkeypatch, "g.safetensors", lambda: run(1))
    assert_same_model(load_model(center), expected[0])
    assert not run(1).made_before
    assert_same_model(load_model(center), expected[1])
    assert sorted(os.listdir(tmp_path)) == ["g.safetensors", "in", "s.state"]


def test_a_state_that_is_lost_is_said(tmp_path, monkeypatch):
    run, center, expected = rounds_of(tmp_path)
    run(0)
    stopped_before(monkeypatch, "s.state", lambda: run(1))
    [left] = tmp_path.glob(".s.state.*")
    left.unlink()
    with pytest.raises(
        InputError, match=r"g\.safetensors has round 2 already, and .*s\.state is still of the round before"
    ):
        run(1)
    assert_same_model(load_model(center), expected[1])
    (tmp_path / "s.state").unlink()
    run(1)  # from the beginning


def test_a_state_that_cannot_be_written_leaves_the_model(tmp_path, monkeypatch):
    run, center, expected = rounds_of(tmp_path)
    run(0)
    before = {path: path.read_bytes() for path in (center, tmp_path / "s.state")}
    really = os.fsync

    def full(fd):
        if ".s.state." in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        really(fd)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: .*s\.state"):
            run(1)
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(os.listdir(tmp_path)) == ["g.safetensors", "in", "s.state"]
    run(1)
    assert_same_model(load_model(center), expected[1])


def test_a_state_belongs_to_one_run_at_a_time(tmp_path):
    run, *_ = rounds_of(tmp_path)

    def again(*_):
        with pytest.raises(InputError, match=r"s\.state\.lock: another process is writing this state"):
            run(0, out_path=tmp_path / "other.safetensors")

    run(0, progress=again)
    assert sorted(os.listdir(tmp_path)) == ["g.safetensors", "in", "s.state"]


def test_state_and_report_replace_nothing_that_is_used(tmp_path):
    run, center, _ = rounds_of(tmp_path)
    client = tmp_path / "in" / "c0.safetensors"
    content = client.read_bytes()
    (tmp_path / "in" / "c0.png").symlink_to(client)
    out = tmp_path / "o.safetensors"
    for path in (client, center):
        with pytest.raises(InputError, match="the state would replace"):
            run(0, state=path, out_path=out)
    with pytest.raises(InputError, match="is the state, and a new model would take its place"):
        run(0, state=tmp_path / "o-00001-of-00002.safetensors", out_path=out)
    with pytest.raises(InputError, match=r"report would replace .*report\.json"):
        run(0, state=tmp_path / "report.json", out_path=out, report=tmp_path)
    assert client.read_bytes() == content
    assert not out.exists()
