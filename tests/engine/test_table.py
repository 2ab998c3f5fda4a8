"""What state dicts may look like, and what is said about those that do not fit."""

from __future__ import annotations

import ctypes
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import fastagg
from fastagg._engine import scanner
from fastagg._engine import table as tables
from helpers.cohort import assert_same_bits, assert_unchanged, flat, make, snapshot

SHAPES = {"conv.weight": (4, 3, 2, 2), "bn.weight": (4,), "bn.bias": (4,), "fc.weight": (5, 4), "fc.bias": (5,)}


@pytest.fixture(params=["native", "python"])
def scan(request, monkeypatch):
    """The same behaviour with and without the native table scan"""
    if request.param == "python":
        monkeypatch.setattr(scanner, "NATIVE", None)
    elif scanner.NATIVE is None:
        pytest.skip("no native scan with this torch")


@pytest.fixture
def cohort():
    return make(3, SHAPES)


def test_nothing_is_copied(scan, cohort):
    g, clients = cohort
    table = tables.build(g, clients)
    for t, key in enumerate(g):
        assert table.center_address[t] == g[key].data_ptr()
        assert list(table.client_address[t]) == [sd[key].data_ptr() for sd in clients]


def test_keys_are_matched_by_name_not_order(scan, cohort):
    g, clients = cohort
    shuffled = [dict(reversed(sd.items())) for sd in clients]
    assert torch.equal(fastagg.gram(g, clients).matrix, fastagg.gram(g, shuffled).matrix)
    assert_same_bits(fastagg.fedavg(g, shuffled), fastagg.fedavg(g, clients))
    assert list(fastagg.fedavg(g, shuffled)) == list(g)


class Lazy(Mapping):
    """A mapping that is no dict and makes its tensors when asked"""

    def __init__(self, sd):
        self.sd = sd

    def __getitem__(self, key):
        return self.sd[key].clone()

    def __iter__(self):
        return iter(self.sd)

    def __len__(self):
        return len(self.sd)


@pytest.mark.parametrize("kind", [OrderedDict, Lazy])
def test_any_mapping(scan, cohort, kind):
    g, clients = cohort
    expected = fastagg.fedawa(g, clients)
    assert_same_bits(fastagg.fedawa(kind(g), [kind(sd) for sd in clients]), expected)


def test_numpy_in_numpy_out(cohort):
    g, clients = cohort
    g["steps"] = torch.tensor(3)
    for k, sd in enumerate(clients):
        sd["steps"] = torch.tensor(k)
    arrays = [{key: value.numpy() for key, value in sd.items()} for sd in (g, *clients)]
    for sd in arrays:
        sd["fc.weight"].flags.writeable = False  # what np.frombuffer gives
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = fastagg.fedawa(arrays[0], arrays[1:])
    expected = fastagg.fedawa(g, clients)
    for key, value in expected.items():
        assert isinstance(got[key], np.ndarray)
        assert got[key].dtype == arrays[0][key].dtype
        assert np.array_equal(got[key], value.numpy())
    assert got["steps"] == 2
    again = fastagg.fedawa(arrays[0], arrays[1:], out=got)
    assert again["fc.weight"] is got["fc.weight"]


def test_numpy_of_odd_memory():
    rng = np.random.default_rng(0)
    plain = [{"w": rng.standard_normal((6, 7)).astype(np.float32)} for _ in range(3)]
    unaligned, reversed_, swapped = [], [], []
    for sd in plain:
        raw = np.zeros(6 * 7 * 4 + 1, dtype=np.uint8)
        raw[1:] = np.frombuffer(sd["w"].tobytes(), dtype=np.uint8)
        unaligned.append({"w": raw[1:].view(np.float32).reshape(6, 7)})
        reversed_.append({"w": sd["w"][::-1].copy()[::-1]})
        swapped.append({"w": sd["w"].astype(">f4")})
    expected = fastagg.mix(plain, [0.2, 0.3, 0.5])["w"]
    for odd in (unaligned, reversed_, swapped):
        assert np.array_equal(fastagg.mix(odd, [0.2, 0.3, 0.5])["w"], expected)


def test_numpy_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    clients = [{"w": np.arange(9).astype(ml_dtypes.bfloat16) * k} for k in (1, 2)]
    out = fastagg.mix(clients, [0.5, 0.5])["w"]
    assert out.dtype == ml_dtypes.bfloat16
    assert np.array_equal(out.astype(np.float32), np.arange(9) * 1.5)


def test_strange_but_fine_tensors(scan, cohort):
    g, clients = cohort
    g = {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), **g}
    clients = [{"scalar": torch.tensor(float(k)), "empty": torch.zeros(0, 3), **sd} for k, sd in enumerate(clients)]
    expected = fastagg.gram(g, clients)
    odd = []
    for sd in clients:
        new = dict(sd)
        new["conv.weight"] = sd["conv.weight"].to(memory_format=torch.channels_last)
        new["fc.weight"] = sd["fc.weight"].T.contiguous().T
        new["bn.bias"] = torch.nn.Parameter(sd["bn.bias"].clone())
        odd.append(new)
    assert not odd[0]["conv.weight"].is_contiguous()
    before = snapshot(*odd)
    assert torch.equal(fastagg.gram(g, odd).matrix, expected.matrix)
    assert_same_bits(fastagg.fedavg(g, odd), fastagg.fedavg(g, clients))
    assert not any(v.requires_grad for v in fastagg.fedavg(g, odd).values())
    assert_unchanged(odd, before)


@pytest.mark.parametrize("shape", [(), (1,), (40,)], ids=str)
def test_lazily_negated_tensors(scan, shape):
    _, clients = make(3, {"w": shape})
    negated = [{"w": torch.complex(torch.zeros(shape), -sd["w"]).conj().imag} for sd in clients]
    assert negated[0]["w"].is_neg()
    assert_same_bits(fastagg.mix(negated, [0.2, 0.3, 0.5]), fastagg.mix(clients, [0.2, 0.3, 0.5]))


def test_buffers_are_mixed_but_not_in_the_gram(scan):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    g = model.state_dict()
    clients = [{k: v + 0.1 * (i + 1) if v.is_floating_point() else v + i * 10 for k, v in g.items()} for i in range(3)]
    for sd in clients:
        sd["1.running_var"] = sd["1.running_var"] * 1e6
    gram = fastagg.gram(g, clients)
    assert int(gram.numel) == 3 * 4 + 4 + 4 + 4
    assert torch.equal(gram.matrix, fastagg.gram(g, clients, params=model).matrix)
    names = [n for n, _ in model.named_parameters()]
    assert torch.equal(gram.matrix, fastagg.gram(g, clients, params=names).matrix)
    only = fastagg.gram(g, clients, params=["0.bias"])
    assert int(only.numel) == 4
    mixed = fastagg.fedavg(g, clients)
    assert mixed["1.num_batches_tracked"].dtype == torch.int64
    assert mixed["1.num_batches_tracked"] == 20
    torch.testing.assert_close(mixed["1.running_var"], sum(sd["1.running_var"] for sd in clients) / 3)
    model.load_state_dict(mixed)


def test_params_make_any_name_a_buffer_or_a_parameter():
    g, clients = make(2, {"q.scale": (3,), "q.running_mean": (3,)})
    assert int(fastagg.gram(g, clients, params=["q.running_mean"]).numel) == 3
    with pytest.raises(fastagg.InputError, match=r"params: 'q\.zero' is not a key"):
        fastagg.gram(g, clients, params=["q.zero"])
    counts = [{"n": torch.tensor([1])} for _ in range(3)]
    with pytest.raises(fastagg.InputError, match="only floating-point"):
        fastagg.gram(counts[0], counts[1:], params=["n"])


def test_layers_are_modules_or_what_the_caller_says(cohort):
    g, clients = cohort
    gram = fastagg.gram(g, clients, layerwise=True)
    assert gram.layers == ("conv", "bn", "fc")
    assert gram.numel.tolist() == [48, 8, 25]
    by_tensor = fastagg.gram(g, clients, layerwise=True, layers=lambda key: key)
    assert by_tensor.layers == tuple(g)
    torch.testing.assert_close(by_tensor.matrix[1] + by_tensor.matrix[2], gram.matrix[1], rtol=1e-12, atol=0)


def test_integer_tensors_become_the_maximum(scan):
    dtypes = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    clients = [
        {str(d): torch.tensor([[k, 3 - k], [5, -k if d.is_signed else k]], dtype=d) for d in dtypes} for k in range(4)
    ]
    for k, sd in enumerate(clients):
        sd["flag"] = torch.tensor([k == 2, False])
    for sd in (fastagg.mix(clients, [0.25] * 4), fastagg.mix(clients, [0.25] * 4, backend="reference")):
        for d in dtypes:
            assert sd[str(d)].dtype == d
            assert sd[str(d)].tolist() == [[3, 3], [5, 0 if d.is_signed else 3]]
        assert sd["flag"].tolist() == [True, False]


def sparse(sd):
    sd["fc.weight"] = sd["fc.weight"].to_sparse()


def broadcastable(sd):
    sd["fc.weight"] = sd["fc.weight"][:1]


def drop(sd):
    del sd["bn.bias"]


def rename(sd):
    sd["bn.bais"] = sd.pop("bn.bias")


BAD_CLIENTS = {
    "missing key": (drop, "client 1: key 'bn.bias' is missing"),
    "misspelt key": (rename, "client 1: key 'bn.bias' is missing"),
    "extra key": (lambda sd: sd.update(more=torch.ones(1)), "client 1: key 'more' is not in the model"),
    "shape": (
        lambda sd: sd.update({"fc.bias": torch.ones(6)}),
        "client 1: key 'fc.bias' has shape (6,), expected (5,)",
    ),
    "broadcastable": (broadcastable, "client 1: key 'fc.weight' has shape (1, 4), expected (5, 4)"),
    "scalar": (lambda sd: sd.update({"fc.bias": torch.tensor(1.0)}), "client 1: key 'fc.bias' has shape ()"),
    "dtype": (
        lambda sd: sd.update({"fc.bias": sd["fc.bias"].double()}),
        "client 1: key 'fc.bias' has dtype torch.float64, expected torch.float32",
    ),
    "sparse": (sparse, "client 1: key 'fc.weight' is a sparse tensor"),
    "meta": (
        lambda sd: sd.update({"fc.bias": torch.ones(5, device="meta")}),
        "client 1: key 'fc.bias' is a meta tensor",
    ),
    "list": (
        lambda sd: sd.update({"fc.bias": [0.0] * 5}),
        "client 1: key 'fc.bias' is a list, expected a torch tensor",
    ),
    "strings": (lambda sd: sd.update({"fc.bias": np.array(["a"])}), "client 1: key 'fc.bias' has NumPy dtype <U1"),
    "quantised": (
        lambda sd: sd.update({"fc.bias": torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)}),
        "client 1: key 'fc.bias' has dtype torch.qint8, expected torch.float32",
    ),
}


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("case", BAD_CLIENTS)
def test_bad_clients_are_named(scan, cohort, case):
    g, clients = cohort
    spoil, message = BAD_CLIENTS[case]
    spoil(clients[1])
    before = snapshot(g, clients[0], clients[2])
    for call in (fastagg.gram, fastagg.fedavg, fastagg.fedawa):
        with pytest.raises(fastagg.InputError, match=re.escape(message)):
            call(g, clients)
    with pytest.raises(fastagg.InputError, match=re.escape(message.replace("client 1", "client 1 (id 'b')"))):
        fastagg.FedAWA().aggregate(g, clients, client_ids=["a", "b", "c"])
    if case != "extra key":
        with pytest.raises(fastagg.InputError, match=re.escape(message)):
            fastagg.mix(clients, [1, 1, 1])
    assert_unchanged([g, clients[0], clients[2]], before)


def test_other_bad_input(cohort):
    g, clients = cohort
    for bad, message in (([], "no clients"), (clients[0], "one mapping"), ([g, 3], "client 1 is a int")):
        with pytest.raises(fastagg.InputError, match=message):
            fastagg.fedavg(g, bad)
    with pytest.raises(fastagg.InputError, match="global model is None"):
        fastagg.gram(None, clients)
    with pytest.raises(fastagg.InputError, match="global model is a list"):
        fastagg.fedavg([1], clients)
    with pytest.raises(fastagg.InputError, match="key 3 is a int"):
        fastagg.mix([{3: torch.ones(1)}], [1])
    complex_ = {"w": torch.ones(2, dtype=torch.complex64)}
    with pytest.raises(fastagg.InputError, match=r"key 'w' has dtype torch\.complex64"):
        fastagg.mix([complex_], [1])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 2], r"sizes have shape \(2,\), expected one for each of the 3 clients"),
        ([1, -2, 3], "client 1: its entry in sizes is -2, expected a finite number >= 0"),
        ([1, 2, float("nan")], "client 2: its entry in sizes is nan"),
        ([float("inf"), 2, 3], "client 0: its entry in sizes is inf"),
        ([0, 0, 0], "sum to zero"),
        (5, "sizes: expected one for each of the 3 clients"),
    ],
)
def test_bad_sizes(cohort, sizes, message):
    for method in (fastagg.fedavg, fastagg.fedawa):
        with pytest.raises(fastagg.InputError, match=message):
            method(*cohort, sizes)


def test_sizes_are_shares(cohort):
    g, clients = cohort
    result = fastagg.fedavg(g, clients, torch.tensor([10, 30, 60]))
    assert result.weights.tolist() == pytest.approx([0.1, 0.3, 0.6], abs=1e-15)
    expected = sum(w * flat(sd) for w, sd in zip([0.1, 0.3, 0.6], clients, strict=True))
    torch.testing.assert_close(flat(result), expected, rtol=1e-7, atol=1e-9)
    assert fastagg.fedavg(g, clients).weights.tolist() == [1 / 3] * 3
    assert torch.isfinite(fastagg.fedavg(g, clients, [1e308, 1e308, 1e308]).weights).all()


def test_duplicate_ids(cohort):
    with pytest.raises(fastagg.InputError, match="clients 0 and 2 have the same id 'a'"):
        fastagg.FedAWA().aggregate(*cohort, client_ids=["a", "b", "a"])
    with pytest.raises(fastagg.InputError, match="2 entries for 3 clients"):
        fastagg.FedAWA().aggregate(*cohort, client_ids=["a", "b"])


def test_layout_is_made_once(cohort):
    g, clients = cohort
    first = tables.build(g, clients).layout
    assert tables.build(g, clients).layout is first


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"layerwise": True}, {"variant": "paper"}, {"variant": "cos"}], ids=str)
def test_a_client_that_is_not_finite_is_named_and_not_remembered(cohort, value, options):
    g, clients = cohort
    aggregator = fastagg.FedAWA(**options)
    aggregator.aggregate(g, clients, client_ids="abc")
    state = aggregator.state_dict()
    clients[1]["fc.weight"][3, 2] = value
    with pytest.raises(fastagg.InputError, match=r"client 1 \(id 'b'\): key 'fc.weight' has values that"):
        aggregator.aggregate(g, clients, client_ids="abc")
    assert aggregator.state_dict()["client_ids"] == state["client_ids"]
    assert torch.equal(aggregator.state_dict()["logits"], state["logits"])
    with pytest.raises(fastagg.InputError, match=r"the global model: key 'fc.weight' has values"):
        fastagg.fedawa(clients[1], [g, g], **options)


def test_fedawa_needs_a_global_model(cohort):
    for call in (fastagg.fedawa, fastagg.FedAWA(variant="paper").aggregate):
        with pytest.raises(fastagg.InputError, match="the global model is None"):
            call(None, cohort[1])


def test_tied_parameters_count_once_and_stay_tied():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(5, 4)
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    g = {k: v.clone() for k, v in model.state_dict().items()}
    clients = [dict.fromkeys(g, g["embed.weight"] + 0.1 * (i + 1)) for i in range(3)]
    assert int(fastagg.gram(g, clients, params=model).numel) == 20
    for method in ("fedavgm", "fedadam"):
        result = fastagg.aggregator(method, params=model).aggregate(g, clients)
        assert torch.equal(result["embed.weight"], result["head.weight"])
    result = fastagg.fedawa(g, clients, params=model, gamma=0.5)
    assert torch.equal(result["embed.weight"], result["head.weight"])


def test_tensors_without_memory_are_refused(scan):
    freed = torch.ones(40)
    freed.untyped_storage().resize_(0)
    with pytest.raises(fastagg.InputError, match="client 0: key 'w' has no memory"):
        fastagg.mix([{"w": freed}], [1.0])
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(40)
    with pytest.raises(fastagg.InputError, match="client 1: key 'w' is a fake tensor"):
        fastagg.mix([{"w": torch.ones(40)}, {"w": fake}], [1.0, 1.0])


class Scaled(dict):
    """A dict that answers otherwise than it stores, as lazy state dicts do"""

    def __getitem__(self, key):
        return super().__getitem__(key) * 10


def test_a_dict_with_a_will_of_its_own(scan, cohort):
    g, clients = cohort
    expected = fastagg.mix([{k: v * 10 for k, v in sd.items()} for sd in clients], [0.2, 0.3, 0.5])
    assert_same_bits(fastagg.mix([Scaled(sd) for sd in clients], [0.2, 0.3, 0.5]), expected)
    assert_same_bits(fastagg.fedavg(Scaled(g), [Scaled(sd) for sd in clients], [2, 3, 5]), expected)


def test_params_may_be_an_iterator(cohort):
    g, clients = cohort
    aggregator = fastagg.FedAWA(params=(name for name in ["fc.weight"]))
    for _ in range(2):
        assert int(aggregator.aggregate(g, clients).gram.numel) == 20
    with pytest.raises(fastagg.InputError, match="params: no names given"):
        fastagg.gram(g, clients, params=[])


def test_layers_of_a_mapping_that_changes(cohort):
    g, clients = cohort
    names = dict.fromkeys(g, "all")
    assert fastagg.gram(g, clients, layerwise=True, layers=names.__getitem__).layers == ("all",)
    names["fc.bias"] = "bias"
    assert fastagg.gram(g, clients, layerwise=True, layers=names.__getitem__).layers == ("all", "bias")


def test_one_odd_tensor_among_many(scan, cohort):
    g, clients = cohort
    g = {"scale": torch.tensor(1.0), **g}
    clients = [{"scale": torch.tensor(float(k)), **sd} for k, sd in enumerate(clients)]
    table = tables.build(g, clients)
    assert all(t is clients[1][key] for key, t in zip(g, table.clients[1], strict=True))


@pytest.mark.parametrize("clients", [None, 3])
def test_clients_that_are_no_sequence(clients):
    for call in (fastagg.fedavg, fastagg.gram):
        with pytest.raises(fastagg.InputError, match="client_sds is a"):
            call({"w": torch.ones(1)}, clients)


def test_models_on_other_devices_are_refused():
    # as far as can be seen without a second device; tests/backends/test_gpu.py has the rest
    with pytest.raises(fastagg.InputError, match=r"client 3: key 'w' is on cpu, expected cuda:0: all models must be"):
        tables.checked(torch.ones(2), (2,), torch.float32, torch.device("cuda", 0), "client 3", "w")


@pytest.mark.skipif(scanner.NATIVE is None, reason="no native scan with this torch")
def test_native_scan_tells_devices_apart():
    """With torch's own functions, but for two that say every tensor is on cuda:1"""
    library = ctypes.CDLL("libtorch_cpu.so")
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))

    @kind
    def one(tensor, out):
        out[0] = 1
        return 0

    functions = scanner.functions_of(library)
    functions |= dict.fromkeys(("device_type", "device_index"), ctypes.cast(one, ctypes.c_void_p).value)
    sd = {"a": torch.ones(3, 2), "b": torch.nn.Parameter(torch.ones(5))}
    offset = scanner.handle_offset(list(sd.values()))
    fake = scanner.Scanner(functions, scanner.codes_of(library), offset)
    layout = tables.build(None, [sd]).layout
    for device, odd in (((1, 1), []), ((1, 0), [0, 1]), ((0, 1), [0, 1]), ((0, 0), [0, 1])):
        address = np.zeros((2, 1), np.int64)
        [(tensors, found)] = fake.scan([sd], layout.keys, layout.shapes, layout.codes, device, address)
        assert found == odd
        assert tensors == [None if t in odd else value for t, value in enumerate(sd.values())]
        if not odd:
            assert address[:, 0].tolist() == [v.data_ptr() for v in sd.values()]


def test_no_native_scan_where_tensors_are_not_where_they_say():
    class Elsewhere:
        __basicsize__ = torch.Tensor.__basicsize__
        _cdata = 1

    assert scanner.handle_offset([torch.ones(3)]) is not None
    assert scanner.handle_offset([torch.ones(3), Elsewhere()]) is None


class Liar(torch.Tensor):
    """Has the memory of one shape and claims another"""

    shape = property(lambda self: torch.Size((4000,)))

    def numel(self):
        return 4000

    def is_contiguous(self, **_):
        return True


@pytest.mark.parametrize("position", [0, 1, "global"])
def test_a_subclass_that_lies_about_its_shape(scan, position):
    small, big = torch.ones(8).as_subclass(Liar), torch.ones(4000)
    assert small.shape == (4000,)
    if position == "global":
        with pytest.raises(fastagg.InputError, match=r"client 0: key 'w' has shape \(4000,\), expected \(8,\)"):
            fastagg.fedawa({"w": small}, [{"w": big}])
        return
    clients = [{"w": big}, {"w": big.clone()}]
    clients[position]["w"] = small
    with pytest.raises(fastagg.InputError, match=r"client 1: key 'w' has shape \(\d+,\), expected \(\d+,\)"):
        fastagg.mix(clients, [0.5, 0.5])
    with pytest.raises(fastagg.InputError, match=r"out: key 'w' has shape \(8,\), expected"):
        fastagg.mix([{"w": big}], [1.0], out={"w": small})
    alone = fastagg.mix([{"w": small}], [0.5])["w"]  # is taken for what it is
    assert type(alone) is torch.Tensor
    assert alone.tolist() == [0.5] * 8


class Wrapper(torch.Tensor):
    """Has no memory of its own, and does not say what it wraps"""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (40,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return torch.ones(40)


def test_wrappers_are_refused(scan):
    for clients in ([{"w": Wrapper()}], [{"w": torch.ones(40)}, {"w": Wrapper()}]):
        with pytest.raises(fastagg.InputError, match=f"client {len(clients) - 1}: key 'w' has no memory"):
            fastagg.mix(clients, [0.5] * len(clients))
    with pytest.raises(fastagg.InputError, match="out: key 'w' has no memory"):
        fastagg.mix([{"w": torch.ones(40)}], [1.0], out={"w": Wrapper()})


@pytest.mark.parametrize("subclass", [False, True])
@pytest.mark.parametrize("left", [0, 8, 156])
def test_memory_that_is_gone(scan, left, subclass):
    """Or a part of it, down to the last element"""
    shrunk = torch.ones(40)
    if subclass:
        shrunk = shrunk.as_subclass(type("Other", (torch.Tensor,), {}))
    shrunk.untyped_storage().resize_(left)
    clients = [{"w": torch.ones(40)}, {"w": torch.ones(40)}]
    with pytest.raises(fastagg.InputError, match="client 0: key 'w' has no memory"):
        fastagg.mix([{"w": shrunk}, *clients], [1.0] * 3)
    with pytest.raises(fastagg.InputError, match="out: key 'w' has no memory"):
        fastagg.mix(clients, [0.5, 0.5], out={"w": shrunk})
    with pytest.raises(fastagg.InputError, match="the global model: key 'w' has no memory"):
        fastagg.fedawa({"w": shrunk}, clients)


def test_a_view_whose_memory_is_gone(scan):
    whole = torch.ones(80)
    view = whole[40:]
    whole.untyped_storage().resize_(4 * 79)
    with pytest.raises(fastagg.InputError, match="client 1: key 'w' has no memory"):
        fastagg.mix([{"w": torch.ones(40)}, {"w": view}], [0.5, 0.5])


class Counted(str):
    """A key that counts how often it is looked up"""

    times = 0

    def __hash__(self):
        Counted.times += 1
        return super().__hash__()

    __eq__ = str.__eq__


def test_an_extra_key_costs_no_more_than_others(scan):
    keys = [Counted(f"{n}.weight") for n in range(200)]
    g, client = ({key: torch.ones(1) for key in keys} for _ in range(2))
    client["more"] = torch.ones(1)
    Counted.times = 0
    with pytest.raises(fastagg.InputError, match="client 0: key 'more' is not in the model"):
        fastagg.fedavg(g, [client])
    assert Counted.times < 50 * len(keys)


@pytest.mark.parametrize(
    ("prefix", "wrapper"), [("module.", "DistributedDataParallel"), ("_orig_mod.", "torch.compile")]
)
def test_the_prefix_of_a_wrapper_is_explained(scan, cohort, prefix, wrapper):
    g, clients = cohort
    wrapped = {prefix + key: value for key, value in clients[1].items()}
    hint = f"its keys have the prefix {prefix!r}, which {wrapper} adds. Remove it"
    with pytest.raises(fastagg.InputError, match=re.escape(f"client 1: key 'conv.weight' is missing; {hint}")):
        fastagg.fedavg(g, [clients[0], wrapped])
    both = {f"module._orig_mod.{key}": value for key, value in clients[1].items()}
    with pytest.raises(fastagg.InputError, match=r"its keys have the prefix 'module\.'"):
        fastagg.fedavg(g, [both])
    hint = f"client 0: key '{prefix}conv.weight' is missing; the other model's keys have the prefix {prefix!r}"
    with pytest.raises(fastagg.InputError, match=re.escape(hint)):
        fastagg.fedavg(wrapped, clients)
    with pytest.raises(fastagg.InputError, match=f"out: key .*; its keys have the prefix '{prefix}'"):
        fastagg.fedavg(g, clients, out={key: value.clone() for key, value in wrapped.items()})
    del wrapped[f"{prefix}bn.bias"]  # not only the prefix
    with pytest.raises(fastagg.InputError, match=r"is missing$"):
        fastagg.fedavg(g, [wrapped])


def test_one_model_given_as_several_clients(scan, cohort):
    g, clients = cohort
    live = torch.nn.Linear(4, 5)
    for same in ([live.state_dict()] * 3, [live.state_dict() for _ in range(3)]):
        with pytest.warns(
            UserWarning, match=r"client 0, client 1, client 2 are the same tensors.*value\.clone"
        ) as said:
            fastagg.fedavg(None, same)
        assert [w.filename for w in said] == [__file__]
    with pytest.warns(UserWarning, match=r"client 0 \(id 'a'\), client 2 \(id 'c'\) are the same"):
        fastagg.FedAWA().aggregate(g, [clients[0], clients[1], dict(clients[0])], client_ids="abc")
    frozen = [{**sd, "conv.weight": clients[0]["conv.weight"]} for sd in clients]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastagg.fedavg(g, frozen)
        fastagg.fedavg(None, [{"w": torch.zeros(0)}] * 2)
        fastagg.fedavg(None, [{}, {}])
