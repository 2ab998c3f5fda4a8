"""What is on the disk outlives the process: no client is lost, and none counts twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import fastagg
from fastagg import InputError
from fastagg._engine.arrivals.spill import Spill
from helpers.cohort import assert_same_bits, make


def names(folder):
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


def test_a_round_goes_on_after_a_stop(tmp_path):
    g, clients = make(6, {"w": (40, 30), "b": (3,)}, torch.bfloat16, scale=0.1)
    spill = tmp_path / "spill"
    server = fastagg.aggregator("fednova")
    round = server.round(g, memory=1, spill=spill)
    for k in range(4):
        given = {"update": {key: v - g[key] for key, v in clients[k].items()}} if k == 2 else {"model": clients[k]}
        round.add(f"client {k}/../x", **given, size=k + 1, local_steps=k + 2)
    assert names(spill) == ["client"] * 4 + ["global.safetensors", "round.json", "round.lock"]
    with pytest.raises(InputError, match="another process is writing this round"):
        server.resume_round(spill)
    round.close()  # as at the end of the process
    with pytest.raises(InputError, match=r"holds a round that was not finished: go on with server.resume_round"):
        server.round(g, spill=spill)
    (spill / ".client-x.safetensors.1-0123456789abcdef.part").write_bytes(b"half of it")
    round = fastagg.aggregator("fednova").resume_round(spill)
    assert sorted(round.clients) == [f"client {k}/../x" for k in range(4)]
    with round:
        round.discard("client 3/../x")
        for k in (3, 4, 5):
            round.add(f"client {k}/../x", clients[k], size=k + 1, local_steps=k + 2)
        found = round.finish()
        order = [int(name.split()[1][0]) for name in round.clients]
    with server.round(g) as round:  # none of it on the disk
        for k in order:
            given = {"update": {key: v - g[key] for key, v in clients[k].items()}} if k == 2 else {"model": clients[k]}
            round.add(f"client {k}/../x", **given, size=k + 1, local_steps=k + 2)
        expected = round.finish()
    assert_same_bits(expected, found)
    assert torch.equal(expected.weights, found.weights)
    assert list(spill.iterdir()) == []
    assert server.resume_round(spill) is None


def test_without_a_global_model(tmp_path):
    _, clients = make(2, {"b": (3,), "w": (40, 30)})
    with fastagg.aggregator("fedavg").round(None, memory=1, spill=tmp_path / "s") as round:
        round.add(0, clients[0])
    with fastagg.aggregator("fedavg").resume_round(tmp_path / "s") as round:
        round.add(1, clients[1])
        assert_same_bits(round.finish(), fastagg.fedavg(None, clients))


def test_a_result_that_was_not_saved_is_computed_again(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    server, spill = fastagg.aggregator("fedadam"), tmp_path / "spill"

    def fill(round):
        for k, sd in enumerate(clients):
            round.add(k, sd)

    with pytest.raises(KeyError), server.round(g, memory=1, spill=spill) as round:
        fill(round)
        first = round.finish()
        raise KeyError  # before anything was saved
    server = fastagg.aggregator("fedadam")  # as it was before the round
    with server.resume_round(spill) as round:
        assert_same_bits(round.finish(), first)
        server.save(tmp_path / "state")
    assert list(spill.iterdir()) == []
    with pytest.raises(KeyError), server.round(g, memory=1, spill=spill) as round:
        fill(round)
        round.finish()
        server.save(tmp_path / "state")
        raise KeyError  # after
    server = fastagg.aggregator("fedadam")
    server.load(tmp_path / "state")
    assert server.resume_round(spill) is None
    assert list(spill.iterdir()) == []


def test_what_is_not_a_round_of_this_server(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    with fastagg.aggregator("fedawa").round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
    with pytest.raises(InputError, match="the round is of method 'fedawa', not 'fedavg'"):
        fastagg.aggregator("fedavg").resume_round(tmp_path)
    about = json.loads((tmp_path / "round.json").read_text())
    for text, words in ((json.dumps(about | {"format": 2}), "reads format 1"), ("[1]", "cannot be read"), ("{", "read")):
        (tmp_path / "round.json").write_text(text)
        with pytest.raises(InputError, match=words):
            fastagg.aggregator("fedawa").resume_round(tmp_path)
    (tmp_path / "round.json").write_text(json.dumps(about))
    with fastagg.aggregator("fedawa").resume_round(tmp_path) as round:  # the lock was released each time
        assert round.clients == [0]


def test_a_damaged_client_has_to_send_again(tmp_path, caplog):
    g, clients = make(2, {"w": (40, 30)})
    with fastagg.aggregator("fedawa").round(g, memory=1, spill=tmp_path) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)
    path = Spill.path_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with fastagg.aggregator("fedawa").resume_round(tmp_path) as round:
        assert round.clients == [0]
        assert "its client has to send again" in caplog.text
        round.add(1, clients[1])
        assert_same_bits(round.finish(), fastagg.fedawa(g, clients))


def test_a_stop_while_a_round_is_removed_leaves_no_client_to_the_next(tmp_path):
    g, clients = make(2, {"w": (40, 30)})
    server = fastagg.aggregator("fedavg")
    for k in (0, 1):
        with server.round(g, memory=1, spill=tmp_path) as round:
            round.add(k, clients[k])
        (tmp_path / "round.json").unlink()  # the first thing that clear() does
        assert server.resume_round(tmp_path) is None
    with server.round(g, memory=1, spill=tmp_path):
        pass
    with server.resume_round(tmp_path) as round:
        assert round.clients == []


def test_cancel_and_temporary_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    g, clients = make(2, {"w": (40, 30)})
    round = fastagg.aggregator("fedavg").round(g, memory=1)
    round.add(0, clients[0])
    assert len(list((tmp_path / "tmp").glob("*/client-*"))) == 1
    del round  # without close()
    assert list((tmp_path / "tmp").iterdir()) == []
    round = fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path / "s")
    round.add(0, clients[0])
    (tmp_path / "s" / "mine").write_text("kept")
    round.cancel()
    assert names(tmp_path / "s") == ["mine"]


def test_a_full_disk(tmp_path, monkeypatch):
    g, clients = make(2, {"w": (40, 30)})

    def full(*_):
        raise OSError(28, "No space left on device")

    with fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path) as round:
        round.add(0, clients[0])
        with monkeypatch.context() as m:
            m.setattr("os.fsync", full)
            with pytest.raises(InputError, match="cannot write there: No space left on device"):
                round.add(1, clients[1])
        assert round.clients == [0]
        round.add(1, clients[1])
        assert_same_bits(round.finish(), fastagg.fedavg(g, clients))


KILLED = """
    import sys, torch, fastagg
    from fastagg._engine import saved
    folder, rounds, clients = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    server = fastagg.aggregator("fedadam", lr=0.1)
    at = {"round": 0, "model": {"w": torch.zeros(500), "seen": torch.zeros(clients)}, "server": None}
    try:
        at = saved.load(folder + "/server")
        server.load_state_dict(at["server"])
    except FileNotFoundError:
        pass
    print("began", flush=True)
    while at["round"] < rounds:
        r = at["round"]
        round = server.resume_round(folder + "/spill", memory=1) or server.round(
            at["model"], memory=1, spill=folder + "/spill"
        )
        with round:
            for k in range(clients):
                if k not in round.clients:
                    w = torch.sin(torch.arange(500.0) * (k + 1) + r)
                    round.add(k, {"w": w, "seen": torch.eye(clients)[k]}, size=k + 1)
            model = round.finish()
            at = {"round": r + 1, "model": dict(model), "server": server.state_dict()}
            saved.save(folder + "/server", at)
    print("done", flush=True)
"""


def rounds_of(folder, rounds, clients, kills, seed):
    """The last model, of a server that is killed at random moments"""
    script, rng = folder / "server.py", random.Random(seed)
    script.write_text(textwrap.dedent(KILLED))
    killed = 0
    while True:
        process = subprocess.Popen(
            [sys.executable, script, folder, str(rounds), str(clients)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout.readline() == "began\n"
        if killed < kills:
            killed += 1
            try:
                process.wait(rng.random() * 0.25)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        said = process.communicate(timeout=600)[0]
        if said == "done\n":
            break
        assert process.returncode == -signal.SIGKILL
    from fastagg._engine import saved

    at = saved.load(folder / "server")
    assert at["round"] == rounds
    assert list((folder / "spill").iterdir()) == []
    return at["model"]


def test_kill_9(tmp_path):
    """python -m benchmarks.soak_arrivals has fifty of them"""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    whole = rounds_of(tmp_path / "a", 30, 6, kills=0, seed=0)
    assert_same_bits(whole, rounds_of(tmp_path / "b", 30, 6, kills=4, seed=1))
