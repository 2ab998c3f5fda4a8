"""Clients whose numbers are finite, and made so that a round's are not, or are rounding errors."""

from __future__ import annotations

import pytest
import torch

import fastagg
from helpers.adapters import PREFIX, adapter, cohort, dense_gram

ROBUST = {"krum": {"f": 1}, "centred_clipping": {"tau": 10.0}, "geometric_median": {}}


def hidden(like, length, ratio):
    """An update of such a length: the products of B = ratio (-b, b) with A = (a, a + length / ratio d)"""
    generator, found = torch.Generator().manual_seed(3), {}
    for key in like:
        if "lora_A" not in key:
            continue
        other = key.replace("lora_A", "lora_B")
        A, B = torch.zeros_like(like[key]), torch.zeros_like(like[other])
        half = A.shape[1] // 2
        A[:2, :half] = torch.randn(half, generator=generator)
        A[1, half:] = torch.randn(A.shape[1] - half, generator=generator) * (length / ratio)
        B[:, 1] = torch.randn(len(B), generator=generator) * ratio
        B[:, 0] = -B[:, 1]
        found[key], found[other] = A, B
    return found


@pytest.mark.parametrize("ratio", [1e8, 1e9, 1e12])
@pytest.mark.parametrize("with_global", [True, False])
@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("partial", [True, False])
def test_factors_that_cancel_hide_no_update(name, with_global, ratio, partial):
    g, clients = cohort(7)
    g, clients[2] = g if with_global else None, hidden(clients[2], 100.0, ratio)
    more = {"method": name, "form": "exact", "partial": partial, **ROBUST[name]}
    with pytest.raises(fastagg.BadClientError, match=r"client 2: module '.*_proj': .* only rounding errors are left"):
        fastagg.lora.aggregate(g, clients, **more)
    found = fastagg.lora.aggregate(g, clients, **more, on_bad_client="drop")
    rest = fastagg.lora.aggregate(g, [*clients[:2], *clients[3:]], **more)
    assert list(found.dropped) == [2]
    assert all(torch.equal(found[key], value) for key, value in rest.items())


def test_nor_do_factors_far_from_the_global_adapters():
    """B (A - A_g) and (B - B_g) A_g cancel each other where A is short and B is long"""
    g, clients = cohort(6)
    clients[3] = {key: value * (2.0**27 if "lora_B" in key else 2.0**-27) for key, value in clients[3].items()}
    with pytest.raises(fastagg.BadClientError, match=r"client 3: module '.*': .* only rounding errors are left"):
        fastagg.lora.aggregate(g, clients, method="krum", f=1)
    fastagg.lora.aggregate(None, clients, method="krum", f=1)  # where nothing cancels
    clients[3] = hidden(clients[3], 100.0, 1.0)
    gram = fastagg.lora.aggregate(g, clients, method="krum", f=1).gram
    torch.testing.assert_close(gram.squares[3], dense_gram(g, clients)[4, 4], rtol=1e-12, atol=0)


@pytest.mark.parametrize("length", [0.0, 1e-12])
def test_a_client_that_gave_its_A_up_has_moved_by_nothing(length):
    """Which B (A - A_g) + B A_g says but for rounding errors: small ones, next to what the others have moved by"""
    g, clients = cohort(5)
    g = {key: torch.zeros_like(value) if "lora_B" in key else value for key, value in g.items()}
    clients[2] = {key: value * length if "lora_A" in key else value for key, value in clients[2].items()}
    gram = fastagg.lora.aggregate(g, clients, layerwise=True).gram
    assert (gram.squares[:, 2] < 1e-14 * gram.squares[:, 1]).all()


def test_each_layer_is_looked_at():
    g, clients = cohort(5)
    evil = hidden(clients[1], 1.0, 1e12)
    clients[1] = {key: evil[key] if "v_proj" in key else 1e6 * value for key, value in clients[1].items()}
    with pytest.raises(fastagg.BadClientError, match=r"client 1: module '.*v_proj': .* only rounding errors are left"):
        fastagg.lora.aggregate(g, clients, layerwise=True)


@pytest.mark.parametrize("alpha", [1e-300, 1e300, -1e200])
def test_a_scaling_out_of_all_proportion_is_the_fault_of_who_has_it(alpha):
    """Also of the first client, by whose scaling the others' are divided"""
    _, clients = cohort(3)
    given = [fastagg.lora.Adapter(sd, {"lora_alpha": a}) for sd, a in zip(clients, (alpha, 8, 8), strict=True)]
    for method in ("fedawa", "fedavg"):
        with pytest.raises(fastagg.BadClientError, match=r"client 0: the scaling of module '.*' is .*e[-+]"):
            fastagg.lora.aggregate(None, given, method=method)
        assert list(fastagg.lora.aggregate(None, given, method=method, on_bad_client="drop").dropped) == [0]


@pytest.mark.parametrize(("form", "long_A", "long_B"), [
    ("rank", 3e4, 3e4), ("separate", 1.0, 6.5e4), ("exact", 6.5e4, 1.0), ("exact", 1.0, 6.5e4),
])  # fmt: skip
def test_a_result_that_is_too_large_is_the_fault_of_the_largest_client(form, long_A, long_B):
    """As of models: on_bad_client="drop" goes on without it"""
    key = PREFIX + "layers.0.v_proj.lora_A.weight"
    clients = [adapter(2, dtype=torch.float16, seed=k, scale=0.1) for k in range(4)]
    config = {"lora_alpha": 2}
    clients[1][key].fill_(long_A)
    clients[1][key.replace("_A", "_B")].fill_(long_B)
    given = [fastagg.lora.Adapter(sd, config) for sd in clients]
    given[1].config = {"lora_alpha": 20}  # all values are finite, and 10 times those that the new factors would have
    if form == "exact" and long_A > 1:
        given[1] = fastagg.lora.Adapter({k: 4.0 * v.float() for k, v in clients[1].items()}, config)
    more = {"method": "fedavg", "form": form}
    with pytest.raises(fastagg.BadClientError, match=r"client 1: with it, the result: module '.*v_proj' is too large"):
        fastagg.lora.aggregate(None, given, **more)
    found = fastagg.lora.aggregate(None, given, **more, on_bad_client="drop")
    rest = fastagg.lora.aggregate(None, [given[0], *given[2:]], **more)
    assert list(found.dropped) == [1]
    assert all(torch.equal(found[key], value) for key, value in rest.items())


@pytest.mark.parametrize("method", ["fedavg", "krum"])
def test_nobody_is_at_fault_where_all_are_as_large(method):
    clients = [{k: v.sign().mul(6e4).half() for k, v in adapter(4, seed=seed).items()} for seed in range(5)]
    with pytest.raises(fastagg.InputError, match=r"^the result: module '.*' is too large for its dtype"):
        fastagg.lora.aggregate(None, clients, method=method, **ROBUST.get(method, {}))


def test_a_rank_that_takes_more_memory_than_the_adapter():
    """Products of 20,000 rows with each other: 3.2 GB, from an adapter of 160 kB"""
    clients = [{PREFIX + "m.lora_A.weight": torch.ones(r, 1), PREFIX + "m.lora_B.weight": torch.ones(1, r)} for r in (
        16, 16, 20_000)]  # fmt: skip
    more = {"method": "fedavg", "scaling": lambda r: 1 / r}
    with pytest.raises(
        fastagg.BadClientError, match=r"client 2: key '.*m.lora_A.weight' has rank 20000, which is more"
    ):
        fastagg.lora.aggregate(None, clients, **more)
    result = fastagg.lora.aggregate(None, clients, **more, on_bad_client="drop")
    assert result.ranks == {PREFIX + "m": 16}  # though B A has one row and one column: as PEFT makes them
    wide = {key: torch.ones((2000, 3) if "lora_A" in key else (2500, 2000)) for key in clients[0]}
    assert fastagg.lora.aggregate(None, [wide], **more, rank=1).ranks == {PREFIX + "m": 1}
