"""A round whose clients arrive one by one gives what the same round gives with all of them at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fastagg
from fastagg import BadClientError, InputError
from fastagg._engine.arrivals.round import Round
from helpers import arrivals
from helpers.arrivals import ORDER, SIZES, arrive, pairs_of
from helpers.cohort import assert_same_bits, assert_unchanged, make, snapshot
from helpers.every_method import IDS, IN_MEMORY, METHODS, OPTIONS, K, cohort, models, round_inputs, run

BYTES = sum(value.nbytes for value in cohort()[0].values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("memory", [None, 4 * BYTES, 1])
def test_every_method_has_the_bits_of_a_whole_round(name, memory, tmp_path):
    g, clients = cohort()
    before = snapshot(g, *clients)
    whole = fastagg.aggregator(name, **OPTIONS[name])
    expected = run(name, g, clients, SIZES, ids=IDS, server=whole)
    server = fastagg.aggregator(name, **OPTIONS[name])
    with server.round(g, memory=memory, spill=None if memory is None else tmp_path / "spill") as round:
        rest = arrive(round, name, clients)
        if memory is not None:
            assert len(list((tmp_path / "spill").glob("client-*"))) == (K if memory == 1 else K - 2)
        found = round.finish(**rest)
        assert round.clients == [IDS[k] for k in ORDER]
    for a, b in pairs_of(server, expected, found):
        assert_same_bits(a, b)
    if server.produces == "global":
        assert torch.equal(expected.weights[..., ORDER], found.weights)
    assert_unchanged([g, *clients], before)
    assert not list(tmp_path.glob("spill/*"))
    if memory is None:  # and the same memory of the round
        again = [run(name, g, clients, SIZES, ids=IDS, server=s) for s in (whole, server)]
        for a, b in zip(*map(models, again), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("how", ["drop", "disk", "narrow", "running"])
def test_torchs_default_device_does_not_matter(name, how, monkeypatch, tmp_path):
    """Servers set it to their GPU, and may have models on the CPU all the same"""
    g, clients = cohort()
    bad = {**g, "fc.bias": g["fc.bias"] * float("nan")}
    options = {**OPTIONS[name], "on_bad_client": "drop"}
    inputs, form = round_inputs(name, K), {"narrow": torch.bfloat16}.get(how, torch.float32)
    monkeypatch.setattr(arrivals, "round_inputs", lambda *_: dict(inputs))
    clients = [{key: v.to(form) if v.is_floating_point() else v for key, v in sd.items()} for sd in clients]
    if how == "drop" and fastagg.aggregator(name, **options).min_clients < K:
        clients[0] = bad
    if how == "running" and fastagg.aggregator(name, **options).why_not_running(g):
        return
    more = {"disk": {"memory": 1, "spill": tmp_path}, "running": {"running": True}}.get(how, {"check": "finish"})

    def one():
        server = fastagg.aggregator(name, **options)
        with server.round(g, **more) as round:
            rest = arrive(round, name, clients)
            found = round.finish(**rest)
        server.save(tmp_path / "state")
        return models(found), (tmp_path / "state").read_bytes()

    expected, found = one(), None
    torch.set_default_device("meta")  # stands in for a GPU
    try:
        found = one()
    finally:
        torch.set_default_device(None)
    for a, b in zip(expected[0], found[0], strict=True):
        if a is not None:
            assert_same_bits(a, b)
    if how != "disk":  # whose rounds have a mark each
        assert expected[1] == found[1]


@pytest.mark.parametrize("name", sorted(set(METHODS) - IN_MEMORY))
def test_every_method_has_these_bits_wherever_tensors_are_cut(name, monkeypatch):
    g, clients = make(K, {"a.weight": (300, 170), "b.weight": (33, 9), "fc.weight": (4, 9100), "one": ()}, scale=1e-2)
    expected = run(name, g, clients, SIZES, ids=IDS)
    server = fastagg.aggregator(name, **OPTIONS[name])
    monkeypatch.setattr(Round, "_slab_bytes", 1 << 18)  # of eight models: half of a chunk of each, so one
    with server.round(g, memory=1) as round:
        rest = arrive(round, name, clients)
        found = round.finish(**rest)
    for a, b in pairs_of(server, expected, found):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["fedawa", "median", "fedavg", "simprox"])
def test_many_clients(name):
    g, clients = make(40, {"a.weight": (300, 70), "b.weight": (33,)}, scale=1e-2)
    expected = fastagg.aggregator(name).aggregate(g, clients, None, [str(k) for k in range(40)])
    with fastagg.aggregator(name).round(g, memory=10**5) as round:
        for k in reversed(range(40)):
            round.add(str(k), clients[k])
        assert_same_bits(expected, round.finish())


def test_files_are_not_copied(tmp_path):
    g, clients = make(5, {"w": (40, 30)})
    for k, sd in enumerate((g, *clients)):
        save_file(sd, tmp_path / f"{k}.safetensors")
    server = fastagg.aggregator("fedawa")
    with server.round(tmp_path / "0.safetensors", memory=1, spill=tmp_path / "spill") as round:
        for k in range(1, 6):
            round.add(k, tmp_path / f"{k}.safetensors")
        assert not list((tmp_path / "spill").glob("client-*"))
        assert_same_bits(fastagg.fedawa(g, clients), round.finish())
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [f"{k}.safetensors" for k in range(6)]


def test_numpy_arrays_stay_numpy_arrays():
    _, clients = make(3, {"w": (40, 30)})
    arrays = [{key: value.numpy() for key, value in sd.items()} for sd in clients]
    with fastagg.aggregator("fedavg").round(None, memory=1) as round:
        for k, sd in enumerate(arrays):
            round.add(k, sd)
        new = round.finish()
    assert isinstance(new["w"], np.ndarray)
    assert np.array_equal(new["w"], fastagg.fedavg(None, arrays)["w"])


def test_out_is_written_in_place():
    g, clients = make(3, {"w": (40, 30)})
    for memory in (None, 1):
        out = fastagg.fedavg(g, clients[:1])
        with fastagg.aggregator("fedavg").round(g, memory=memory) as round:
            for k, sd in enumerate(clients):
                round.add(k, sd)
            new = round.finish(out=out)
        assert new["w"] is out["w"]
        assert_same_bits(new, fastagg.fedavg(g, clients))
        with fastagg.aggregator("fedavg").round(g, memory=memory) as round:
            round.add(0, out)
            if memory is None:
                with pytest.raises(InputError, match="shares memory with an input"):
                    round.finish(out=out)
            else:  # it was written to the disk
                assert_same_bits(round.finish(out=out), fastagg.fedavg(g, clients))


FAULTS = {
    "client 'x': key 'w' has values that are not finite": {"w": torch.full((4, 3), torch.nan), "b": torch.ones(4)},
    "client 'x': key 'b' has shape (5,), expected (4,)": {"w": torch.ones(4, 3), "b": torch.ones(5)},
    "client 'x': key 'b' is missing": {"w": torch.ones(4, 3)},
    "client 'x': key 'b' has dtype torch.float64": {"w": torch.ones(4, 3), "b": torch.ones(4).double()},
    "client 'x': it is a list": [1],
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_bad_client_is_refused_by_name(words, caplog):
    g = {"w": torch.ones(4, 3), "b": torch.zeros(4)}
    good = {"w": torch.zeros(4, 3), "b": torch.ones(4)}
    with fastagg.aggregator("fedawa").round(g) as round:
        round.add("a", good)
        with pytest.raises(BadClientError) as raised:
            round.add("x", FAULTS[words])
        assert str(raised.value).startswith(words)
        assert round.clients == ["a"]
        round.add("x", good)  # it may send again
        assert round.finish().dropped == {}
    with fastagg.aggregator("fedawa", on_bad_client="drop").round(g) as round:
        assert not round.add("x", FAULTS[words])
        assert words in caplog.text
        round.add("a", good)
        result = round.finish()
    assert list(result.dropped) == ["x"]
    assert f"client 'x': {result.dropped['x']}".startswith(words)
    assert result.weights.tolist() == [1]


def test_sizes_and_inputs_are_checked_when_they_come():
    g, clients = make(4, {"w": (4, 3)})
    with fastagg.aggregator("fednova").round(g) as round:
        round.add("a", clients[0], size=3, local_steps=5)
        for faulty in ({"size": -1}, {"size": "3"}, {"size": float("nan")}, {"size": 1, "local_steps": 0}, {}):
            with pytest.raises(BadClientError, match="client 'b'"):
                round.add("b", clients[1], **faulty)
        with pytest.raises(TypeError, match="no 'local_step'; did you mean 'local_steps'"):
            round.add("b", clients[1], size=1, local_step=4)
        round.add("b", clients[1], size=2, local_steps=4)
        expected = fastagg.fednova(g, clients[:2], [3, 2], local_steps=[5, 4])
        with pytest.raises(InputError, match="local_steps came with the clients"):
            round.finish(local_steps=[5, 4])
        assert_same_bits(round.finish(), expected)


def test_twice_and_discarded(caplog):
    g, clients = make(4, {"w": (4, 3)})
    for memory in (None, 1):
        with fastagg.aggregator("fedavg").round(g, memory=memory) as round:
            round.add(0, clients[0])
            with pytest.raises(BadClientError, match="client 0: it has sent a model in this round already"):
                round.add(0, clients[1])
            assert round.discard(0)
            assert not round.discard(0)
            round.add(0, clients[2])
            round.add("0", clients[3])
            assert_same_bits(round.finish(), fastagg.fedavg(g, clients[2:]))
    with fastagg.aggregator("fedavg", on_bad_client="drop").round(g) as round:
        assert round.add(0, clients[0])
        assert not round.add(0, clients[1])
        assert "the first one counts" in caplog.text
        result = round.finish()
    assert_same_bits(result, fastagg.fedavg(g, clients[:1]))
    assert result.dropped == {}


def test_a_round_ends_once():
    g, clients = make(2, {"w": (4, 3)})
    server = fastagg.aggregator("fedadam")
    with server.round(g) as round:
        with pytest.raises(InputError, match="no client is in the round"):
            round.finish()
        round.add(0, clients[0])
        round.finish()
        for again in (lambda: round.add(1, clients[1]), round.finish, lambda: round.discard(0)):
            with pytest.raises(InputError, match="the round is finished"):
                again()
    with pytest.raises(InputError, match="the round is closed"):
        round.finish()


def test_a_round_that_failed_goes_on():
    g, clients = make(3, {"w": (4, 3)})
    with fastagg.aggregator("krum", f=1).round(g) as round:
        round.add(0, clients[0])
        with pytest.raises(InputError):
            round.finish()  # too few for f = 1
        for k in (1, 2):
            round.add(k, clients[k])
        with pytest.raises(InputError):
            round.finish()
        round.add(3, clients[0])
        round.add(4, clients[1])
        round.finish()


def test_what_cannot_be():
    g, clients = make(2, {"w": (4, 3)})
    with pytest.raises(InputError, match="global model"):
        fastagg.aggregator("fedawa").round(None)
    with pytest.raises(ValueError, match="expected a number of bytes"):
        fastagg.aggregator("fedawa").round(g, memory="much")
    with fastagg.aggregator("fedavg").round(None) as round:
        with pytest.raises(TypeError, match="a client's model or its update"):
            round.add(0)
        with pytest.raises(TypeError, match="a client's model or its update"):
            round.add(0, g, update=g)
        with pytest.raises(InputError, match="was given none"):
            round.add(0, update=g)
        with pytest.raises(InputError, match="expected a string or integer"):
            round.add(0.5, g)
        round.add(0, clients[0])
        assert_same_bits(round.finish(), clients[0])


@pytest.mark.parametrize("memory", [None, 5000])
def test_many_threads(memory):
    g, clients = make(24, {"w": (40, 30)}, scale=1e-2)
    refused = []
    for _ in range(3):
        with fastagg.aggregator("fedawa", on_bad_client="drop").round(g, memory=memory) as round:

            def send(k, round=round):
                if not round.add(k % 20, clients[k % 20], size=k % 20 + 1):
                    refused.append(k)

            threads = [threading.Thread(target=send, args=[k]) for k in range(24)]  # four of them twice
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            new = round.finish()
        assert_same_bits(new, fastagg.fedawa(g, clients[:20], range(1, 21)))
    assert len(refused) == 12


def test_finish_waits_for_a_client_that_is_being_received(monkeypatch):
    g, clients = make(2, {"w": (4, 3)})
    begun, go_on = threading.Event(), threading.Event()
    round = fastagg.aggregator("fedavg").round(g)
    checked = type(round)._checked

    def slow(self, *given):
        begun.set()
        assert go_on.wait(60)
        return checked(self, *given)

    round.add(0, clients[0])
    monkeypatch.setattr(type(round), "_checked", slow)
    sender = threading.Thread(target=round.add, args=[1, clients[1]])
    sender.start()
    assert begun.wait(60)
    threading.Timer(0.1, go_on.set).start()
    assert_same_bits(round.finish(), fastagg.fedavg(g, clients))
    sender.join()
    round.close()
