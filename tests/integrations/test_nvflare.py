"""The NVFlare aggregator on real FLModels, without a simulator."""

from __future__ import annotations

import gc
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare: make test-integrations")

import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict, _LazyRef
from safetensors.torch import save_file

import fastagg
from fastagg._engine import kernels
from fastagg.integrations.nvflare import FastAggAggregator

pytestmark = pytest.mark.integration

SITES = ("site-1", "site-2", "site-3")
SIZES = (100, 300, 50)


def model(seed, near=None):
    """With a BatchNorm and its counter; near: what a client makes of that model"""
    generator = torch.Generator().manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    sd = {key: torch.randn(value.shape, generator=generator) for key, value in net.state_dict().items()}
    if near is not None:
        sd = {key: near[key] + 0.1 * value for key, value in sd.items()}
    sd["1.num_batches_tracked"] = torch.tensor(seed)
    return sd


def as_numpy(sd):
    return {key: value.numpy() for key, value in sd.items()}


def minus(a, b):
    return {key: a[key] - b[key] for key in a}


@pytest.fixture
def sent():
    return model(0)


@pytest.fixture
def returned(sent):
    return [model(k + 1, near=sent) for k in range(3)]


def event(aggregator, global_sd):
    """What the controller does when it sends the model out"""
    context = FLContext()
    sent = FLModelUtils.to_shareable(FLModel(params=global_sd, current_round=4))
    context.set_prop(AppConstants.TRAIN_SHAREABLE, sent, private=True)
    aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, context)


def fl_model(name, params, kind=ParamsType.FULL, size=None, accuracy=None, number=4, **meta):
    meta = {"client_name": name, **meta}
    if size is not None:
        meta["NUM_STEPS_CURRENT_ROUND"] = size
    metrics = None if accuracy is None else {"accuracy": accuracy}
    return FLModel(params=params, params_type=kind, metrics=metrics, current_round=number, meta=meta)


def run(aggregator, global_sd, clients, kind=ParamsType.FULL, sizes=SIZES, order=None, **kw):
    aggregator.reset_stats()
    if global_sd is not None:
        event(aggregator, global_sd)
    for k in order or range(len(clients)):
        meta = {what: values[k] for what, values in kw.items()}
        aggregator.accept_model(fl_model(SITES[k], clients[k], kind, None if sizes is None else sizes[k], **meta))
    return aggregator.aggregate_model()


def assert_equal(a, b):
    assert list(a) == list(b)
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])
@pytest.mark.parametrize("kind", list(ParamsType))
def test_fedavg_is_what_nvflare_computes(sent, returned, kind, numpy):
    clients = returned if kind == ParamsType.FULL else [minus(sd, sent) for sd in returned]
    if numpy:
        sent, clients = as_numpy(sent), [as_numpy(sd) for sd in clients]
    ours = run(FastAggAggregator(), sent, clients, kind, accuracy=(0.5, 0.9, 0.1))
    theirs = BaseFedAvg.aggregate_fn(
        [fl_model(n, sd, kind, s, a) for n, sd, s, a in zip(SITES, clients, SIZES, (0.5, 0.9, 0.1), strict=True)]
    )
    assert ours.params_type == theirs.params_type == kind
    assert ours.current_round == 4
    assert ours.metrics == pytest.approx(theirs.metrics)
    for key in sent:
        if "num_batches" not in key:  # theirs becomes a mean, and a float
            assert type(ours.params[key]) is type(clients[0][key])
            np.testing.assert_allclose(ours.params[key], theirs.params[key], rtol=1e-5, atol=1e-6)
    assert ours.params["1.num_batches_tracked"].dtype == clients[0]["1.num_batches_tracked"].dtype
    assert ours.params["1.num_batches_tracked"] == 3
    assert ours.meta["fastagg_weights"] == pytest.approx({n: s / 450 for n, s in zip(SITES, SIZES, strict=True)})


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedawa", {"variant": "paper", "steps": 20, "lr": 0.1}), ("fedavg", {"gamma": 0.9}),
        ("uniform", {"server_lr": 0.5, "gamma": 0.9}),
    ],
)  # fmt: skip
def test_the_controller_takes_results_over(sent, returned, method, options):
    """FULL and DIFF end in the same global model, by NVFlare's own update"""
    new = []
    for kind in ParamsType:
        clients = returned if kind == ParamsType.FULL else [minus(sd, sent) for sd in returned]
        result = run(FastAggAggregator(method, options), sent, clients, kind)
        new.append(FLModelUtils.update_model(FLModel(params=dict(sent)), result).params)
    for key in sent:
        torch.testing.assert_close(new[0][key], new[1][key], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(new[0]["0.weight"], sent["0.weight"], atol=1e-2)


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedawa", {"layerwise": True}), ("simprox", {}), ("ldawa", {}), ("geometric_median", {}), ("fedadam", {})],
)
def test_methods_are_fastaggs(sent, returned, method, options):
    result = run(FastAggAggregator(method, options), sent, returned)
    expected = fastagg.aggregator(method, **options).aggregate(sent, returned, SIZES, SITES)
    assert_equal(result.params, dict(expected))
    if options:
        assert result.meta["fastagg_layers"] == ["0", "1", "2"]
        assert result.meta["fastagg_weights"]["site-2"] == expected.weights[:, 1].tolist()


def test_bfloat16_updates_are_not_lost(sent):
    """An update below half a unit in the last place of the model vanishes if added in bfloat16"""
    half = {key: value.bfloat16() if value.is_floating_point() else value for key, value in sent.items()}
    half["0.weight"] = torch.ones(5, 7, dtype=torch.bfloat16)
    updates = [{key: torch.zeros_like(value) for key, value in half.items()} for _ in range(3)]
    for k, update in enumerate(updates):
        update["0.weight"] += 0.001 * (k + 1)
    result = run(FastAggAggregator("geometric_median"), half, updates, ParamsType.DIFF)
    assert result.params["0.weight"].dtype == torch.bfloat16
    assert 0.0009 < result.params["0.weight"].float().mean() < 0.0031
    full = run(FastAggAggregator("fedawa"), half, [half, half, half])
    assert {key: value.dtype for key, value in full.params.items()} == {key: v.dtype for key, v in half.items()}


@pytest.mark.parametrize(("method", "memory"), [("fedavg", None), ("fedawa", None), ("simprox", None), ("fedawa", 1)])
def test_order_of_arrival_does_not_matter(sent, returned, method, memory):
    first = run(FastAggAggregator(method, memory=memory), sent, returned)
    other = run(FastAggAggregator(method, memory=memory), sent, returned, order=[2, 0, 1])
    assert_equal(first.params, other.params)
    assert first.meta == other.meta


def test_memory_outlives_the_round(sent, returned):
    aggregator = FastAggAggregator("fedawa", {"variant": "released"})
    first, second = (run(aggregator, sent, returned).meta["fastagg_weights"] for _ in range(2))
    assert first != second  # the second round starts from the logits of the first
    server = fastagg.aggregator("fedawa", variant="released")
    expected = [server.aggregate(sent, returned, SIZES, SITES).weights.tolist() for _ in range(2)]
    assert [list(first.values()), list(second.values())] == expected


def test_inputs_are_not_modified(sent, returned):
    before = [{key: value.clone() for key, value in sd.items()} for sd in (sent, *returned)]
    run(FastAggAggregator("fedawa"), sent, returned, ParamsType.DIFF)
    run(FastAggAggregator("fedawa"), sent, returned)
    for was, sd in zip(before, (sent, *returned), strict=True):
        assert_equal(was, sd)


def broken(sd, how):
    sd = dict(sd)
    if how == "nan":
        sd["2.weight"] = sd["2.weight"] * float("nan")
    elif how == "shape":
        sd["2.weight"] = sd["2.weight"][:1]
    elif how == "dtype":
        sd["2.weight"] = sd["2.weight"].double()
    elif how == "missing":
        del sd["2.weight"]
    elif how == "extra":
        sd["2.weight.more"] = sd["2.weight"].clone()
    return sd


HOW = ["nan", "shape", "dtype", "missing", "extra"]


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
@pytest.mark.parametrize("how", HOW)
def test_a_bad_model_is_named_or_left_out(sent, returned, how, method, on_disk, tmp_path):
    clients = [broken(returned[0], how), *returned[1:]]
    if on_disk:
        clients = [lazy(sd, tmp_path / str(k)) for k, sd in enumerate(clients)]
    with pytest.raises(fastagg.InputError, match=r"site-1.*2\.weight"):
        run(FastAggAggregator(method), sent, clients)
    result = run(FastAggAggregator(method, on_bad_client="drop"), sent, clients, accuracy=(float("nan"), 0.5, 0.5))
    expected = fastagg.aggregator(method).aggregate(sent, returned[1:], SIZES[1:], SITES[1:])
    assert_equal(result.params, dict(expected))
    assert list(result.meta["fastagg_dropped"]) == ["site-1"]
    assert result.meta["fastagg_weights"].get("site-1", 0) == 0
    assert result.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize("key", [0, 3, -1])
@pytest.mark.parametrize("method", ["fedavg", "feddisco", "fedawa"])
def test_a_client_with_one_bad_tensor_is_in_no_tensor(sent, returned, method, key, tmp_path):
    """Also where tensors are read one by one, and whichever is the bad one"""
    told = {"label_dist": ([1, 2], [3, 1], [2, 2])} if method == "feddisco" else {}
    key = [key for key in sent if "num_batches" not in key][key]
    clients = [lazy(sd, tmp_path / str(k)) for k, sd in enumerate(returned)]
    clients[1] = lazy({**returned[1], key: returned[1][key] * float("nan")}, tmp_path / "bad")
    result = run(FastAggAggregator(method, on_bad_client="drop"), sent, clients, **told)
    some = {what: value[::2] for what, value in told.items()}
    expected = fastagg.aggregator(method).aggregate(sent, returned[::2], SIZES[::2], SITES[::2], **some)
    assert_equal(result.params, dict(expected))
    assert list(result.meta["fastagg_dropped"]) == ["site-2"]
    assert result.meta["fastagg_weights"] == dict(zip(SITES[::2], expected.weights.tolist(), strict=True))


@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
@pytest.mark.parametrize("how", [*HOW, "numpy dtype"])
def test_a_bad_update_is_named_or_left_out(sent, returned, how, method):
    """To 16-bit models too: they are widened before updates are added, and no update may pass for a model then"""
    for dtype in (torch.float32, torch.bfloat16):
        start = {key: value.to(dtype) if value.is_floating_point() else value for key, value in sent.items()}
        updates = [{key: (sd[key] - sent[key]).to(start[key].dtype) for key in sd} for sd in returned]
        other = torch.float32 if dtype == torch.bfloat16 else torch.float64
        bad = broken(updates[0], how) if how not in ("dtype", "numpy dtype") else dict(updates[0])
        if how == "dtype":
            bad["2.weight"] = bad["2.weight"].to(other)
        elif how == "numpy dtype":
            bad["2.weight"] = bad["2.weight"].to(other).numpy()
        clients = [bad, *updates[1:]]
        with pytest.raises(fastagg.InputError, match=r"site-1.*2\.weight"):
            run(FastAggAggregator(method), start, clients, ParamsType.DIFF)
        result = run(FastAggAggregator(method, on_bad_client="drop"), start, clients, ParamsType.DIFF)
        assert list(result.meta["fastagg_dropped"]) == ["site-1"]
        assert list(result.meta["fastagg_weights"]) == ["site-2", "site-3"]
        aggregator = FastAggAggregator(method)
        event(aggregator, start)
        for name, update, size in list(zip(SITES, updates, SIZES, strict=True))[1:]:
            aggregator.accept_model(fl_model(name, update, ParamsType.DIFF, size))
        expected = aggregator.aggregate_model()
        assert_equal(result.params, expected.params)
        assert result.meta["fastagg_weights"] == expected.meta["fastagg_weights"]
        assert result.meta.get("fastagg_coherence") == expected.meta.get("fastagg_coherence")


def test_numpy_updates_of_a_torch_model(sent, returned):
    updates = [minus(sd, sent) for sd in returned]
    for method in ("fedavg", "fedawa"):
        expected = run(FastAggAggregator(method), sent, updates, ParamsType.DIFF)
        result = run(FastAggAggregator(method), sent, [as_numpy(sd) for sd in updates], ParamsType.DIFF)
        assert_equal(result.params, expected.params)


def test_without_the_global_model_the_form_of_most_clients_counts(returned):
    for how in HOW:
        clients = [broken(returned[0], how), *returned[1:]]
        result = run(FastAggAggregator(on_bad_client="drop"), None, clients)
        assert list(result.meta["fastagg_dropped"]) == ["site-1"]
        expected = fastagg.fedavg(None, returned[1:], SIZES[1:], client_ids=SITES[1:])
        assert_equal(dict(sorted(result.params.items())), dict(sorted(expected.items())))


def test_the_first_fault_of_a_client_is_what_is_said(sent, returned, caplog):
    clients = ["no params", *returned[1:]]
    with pytest.raises(fastagg.InputError, match=r"site-1.*no dict"):
        run(FastAggAggregator("fednova"), sent, clients, local_steps=(None, 2, 3))
    result = run(FastAggAggregator("fednova", on_bad_client="drop"), sent, clients, local_steps=(None, 2, 3))
    assert result.meta["fastagg_dropped"] == {"site-1": "its params are no dict of names and tensors"}
    assert "its params are no dict" in caplog.text
    assert "local_steps" not in caplog.text


@pytest.mark.parametrize(
    "weight", [-1, float("nan"), float("inf"), "many", True, None, [3], 10**400, pytest.param(10**5000, id="long")]
)
def test_a_bad_weight_is_named_or_left_out(sent, returned, weight):
    sizes = (100, weight, 50)
    with pytest.raises(fastagg.InputError, match=r"site-2.*NUM_STEPS_CURRENT_ROUND"):
        run(FastAggAggregator(), sent, returned, sizes=sizes)
    result = run(FastAggAggregator(on_bad_client="drop"), sent, returned, sizes=sizes)
    assert result.meta["fastagg_weights"] == pytest.approx({"site-1": 2 / 3, "site-3": 1 / 3})
    assert list(result.meta["fastagg_dropped"]) == ["site-2"]


def test_weights_from_elsewhere(sent, returned, caplog):
    result = run(FastAggAggregator(weight_key="rows"), sent, returned, rows=(np.int64(3), 1.0, 0))
    assert result.meta["fastagg_weights"] == {"site-1": 0.75, "site-2": 0.25, "site-3": 0.0}
    result = run(FastAggAggregator(), sent, returned, sizes=(0, 0, 2), accuracy=(0.1, 0.2, 0.7))
    assert result.metrics == pytest.approx({"accuracy": 0.7})
    aggregator = FastAggAggregator()  # nothing is divided by the weight of a metric that only site-1 has
    for name, size, metrics in (("site-1", 0, {"loss": 3.0}), ("site-2", 5, {"accuracy": 0.5})):
        sent_back = fl_model(name, returned[0], size=size)
        sent_back.metrics = metrics
        aggregator.accept_model(sent_back)
    assert aggregator.aggregate_model().metrics == {"accuracy": 0.5}
    result = run(FastAggAggregator(aggregation_weights={"site-3": 4}), sent, returned, sizes=(1, 1, 1))
    assert result.meta["fastagg_weights"] == pytest.approx({"site-1": 1 / 6, "site-2": 1 / 6, "site-3": 4 / 6})
    aggregator = FastAggAggregator()
    for _ in range(2):
        result = run(aggregator, sent, returned, sizes=None)
    assert result.meta["fastagg_weights"] == pytest.approx(dict.fromkeys(SITES, 1 / 3))
    assert caplog.text.count("all count equally") == 1


def test_what_clients_say_reaches_the_method(sent, returned):
    steps = (2, 9, 4)
    result = run(FastAggAggregator("fednova"), sent, returned, local_steps=steps)
    expected = fastagg.fednova(sent, returned, SIZES, local_steps=steps, client_ids=SITES)
    assert_equal(result.params, dict(expected))
    for bad in (None, "x", "4", True, -1, float("nan"), [1, 2], 10**5000):
        with pytest.raises(fastagg.InputError, match=r"site-3.*local_steps"):
            run(FastAggAggregator("fednova"), sent, returned, local_steps=(2, 9, bad))
        result = run(FastAggAggregator("fednova", on_bad_client="drop"), sent, returned, local_steps=(2, 9, bad))
        assert list(result.meta["fastagg_dropped"]) == ["site-3"]
        rest = fastagg.fednova(sent, returned[:2], SIZES[:2], local_steps=steps[:2], client_ids=SITES[:2])
        assert_equal(result.params, dict(rest))
    honest, forged = (
        run(FastAggAggregator("fedawa"), sent, returned, **kw) for kw in ({}, {"logits": (9.0, 0.0, 0.0)})
    )
    assert honest.meta == forged.meta  # a client has no say in its logits


def test_a_subclass_gives_other_round_inputs(sent, returned):
    class Remembering(FastAggAggregator):
        def round_inputs(self):
            return {"logits": [0.0, 1.0, 2.0]}

    weights = run(Remembering("fedawa", {"variant": "released"}), sent, returned, order=[1, 2, 0]).meta[
        "fastagg_weights"
    ]
    assert weights == pytest.approx(dict(zip(SITES, torch.tensor([0.0, 1.0, 2.0]).softmax(0).tolist(), strict=True)))


@pytest.mark.parametrize("kind", list(ParamsType))
def test_nobody_left_keeps_the_global_model(sent, returned, kind):
    clients = [broken(sd, "nan") for sd in returned]
    for bad in (clients, [broken(sd, "dtype") for sd in returned]):
        result = run(FastAggAggregator("fedawa", on_bad_client="drop"), sent, bad, kind)
        new = FLModelUtils.update_model(FLModel(params=dict(sent)), result)
        assert_equal(new.params, sent)
        assert list(result.meta["fastagg_dropped"]) == list(SITES)
        assert all("2.weight" in reason for reason in result.meta["fastagg_dropped"].values())
        assert result.metrics is None
    with pytest.raises(fastagg.InputError, match="site-1"):
        run(FastAggAggregator("fedawa"), sent, clients, kind)
    with pytest.raises(fastagg.InputError, match="no client sent a model"):
        run(FastAggAggregator(), sent, [])


@pytest.mark.parametrize(
    ("method", "options", "sizes", "told"),
    [
        ("fedavg", {}, (0, 0, 0), {}),
        ("krum", {"f": 1}, SIZES, {}),
        ("feddisco", {}, SIZES, {"label_dist": ([], [], [])}),
    ],
)
def test_a_round_that_cannot_be_aggregated_keeps_the_global_model(sent, returned, method, options, sizes, told):
    with pytest.raises(fastagg.InputError):
        run(FastAggAggregator(method, options), sent, returned, sizes=sizes, **told)
    result = run(FastAggAggregator(method, options, on_bad_client="drop"), sent, returned, sizes=sizes, **told)
    assert_equal(result.params, sent)
    assert list(result.meta["fastagg_dropped"]) == list(SITES)
    assert result.meta["fastagg_weights"] == {}


def test_a_number_of_steps_out_of_range_is_named_or_left_out(sent, returned):
    with pytest.raises(fastagg.InputError, match=r"site-1.*local steps"):
        run(FastAggAggregator("fednova"), sent, returned, local_steps=(1e308, 2, 3))
    result = run(FastAggAggregator("fednova", on_bad_client="drop"), sent, returned, local_steps=(1e308, 2, 3))
    assert list(result.meta["fastagg_dropped"]) == ["site-1"]


@pytest.mark.parametrize(
    ("method", "told", "words"),
    [
        ("fednova", {"local_steps": (0, 2, 3)}, "local_steps is 0, expected a finite number > 0"),
        ("feddisco", {"label_dist": ([0, 0], [1, 2], [2, 1])}, r"label_dist is \[0, 0\].*not all of them 0"),
    ],
)
def test_a_client_that_tells_only_zeros_is_named_or_left_out(sent, returned, method, told, words):
    with pytest.raises(fastagg.InputError, match=f"site-1.*{words}"):
        run(FastAggAggregator(method), sent, returned, **told)
    result = run(FastAggAggregator(method, on_bad_client="drop"), sent, returned, **told)
    assert list(result.meta["fastagg_dropped"]) == ["site-1"]


@pytest.mark.parametrize("params", [{1: torch.ones(1), "x": torch.ones(1)}, [torch.ones(1)], "abc"])
def test_params_that_are_no_state_dict(sent, returned, params):
    clients = [params, *returned[1:]]
    with pytest.raises(fastagg.InputError, match=r"site-1.*no dict"):
        run(FastAggAggregator(), sent, clients)
    assert list(run(FastAggAggregator(on_bad_client="drop"), sent, clients).meta["fastagg_dropped"]) == ["site-1"]


@pytest.mark.parametrize("strange", [np.ones(3), torch.ones(3), 10**400])
def test_metrics_that_cannot_be_averaged(sent, returned, strange):
    accuracy = (np.ones(2), strange, 0.5)
    with pytest.raises(fastagg.InputError, match=r"site-2.*metrics"):
        run(FastAggAggregator(), sent, returned, accuracy=accuracy)
    result = run(FastAggAggregator(on_bad_client="drop"), sent, returned, accuracy=accuracy)
    assert result.metrics is None
    assert list(result.meta["fastagg_dropped"]) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan"), np.array([np.nan])])
def test_metrics_that_are_not_finite_are_left_out_of_averages(sent, returned, bad):
    for on_bad_client in ("raise", "drop"):
        result = run(
            FastAggAggregator(on_bad_client=on_bad_client), sent, returned, sizes=(1, 5, 3), accuracy=(0.1, bad, 0.5)
        )
        assert result.metrics == pytest.approx({"accuracy": 0.4})
        assert list(result.meta["fastagg_weights"]) == list(SITES)  # its model counts
    assert run(FastAggAggregator(), sent, returned, accuracy=(bad, bad, bad)).metrics is None


def test_the_prefix_of_a_wrapper_is_explained(sent, returned):
    returned[1] = {f"module.{key}": value for key, value in returned[1].items()}
    with pytest.raises(fastagg.InputError, match=r"site-2.*prefix 'module\.', which DistributedDataParallel adds"):
        run(FastAggAggregator(), sent, returned)


def test_a_client_does_not_choose_the_round(sent, returned):
    assert run(FastAggAggregator(), sent, returned, number=(999, 4, 4)).current_round == 4
    assert run(FastAggAggregator(), None, returned, number=(999, 4, 4)).current_round is None


def test_a_factor_cannot_make_a_weight_infinite(sent, returned):
    aggregator = FastAggAggregator(aggregation_weights={"site-1": 1e299})
    assert run(aggregator, sent, returned, sizes=(1e299, 1, 1)).meta["fastagg_weights"]["site-1"] == 1


def test_kinds_do_not_mix(sent, returned):
    for aggregator in (FastAggAggregator(), FastAggAggregator(on_bad_client="drop")):
        aggregator.reset_stats()
        event(aggregator, sent)
        for name, sd, kind in zip(SITES, returned, ("FULL", "DIFF", "FULL"), strict=True):
            aggregator.accept_model(fl_model(name, sd, kind, 1))
        if aggregator.on_bad_client == "raise":
            with pytest.raises(fastagg.InputError, match=r"site-2.*DIFF"):
                aggregator.aggregate_model()
        else:
            reasons = aggregator.aggregate_model().meta["fastagg_dropped"]
            assert reasons == {"site-2": "it sent ParamsType.DIFF, others ParamsType.FULL"}


def test_clients_may_send_a_part_of_the_model(sent, returned):
    parts = [{key: sd[key] for key in ("2.weight", "2.bias")} for sd in returned]
    result = run(FastAggAggregator("fedawa"), sent, parts, ParamsType.FULL)
    assert list(result.params) == ["2.weight", "2.bias"]


def test_a_second_model_is_ignored_and_one_without_a_name_refused(sent, returned):
    aggregator = FastAggAggregator()
    aggregator.accept_model(fl_model("site-1", returned[0], size=1))
    aggregator.accept_model(fl_model("site-1", returned[1], size=1))
    with pytest.raises(fastagg.InputError, match="client_name"):
        aggregator.accept_model(FLModel(params=returned[2]))
    assert_equal(aggregator.aggregate_model().params, returned[0])


def test_adaptive_methods_say_that_they_lack_the_global_model(returned):
    with pytest.raises(fastagg.InputError, match="fedawa needs the global model"):
        run(FastAggAggregator("fedawa"), None, returned)


def test_the_constructor_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="cwfedavg gives several models"):
        FastAggAggregator("cwfedavg")
    with pytest.raises(ValueError, match="fedawa: partial=True is not possible here, where clients arrive one by one"):
        FastAggAggregator("fedawa", {"partial": True})
    with pytest.raises(ValueError, match="did you mean 'fedawa'"):
        FastAggAggregator("fedawaa")
    with pytest.raises(TypeError, match="no option 'layer_wise'"):
        FastAggAggregator("fedawa", {"layer_wise": True})
    with pytest.raises(ValueError, match="site-1"):
        FastAggAggregator(aggregation_weights={"site-1": -1})
    with pytest.raises(ValueError, match="memory='much'; expected a number of bytes"):
        FastAggAggregator(memory="much")


def lazy(sd, folder):
    """As NVFlare leaves streamed tensors on disk"""
    folder.mkdir()
    save_file(sd, folder / "tensors.safetensors")
    on_disk = LazyTensorDict({key: (str(folder / "tensors.safetensors"), key) for key in sd}, str(folder))
    return {key: on_disk.make_lazy_ref(key) for key in sd}


def test_names_of_parameters_with_tensors_on_disk(sent, returned, tmp_path):
    clients = [lazy(sd, tmp_path / str(k)) for k, sd in enumerate(returned)]
    result = run(FastAggAggregator(options={"params": ["0.weight", "2.weight"]}), sent, clients)
    assert_equal(result.params, run(FastAggAggregator(), sent, returned).params)


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("kind", list(ParamsType))
@pytest.mark.parametrize("method", ["fedavg", "feddisco", "fedawa", "median"])
def test_tensors_on_disk(sent, returned, method, kind, memory, tmp_path, monkeypatch):
    info = {"label_dist": ([1, 2], [3, 1], [2, 2])} if method == "feddisco" else {}
    expected = run(FastAggAggregator(method, memory=memory), sent, returned, kind, **info)
    monkeypatch.setattr(_LazyRef, "materialize", lambda _: 1 / 0)  # it would read a whole tensor into memory
    clients = [lazy(sd, tmp_path / str(k)) for k, sd in enumerate(returned)]
    result = run(FastAggAggregator(method, memory=memory), sent, clients, kind, **info)
    assert_equal(result.params, expected.params)
    clients.clear()
    assert not list(tmp_path.iterdir())  # nothing holds the files once the round is over


class Elsewhere:
    """A tensor of which only NVFlare knows where it is"""

    alive: ClassVar[list] = []
    most = 0

    def __init__(self, tensor):
        self.tensor = tensor

    def materialize(self):
        tensor = self.tensor.clone()
        Elsewhere.alive.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        Elsewhere.most = max(Elsewhere.most, sum(not ref.expired() for ref in Elsewhere.alive))
        return tensor


@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
def test_tensors_that_are_somewhere_are_read_client_by_client(sent, returned, method):
    Elsewhere.alive.clear()
    Elsewhere.most = 0
    clients = [{key: Elsewhere(value) for key, value in sd.items()} for sd in returned]
    result = run(FastAggAggregator(method, memory=1), sent, clients)
    assert_equal(result.params, run(FastAggAggregator(method, memory=1), sent, returned).params)
    assert len(Elsewhere.alive) == 3 * len(sent)
    assert Elsewhere.most == len(sent)


@pytest.mark.parametrize("kind", list(ParamsType))
@pytest.mark.parametrize("method", ["fedawa", "median", "fedexp", "feddisco"])
def test_clients_that_do_not_fit_into_memory(sent, returned, method, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = {"label_dist": ([1, 2], [3, 1], [2, 2])} if method == "feddisco" else {}
    clients = returned if kind == ParamsType.FULL else [minus(sd, sent) for sd in returned]
    expected = run(FastAggAggregator(method), sent, clients, kind, **told)
    aggregator = FastAggAggregator(method, memory=1)
    event(aggregator, sent)
    for k in (2, 0, 1):
        meta = {what: values[k] for what, values in told.items()}
        aggregator.accept_model(fl_model(SITES[k], clients[k], kind, SIZES[k], **meta))
    assert len(list(tmp_path.glob("*/client-*"))) == 3
    result = aggregator.aggregate_model()
    assert_equal(result.params, expected.params)
    assert result.meta == expected.meta
    assert not list(tmp_path.iterdir())
    aggregator.accept_model(fl_model("site-1", {"w": torch.ones(3)}, size=1))
    aggregator.reset_stats()  # of a round that is not finished
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", list(ParamsType))
@pytest.mark.parametrize(("method", "options"), [("fedavg", {}), ("fedavg", {"gamma": 0.9}), ("fedadam", {})])
def test_what_is_a_mean_adds_models_up_in_bounded_memory(sent, returned, kind, method, options):
    """And holds none of them"""
    clients = returned if kind == ParamsType.FULL else [minus(sd, sent) for sd in returned]
    expected = run(FastAggAggregator(method, options), sent, clients, kind)
    aggregator = FastAggAggregator(method, options, memory="100MB")
    event(aggregator, sent)
    for name, sd, size in zip(SITES, clients, SIZES, strict=True):
        sd = {key: value.clone() for key, value in sd.items()}
        there = torch.multiprocessing.reductions.StorageWeakRef(sd["0.weight"].untyped_storage())
        aggregator.accept_model(fl_model(name, sd, kind, size))
        del sd
        gc.collect()
        assert there.expired()
    result = aggregator.aggregate_model()
    for key, value in expected.params.items():
        bit = 2 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(result.params[key], value, rtol=bit, atol=bit)
    assert result.meta["fastagg_weights"] == pytest.approx(expected.meta["fastagg_weights"], rel=1e-15)


@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
def test_a_wrong_client_that_comes_first_does_not_choose_the_form(sent, returned, method):
    """Its models wait beside those of the others, in bounded memory as well"""
    for how in HOW:
        clients = [broken(returned[0], how), *returned[1:]]
        aggregator = FastAggAggregator(method, on_bad_client="drop", memory="100MB")
        result = run(aggregator, sent, clients)
        expected = fastagg.aggregator(method).aggregate(sent, returned[1:], SIZES[1:], SITES[1:])
        assert list(result.meta["fastagg_dropped"]) == ["site-1"]
        for key, value in expected.items():
            torch.testing.assert_close(result.params[key], value)
    for wrong in ({"0.weight": sent["0.weight"]}, sent | {"more": torch.ones(1)}, {"x": torch.ones(1)}):
        result = run(FastAggAggregator(method, on_bad_client="drop", memory=1), sent, [wrong, *returned[1:]])
        assert list(result.meta["fastagg_dropped"]) == ["site-1"]
        assert list(result.params) == list(sent)


def test_updates_are_not_copied(sent, returned, monkeypatch):
    """What the kernels read is what came"""
    updates = [minus(sd, sent) for sd in returned]
    seen = []
    gram = kernels.gram_of
    monkeypatch.setattr(kernels, "gram_of", lambda table, *rest: (seen.append(table), gram(table, *rest))[1])
    run(FastAggAggregator("fedawa"), sent, updates, ParamsType.DIFF)
    addresses = {table.client_address[0, k] for table in seen for k in range(table.K)}
    assert {next(iter(update.values())).data_ptr() for update in updates} <= addresses


def test_a_disk_that_is_full_is_said_when_models_are_aggregated(sent, returned, monkeypatch):
    def full(*_, **__):
        raise fastagg.InputError("x: cannot write there: No space left on device")

    monkeypatch.setattr("fastagg._engine.arrivals.spill.write", full)
    with pytest.raises(fastagg.InputError, match=r"site-1.*No space left on device"):
        run(FastAggAggregator("fedawa", memory=1), sent, returned)


def test_an_error_of_ours_is_not_lost(sent, returned, monkeypatch):
    """Of one in accept_model NVFlare would only make a line in its log"""
    aggregator = FastAggAggregator("fedawa")
    monkeypatch.setattr(aggregator, "_add", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(aggregator, sent, returned)
