"""The strategy on Flower's own records and messages, without a network; test_flower_app.py has real processes."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import fastagg
from fastagg._engine.examples import ExampleNet, example_batches
from fastagg._engine.registry import SHARED, own_options, registry
from fastagg.integrations.flower import FastAgg, pack, unpack, view
from helpers import every_method
from helpers.flower_nodes import NODES, Nodes, content, replies, same, started

pytestmark = pytest.mark.integration
SIZES = [10, 20, 5, 40, 7, 3, 15]


def contents_of(name, sds, sizes):
    inputs = every_method.round_inputs(name, len(sds))
    told = {key: value for key, value in inputs.items() if key not in every_method.from_the_server(name)}
    return [
        content(sd, n, **{key: np.asarray(value)[k].tolist() for key, value in told.items()})
        for k, (sd, n) in enumerate(zip(sds, sizes, strict=True))
    ]


@pytest.mark.parametrize("name", sorted(registry()))
def test_every_method_gives_what_it_gives_without_flower(name):
    g, sds = every_method.cohort()
    expected = every_method.run(name, g, sds, SIZES, ids=NODES)
    inputs = every_method.from_the_server(name)
    strategy = FastAgg(name, round_inputs=inputs, **every_method.OPTIONS[name])
    started(strategy, g)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays, metrics = strategy.aggregate_train(1, replies(NODES, contents_of(name, sds, SIZES)))
    assert metrics["fastagg-clients"] == NODES
    assert metrics["fastagg-dropped"] == []
    assert MetricRecord.inflate(metrics.deflate()) == metrics  # 64-bit node ids survive Flower's serialisation
    assert ("fastagg-coherence" in metrics) == (expected.gram is not None and registry()[name].produces != "clusters")
    assert not {"class_dist", "label_dist", "local_steps"} & set(metrics)
    if registry()[name].produces == "global":
        same(unpack(arrays), expected)
        if expected.weights.dim() == 1:
            assert metrics["fastagg-weights"] == expected.weights.tolist()
        same(strategy.result, expected)
    else:
        same(unpack(arrays), fastagg.fedavg(g, sds, SIZES, client_ids=NODES))
        for mine, theirs in zip(strategy.result, expected, strict=True):
            same(mine, theirs)


def test_no_method_has_an_option_that_flower_has():
    theirs = set(FlowerFedAvg.__init__.__annotations__)
    assert not any(theirs & {*own_options(cls), *SHARED} for cls in registry().values())


def test_fedavg_agrees_with_flowers_own():
    g, sds = every_method.cohort()
    for sd in (g, *sds):
        del sd["bn.num_batches_tracked"]  # a counter, which Flower averages and makes a float64 of
    contents = [content(sd, n, loss=0.1 * n) for sd, n in zip(sds, SIZES, strict=True)]
    arrays, metrics = started(FastAgg(), g).aggregate_train(1, replies(NODES, contents))
    theirs, their_metrics = FlowerFedAvg().aggregate_train(1, replies(NODES, contents))
    assert metrics["loss"] == pytest.approx(their_metrics["loss"])
    for key, array in arrays.items():
        exact = sum(n * sd[key].double().numpy() for sd, n in zip(sds, SIZES, strict=True)) / sum(SIZES)
        ours, flowers = array.numpy(), theirs[key].numpy()  # Flower's own reader
        assert ours.dtype == np.float32
        assert np.abs(ours - exact).max() <= 2**-24 * np.abs(exact).max() * 1.001
        np.testing.assert_allclose(ours, flowers, rtol=3e-6, atol=1e-7)
    same(arrays.to_torch_state_dict(), unpack(arrays))


def test_replies_are_read_where_they_are_and_the_result_is_written_once():
    model = {"w": torch.randn(1000, 1000), "b": torch.randn(3)}
    record = ArrayRecord(model)
    for key, tensor in view(record).items():
        payload = np.frombuffer(record[key].data, np.uint8)
        assert np.shares_memory(payload, tensor.numpy())
        assert torch.equal(tensor, model[key])
    contents = [content({k: v + i for k, v in model.items()}, record=ArrayRecord) for i in range(5)]
    strategy = started(FastAgg("fedawa"), ArrayRecord(model), NODES[:5])
    for r in (1, 2):  # the first round fills caches
        tracemalloc.start()
        arrays, _ = strategy.aggregate_train(r, replies(NODES[:5], contents))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4.3e6  # one model of 4 MB: the new one, in the bytes that are sent
    assert np.shares_memory(np.frombuffer(arrays["w"].data, np.uint8), strategy.result["w"].numpy())


def test_bfloat16_travels():
    g = {"w": torch.randn(33, 7).bfloat16(), "empty": torch.zeros(0, dtype=torch.bfloat16), "n": torch.tensor(3)}
    record = ArrayRecord.inflate(  # through Flower's serialisation
        (packed := pack(g)).deflate(),
        {array.object_id: Array.inflate(array.deflate(), array.children) for array in packed.values()},
    )
    same(unpack(record), g)
    with pytest.raises(TypeError, match="bfloat16"):  # Flower's own code says no, rather than hand out integers
        record["w"].numpy()
    sds = [{"w": g["w"] + k, "empty": g["empty"], "n": torch.tensor(k)} for k in range(3)]
    arrays, _ = started(FastAgg("fedawa"), record, NODES[:3]).aggregate_train(
        1, replies(NODES[:3], [content(sd) for sd in sds])
    )
    same(unpack(arrays), fastagg.fedawa(g, sds, client_ids=NODES[:3]))
    wrong = content({**sds[0], "w": sds[0]["w"].float()})
    with pytest.raises(
        fastagg.InputError,
        match=rf"client 1 \(id {NODES[1]}\): key 'w' has dtype torch.float32, expected torch.bfloat16",
    ):
        started(FastAgg(), record, NODES[:2]).aggregate_train(1, replies(NODES[:2], [content(sds[0]), wrong]))
    with pytest.raises(fastagg.InputError, match=r"'w' has dtype torch\.complex64"):
        pack({"w": torch.zeros(2, dtype=torch.complex64)})


def test_what_fedawa_remembers_follows_the_node():
    g, sds = every_method.cohort()
    released = {"variant": "released"}
    strategy, server, center = FastAgg("fedawa", **released), fastagg.aggregator("fedawa", **released), g
    for r, order in enumerate([[0, 1, 2, 3], [3, 1, 0], [2, 3, 1, 0, 4]], 1):
        nodes, models = [NODES[k] for k in order], [sds[k] for k in order]
        started(strategy, center, nodes, r)
        arrays, _ = strategy.aggregate_train(r, replies(nodes, [content(sd) for sd in models]))
        expected = server.aggregate(center, models, [10] * len(order), nodes)
        same(unpack(arrays), expected)
        center = unpack(arrays)
    assert set(strategy.aggregator.state_dict()["client_ids"]) == set(NODES[:5])


def test_what_is_remembered_can_be_saved(tmp_path):
    g, sds = every_method.cohort()
    strategy = started(FastAgg("fedawa", variant="released"), g)
    strategy.aggregate_train(1, replies(NODES, [content(sd) for sd in sds]))
    strategy.aggregator.save(tmp_path / "state")
    other = fastagg.aggregator("fedawa", variant="released")
    other.load(tmp_path / "state")
    started(strategy, g), started(resumed := FastAgg(other), g)
    a, b = (s.aggregate_train(2, replies(NODES, [content(sd) for sd in sds]))[0] for s in (strategy, resumed))
    assert a == b


@pytest.mark.parametrize("method", ["cwfedavg", "fedamp"])
def test_every_node_gets_its_own_model(method):
    g, sds = every_method.cohort(3)
    own = dict(zip(NODES, sds, strict=False))
    got = {}

    def train(message):
        node = message.metadata.dst_node_id
        got.setdefault(node, []).append(message.content["arrays"])
        nan = node == NODES[0] and message.content["config"]["server-round"] == 2
        model = {k: v * float("nan") if nan and v.is_floating_point() else v for k, v in own[node].items()}
        return content(model)

    def evaluate(message):
        got[message.metadata.dst_node_id].append(message.content["arrays"])
        return RecordDict({"m": MetricRecord({"num-examples": 1, "acc": 1.0})})

    strategy = FastAgg(method, on_bad_client="drop")
    initial = pack(g)
    result = strategy.start(Nodes(NODES[:3], train, evaluate), initial, num_rounds=2)
    first = every_method.registry()[method]().aggregate(g, sds, [10] * 3, NODES[:3])
    for node, model in zip(NODES, first, strict=False):
        before, evaluated, trained, _ = got[node]
        assert before == initial
        same(unpack(evaluated), model)
        assert trained == evaluated
    assert got[NODES[0]][3] == got[NODES[0]][2]  # dropped in the second round: it keeps the model it had
    same(unpack(result.arrays), fastagg.fedavg(g, sds[1:], client_ids=NODES[1:3]))


def test_clusters_get_their_own_models_and_new_nodes_the_first():
    # two kinds of clients that pull in opposite directions, so that the mean stands still and CFL splits
    g = {"w": torch.zeros(8)}
    goal = dict(zip(NODES, torch.tensor([1.0, 1, -1, -1, 1])[:, None].expand(5, 8), strict=False))
    got = {}

    def train(message):
        node = message.metadata.dst_node_id
        got.setdefault(node, []).append(unpack(message.content["arrays"])["w"])
        start = got[node][-1]
        return content({"w": start + (goal[node] - start) * 0.5})

    grid = Nodes(NODES[:4], train)
    strategy = FastAgg("cfl", eps1=0.4, eps2=0.1, min_size=3, fraction_evaluate=0.0)
    strategy.start(grid, pack(g), num_rounds=2)
    grid.ids = NODES[:5]
    strategy.start(grid, pack(g), num_rounds=1)
    assert sorted(map(sorted, strategy.aggregator.clusters)) == sorted(
        [sorted([*NODES[:2], NODES[4]]), sorted(NODES[2:4])]
    )
    for node in NODES[:4]:
        assert torch.equal(got[node][1], goal[node] * 0.5)
        assert torch.equal(got[node][2], goal[node] * 0.75)
    first = strategy.aggregator.clusters[0][0]
    assert torch.equal(got[NODES[4]][0], goal[first] * 0.75)


def test_layers_of_fedawa_are_reported_as_one_weight_per_client():
    g, sds = every_method.cohort(4)
    nodes = NODES[:4]
    strategy = started(FastAgg("fedawa", layerwise=True, variant="paper", steps=3, lr=0.5), g, nodes)
    _, metrics = strategy.aggregate_train(1, replies(nodes, [content(sd) for sd in sds]))
    numel = torch.tensor([162, 12, 100]).double()  # conv, bn, fc
    assert strategy.result.weights.shape == (3, 4)
    expected = numel @ strategy.result.weights / numel.sum()
    assert metrics["fastagg-weights"] == pytest.approx(expected.tolist())
    whole = fastagg.diagnostics(fastagg.gram(g, sds), expected).coherence.item()
    assert metrics["fastagg-coherence"] == pytest.approx(whole, abs=1e-9)


def test_round_inputs_may_depend_on_the_round():
    g, sds = every_method.cohort(3)
    asked = []

    def inputs(server_round):
        asked.append(server_round)
        return {"proxy": example_batches()}

    strategy = FastAgg("fedlaw", model=ExampleNet(), epochs=1, progress=False, round_inputs=inputs)
    started(strategy, g, NODES[:3], 7).aggregate_train(7, replies(NODES[:3], [content(sd) for sd in sds]))
    assert asked == [7]


def test_options():
    strategy = FastAgg("simprox", lam=0.25, fraction_train=0.5, weighted_by_key="n", on_bad_client="drop")
    assert (strategy.aggregator.lam, strategy.fraction_train, strategy.weighted_by_key) == (0.25, 0.5, "n")
    with pytest.raises(TypeError, match="did you mean 'lam'"):
        FastAgg("simprox", lamm=0.25)
    with pytest.raises(TypeError, match="lam"):
        FastAgg(fastagg.aggregator("simprox"), lam=0.25)
    with pytest.raises(ValueError, match="did you mean 'fedawa'"):
        FastAgg("fedawaa")


def test_weighted_by_what_the_method_wants_to_know():
    g, sds = every_method.cohort(3)
    strategy = started(FastAgg("fednova", weighted_by_key="local_steps"), g, NODES[:3])
    contents = [content(sd, local_steps=k + 1, loss=float(k)) for k, sd in enumerate(sds)]
    _, metrics = strategy.aggregate_train(1, replies(NODES[:3], contents))
    assert metrics["loss"] == pytest.approx(8 / 6)
    assert "local_steps" not in metrics


def test_without_the_global_model():
    g, sds = every_method.cohort(3)
    given = replies(NODES[:3], [content(sd) for sd in sds])
    with pytest.raises(RuntimeError, match="configure_train"):
        FastAgg("fedawa").aggregate_train(1, given)
    strategy = FastAgg("fedavg")
    arrays, _ = strategy.aggregate_train(1, given)
    same(unpack(arrays), fastagg.fedavg(g, sds, client_ids=NODES[:3]))
    same(strategy.result, unpack(arrays))
    odd = replies(NODES[:3], [content({"x": torch.ones(3)}), *(content(sd) for sd in sds[1:])])  # most are right
    for method in ("fedavg", "cwfedavg"):
        arrays, metrics = FastAgg(method, on_bad_client="drop").aggregate_train(1, odd)
        assert metrics["fastagg-dropped"] == NODES[:1]
        same(unpack(arrays), fastagg.fedavg(None, sds[1:], client_ids=NODES[1:3]))


def test_flower_is_not_imported_unless_used():
    code = "import fastagg, sys; assert not any(m.split('.')[0] in ('flwr', 'ray') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
