"""partial=True on adapters: a module is mixed over the clients that have it, and not as if the others had not moved."""

from __future__ import annotations

import pytest
import torch

import fastagg
from helpers.adapters import PREFIX, SHAPES, cohort, dense
from helpers.partial import gram, mix

SIZES = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0]
MODULES = list(SHAPES)


def some_modules(K=6, plain=("head.weight",)):
    """An adapter, and clients that have one or two of its three modules; a head that two of them have"""
    g, clients = cohort(K, dtype=torch.float64, scale=0.3, plain=plain)
    for k, sd in enumerate(clients):
        lacks = {MODULES[k % 3], MODULES[(k * k) % 3]}
        for key in list(sd):
            if any(module in key for module in lacks) or ("head" in key and k % 3):
                del sd[key]
    return g, clients


def as_models(sd):
    """Their updates, as models with one tensor for each module"""
    return {name if name.endswith("head.weight") else f"{name}.lora": value for name, value in dense(sd).items()}


@pytest.mark.parametrize("form", ["exact", "rank"])
@pytest.mark.parametrize("method", ["fedavg", "fedawa", "simprox", "geometric_median", "fedexp"])
def test_as_of_dense_updates(method, form):
    g, clients = some_modules()
    whole, parts = as_models(g), [as_models(sd) for sd in clients]
    rank = 64 if form == "rank" else None
    found = fastagg.lora.aggregate(g, clients, SIZES, method=method, form=form, rank=rank, partial=True)
    expected = getattr(fastagg, method)(whole, parts, SIZES, partial=True)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-8, atol=1e-10)
    made = as_models(found)
    for key, value in expected.items():  # of the best rank, singular values are known to 1e-7 of the largest
        assert (made[key] - value).norm() < value.norm() * (1e-6 if form == "rank" else 1e-9)
    if expected.gram is not None:
        torch.testing.assert_close(found.gram.matrix, gram(whole, parts), rtol=1e-8, atol=1e-8)
    by_key = dict(zip(expected, expected.contributions, strict=True))
    in_order = [by_key[key] for key in (*sorted(f"{PREFIX}{m}.lora" for m in MODULES), f"{PREFIX}head.weight")]
    torch.testing.assert_close(found.contributions, torch.stack(in_order), rtol=1e-8, atol=1e-10)


def test_without_partial_who_lacks_a_module_has_not_moved():
    g, clients = some_modules()
    found = as_models(fastagg.lora.aggregate(g, clients, method="fedavg", form="exact"))
    expected = [as_models({**g, **sd}) for sd in clients]
    for key, value in found.items():
        torch.testing.assert_close(value, sum(sd[key] for sd in expected) / len(clients), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("partial", [False, True])
def test_who_lacks_a_plain_tensor_is_not_taken_for_the_global_adapter(partial, recwarn):
    g, clients = some_modules()
    fastagg.lora.aggregate(g, clients, method="fedavg", partial=partial)
    assert not recwarn.list
    _, clients = cohort(3, plain=["head.weight"])
    fastagg.lora.aggregate(None, [clients[0], clients[0], clients[1]], method="fedavg")
    assert "client 0, client 1 are the same tensors" in str(recwarn.pop(UserWarning).message)


def test_from_zero():
    """Without a global adapter"""
    _, clients = some_modules(plain=())
    zero = {key: torch.zeros_like(value) for key, value in as_models(cohort(1, dtype=torch.float64)[0]).items()}
    found = fastagg.lora.aggregate(None, clients, SIZES, method="fedavg", form="exact", partial=True)
    weights = [size / sum(SIZES) for size in SIZES]
    for key, value in mix(zero, [as_models(sd) for sd in clients], weights).items():
        torch.testing.assert_close(as_models(found)[key], value, rtol=1e-9, atol=1e-10)


def test_folders(tmp_path):
    """Their bytes are counted once for each read, and those of no module that a client does not have"""
    g, clients = some_modules(plain=())
    paths = []
    for name, sd in zip(["g", *(f"c{k}" for k in range(len(clients)))], [g, *clients], strict=True):
        paths.append(fastagg.lora.save(sd, tmp_path / name, {"peft_type": "LORA", "lora_alpha": 4, "r": 4}).parent)
    found = fastagg.aggregate_files("fedawa", paths[0], paths[1:], tmp_path / "new", sizes=SIZES, partial=True)
    expected = fastagg.lora.aggregate(g, clients, SIZES, partial=True)
    made = fastagg.lora.load(tmp_path / "new")
    assert all(torch.equal(made[key], value) for key, value in expected.items())
    assert torch.equal(found.contributions, expected.contributions)
    size = sum(value.nbytes for sd in clients for value in sd.values())
    assert (found.passes, found.bytes_read) == (2, 2 * size)
