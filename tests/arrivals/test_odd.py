"""Rounds in odd circumstances: clients that are wrong first, odd tensors and ids, forks, rounds that nobody closes."""

from __future__ import annotations

import gc
import os
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fastagg
from fastagg import BadClientError, InputError, extend
from fastagg._engine import kernels, rounds
from fastagg._engine.arrivals.running import RunningSum
from helpers.cohort import assert_same_bits, make
from helpers.every_method import OPTIONS, cohort, round_inputs


def odd(seed):
    """0-dim and empty tensors, booleans and integers, not contiguous, requiring grad"""
    g = torch.Generator().manual_seed(seed)
    return {
        "empty": torch.zeros(0, 5), "w": torch.randn(40, 30, generator=g).t(), "one": torch.randn((), generator=g),
        "p": torch.nn.Parameter(torch.randn(7, generator=g)), "flag": torch.tensor([True, False]),
        "i": torch.tensor([seed, 3], dtype=torch.int16), "u": torch.tensor(7, dtype=torch.uint8),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fedavg", "fedawa", "median", "fedadam"])
@pytest.mark.parametrize("memory", [None, 1])
def test_odd_tensors(name, memory, tmp_path):
    g, *clients = map(odd, range(6))
    spill = None if memory is None else tmp_path
    with fastagg.aggregator(name).round(g, memory=memory, spill=spill) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)
    if memory:
        round = fastagg.aggregator(name).resume_round(tmp_path)
    else:
        round = fastagg.aggregator(name).round(g)
        for k, sd in enumerate(clients):
            round.add(k, sd)
    with round:
        assert_same_bits(fastagg.aggregator(name).aggregate(g, clients), round.finish(client_ids=range(5)))


@pytest.mark.parametrize("how", [{}, {"memory": 1}, {"running": True}], ids=str)
@pytest.mark.parametrize("others", [{}, {"w": torch.ones(3)}, {"n": torch.tensor(3)}], ids=str)
def test_tensors_without_elements(others, how):
    sds = [{"e": torch.zeros(0, 5), **others} for _ in range(3)]
    for given in (None, sds[0]):
        with fastagg.aggregator("fedavg").round(given, **how) as round:
            for k, sd in enumerate(sds):
                round.add(k, sd)
            assert_same_bits(fastagg.fedavg(given, sds), round.finish())
    with fastagg.aggregator("fedadam").round(sds[0], **how) as round:
        for k, sd in enumerate(sds):
            round.add(k, update={key: value - sds[0][key] for key, value in sd.items()})
        assert_same_bits(fastagg.fedadam(sds[0], sds), round.finish())


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(9, 7), torch.nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(9)


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("options", [{"params": Tied()}, {"layers": lambda key: key[0], "layerwise": True}])
def test_tied_weights_modules_and_layers(options, memory):
    models = []
    for seed in range(5):
        torch.manual_seed(seed)
        models.append(Tied().state_dict())
    g, *clients = models
    with fastagg.aggregator("fedawa", **options).round(g, memory=memory) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)
        assert_same_bits(fastagg.fedawa(g, clients, **options), round.finish())


def test_a_wrong_client_sets_no_form():
    good = {"w": torch.ones(4)}
    wrong = {
        "not finite": {"w": torch.full((3,), torch.nan)},
        "it is a list": [1],
        "dtype torch.complex64, which cannot be aggregated": {"w": torch.ones(3, dtype=torch.complex64)},
    }
    with fastagg.aggregator("fedavg").round(None) as round:
        for words, sd in wrong.items():
            with pytest.raises(BadClientError, match=rf"client 'x': .*{words}"):
                round.add("x", sd)
        round.add("a", good)
        assert_same_bits(round.finish(), good)


@pytest.mark.parametrize("running", [False, True])
def test_buffers_are_looked_at_when_a_client_comes(running):
    g = {"bn.weight": torch.ones(3), "bn.running_mean": torch.zeros(3)}
    with fastagg.aggregator("fedavg").round(g, running=running) as round:
        with pytest.raises(BadClientError, match=r"client 'x': key 'bn.running_mean' has values that are not finite"):
            round.add("x", g | {"bn.running_mean": torch.tensor([0, torch.inf, 0])})
        round.add("a", g)
        assert_same_bits(round.finish(), g)


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("name", ["fedavg", "fedawa"])
def test_values_may_be_looked_at_in_the_end(name, memory):
    g, clients = make(3, {"w": (4, 3)})
    clients[1] = {"w": torch.full((4, 3), torch.nan)}
    with fastagg.aggregator(name).round(g, memory=memory, check="finish") as round:
        assert all(round.add(k, sd) for k, sd in enumerate(clients))
        with pytest.raises(BadClientError, match=r"client 1: key 'w' has values that are not finite"):
            round.finish()
    with fastagg.aggregator(name, on_bad_client="drop").round(g, memory=memory, check="finish") as round:
        assert all(round.add(k, sd) for k, sd in enumerate(clients))
        result = round.finish()
    assert list(result.dropped) == [1]
    assert_same_bits(result, fastagg.aggregator(name).aggregate(g, clients[::2]))
    with pytest.raises(InputError, match="leave check out"):
        fastagg.aggregator("fedavg").round(g, running=True, check="finish")
    with pytest.raises(ValueError, match="expected 'add' or 'finish'"):
        fastagg.aggregator("fedavg").round(g, check="never")


def test_a_state_dict_may_be_filled_anew_for_the_next_client():
    g, clients = make(3, {"w": (4, 3)})
    buffer = {}
    with fastagg.aggregator("fedawa").round(buffer | g) as round:
        for k, sd in enumerate(clients):
            buffer.update(sd)
            round.add(k, buffer)
        buffer.clear()
        assert_same_bits(round.finish(), fastagg.fedawa(g, clients))


@pytest.mark.parametrize("memory", [None, 1])
def test_an_array_may_be_filled_anew_for_the_next_client(memory):
    g, clients = make(3, {"w": (4, 3)})
    counts, size, dists = np.zeros(4), torch.zeros(()), [[50.0, 1, 1, 1], [1, 50, 1, 1], range(1, 5)]
    with fastagg.aggregator("feddisco").round(g, memory=memory) as round:
        for k, sd in enumerate(clients):
            counts[:] = dists[k]
            size.fill_(k + 1)
            round.add(k, sd, size=size, label_dist=dists[k] if k == 2 else counts)
        found = round.finish()
    expected = fastagg.feddisco(g, clients, [1, 2, 3], label_dist=[list(dist) for dist in dists])
    assert_same_bits(found, expected)
    assert torch.equal(found.weights, expected.weights)


@pytest.mark.parametrize("running", [False, True])
def test_results_are_of_the_callers_kind(running):
    """NumPy's arrays, also of a running sum; and state_dict()'s _metadata"""
    g, clients = make(3, {"w": (4, 3)})
    arrays = [{key: value.numpy() for key, value in sd.items()} for sd in clients]
    with fastagg.aggregator("fedavg").round(None, running=running) as round:
        for k, sd in enumerate(arrays):
            round.add(k, sd, size=Fraction(1, 3))
        new = round.finish()
    assert isinstance(new["w"], np.ndarray)
    np.testing.assert_allclose(new["w"], fastagg.fedavg(g, clients)["w"], rtol=1e-6)
    net = torch.nn.BatchNorm1d(3)
    with fastagg.aggregator("fedavg").round(net.state_dict(), running=running) as round:
        round.add(0, net.state_dict())
        assert round.finish()._metadata == net.state_dict()._metadata


def test_sizes_of_all_or_of_none():
    g, clients = make(3, {"w": (4, 3)})
    for sizes in ((1, None), (None, 1)):
        with fastagg.aggregator("fedavg").round(g) as round:
            round.add(0, clients[0], size=sizes[0])
            with pytest.raises(BadClientError, match="client 1: it has"):
                round.add(1, clients[1], size=sizes[1])
            round.discard(0)
            round.add(1, clients[1], size=sizes[1])


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "uniform"])
def test_somebody_has_data(name, running):
    with fastagg.aggregator(name).round({"w": torch.ones(2)}, running=running) as round:
        for k in range(2):
            round.add(k, {"w": torch.ones(2)}, size=0)
        with pytest.raises(InputError, match="sizes sum to zero"):
            round.finish()
        round.add(2, {"w": torch.zeros(2)}, size=1)
        assert round.finish()["w"].tolist() == ([0, 0] if name == "fedavg" else pytest.approx([2 / 3, 2 / 3]))


@pytest.mark.parametrize("drop", ["raise", "drop"])
def test_a_running_sum_that_is_too_large_is_put_down_to_nobody(drop):
    large = {"w": torch.full((5,), 6e4, dtype=torch.float16)}
    with fastagg.aggregator("fedavg", on_bad_client=drop).round(large, running=True) as round:
        round.add("a", update=large)
        with pytest.raises(InputError, match=r"fedavg: the mean of all clients: key 'w' has values that are not"):
            round.finish()


@pytest.mark.parametrize(("name", "most"), [("fedavg", 3e38), ("fednova", 3e38), ("fedadam", 1e15)])
def test_nobody_overflows_a_running_sum(name, most):
    """Or the round of all others would be lost, and nobody can be taken out of it again"""
    steps = {"local_steps": 3} if name == "fednova" else {}
    with fastagg.aggregator(name, on_bad_client="drop").round({"w": torch.zeros(2)}, running=True) as round:
        for size in (1e308, 1e200, 1e-320):
            assert not round.add("a", {"w": torch.full((2,), 1e5)}, size=size, **steps)
            assert "in the running sum, expected 1e-100 to 1e+100, or 0" in round.dropped["a"]
        for who, size in (("b", 1e100), ("c", 1.0), ("d", 0.0), ("e", 1e-99)):
            assert round.add(who, {"w": torch.full((2,), most)}, size=size, **steps)
        assert round.finish()["w"].isfinite().all()


def test_ids_of_any_kind_that_are_equal():
    for ids in (torch.tensor([5, 3]), np.array([5, 3]), range(5, 1, -2)):
        with fastagg.aggregator("fedavg").round(None) as round:
            for k in (3, 5):
                round.add(k, {"w": torch.ones(2)}, size=k)
            assert round.finish(client_ids=ids).weights.tolist() == pytest.approx([5 / 8, 3 / 8])


def test_shares_of_a_running_sum_are_the_clients_whoever_is_faster(monkeypatch):
    """One is added to the sum first, and comes into the round last"""
    g, clients = make(2, {"w": (4, 3)})
    kept, go_on = threading.Event(), threading.Event()
    with fastagg.aggregator("fedavg").round(g, running=True) as round:
        keep = type(round)._keep

        def slow(self, name, arrived):
            if name == "slow":
                kept.set()
                assert go_on.wait(60)
            keep(self, name, arrived)

        monkeypatch.setattr(type(round), "_keep", slow)
        thread = threading.Thread(target=round.add, args=["slow", clients[0]], kwargs={"size": 9})
        thread.start()
        assert kept.wait(60)
        round.add("fast", clients[1], size=1)
        go_on.set()
        thread.join()
        assert round.clients == ["fast", "slow"]
        assert round.finish().weights.tolist() == pytest.approx([0.1, 0.9])


def test_a_running_sum_that_was_interrupted_is_not_used():
    g, clients = make(2, {"a": (4, 3), "b": (2,)})
    with fastagg.aggregator("fedavg").round(g, running=True) as round:
        round.add(0, clients[0])

        class Interrupted(list):
            def __getitem__(self, t):
                if t == 1:
                    raise KeyboardInterrupt
                return super().__getitem__(t)

        sums = round._sum.sums
        round._sum.sums = Interrupted(sums)
        with pytest.raises(KeyboardInterrupt):
            round.add(1, clients[1])
        round._sum.sums = sums
        for goes_on in (lambda: round.add(2, clients[1]), round.finish):
            with pytest.raises(InputError, match="client 1 was added in part only"):
                goes_on()


def test_a_running_sum_of_which_the_division_was_interrupted_is_not_used(monkeypatch):
    """The mean is written over the sum"""
    g, clients = make(2, {"a": (4, 3), "b": (2,)})
    divided = RunningSum._divided
    with fastagg.aggregator("fedavg").round(g, running=True) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)
        with monkeypatch.context() as m:
            m.setattr(RunningSum, "_divided", lambda total, t, *rest: interrupted() if t else divided(total, t, *rest))
            with pytest.raises(KeyboardInterrupt):
                round.finish()
        with pytest.raises(InputError, match="the sum was divided in part only"):
            round.finish()


def test_who_was_interrupted_after_the_sum_does_not_count_unseen(monkeypatch):
    g, clients = make(2, {"w": (4, 3)})
    with fastagg.aggregator("fedavg").round(g, running=True) as round:
        round.add(0, clients[0])
        with monkeypatch.context() as m:
            m.setattr(type(round), "_keep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                round.add(1, clients[1])
        assert round.clients == [0]
        with pytest.raises(InputError, match="client 1 was added to the running sum already"):
            round.add(1, clients[1])
        with pytest.raises(InputError, match="client 1 was interrupted while it was added"):
            round.finish()


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_running_sum_is_divided_once():
    total = RunningSum([torch.zeros(3)])
    table = extend.tables.build(None, [{"w": torch.tensor([1.0, 2, 4])}])
    total.add("a", table, (2.0, 2.0), True, False)
    total.add("b", table, (1.0, 1.0), True, False)
    for _ in range(2):  # as where the rest of a round fails
        assert total.mean()[0].tolist() == [1, 2, 4]
    with pytest.raises(InputError, match="divided already"):
        total.add("c", table, (1.0, 1.0), True, False)


def test_ids_may_be_anything(tmp_path):
    g, [sd] = make(1, {"w": (4, 3)})
    ids = ["../x", "a/b", "", "\0", "\u00fc" * 500, 5, "5", 10**30]
    with fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path / "s") as round:
        for name in ids:
            round.add(name, sd)
    with fastagg.aggregator("fedavg").resume_round(tmp_path / "s") as round:
        assert set(round.clients) == set(ids)
        with pytest.raises(InputError, match="client_ids are"):
            round.finish(client_ids=ids[1:])
        assert_same_bits(round.finish(client_ids=ids), sd)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_long_inputs_wait_with_their_client(tmp_path):
    g, clients = make(2, {"w": (4, 3)})
    dists = [1.0] * 10**5, torch.arange(10**5)
    with fastagg.aggregator("feddisco").round(g, memory=1, spill=tmp_path) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd, size=k + 1, label_dist=dists[k])
    with fastagg.aggregator("feddisco").resume_round(tmp_path) as round:
        found = round.finish(client_ids=[0, 1])
    assert_same_bits(found, fastagg.feddisco(g, clients, [1, 2], label_dist=[dists[0], dists[1].tolist()]))


def test_a_resumed_round_has_the_order_and_kind_of_its_tensors(tmp_path):
    _, clients = make(2, {"w": (4, 3), "a": (2,)})
    g = {"n": np.array(3), "w": np.ones((4, 3), np.float32), "a": np.ones(2, np.float32)}
    clients = [{"n": np.array(4)} | {key: value.numpy() for key, value in sd.items()} for sd in clients]
    with fastagg.aggregator("fedavg").round(g, memory=1, spill=tmp_path) as round:
        for k, sd in enumerate(clients):
            round.add(k, sd)
    with fastagg.aggregator("fedavg").resume_round(tmp_path) as round:
        found = round.finish(client_ids=[0, 1])
    expected = fastagg.fedavg(g, clients)
    assert list(found) == list(g)
    assert all(isinstance(value, np.ndarray) for value in found.values())
    assert all(np.array_equal(found[key], expected[key]) for key in g)


@pytest.mark.parametrize("spill", [None, "s"])
def test_a_fork_leaves_the_round_to_its_parent(spill, tmp_path):
    g, clients = make(2, {"w": (4, 3)})
    server = fastagg.aggregator("fedavg")
    round = server.round(g, memory=1, spill=spill and tmp_path / spill)
    round.add(0, clients[0])
    child = os.fork()
    if not child:
        try:
            round.close()
            del round
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    round.add(1, clients[1])
    assert_same_bits(round.finish(), fastagg.fedavg(g, clients))
    round.close()


def test_a_round_that_nobody_closes_gives_up_its_folder(tmp_path):
    g, clients = make(1, {"w": (4, 3)})
    server = fastagg.aggregator("fedavg")
    round = server.round(g, memory=1, spill=tmp_path)
    round.add(0, clients[0])
    del round
    gc.collect()
    with server.resume_round(tmp_path) as round:
        assert round.clients == [0]


def test_two_rounds_of_one_server():
    g, clients = make(2, {"w": (4, 3)})
    server, expected = fastagg.aggregator("fedadam"), fastagg.aggregator("fedadam")
    with server.round(g) as a, server.round(g, memory=1) as b:
        a.add(0, clients[0])
        b.add(0, clients[1])
        found = [b.finish(), a.finish()]  # a round begins from what the server remembers when it is finished
    for result, sd in zip(found, (clients[1], clients[0]), strict=True):
        assert_same_bits(result, expected.aggregate(g, [sd], None, [0]))


@pytest.mark.parametrize("change", ["another", "cut", "gone"])
def test_a_file_that_changes_before_the_end(change, tmp_path):
    g, clients = make(2, {"w": (4, 3)})
    path = tmp_path / "c.safetensors"
    save_file(clients[0], path)
    with fastagg.aggregator("fedavg").round(g) as round:
        round.add(0, path)
        if change == "another":
            save_file(clients[1], tmp_path / "new.safetensors")
            (tmp_path / "new.safetensors").replace(path)
        elif change == "cut":
            os.truncate(path, 100)
        else:
            path.unlink()
        with pytest.raises(InputError, match=r"client 0: .*c\.safetensors (was changed|cannot be read any more)"):
            round.finish()
        assert round.discard(0)  # which has to know whose it is
        round.add(1, clients[1])
        assert_same_bits(clients[1], round.finish())


@pytest.mark.parametrize("who", ["client 'a'", "the global model"])
def test_a_file_that_changes_while_a_round_is_computed(who, monkeypatch, tmp_path):
    """Its name on the disk does not say whose it is"""
    g, clients = make(2, {"w": (4, 3)})
    save_file(g, tmp_path / "g.safetensors")
    run = rounds.run

    def changed(*given, **more):
        path = tmp_path / "g.safetensors" if "global" in who else next((tmp_path / "waiting").glob("client-*"))
        os.utime(path, (1, 1))
        return run(*given, **more)

    with fastagg.aggregator("fedavg").round(tmp_path / "g.safetensors", memory=1, spill=tmp_path / "waiting") as round:
        round.add("a", clients[0])
        monkeypatch.setattr(rounds, "run", changed)
        with pytest.raises(InputError, match=rf"^{who}: .* was changed while it was read"):
            round.finish()


def test_tensors_in_several_files(tmp_path):
    g, clients = make(2, {"w": (4, 3), "b": (3,)})
    for k, sd in enumerate(clients):
        save_file({"x": sd["w"]}, tmp_path / f"{k}-0.safetensors")
        save_file({"y": sd["b"], "more": torch.ones(2)}, tmp_path / f"{k}-1.safetensors")
    with fastagg.aggregator("fedawa").round(g, memory=1) as round:
        for k in range(2):
            places = {"w": (tmp_path / f"{k}-0.safetensors", "x"), "b": (str(tmp_path / f"{k}-1.safetensors"), "y")}
            round.add(k, extend.open_tensors(places))
        assert_same_bits(round.finish(), fastagg.fedawa(g, clients))
    with pytest.raises(InputError, match="has no tensor 'z'"):
        extend.open_tensors({"w": (tmp_path / "0-0.safetensors", "z")})


def test_who_was_refused_first_is_in_the_round_with_a_better_model():
    g, clients = make(2, {"w": (4, 3)})
    with fastagg.aggregator("fedavg", on_bad_client="drop").round(g, memory=1) as round:
        assert not round.add("a", {"w": torch.full((4, 3), torch.nan)})
        assert not round.add("b", {"w": torch.ones(2)})
        assert list(round.dropped) == ["a", "b"]
        assert round.add("a", clients[0])
        result = round.finish()
    assert list(result.dropped) == ["b"]


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_file_that_changes_where_whole_models_are_tried_out(change, tmp_path):
    g, clients = cohort()
    path = tmp_path / "c.safetensors"
    save_file(clients[0], path)
    with fastagg.aggregator("feddf", **OPTIONS["feddf"]).round(g) as round:
        round.add(0, path)
        os.truncate(path, 1000) if change == "cut" else path.unlink()  # to read it would end the process
        with pytest.raises(InputError, match=r"c\.safetensors"):
            round.finish(**round_inputs("feddf", 1))


@pytest.mark.parametrize("drop", [False, True])
def test_a_file_that_changes_while_it_is_looked_at_is_its_clients_fault(drop, tmp_path, monkeypatch):
    g, clients = make(1, {"w": (4, 3)})
    path = tmp_path / "c.safetensors"
    save_file(clients[0], path)
    dots = kernels.dots_of

    def changed(*given):
        os.utime(path, ns=(1, 1))
        return dots(*given)

    monkeypatch.setattr(kernels, "dots_of", changed)
    with fastagg.aggregator("fedavg", on_bad_client="drop" if drop else "raise").round(g) as round:
        if drop:
            assert not round.add("x", path)
        else:
            with pytest.raises(BadClientError, match=r"client 'x': .*c\.safetensors was changed while it was read"):
                round.add("x", path)
        assert round.clients == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grams_of_many_layers_need_no_more_memory_than_the_result_has(dtype):
    """memory= is of the clients"""
    g, clients = make(90, {f"{layer}.weight": (8,) for layer in range(40)}, scale=0.1)
    with fastagg.aggregator("fedawa", layerwise=True).round(g, memory=1) as round:
        for k, sd in enumerate(clients):
            round.add(k, {key: value.to(dtype) for key, value in sd.items()})
        meant = [{key: value.to(dtype).float() for key, value in sd.items()} for sd in clients]
        assert_same_bits(round.finish(), fastagg.fedawa(g, meant, layerwise=True))
