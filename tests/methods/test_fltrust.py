"""FLTrust against its equations on flattened updates."""

import math
import warnings

import pytest
import torch

import fastagg
from fastagg.methods.fltrust import FLTrust
from helpers import robust
from helpers.cohort import assert_same_bits, assert_unchanged, snapshot
from helpers.forming import never_formed


def trust_of(d, d0):
    """The cosines of the clients with the server's update, from 0"""
    return [max(0.0, float(x @ d0) / float(x.norm() * d0.norm())) if x.norm() * d0.norm() else 0.0 for x in d]


def weights_of(d, d0):
    trust = trust_of(d, d0)
    scaled = [t * float(d0.norm() / x.norm()) / sum(trust) if t else 0.0 for t, x in zip(trust, d, strict=True)]
    return torch.tensor(scaled, dtype=torch.float64)


def served(K, dtype=torch.float64, seed=0):
    """Clients, and a model of the server that most of them agree with"""
    g, clients = robust.cohort(K + 1, dtype, seed)
    [server] = clients[K:]
    for k in range(0, K, 2):
        clients[k] = clients[k] | {key: (clients[k][key] + 2 * (server[key] - g[key])) for key in robust.PARAMS}
    return g, clients[:K], server


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("formed", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("K", [1, 2, 5, 9])
def test_equals_the_definition(K, seed, formed, dtype):
    g, clients, server = served(K, dtype, seed)
    before = snapshot(g, *clients, server)
    d, d0 = robust.rows(clients, g), robust.rows([server], g)[0]
    if formed:
        result = fastagg.fltrust(g, clients, server_model=server, gram="full")
    else:
        with never_formed():
            result = fastagg.fltrust(g, clients, server_model=server)
    weights = weights_of(d, d0)
    torch.testing.assert_close(result.weights, weights, **robust.tolerance(dtype))
    torch.testing.assert_close(
        result.trust, torch.tensor(trust_of(d, d0), dtype=torch.float64), **robust.tolerance(dtype)
    )
    robust.assert_mixed(result, g, clients, weights)
    assert result.gram.K == K
    assert_unchanged([g, *clients, server], before)


@pytest.mark.parametrize("magnitude", [1e2, 1e6, 1e20, 1e36])
def test_the_model_moves_no_further_than_the_servers(magnitude):
    g, clients, server = served(7, torch.float32)
    clients = robust.far_away(clients, 6, magnitude)
    result = fastagg.fltrust(g, clients, server_model=server)
    length = float(robust.rows([server], g).norm())
    assert float(robust.rows([result], g).norm()) <= length * (1 + 1e-5)


def test_who_goes_against_the_server_has_no_weight():
    g, clients, server = served(5)
    against = {key: 2 * g[key] - server[key] for key in robust.PARAMS}
    result = fastagg.fltrust(g, [dict(sd, **against) if k == 0 else sd for k, sd in enumerate(clients)],
                             server_model=server)  # fmt: skip
    assert result.weights[0] == 0
    assert result.trust[0] == 0
    nobody = fastagg.fltrust(g, [dict(sd, **against) for sd in clients], server_model=server)
    assert nobody.weights.tolist() == [0] * 5
    for key in robust.PARAMS:
        assert torch.equal(nobody[key], g[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tiny_update_cannot_blow_up_rounding(dtype):
    """A client that changes one number by very little: not lengthened to the server's, for what else it has is g"""
    g = {"w": torch.linspace(-3, 3, 100).to(dtype), "zero.w": torch.zeros(3, dtype=dtype)}
    server = {key: value + 0.25 for key, value in g.items()}
    tiny = dict(g, **{"zero.w": torch.full((3,), torch.finfo(dtype).smallest_normal, dtype=dtype)})
    result = fastagg.fltrust(g, [tiny], server_model=server)
    assert 0 < result.weights[0] <= 1000
    torch.testing.assert_close(result["w"], g["w"], rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_degenerate_cohorts_and_order():
    _, _, server = served(5, torch.float32)
    for g, clients in robust.degenerate():
        for model in (server, dict(g), dict(clients[0])):
            result = fastagg.fltrust(g, clients, server_model=model)
            assert torch.isfinite(result.weights).all()
            assert all(torch.isfinite(value.double()).all() for value in result.values())
    robust.check_order_of(*served(9, torch.float32)[:2], fastagg.fltrust, server_model=served(9, torch.float32)[2])


def test_a_server_model_of_another_form():
    g, clients, server = served(3)
    for model, words in (
        (
            {**server, "fc.bias": server["fc.bias"][:3]},
            r"server_model: key 'fc\.bias' has shape \(3,\), expected \(9,\)",
        ),
        ({k: v for k, v in server.items() if k != "fc.bias"}, r"server_model: key 'fc\.bias' is missing"),
        ({**server, "fc.bias": server["fc.bias"].float()}, r"server_model: key 'fc\.bias' has dtype torch\.float32"),
        ({**server, "fc.bias": server["fc.bias"] * math.nan}, "server_model: it has values that are not finite"),
        ([server], "server_model is a list, expected a state dict"),
    ):
        with pytest.raises(fastagg.InputError, match=words) as caught:
            fastagg.fltrust(g, clients, server_model=model, on_bad_client="drop")
        assert not isinstance(caught.value, fastagg.BadClientError)
    with pytest.raises(fastagg.InputError, match="fltrust needs server_model: the model that the server has trained"):
        fastagg.aggregator("fltrust").aggregate(g, clients)


def test_other_memory():
    """NumPy arrays, tensors that are not contiguous, and a model that one of the clients has sent as well"""
    g, clients, server = served(4, torch.float32)
    expected = fastagg.fltrust(g, clients, server_model=server)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = {key: value.numpy() for key, value in server.items()}
        assert_same_bits(fastagg.fltrust(g, clients, server_model=arrays), expected)
        turned = server | {"fc.weight": server["fc.weight"].T.contiguous().T}
        assert_same_bits(fastagg.fltrust(g, clients, server_model=turned), expected)
        same = fastagg.fltrust(g, [*clients, server], server_model=server)
    assert same.trust[4] == pytest.approx(1, abs=1e-6)
    for out in (server, clients[0]):
        with pytest.raises(fastagg.InputError, match="shares memory with an input"):
            fastagg.fltrust(g, clients, server_model=server, out=out)


def test_it_says_where_it_does_not_work():
    with pytest.raises(ValueError, match="fltrust: the server's model is given whole, and this method takes no group"):
        FLTrust(group=True)
    assert "does not work on files" in FLTrust().why_not_on_files()
