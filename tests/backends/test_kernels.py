"""The native kernels against the float64 reference that defines them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading

import pytest
import torch

import fastagg
from fastagg._engine import backends
from helpers.cohort import DTYPES, assert_same_bits, assert_unchanged, flat, make, snapshot
from helpers.kernels import SHAPES, assert_mixed, check_marks, gram_error, gram_tolerance, poisoned


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 2, 3, 4, 5, 7, 12, 20, 33, 64, 126, 127, 128, 130])
def test_gram_and_mix_match_the_reference(kernels, dtype, K):
    shapes = SHAPES if K <= 20 else {"a.weight": (33,), "b.weight": (17000,)}
    if kernels == "cuda-tensor-cores" or (K > 20 and kernels == "cuda"):  # emulated, and so slow
        shapes = {"a.weight": (33,), "b.weight": (2060,)}
    g, clients = make(K, shapes, dtype, seed=K)
    before = snapshot(g, *clients)
    expected = fastagg.gram(g, clients, layerwise=True, backend="reference")
    largest = max(v.numel() for v in g.values())
    got = fastagg.gram(g, clients, layerwise=True)
    assert torch.equal(got.matrix, got.matrix.mT)
    assert gram_error(got, expected) <= gram_tolerance(dtype, largest)
    assert torch.equal(fastagg.gram(g, clients).matrix, got.model().matrix)  # the model's is the sum over its layers

    weights = torch.rand(5, K, dtype=torch.float64) - 0.2
    out = [poisoned(g) for _ in range(5)]
    for m, sd in enumerate(fastagg.mix(clients, weights, out=out)):
        last = list(shapes)[-2]
        assert sd[last].data_ptr() == out[m][last].data_ptr()
        assert_mixed(sd, clients, weights[m], dtype)
    one = fastagg.mix(clients, weights[0], out=poisoned(g))
    assert_same_bits(one, out[0])

    both, mixed = fastagg.gram_mix(g, clients, weights[0], layerwise=False, out=poisoned(g))
    assert_same_bits(mixed, one)
    assert gram_error(both, expected.model()) <= gram_tolerance(dtype, sum(v.numel() for v in g.values()))
    assert_unchanged([g, *clients], before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "offset"), [(1, 0), (1, 1), (3, 0), (7, 1)])
def test_outputs_that_are_not_finite_are_marked(kernels, dtype, M, offset):
    check_marks(backends.choose(torch.device("cpu")), dtype, M, offset)


def test_the_reference_marks_outputs_that_are_not_finite():
    check_marks(backends.reference, torch.float32, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [2, 3, 5, 6, 7])
def test_every_number_of_clients_and_outputs_gives_the_bits_of_one_output(kernels, dtype, M):
    """Clients are read in batches, outputs formed in groups, tails and unaligned tensors done apart"""
    for K in (1, 2, 3, 5, 6, 7, 11, 15):
        for offset in (0, 1):
            _, clients = make(K, {"a.weight": (1061,), "b.weight": (530,)}, dtype, offset=offset, seed=K)
            weights = torch.rand(M, K, dtype=torch.float64)
            several = fastagg.mix(clients, weights)
            for m, sd in enumerate(several):
                assert_same_bits(sd, fastagg.mix(clients, weights[m], backend="cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_views(kernels, dtype, offset):
    g, clients = make(6, SHAPES, dtype, offset=offset)
    aligned_g, aligned = snapshot(g)[0], snapshot(*clients)
    assert torch.equal(fastagg.gram(g, clients).matrix, fastagg.gram(aligned_g, aligned).matrix)
    weights = torch.rand(6)
    _, out = make(1, SHAPES, dtype, offset=offset)
    assert_same_bits(fastagg.mix(clients, weights, out=out[0]), fastagg.mix(aligned, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [3, 21, 130])
def test_integer_valued_data_is_exact(kernels, dtype, K):
    shapes = {"a.weight": (1000,), "b.weight": (33,)}
    g, clients = make(K, shapes, dtype, integers=True)
    expected = fastagg.gram(g, clients, layerwise=True, backend="reference")
    assert torch.equal(fastagg.gram(g, clients, layerwise=True).matrix, expected.matrix)
    weights = torch.randint(-1, 2, (4, K)).double()
    for m, sd in enumerate(fastagg.mix(clients, weights)):
        assert torch.equal(flat(sd), (weights[m] @ torch.stack([flat(c) for c in clients])).to(dtype).double())


@pytest.mark.parametrize("K", [20, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_any_number_of_threads(dtype, K):
    g, clients = make(K, {"a.weight": (40000,), "a.bias": (7,), "b.weight": (123, 457), "c.weight": (5,)}, dtype)
    weights = torch.rand(3, K)
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        gram, mixed = fastagg.gram_mix(g, clients, weights, layerwise=False)
        results.append((gram.matrix, fastagg.gram(g, clients, layerwise=True).matrix, mixed))
    for gram, layers, mixed in results[1:]:
        assert torch.equal(gram, results[0][0])
        assert torch.equal(layers, results[0][1])
        for a, b in zip(mixed, results[0][2], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("ratio", [1e-2, 1e-4, 1e-6])
def test_small_updates_keep_their_precision(kernels, ratio):
    g, clients = make(20, {"a.weight": (50000,)}, scale=ratio)
    exact = fastagg.gram(g, clients, backend="reference")
    assert exact.norms().max() / exact.matrix[0, 0].sqrt() < 3 * ratio
    assert gram_error(fastagg.gram(g, clients), exact) <= 1e-6


@pytest.mark.parametrize("fill", [0.1, 1 / 3, 0.7])
def test_constant_data_does_not_accumulate_rounding(kernels, fill):
    # every addition rounds the same way: the worst case for float32 sums
    g = {"w": torch.zeros(100_000)}
    clients = [{"w": torch.full((100_000,), fill)} for _ in range(3)]
    assert gram_error(fastagg.gram(g, clients), fastagg.gram(g, clients, backend="reference")) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e25, 1e-25, 3e-38])
def test_values_whose_squares_leave_float32(kernels, dtype, size):
    g, clients = make(5, {"a.weight": (20000,), "b.weight": (5,)}, torch.float64, scale=1.0)
    g, *clients = ({k: (v * size).to(dtype) for k, v in sd.items()} for sd in (g, *clients))
    exact = fastagg.gram(g, clients, layerwise=True, backend="reference")
    assert torch.isfinite(exact.matrix).all()
    assert gram_error(fastagg.gram(g, clients, layerwise=True), exact) <= 1e-6


def test_large_cohort_with_one_huge_client(kernels):
    g, clients = make(130, {"a.weight": (3000,)})
    clients[77]["a.weight"] *= 1e25
    exact = fastagg.gram(g, clients, backend="reference")
    assert gram_error(fastagg.gram(g, clients), exact) <= 1e-6


def test_frozen_layers_have_zero_rows(kernels):
    g, clients = make(4, {"a.weight": (3000,), "b.weight": (100,)})
    for sd in clients:
        sd["a.weight"] = g["a.weight"].clone()
    frozen = fastagg.gram(g, clients, layerwise=True).matrix[0]
    assert frozen[0, 0] > 0
    assert (frozen[1:, :] == 0).all()


def test_order_of_clients_does_not_change_an_entry(kernels):
    g, clients = make(23, {"a.weight": (5000,), "b.weight": (37,)})
    order = torch.randperm(23)
    there = fastagg.gram(g, clients).updates()
    back = fastagg.gram(g, [clients[k] for k in order]).updates()
    assert torch.equal(back, there[order][:, order])


def test_identical_clients_have_identical_entries_and_come_back(kernels):
    g, clients = make(1, {"a.weight": (5001,)})
    same = [clients[0]] * 22
    updates = fastagg.gram(g, same).updates()
    assert (updates == updates[0, 0]).all()
    weights = torch.rand(22, dtype=torch.float64)
    assert_same_bits(fastagg.mix(same, weights / weights.sum()), clients[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_survives(kernels, dtype):
    every = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    mixed = fastagg.mix([{"w": every}], [1.0], on_nonfinite="pass")["w"]
    nan = every.isnan()
    assert torch.equal(mixed[~nan], every[~nan])
    assert mixed.isnan().equal(nan)
    halves = fastagg.mix([{"w": every}], [1 / 3], on_nonfinite="pass")["w"]  # rounding, subnormal results included
    assert torch.equal(halves[~nan], (every.double() / 3).to(dtype)[~nan])


def test_streaming_stores_and_large_tensors(kernels):
    _, clients = make(3, {"a.weight": (3_000_001,), "b.weight": (5,)}, offset=1)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    first = fastagg.mix(clients, weights)
    assert_mixed(first, clients, weights, torch.float32)
    for offset in (0, 1, 4):
        _, out = make(1, {"a.weight": (3_000_001,), "b.weight": (5,)}, offset=offset)
        assert_same_bits(fastagg.mix(clients, weights, out=out[0]), first)


def test_threads_honour_torch(monkeypatch):
    seen = []
    from fastagg._engine.backends import cpu

    class Spy:
        def mix(self, *args):
            seen.append(args[-1])

    monkeypatch.setattr(cpu, "_cpu", Spy())
    _, clients = make(2, {"w": (3,)})
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        fastagg.mix(clients, [0.5, 0.5])
    assert seen == [1, 2, 3]


def test_many_python_threads_at_once():
    rounds = [make(8, {"a.weight": (30000,)}, seed=seed) for seed in range(6)]
    weights = torch.rand(8)
    expected = [fastagg.gram_mix(g, c, weights) for g, c in rounds]
    failures = []

    def work(i):
        for _ in range(20):
            gram, mixed = fastagg.gram_mix(*rounds[i], weights)
            if not torch.equal(gram.matrix, expected[i][0].matrix) or not torch.equal(
                mixed["a.weight"], expected[i][1]["a.weight"]
            ):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(600)
    assert not failures
    assert not any(t.is_alive() for t in threads)


@pytest.mark.parametrize(
    ("start", "parent"), [("fork", "gram()"), ("fork", "torch.ones(1 << 21).neg_()"), ("spawn", "gram()")]
)
def test_child_processes(start, parent):
    # The parent has used its helper threads, through fastagg or through torch alone; a forked child has none of them.
    # Tensors stay below the size at which torch's own OpenMP threads, which do hang after a fork, would be asked for
    # help in the child.
    script = f"""
import multiprocessing, sys, torch, fastagg
def cohort():
    torch.manual_seed(0)
    return [{{f"{{t}}.weight": torch.randn(9000) for t in range(9)}} for _ in range(5)]
def gram():
    g, *clients = cohort()
    return fastagg.gram(g, clients).matrix.tolist()
def work(sender):
    torch.set_num_threads(4)
    sender.send(gram())
if __name__ == "__main__":
    torch.set_num_threads(4)
    {parent}
    context = multiprocessing.get_context("{start}")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=work, args=(sender,), daemon=True)
    child.start()
    if not receiver.poll(600):
        child.kill()
        sys.exit("the child hangs")
    assert receiver.recv() == gram()
    child.join()
    sys.exit(child.exitcode)
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        done = subprocess.run([sys.executable, file.name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_flush_to_zero_of_the_caller_changes_nothing():
    _, clients = make(3, {"a.weight": (100,)}, scale=1.0)
    clients = [{k: v * 1e-40 for k, v in sd.items()} for sd in clients]
    expected = fastagg.mix(clients, [0.5, 0.25, 0.25])["a.weight"].clone()
    assert expected.abs().max() > 0
    try:
        assert torch.set_flush_denormal(True)
        got = fastagg.mix(clients, [0.5, 0.25, 0.25])["a.weight"]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simd_levels_agree(dtype):
    native = backends.cpu._cpu
    g, clients = make(9, {"a.weight": (333, 57), "b.weight": (5,)}, dtype, scale=0.1)
    weights = torch.linspace(0.3, 2, 9, dtype=torch.float64)
    grams, mixed, fused = {}, {}, None
    for level in native.simd_levels():
        native.set_simd(level)
        if native.simd_level() == level:
            grams[level], mixed[level] = fastagg.gram(g, clients).matrix, flat(fastagg.mix(clients, weights))
    lengths = grams["baseline"].diagonal().sqrt()
    for level, matrix in grams.items():
        assert ((matrix - grams["baseline"]).abs() <= 1e-6 * lengths[:, None] * lengths).all()
        if level != "baseline":  # the same fused multiply-adds in the same order
            fused = mixed[level] if fused is None else fused
            assert torch.equal(mixed[level], fused)
        wide = 2**-53 if dtype in (torch.float32, torch.float64) else 2**-24
        sums = sum(w * flat(sd).abs() for w, sd in zip(weights, clients, strict=True))
        bound = torch.finfo(dtype).eps * mixed["baseline"].abs() + 2 * len(clients) * wide * sums
        assert ((mixed[level] - mixed["baseline"]).abs() <= bound).all()
