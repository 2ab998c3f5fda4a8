"""The Triton kernels against the reference: on a GPU, or interpreted on CPU tensors where there is none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import fastagg
from fastagg._engine import backends
from helpers import environment, interpreted
from helpers import kernels as checks
from helpers.cohort import DTYPES, assert_same_bits, assert_unchanged, make, snapshot
from helpers.interpreted import DEVICE, cohort, moved
from helpers.kernels import assert_mixed, check_marks, gram_error, gram_tolerance

pytest.importorskip("triton", reason="triton is not installed")
WHY_NOT = backends.why_not("triton", DEVICE)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # interpreted
needs_kernels = pytest.mark.skipif(bool(WHY_NOT), reason=f"triton: {WHY_NOT}")
TAILS = (1, 3, 7, 15, 17, 31, 33, 1023, 1024, 1025)
SHAPES = {f"{'small' if n < 100 else 'large'}.{n}": (n,) for n in TAILS} | {"small.0d": (), "empty.weight": (0, 5)}
SMALL = {"a.weight": (33, 35), "a.bias": (7,), "b.weight": (5,)}


@pytest.fixture(autouse=True)
def _round_to_nearest(monkeypatch):
    interpreted.convert_as_gpus_do(monkeypatch)


def on_cpu(sd):
    return {key: value.cpu() for key, value in sd.items()}


def poisoned(sd, offset=0):
    return moved({k: torch.full_like(v, float("nan") if v.is_floating_point() else 1) for k, v in sd.items()}, offset)


def check(g, clients, dtype, outputs=1, offset=0):
    """gram, mix and gram_mix of a cohort of one dtype against the reference, and against each other"""
    before, K = snapshot(g, *clients), len(clients)
    got = fastagg.gram(g, clients, layerwise=True, backend="triton")
    expected = fastagg.gram(g, clients, layerwise=True, backend="reference")
    assert got.matrix.dtype == torch.float64
    assert got.matrix.device == DEVICE
    assert torch.equal(got.matrix, got.matrix.mT)
    assert gram_error(got, expected) <= gram_tolerance(dtype, max(v.numel() for v in g.values()))

    weights = torch.rand(outputs, K, dtype=torch.float64) - 0.2
    out = [poisoned(g, offset) for _ in range(outputs)]
    both, mixed = fastagg.gram_mix(g, clients, weights, out=out, backend="triton")
    assert torch.equal(both.matrix, got.model().matrix)  # the model's is the sum over its layers, bit for bit
    for m, sd in enumerate(fastagg.mix(clients, weights, backend="triton", out=[poisoned(g) for _ in range(outputs)])):
        assert_mixed(on_cpu(sd), [on_cpu(c) for c in clients], weights[m], dtype)
        assert_same_bits(sd, mixed[m])
        assert all(mixed[m][key].data_ptr() == tensor.data_ptr() for key, tensor in out[m].items())
    assert_unchanged([g, *clients], before)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "K"),
    [(torch.float32, K) for K in (1, 2, 5, 8, 20, 33, 65, 70, 130)] + [(d, K) for d in DTYPES[1:] for K in (5, 33, 70)],
    ids=str,
)
def test_matches_the_reference(dtype, K):
    g, clients = cohort(K, {"a.weight": (301 if K < 50 else 35,), "a.bias": (3,)}, dtype, seed=K)
    check(g, clients, dtype, outputs=1 + K % 4)


@needs_kernels
@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 0), *((dtype, 1) for dtype in DTYPES)], ids=str)
def test_tails_and_unaligned_views(dtype, offset):
    g, clients = cohort(3, SHAPES, dtype, offset=offset)
    assert g["large.1023"].data_ptr() % 16 == offset * dtype.itemsize
    check(g, clients, dtype, offset=offset)


@needs_kernels
def test_many_small_tensors():
    g, clients = cohort(3, {f"{i % 6}.{i}": (1 + i % 5,) for i in range(40)})
    got = fastagg.gram(g, clients, layerwise=True, backend="triton")
    assert gram_error(got, fastagg.gram(g, clients, layerwise=True, backend="reference")) <= 1e-6
    weights = torch.rand(3)
    assert_same_bits(
        fastagg.mix(clients, weights, backend="triton"), fastagg.mix(clients, weights, backend="reference")
    )


@needs_kernels
def test_one_item_walks_through_tensors(monkeypatch):
    # so few items that each takes several chunks, and ends inside a tensor
    monkeypatch.setattr(backends.plan, "PRODUCT_BLOCKS", 2)
    monkeypatch.setattr(backends.plan, "MIX_ITEMS", 2)
    g, clients = cohort(2, {"a.weight": (2050,), "a.bias": (3,), "a.more": (1100,)})
    check(g, clients, torch.float32)


@needs_kernels
def test_dtypes_and_buffers_in_one_model():
    dtypes = dict(zip(("a.weight", "a.bias", "a.scale", "a.shift"), DTYPES, strict=True))
    g, clients = cohort(5, dict.fromkeys([*dtypes, "a.running_mean", "b.weight"], (70,)), torch.float64)
    integers = {
        "b.num_batches_tracked": torch.int64, "b.i8": torch.int8, "b.i16": torch.int16, "b.i32": torch.int32,
        "b.u8": torch.uint8, "b.mask": torch.bool,
    }  # fmt: skip
    for sd in (g, *clients):
        for key, dtype in dtypes.items():
            sd[key] = sd[key].to(dtype)
        for key, dtype in integers.items():
            low = 0 if dtype in (torch.uint8, torch.bool) else -100
            sd[key] = torch.randint(low, 2 if dtype == torch.bool else 100, (37,)).to(DEVICE, dtype)
        sd["b.big"] = torch.tensor(2**40 + int(sd["b.i8"][0]), device=DEVICE)
    got = fastagg.gram(g, clients, layerwise=True, backend="triton")
    expected = fastagg.gram(g, clients, layerwise=True, backend="reference")
    assert gram_error(got, expected) <= 1e-6
    weights = torch.rand(2, 3, 5, dtype=torch.float64)
    out = [poisoned(g) for _ in range(3)]
    both, mixed = fastagg.gram_mix(g, clients, weights, layerwise=True, out=out, backend="triton")
    assert torch.equal(both.matrix, got.matrix)
    plain = fastagg.mix(clients, weights, layerwise=True, backend="triton")
    for m, truth in enumerate(fastagg.mix(clients, weights, layerwise=True, backend="reference")):
        assert_same_bits(mixed[m], plain[m])
        for key, value in truth.items():
            tight = {} if value.is_floating_point() else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(plain[m][key], value, **tight)


@needs_kernels
def test_layers_without_parameters():
    g, clients = cohort(2, {"a.running_mean": (5,), "b.weight": (0,)})
    assert (fastagg.gram(g, clients, layerwise=True, backend="triton").matrix == 0).all()
    both, mixed = fastagg.gram_mix(g, clients, [0.5, 0.5], backend="triton")
    assert (both.matrix == 0).all()
    assert_same_bits(mixed, fastagg.mix(clients, [0.5, 0.5], backend="reference"))


@needs_kernels
@pytest.mark.parametrize(("K", "layerwise"), [(3, True), (3, False), (40, True)])
def test_dots_and_the_gradient_of_mix(K, layerwise):
    fastagg.set_backend("triton")
    g, clients = cohort(K, {"a.weight": (6, 3), "b.weight": (45,)})
    for sd in (g, *clients):
        sd["a.num_batches_tracked"] = torch.tensor(3, device=DEVICE)
    weights = torch.rand((2, K) if layerwise else (K,), requires_grad=True)
    target = {name: torch.randn_like(g[name]) for name in ("a.weight", "b.weight")}

    def loss(sd):
        return sum(((sd[name] - t) ** 2).sum() for name, t in target.items())

    loss(fastagg.mix(clients, weights, layerwise=layerwise)).backward()
    plain = weights.detach().clone().requires_grad_()
    rows = {name: (plain[i] if layerwise else plain).to(DEVICE) for i, name in enumerate(target)}
    loss({n: torch.einsum("k...,k->...", torch.stack([sd[n] for sd in clients]), rows[n]) for n in target}).backward()
    torch.testing.assert_close(weights.grad, plain.grad, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dots_match_the_reference(dtype):
    _, clients = cohort(18, {"a.weight": (300,), "b.weight": (33,)}, dtype)
    left = [t for sd in cohort(17, {"a.weight": (300,), "b.weight": (33,)}, dtype, seed=1)[1] for t in sd.values()]
    args = left, [t for sd in clients for t in sd.values()], [1, 0], 3
    results = []
    for backend in ("triton", "reference"):
        fastagg.set_backend(backend)
        results.append(torch.ops.fastagg.dots(*args))
    scale = 300 if dtype != torch.float64 else 300 * 300 * 2.0**-53 / 1e-6
    torch.testing.assert_close(*results, rtol=0, atol=2e-6 * scale)
    assert (results[0][2] == 0).all()


@needs_kernels
@pytest.mark.parametrize("K", [3, 70])
@pytest.mark.parametrize("fill", [0.1, 1 / 3])
def test_constant_data_does_not_accumulate_rounding(fill, K, monkeypatch):
    interpreted.sum_as_gpus_do(monkeypatch)
    g = moved({"w": torch.zeros(3000 if K == 3 else 300)})
    clients = [{"w": torch.full_like(g["w"], fill)} for _ in range(K)]
    got = fastagg.gram(g, clients, backend="triton")
    assert gram_error(got, fastagg.gram(g, clients, backend="reference")) <= 1e-6
    assert (got.updates() == got.updates()[0, 0]).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e25, 1e-25, 3e-38])
def test_values_whose_squares_leave_float32(dtype, size):
    g, clients = make(5, {"a.weight": (1500,), "b.weight": (5,)}, torch.float64, scale=1.0)
    g, *clients = (moved({k: (v * size).to(dtype) for k, v in sd.items()}) for sd in (g, *clients))
    exact = fastagg.gram(g, clients, layerwise=True, backend="reference")
    assert torch.isfinite(exact.matrix).all()
    assert gram_error(fastagg.gram(g, clients, layerwise=True, backend="triton"), exact) <= 1e-6


@needs_kernels
@pytest.mark.parametrize("huge", [1e25, 1e38])
def test_large_cohort_with_one_huge_client(huge):
    g, clients = cohort(70, {"a.weight": (50,)})
    g["a.weight"].clamp_(-2, 2)
    clients[66]["a.weight"].clamp_(-3, 3).mul_(huge)  # only some pairs of groups are done again
    exact = fastagg.gram(g, clients, backend="reference")
    assert gram_error(fastagg.gram(g, clients, backend="triton"), exact) <= 1e-6


@needs_kernels
def test_difference_that_leaves_float32():
    g = moved({"w": torch.full((40,), -3e38)})
    clients = [moved({"w": torch.full((40,), 3e38)})]
    exact = fastagg.gram(g, clients, backend="reference")
    assert gram_error(fastagg.gram(g, clients, backend="triton"), exact) <= 1e-6


@needs_kernels
def test_dots_of_huge_values():
    fastagg.set_backend("triton")
    left, *clients = (torch.full((40,), x, device=DEVICE) for x in (1e30, 1e-30, 1e30))
    expected = torch.tensor([[[40.0, 4e61]]], dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(torch.ops.fastagg.dots([left], clients, [0], 1), expected, rtol=1e-6, atol=0)


@needs_kernels
def test_frozen_layers_are_not_done_again(monkeypatch):
    g, clients = cohort(20, {"a.weight": (300,), "b.weight": (100,)})
    for sd in clients:
        sd["a.weight"] = g["a.weight"].clone()
    flags, launch = [], backends.load("triton")[0]._launch

    def spy(table, kernel, grid, *args, **constants):
        launch(table, kernel, grid, *args, **constants)
        if "AGAIN" in constants and not constants["WIDE"]:
            flags.append(args[9].clone())

    monkeypatch.setattr(backends.load("triton")[0], "_launch", spy)
    frozen = fastagg.gram(g, clients, layerwise=True, backend="triton").matrix[0]
    assert frozen[0, 0] > 0
    assert (frozen[1:] == 0).all()
    assert len(flags) == 1
    assert not flags[0].any()


@needs_kernels
def test_not_finite_values_are_seen():
    g, clients = cohort(3, {"a.weight": (50,)})
    clients[1]["a.weight"][7] = float("nan")
    clients[2]["a.weight"][7] = float("inf")
    diagonal = fastagg.gram(g, clients, backend="triton").matrix.diagonal()
    assert diagonal.isfinite().tolist() == [True, True, False, False]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_that_are_not_finite_are_marked(monkeypatch, dtype):
    monkeypatch.setattr(checks, "make", cohort)
    check_marks(backends.load("triton")[0], dtype, M=3, sizes=(33,))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_survives(dtype):
    every = torch.arange(-32768, 32768).to(torch.int16).view(dtype).to(DEVICE)
    nan = every.isnan()
    mixed = fastagg.mix([{"w": every}], [1.0], backend="triton", on_nonfinite="pass")["w"]
    assert torch.equal(mixed[~nan], every[~nan])
    assert mixed.isnan().equal(nan)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_when_repeated(dtype):
    g, clients = cohort(20, SMALL, dtype)
    weights = torch.rand(20)
    (gram, mixed), (again, remixed) = (fastagg.gram_mix(g, clients, weights, backend="triton") for _ in range(2))
    assert torch.equal(gram.matrix, again.matrix)
    assert_same_bits(mixed, remixed)


@needs_kernels
def test_a_method_end_to_end():
    g, clients = cohort(6, SMALL | {"bn.running_mean": (7,)}, scale=0.1)
    results = []
    for backend in ("triton", "reference"):
        fastagg.set_backend(backend)
        results.append(fastagg.fedawa(g, clients))
    torch.testing.assert_close(results[0].weights, results[1].weights)
    for key, value in results[1].items():
        torch.testing.assert_close(results[0][key], value)


def test_says_why_not():
    if not torch.cuda.is_available():
        assert "no CUDA device" in backends.why_not("triton", torch.device("cuda", 0))
    assert "mps" in backends.why_not("triton", torch.device("mps"))
    script = "import torch; from fastagg._engine.backends import why_not; print(why_not('triton', torch.device('cpu')))"
    assert "TRITON_INTERPRET=1" in _compiled_python("-c", script)


@pytest.fixture(scope="module")
def kernels():
    """What triton_aot.py says about every kernel on A100, H100 and B200"""
    said = _compiled_python("-m", "helpers.triton_aot", "90", "80", "100")
    return [json.loads(line) for line in said.splitlines()]


def _compiled_python(*args):
    usual = {k: v for k, v in environment().items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *args], capture_output=True, text=True, check=False, env=usual
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_compiles_for_every_architecture(kernels):
    names = {"products", "add_slots", "add_layers", "mix", "times", "find_scales", "add_items", "ranked"}
    for arch in (80, 90, 100):
        assert {k["kernel"] for k in kernels if k["arch"] == arch} == names
    assert all(k["cubin"] > 0 for k in kernels)
    for kernel in kernels:
        assert kernel.get("stack", 0) <= 128, kernel  # bytes a thread spills


def test_tensor_cores_only_for_large_cohorts(kernels):
    narrow = [k for k in kernels if k["kernel"] == "products" and not k["constants"]["WIDE"]]
    assert {k["case"][2] > 64 for k in narrow} == {False, True}
    for kernel in narrow:
        assert (kernel["tf32"] > 0) == (kernel["case"][2] > 64), kernel
    assert not any(k["tf32"] for k in kernels if k not in narrow)


def test_aligned_tensors_are_read_16_bytes_at_a_time(kernels):
    reading = [k for k in kernels if k["case"][1] == "torch.float32" and k["kernel"] in ("products", "mix", "times")]
    assert {k["case"][4] for k in reading} == {0, 1}
    for kernel in reading:
        assert (kernel["16 bytes"] > 0) == (kernel["case"][4] == 0), kernel
