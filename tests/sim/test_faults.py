"""Runs that are killed and resumed: at random moments by benchmarks.faults, and at every write, one after the other."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import faults
from fastagg._engine import saved
from fastagg.sim import data
from fastagg.sim.config import from_dict
from fastagg.sim.run import simulate

SMALL = {"clients": 4, "rounds": 2, "epochs": 1, "alpha": 1.0, "samples": 200, "method": "fedadam"}


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    simulate(from_dict(SMALL), folder, dataset=digits)
    return folder


def test_killed_at_random_moments(capsys):
    assert faults.main(["--kills", "3", "--rounds", "20", "--methods", "fedadam"]) == 0
    said = capsys.readouterr().out
    assert "3 kills" in said
    assert "of which 0 differ" in said
    assert "the same bits" in said


class Crash(BaseException):
    pass


def crash_at(monkeypatch, number):
    """The write or rename of this number does not happen, and nothing after it; number of those so far, in a list"""
    count = [0]

    def counted(original):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] > number:
                raise Crash
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    return count


def test_crashed_at_every_write(digits, whole, tmp_path):
    """Files are written, synced, then renamed: a crash before each of these steps, in turn, loses nothing"""
    other = from_dict(SMALL | {"alpha": 0.5})
    for number in range(1000):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            count = crash_at(patch, number)
            try:
                simulate(from_dict(SMALL), folder, dataset=digits, resume=True)
            except Crash:
                pass
            else:
                assert count[0] == number
                break
        if (folder / "config.json").exists():
            with pytest.raises(ValueError, match="was begun with alpha"):
                simulate(other, folder, dataset=digits, resume=True)
        else:  # then nothing is there that other options could be mixed with
            assert not (folder / "checkpoint.safetensors").exists()
        simulate(from_dict(SMALL), folder, dataset=digits, resume=True)
        assert faults.differences(whole, folder) == []
    assert number > 15


def test_differences_are_found(whole, tmp_path):
    def changed(name, change):
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        change(folder)
        return faults.differences(whole, folder)

    def other_model(folder):
        tree = saved.load(folder / "checkpoint.safetensors")
        tree["models"][0] = {key: torch.nextafter(v, v + 1) for key, v in tree["models"][0].items()}
        saved.save(folder / "checkpoint.safetensors", tree)

    def other_metrics(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        record = json.loads(lines[1])
        record["accuracy"] += 1e-9
        (folder / "metrics.jsonl").write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]) + "\n")

    def times(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) | {"seconds": {"train": 3.0}} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    assert changed("nothing", lambda folder: None) == []
    assert changed("times", times) == []
    assert all(text.startswith("checkpoint.safetensors: tensor") for text in changed("model", other_model))
    assert changed("again", other_model)
    assert changed("metrics", other_metrics) == ["metrics.jsonl: rounds [1] differ"]
    assert changed("part", lambda f: (f / "config.json.part").touch()) == ["config.json.part: only in part"]
    assert changed("cut", lambda f: (f / "summary.json").unlink())[0].startswith("summary.json: only in")


def test_moments_are_spread_over_the_run():
    parts = faults.spread(20, random.Random(0))
    assert [int(x * 20) for x in sorted(parts)] == list(range(20))
    assert parts != sorted(parts)
