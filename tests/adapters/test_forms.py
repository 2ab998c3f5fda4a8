"""What new adapters are made of the weighted sum of updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastagg
from helpers.adapters import PREFIX, SHAPES, adapter, cohort, dense, mixed

SIZES = [1.0, 2.0, 3.0, 4.0, 5.0]
SHARES = [s / 15 for s in SIZES]
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of what is written


def fedavg(g, clients, **more):
    return fastagg.lora.aggregate(g, clients, SIZES[: len(clients)], method="fedavg", **more)


def apart(found, expected):
    """||found - expected|| / ||expected||, the largest of the modules"""
    return max(float((found[m] - expected[m]).norm() / expected[m].norm()) for m in expected)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("with_global", [True, False])
def test_exact_is_the_weighted_sum(dtype, with_global):
    g, clients = cohort(dtype=dtype)
    result = fedavg(g if with_global else None, clients, form="exact")
    assert apart(dense(result), mixed(clients, SHARES)) < CLOSE[dtype]
    assert set(result.ranks.values()) == {20}
    assert set(result.truncation.values()) == {0.0}
    assert all(value.dtype == dtype for value in result.values())


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rank", [1, 3, 4, 16])
def test_rank_is_the_best_of_that_rank(dtype, rank):
    g, clients = cohort(dtype=dtype, scale=1.0)
    result = fedavg(g, clients, rank=rank)
    found, expected = dense(result), mixed(clients, SHARES)
    for module, S in expected.items():
        values = torch.linalg.svdvals(S)
        left = float(values[rank:].norm() / values.norm())
        assert result.truncation[module] == pytest.approx(left, rel=1e-9, abs=1e-6)
        error = float((found[module] - S).norm() / S.norm())
        assert error <= (left**2 + CLOSE[dtype] ** 2) ** 0.5 + 1e-12
    assert result[f"{PREFIX}layers.0.v_proj.lora_A.weight"].shape == (rank, 40)


def test_a_gram_before_it_changes_nothing():
    """The products that the Gram needed serve the truncation as well as products of their own"""
    g, clients = cohort(3, scale=1.0)
    result = fastagg.lora.aggregate(g, clients, method="fedawa")
    again = mixed(clients, result.weights.tolist())
    for module, S in again.items():
        values = torch.linalg.svdvals(S)
        assert result.truncation[module] == pytest.approx(float(values[4:].norm() / values.norm()), rel=1e-9)
        best = (values[4:].square().sum()).sqrt()
        assert float((dense(result)[module] - S).norm()) == pytest.approx(float(best), rel=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedawa"])
@pytest.mark.parametrize("tiny", [3e-6, 1e-6, 1e-7])
def test_tiny_updates_stay_in_the_best_rank(method, tiny):
    """Rows of A that are the same for all but a millionth still turn those of the new one"""
    g = adapter(4, dtype=torch.float64)
    clients = [adapter(4, dtype=torch.float64, seed=1 + k, start=g, scale=tiny) for k in range(20)]
    result = fastagg.lora.aggregate(g, clients, [1.5**k for k in range(20)], method=method)
    expected, center, found = mixed(clients, result.weights.tolist()), dense(g), dense(result)
    for module, S in expected.items():
        assert float((found[module] - S).norm() / (S - center[module]).norm()) < 1e-5


def test_nothing_is_left_out_where_the_rank_suffices():
    g, clients = cohort(dtype=torch.float64)
    result = fedavg(g, clients, rank=20)
    assert set(result.truncation.values()) == {0.0}
    assert apart(dense(result), mixed(clients, SHARES)) < 1e-8


def test_the_rank_is_by_default_that_of_the_global_adapter_or_the_largest():
    clients = [adapter(rank, seed=rank) for rank in (2, 7, 4)]
    one = {"scaling": 1.0}
    assert set(fedavg(adapter(3), clients, **one).ranks.values()) == {3}
    assert set(fedavg(None, clients, **one).ranks.values()) == {7}
    assert set(fedavg(adapter(3), clients, form="exact", **one).ranks.values()) == {13}


def test_lengths_are_shared_and_signs_are_fixed():
    g, clients = cohort(dtype=torch.float64, scale=1.0)
    result, other = fedavg(g, clients), fedavg(g, [{k: -v for k, v in sd.items()} for sd in clients])
    for module in SHAPES:
        A, B = (result[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(A.norm(dim=1), B.norm(dim=0), rtol=1e-9, atol=0)
        assert (A.norm(dim=1).diff() < 0).all()
        assert (A.gather(1, A.abs().argmax(1, keepdim=True)) > 0).all()
        torch.testing.assert_close(A, other[f"{PREFIX}{module}.lora_A.weight"], rtol=1e-6, atol=1e-9)


def test_components_without_a_length_can_still_learn():
    """B = 0 and A = 0 would stay what they are for ever: the gradient of each is a product with the other"""
    clients = [adapter(4, seed=k) for k in range(3)]
    for sd in clients:
        for key in sd:
            if "lora_B" in key:
                sd[key].zero_()
    result = fedavg(None, clients)
    for key, value in result.items():
        assert value.any() == ("lora_A" in key)
        if "lora_A" in key:
            usual = torch.cat([sd[key] for sd in clients]).norm(dim=1).square().mean().sqrt()
            torch.testing.assert_close(value.norm(dim=1), usual.expand(4), rtol=1e-3, atol=0)


def test_more_components_than_all_clients_have_can_learn_too():
    """Rows of A that nobody has given: otherwise a global adapter of rank 16 would lose components for ever in a round
    of two clients of rank 4"""
    result, again = (fedavg(None, [adapter(2)] * 2, rank=50) for _ in range(2))
    assert apart(dense(result), dense(adapter(2))) < 1e-6
    for module, (_, into) in SHAPES.items():
        A, B = (result[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
        usual = adapter(2)[f"{PREFIX}{module}.lora_A.weight"].square().sum(1).mean().sqrt()
        torch.testing.assert_close(A[2:].norm(dim=1), usual.expand(48), rtol=1e-5, atol=0)
        assert torch.linalg.matrix_rank(A) == into
        assert not B[:, 2:].any()
    assert all(torch.equal(value, again[key]) for key, value in result.items())


def test_frozen_a_is_the_weighted_sum():
    g, clients = cohort()
    for sd in clients:
        sd.update({key: g[key].clone() for key in g if "lora_A" in key})
    result = fedavg(g, clients, form="frozen_a")
    assert apart(dense(result), mixed(clients, SHARES)) < 1e-6
    assert all(torch.equal(result[key], g[key]) for key in g if "lora_A" in key)
    assert apart(dense(fedavg(None, clients, form="frozen_a")), mixed(clients, SHARES)) < 1e-6
    clients[2][f"{PREFIX}layers.0.v_proj.lora_A.weight"] += 1
    with pytest.raises(fastagg.InputError, match=r"client 2: key '.*v_proj.lora_A.weight' is not the A of the others"):
        fedavg(g, clients, form="frozen_a")


def test_frozen_a_is_checked_in_modules_that_the_first_client_lacks():
    g, clients = cohort(4)
    for sd in clients:
        sd.update({key: g[key].clone() for key in g if "lora_A" in key})
    clients[0] = {key: value for key, value in clients[0].items() if "v_proj" not in key}
    fedavg(None, clients, form="frozen_a")
    clients[2][f"{PREFIX}layers.0.v_proj.lora_A.weight"] += 1
    with pytest.raises(fastagg.InputError, match=r"client 2: key '.*v_proj.lora_A.weight' is not the A of the others"):
        fedavg(None, clients, form="frozen_a")
    for key in clients[0]:
        clients[0][key] = clients[0][key] + 1
    assert list(fedavg(None, clients, form="frozen_a", on_bad_client="drop").dropped) == [0, 2]


@pytest.mark.parametrize("ratio", [1e3, 1e6, 1e9])
def test_it_does_not_matter_how_an_update_is_shared_by_its_factors(ratio):
    """1e-6 A and 1e6 B are the same update"""
    clients = [adapter(4, seed=k, dtype=torch.float64) for k in range(3)]
    odd = {key: value * (ratio if "lora_B" in key else 1 / ratio) for key, value in clients[1].items()}
    for rank in (2, 12):
        result, expected = fedavg(None, [clients[0], odd, clients[2]], rank=rank), fedavg(None, clients, rank=rank)
        assert apart(dense(result), dense(expected)) < 1e-9
        for module, left in expected.truncation.items():
            assert result.truncation[module] == pytest.approx(left, rel=1e-9, abs=1e-12)


def test_factors_that_are_zero():
    clients = [{key: torch.zeros_like(value) for key, value in adapter(3).items()} for _ in range(2)]
    for form in ("rank", "exact", "separate"):
        result = fedavg(None, clients, form=form)
        assert not any(value.any() for value in result.values())
        assert set(result.truncation.values()) == {0.0}


def test_separate_is_fedavg_of_the_tensors():
    g, clients = cohort(plain=["head.bias"])
    result, expected = fedavg(g, clients, form="separate"), fastagg.fedavg(g, clients, SIZES)
    assert set(result) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=1e-6, atol=1e-7)
    assert apart(dense(result), mixed(clients, SHARES)) > 1e-4  # and not the sum of the updates


def test_separate_fills_up_smaller_ranks():
    clients = [adapter(rank, seed=rank) for rank in (2, 5)]
    padded = {}
    for key, value in clients[0].items():
        padded[key] = torch.zeros_like(clients[1][key])
        padded[key][tuple(map(slice, value.shape))] = value
    found = fedavg(None, clients, form="separate", scaling=1.0)
    expected = fedavg(None, [padded, clients[1]], form="separate")
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["rank", "exact", "separate"])
def test_scalings_of_clients_count(form):
    ranks, alpha = (2, 4, 8), 16
    clients = [adapter(rank, seed=rank) for rank in ranks]
    result = fedavg(None, clients, form=form, scaling=lambda r: alpha / r)
    if form != "separate":
        each = [dense(sd, alpha / r) for sd, r in zip(clients, ranks, strict=True)]
        expected = {m: sum(n / 6 * sd[m] for n, sd in zip((1, 2, 3), each, strict=True)) for m in each[0]}
        whole = {"rank": 14} if form == "rank" else {}
        exact = fedavg(None, clients, form=form, scaling=lambda r: alpha / r, **whole)
        assert apart(dense(exact, exact.scaling), expected) < 1e-6
    assert set(result.scaling.values()) == {2.0}  # of the largest rank


def test_a_step_of_the_server_is_one_of_the_products():
    g, clients = cohort()
    result = fedavg(g, clients, form="exact", server_lr=0.3)
    sums, center = mixed(clients, SHARES), dense(g)
    expected = {m: center[m] + 0.3 * (sums[m] - center[m]) for m in center}
    assert apart(dense(result), expected) < 1e-6
    assert set(result.ranks.values()) == {24}


def test_modules_that_clients_do_not_have_are_the_global_ones():
    g, clients = cohort()
    gone = [{k: v for k, v in sd.items() if "layers.1" not in k or at == 3} for at, sd in enumerate(clients)]
    result = fedavg(g, gone, form="exact")
    assert apart(dense(result), mixed([{**g, **sd} for sd in gone], SHARES)) < 1e-6
    assert result.ranks[PREFIX + "layers.1.q_proj"] == 8  # that of one client, and the global adapter's once
    alone = fedavg(None, gone, form="exact")
    zero = {key: torch.zeros_like(value) for key, value in g.items()}
    assert apart(dense(alone), mixed([{**zero, **sd} for sd in gone], SHARES)) < 1e-6


def test_a_module_that_nobody_who_counts_has_is_no_update():
    """And of a rank that PEFT takes"""
    _, clients = cohort(3)
    clients[0] = {key: value for key, value in clients[0].items() if "layers.1" not in key}
    for form in ("exact", "rank", "separate"):
        result = fastagg.lora.aggregate(None, clients, [1, 0, 0], method="fedavg", form=form)
        assert result.ranks[PREFIX + "layers.1.q_proj"] == 4
        assert not result[PREFIX + "layers.1.q_proj.lora_B.weight"].any()
        assert result[PREFIX + "layers.1.q_proj.lora_A.weight"].any()  # with both zero, neither would ever learn


def test_plain_tensors_are_averaged():
    g, clients = cohort(plain=["head.weight"])
    result = fedavg(g, clients, form="exact")
    expected = fastagg.fedavg(g, clients, SIZES)[PREFIX + "head.weight"]
    assert torch.equal(result[PREFIX + "head.weight"], expected)


def test_numpy_arrays_and_odd_strides():
    g, clients = cohort()
    plain = fastagg.lora.aggregate(g, clients)
    arrays = fastagg.lora.aggregate(_numpy(g), [_numpy(sd) for sd in clients])
    strided = fastagg.lora.aggregate(g, [{k: v.T.contiguous().T for k, v in sd.items()} for sd in clients])
    for key, value in plain.items():
        assert isinstance(arrays[key], np.ndarray)
        assert np.array_equal(arrays[key], value.numpy())
        assert torch.equal(strided[key], value)


def _numpy(sd):
    return {key: value.numpy() for key, value in sd.items()}


def test_inputs_are_not_modified_and_results_share_no_memory():
    g, clients = cohort(plain=["head.weight"])
    before = [{key: value.clone() for key, value in sd.items()} for sd in (g, *clients)]
    for form in ("rank", "exact", "separate"):
        result = fastagg.lora.aggregate(g, clients, form=form)
        for value in result.values():
            value.zero_()
        for sd, old in zip((g, *clients), before, strict=True):
            assert all(torch.equal(sd[key], value) for key, value in old.items())
    one = fedavg(None, clients[:1], form="exact")
    assert not {v.data_ptr() for v in one.values()} & {v.data_ptr() for v in clients[0].values()}
