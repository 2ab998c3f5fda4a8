"""FedBuff against Algorithm 1 of its paper, over many versions, with random arrivals of random staleness."""

from __future__ import annotations

import random

import pytest
import torch

import fastagg
from fastagg import BadClientError, InputError
from helpers.asynchronous import PARAMS, arrivals, assert_close, assert_near, discount, model_of, vector
from helpers.cohort import assert_same_bits, assert_unchanged, make_with_batch_norm, snapshot
from helpers.states import same


def naive(history, sent, sizes, s, server_lr):
    """w <- w + eta_g mean(s(tau_i) Delta_i), Delta_i = w_i - w_(t - tau_i), in float64; the mean is weighted by data"""
    now = len(history) - 1
    total = sum(sizes)
    delta = sum(n / total * s(now - v) * (vector(w) - history[v]) for (v, w), n in zip(sent, sizes, strict=True))
    return history[-1] + server_lr * delta


def play(server, dtype, rounds, *, updates="never", seed=0, memory=None, s=None, server_lr=1.0):
    """Many versions in sessions, each compared with the algorithm. Returns the last model"""
    rng, g = random.Random(seed), model_of(dtype, seed)
    models = {0: g}  # as the clients got them
    for now in range(rounds):
        history = [vector(models[v]) for v in range(now + 1)]
        sent, sizes = arrivals(rng, models, server.buffer_size, server.keep_versions if updates != "always" else 99)
        with server.round(g, memory=memory) as round:
            assert server.version == now
            for i, ((v, w), n) in enumerate(zip(sent, sizes, strict=True)):
                assert not round.is_ready
                if updates == "always" or (updates == "some" and i % 2):
                    start = models[v]
                    given = {"update": {k: w[k] - (start if k in PARAMS else g)[k] for k in w}}
                else:
                    given = {"model": w}
                before = snapshot(*given.values())
                round.add(i, **given, size=n, version=v)
                assert_unchanged([*given.values()], before)
            assert round.is_ready
            new = round.finish()
        expected = naive(history, sent, sizes, s or discount("polynomial", 0.5), server_lr)
        assert_near(new, expected, dtype, [w for _, w in sent] + [models[v] for v, _ in sent])
        assert new.staleness.tolist() == [now - v for v, _ in sent]
        assert_close(
            new["bn.running_var"],
            sum(n / sum(sizes) * w["bn.running_var"].double() for (_, w), n in zip(sent, sizes, strict=True)),
            dtype,
        )
        assert (new["bn.running_var"] >= 0).all()
        g = models[now + 1] = {key: value.clone() for key, value in new.items()}
    return g


@pytest.mark.parametrize("updates", ["never", "some", "always"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("memory", [None, 1])
def test_the_algorithm(dtype, updates, memory):
    play(fastagg.FedBuff(buffer_size=4, keep_versions=6), dtype, 15, updates=updates, memory=memory)


@pytest.mark.parametrize("decay", ["polynomial", "hinge", "constant"])
@pytest.mark.parametrize("a", [None, 0.0, 0.7])
def test_options(decay, a):
    server = fastagg.FedBuff(buffer_size=3, keep_versions=8, server_lr=0.7, decay=decay, a=a, b=2)
    usual = {"polynomial": 0.5, "hinge": 10.0, "constant": 0.0}[decay]
    play(server, torch.float64, 12, s=discount(decay, usual if a is None else a, 2), server_lr=0.7)


def test_a_buffer_of_one():
    play(fastagg.FedBuff(buffer_size=1, keep_versions=5), torch.float32, 20)


def test_bfloat16():
    play(fastagg.FedBuff(buffer_size=4, keep_versions=4), torch.bfloat16, 6)


def test_without_staleness_it_is_fedavg_with_a_server_step():
    g, clients = make_with_batch_norm(
        5, {"a.weight": (30, 7), "bn.running_var": (30,)}, torch.float32, seed=0, scale=0.1
    )
    for server_lr in (1.0, 0.5):
        found = fastagg.fedbuff(g, clients, [3, 1, 4, 1, 5], server_lr=server_lr, version=[0] * 5)
        assert_same_bits(found, fastagg.fedavg(g, clients, [3, 1, 4, 1, 5], server_lr=server_lr))


@pytest.mark.parametrize("updates", [False, True])
def test_any_order_of_arrival_has_the_same_bits(updates):
    """In one call, in a session, and in another order"""
    g, later = model_of(torch.float32, 0), model_of(torch.float32, 1)
    _, clients = make_with_batch_norm(
        6, {k: v.shape for k, v in g.items() if v.dim()}, torch.float32, seed=2, scale=0.1
    )
    versions, sizes, found = [0, 1, 1, 0, 1, 0], [3.0, 1, 4, 1, 5, 9], []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        server = fastagg.FedBuff(buffer_size=6)
        server.aggregate(g, clients, sizes, version=[0] * 6)
        if not updates:
            whole = server.with_state(server.state).aggregate(
                later, [clients[k] for k in order], [sizes[k] for k in order], order,
                version=[versions[k] for k in order],
            )  # fmt: skip
            found.append(whole)
        with server.round(later) as round:
            for k in order:
                sent = {k: value - later[k] for k, value in clients[k].items()}
                round.add(
                    k, **({"update": sent} if updates else {"model": clients[k]}), size=sizes[k], version=versions[k]
                )
            found.append(round.finish())
    for other in found[1:]:
        assert_same_bits(found[0], other)


def test_clients_that_cannot_be_used():
    server = fastagg.FedBuff(buffer_size=2, keep_versions=2)
    g = model_of(torch.float32, 0)
    for _ in range(4):
        server.aggregate(g, [g, g], version=[server.version] * 2)
    faults = {
        5: "it started from version 5 of the global model, and the current one is 4",
        1: "it started from version 1 of the global model, and there are 2 and 3 and 4, the current one; remember more",
        2.5: "it started from version 2.5 of the global model, expected an integer",
        -1: "its entry in version is -1, expected a finite number >= 0",
        "3": "its entry in version is '3', expected a finite number",
        float("nan"): "its entry in version is nan",
    }
    state = server.state_dict()
    with server.round(g) as round:
        for version, words in faults.items():
            with pytest.raises(BadClientError, match=f"client 'x': {words}"):
                round.add("x", g, version=version)
            with pytest.raises(BadClientError, match=rf"client 1 \(id 'x'\): {words}"):
                server.aggregate(g, [g, g], None, ["a", "x"], version=[4, version])
            assert same(server.state_dict(), state)
        with pytest.raises(BadClientError, match="client 'x': it does not say which version"):
            round.add("x", g)
        assert round.clients == []
        round.add("x", update={k: v - v for k, v in g.items()}, version=1)  # which needs no old model
        round.add("y", g, version=3)
        assert round.finish().staleness.tolist() == [3, 1]
    assert server.version == 5
    drops = fastagg.FedBuff(keep_versions=2, on_bad_client="drop")
    drops.load_state_dict(server.state_dict())  # of versions 3 and 4
    result = drops.aggregate(g, [g, g, g, g], None, ["a", "x", "y", "z"], version=[4, 6, 0, 0.5])
    assert list(result.dropped) == ["x", "y", "z"]
    assert result.weights.tolist() == [2**-0.5, 0, 0, 0]
    assert result.staleness[0] == 1
    assert result.staleness[1:].isnan().all()
    with pytest.raises(InputError, match="needs version"):
        server.aggregate(g, [g])


def test_all_of_them_may_be_stale():
    server, g = fastagg.FedBuff(buffer_size=2, decay="constant"), model_of(torch.float64, 0)
    w, later = model_of(torch.float64, 1), model_of(torch.float64, 2)
    server.aggregate(g, [g, g], version=[0, 0])
    new = server.aggregate(later, [w, w], version=[0, 0])
    assert_near(new, vector(later) + vector(w) - vector(g), torch.float64, [w, later, g])


def test_memory_is_bounded_and_former_versions_are_copies():
    g = {"w": torch.zeros(4)}
    server = fastagg.FedBuff(keep_versions=3)
    for v in range(7):
        g["w"].fill_(v)
        server.aggregate(g, [{"w": torch.ones(4)}], version=[v])
        assert [int(k) for k in server.state.former] == list(range(max(0, v - 2), v + 1))
    g["w"].fill_(9)
    assert [model["w"][0].item() for model in server.state.former.values()] == [4, 5, 6]
    none = fastagg.FedBuff(keep_versions=0)
    none.aggregate(g, [g], version=[0])
    assert none.state.former == {}
    assert none.version == 1


def test_state_is_saved_and_resumed(tmp_path):
    server = fastagg.FedBuff(buffer_size=3, keep_versions=4)
    g = play(server, torch.float32, 6)
    server.save(tmp_path / "state")
    other = fastagg.FedBuff(buffer_size=3, keep_versions=4)
    other.load(tmp_path / "state")
    assert same(server.state_dict(), other.state_dict())
    clients = [model_of(torch.float32, k) for k in range(3)]
    for version in ([5, 2, 6], [7, 4, 6]):
        new = [s.aggregate(g, clients, version=version) for s in (server, other)]
        assert_same_bits(*new)
    state = server.state_dict()
    for wrong, words in (
        ({"version": -1}, "version is -1"), ({"version": True}, "version is True"),
        ({"former": 3}, "no dict of models"),
        ({"former": {"8": {}}}, "there is a former version '8', and the current one is 8"),
        ({"former": {"x": {}}}, "former version 'x'"), ({"former": {"3": {"w": 1}}}, "not a floating-point tensor"),
        ({"former": {"3": {"w": torch.tensor([torch.nan])}}}, "'w' of version 3 is not finite"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"fedbuff state: .*{words}"):
            other.load_state_dict({**state, **wrong})
    assert same(state, other.state_dict())
    with pytest.raises(InputError, match="in the rounds before"):
        other.aggregate({"v": torch.ones(3)}, [{"v": torch.ones(3)}], version=[8])


def test_a_round_goes_on_after_a_stop(tmp_path):
    """The process stops before and after the server was saved: no client is lost or counted twice"""
    server = fastagg.FedBuff(buffer_size=3, keep_versions=4)
    g = play(server, torch.float32, 3)
    server.save(tmp_path / "state")
    clients = [model_of(torch.float32, k) for k in range(3)]
    expected = server.with_state(server.state).aggregate(g, clients, version=[3, 1, 2])

    def restarted():
        again = fastagg.FedBuff(buffer_size=3, keep_versions=4)
        again.load(tmp_path / "state")
        return again

    round = server.round(g, memory=1, spill=tmp_path / "spill")
    for k in (2, 0):
        round.add(k, clients[k], version=[3, 1, 2][k])
    round.close()
    server = restarted()
    with pytest.raises(KeyError), server.resume_round(tmp_path / "spill", memory=1) as round:  # noqa: PT012
        assert not round.is_ready
        round.add(1, clients[1], version=1)
        assert round.is_ready
        assert_same_bits(round.finish(), expected)
        assert server.version == 4
        raise KeyError  # before the state was saved
    server = restarted()
    with pytest.raises(KeyError), server.resume_round(tmp_path / "spill", memory=1) as round:  # noqa: PT012
        assert_same_bits(round.finish(), expected)
        server.save(tmp_path / "state")
        raise KeyError  # after
    server = restarted()
    assert server.resume_round(tmp_path / "spill") is None
    assert server.version == 4


def test_numbers_of_versions_are_told_exactly():
    server, g = fastagg.FedBuff(), model_of(torch.float32, 0)
    with pytest.raises(BadClientError, match=r"from version 3 of .* is 0; an aggregator counts its own rounds"):
        fastagg.fedbuff(g, [g], version=[3])
    server.load_state_dict({"method": "fedbuff", "version": 12345678, "former": {}})
    for version, words in ((12345679, "version 12345679 of .* is 12345678$"), (12345676.5, "version 12345676.5 of")):
        with pytest.raises(BadClientError, match=words):
            server.aggregate(g, [g], version=[version])


def test_memory_that_is_announced():
    assert fastagg.FedBuff(keep_versions=2).bytes_needed([(10, torch.float32)]) == 120
    assert fastagg.FedBuff(keep_versions=0).bytes_needed([(10, torch.float32)]) == 0  # it keeps nothing


def test_rounds_one_after_the_other():
    """One that was begun before another was finished has a global model that is not the newest"""
    server, g, w = fastagg.FedBuff(), model_of(torch.float32, 0), model_of(torch.float32, 1)
    with server.round(g) as first, server.round(g) as second:
        first.add("a", w, version=0)
        second.add("b", w, version=0)
        first.finish()
        state = server.state_dict()
        with pytest.raises(InputError, match="begun with version 0 of the global model, and another round has made v"):
            second.finish()
        assert same(server.state_dict(), state)


def test_a_round_goes_on_with_its_own_state_only(tmp_path):
    server, g = fastagg.FedBuff(), model_of(torch.float32, 0)
    for version in range(2):
        if version:
            server.save(tmp_path / "state")
        server.aggregate(g, [g], version=[version])
    with server.round(g, memory=1, spill=tmp_path / "spill") as round:
        round.add("a", g, version=1)
    other = fastagg.FedBuff()
    for has in (0, 1):
        with pytest.raises(InputError, match=f"begun with version 2 .* this server has version {has}: load the state"):
            other.resume_round(tmp_path / "spill")
        other.load(tmp_path / "state")
    with server.resume_round(tmp_path / "spill") as round:
        assert round.finish().staleness.tolist() == [1]


def test_with_a_server_optimiser():
    """FedBuff's mean update as the gradient of one: m of FedAvgM without momentum is its step"""
    plain = fastagg.FedBuff(buffer_size=3)
    server = fastagg.aggregator("fedavgm", weights=fastagg.FedBuff(buffer_size=3), momentum=0.0, lr=0.5)
    g, later = model_of(torch.float64, 0), model_of(torch.float64, 3)
    clients = [model_of(torch.float64, k) for k in range(3)]
    for s in (plain, server):
        s.aggregate(g, clients, version=[0, 0, 0])
        assert s.version == 1
    expected = plain.aggregate(later, clients, version=[0, 1, 0])
    with server.round(later) as round:
        for k, v in enumerate([0, 1, 0]):
            with pytest.raises(BadClientError, match="version 2 of the global model"):
                round.add(k, clients[k], version=2)
            assert not round.is_ready
            round.add(k, clients[k], version=v)
        assert round.is_ready
        found = round.finish()
    half = (vector(expected) + vector(later)) / 2
    assert_near(found, half, torch.float64, [expected, later, *clients])
