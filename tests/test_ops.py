"""The torch.library operators: schemas, fakes, gradients, compilation."""

from __future__ import annotations

import pytest
import torch

import fastagg
from fastagg._engine import backends
from helpers.cohort import flat, make

SHAPES = {"a.weight": (6, 3), "b.weight": (5,)}


def lists(dtype=torch.float64, K=3):
    g, clients = make(K, SHAPES, dtype)
    return list(g.values()), [t for sd in clients for t in sd.values()]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_opcheck(backend, dtype):
    fastagg.set_backend(backend)
    g, clients = lists(dtype)
    weights = torch.rand(2, 2, 3, dtype=torch.float64)
    torch.library.opcheck(torch.ops.fastagg.gram, (g, clients, [0, 1], 2, True))
    torch.library.opcheck(torch.ops.fastagg.gram, (g, clients, [0, -1], 2, False))
    torch.library.opcheck(torch.ops.fastagg.mix, (clients, weights, [0, 1]))
    torch.library.opcheck(torch.ops.fastagg.mix, (clients, weights.clone().requires_grad_(), [1, 0]))
    wanted = [x.clone().requires_grad_() for x in clients]
    torch.library.opcheck(torch.ops.fastagg.mix, (wanted, weights, [0, 1]))
    torch.library.opcheck(torch.ops.fastagg.mix, (wanted, weights.clone().requires_grad_(), [0, 0]))
    torch.library.opcheck(torch.ops.fastagg.dots, ([x.clone().requires_grad_() for x in g], wanted, [0, 0], 1))
    torch.library.opcheck(torch.ops.fastagg.gram_mix, (g, clients, [0, 1], 2, True, weights, [0, 1]))
    torch.library.opcheck(torch.ops.fastagg.dots, (g, clients, [0, 0], 1))


def test_gradient_by_finite_differences():
    _, clients = lists()
    weights = torch.rand(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: torch.ops.fastagg.mix(clients, w, [1, 0]), (weights,))


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients_in_clients_and_weights_by_finite_differences(check):
    _, clients = lists(K=2)
    weights = torch.rand(2, 3, 2, dtype=torch.float64, requires_grad=True)
    wanted = [x.clone().requires_grad_() for x in clients]
    assert check(lambda w, *x: torch.ops.fastagg.mix(list(x), w, [1, 0]), (weights, *wanted))
    assert check(lambda *x: torch.ops.fastagg.mix(list(x), weights.detach(), [0, 1]), tuple(wanted))
    rows = tuple(torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(4))
    assert check(lambda v, *x: torch.ops.fastagg.dots([v], list(x), [0], 1), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clients_that_require_grad_get_it(dtype):
    clients = [torch.randn(50).to(dtype).requires_grad_() if i % 2 == 0 else torch.tensor(i) for i in range(4)]
    weights = torch.tensor([[[0.25, 0.75], [2.0, -1.0]]], dtype=torch.float64)
    outputs = torch.ops.fastagg.mix(clients, weights, [0, 0])
    assert not outputs[1].requires_grad  # a counter
    grads = [torch.randn(50).to(dtype) for _ in range(2)]
    torch.autograd.backward([outputs[0], outputs[2]], grads)
    for k, client in enumerate((clients[0], clients[2])):
        expected = sum(weights[0, m, k] * grads[m].double() for m in range(2))
        torch.testing.assert_close(client.grad, expected.to(dtype))
    assert clients[1].grad is None


def test_only_what_requires_grad_costs_a_pass(monkeypatch):
    _, clients = lists()
    wanted = [clients[0].requires_grad_(), *clients[1:]]
    weights, calls = torch.rand(1, 1, 3, dtype=torch.float64), []
    outputs = torch.ops.fastagg.mix(wanted, weights, [0, 0])
    monkeypatch.setattr(backends.cpu, "dots", lambda *args: calls.append(args))
    sum(x.sum() for x in outputs).backward()
    assert not calls
    torch.testing.assert_close(clients[0].grad, weights[0, 0, 0].expand(6, 3))


def test_the_public_mix_is_differentiable_in_weights_only():
    _, clients = make(3, SHAPES)
    clients[0]["b.weight"].requires_grad_()
    weights = torch.rand(3, requires_grad=True)
    fastagg.mix(clients, weights)["b.weight"].sum().backward()
    assert weights.grad is not None
    assert clients[0]["b.weight"].grad is None


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("K", [3, 130])
def test_gradient_through_the_public_mix(layerwise, K):
    _, clients = make(K, SHAPES | {"a.num_batches_tracked": ()})
    for sd in clients:
        sd["a.num_batches_tracked"] = torch.tensor(3)
    shape = (2, K) if layerwise else (K,)
    weights = torch.rand(shape, requires_grad=True)
    target = {name: torch.randn(shape) for name, shape in SHAPES.items()}

    def loss(sd):
        return sum(((sd[name] - t) ** 2).sum() for name, t in target.items())

    loss(fastagg.mix(clients, weights, layerwise=layerwise)).backward()
    plain = weights.detach().clone().requires_grad_()
    rows = {name: plain[i] if layerwise else plain for i, name in enumerate(SHAPES)}
    loss({n: torch.einsum("k...,k->...", torch.stack([sd[n] for sd in clients]), rows[n]) for n in SHAPES}).backward()
    torch.testing.assert_close(weights.grad, plain.grad, rtol=1e-5, atol=1e-5)


def test_a_loss_on_one_tensor_only():
    _, clients = make(3, SHAPES)
    weights = torch.rand(3, dtype=torch.float64, requires_grad=True)
    fastagg.mix(clients, weights)["b.weight"].sum().backward()
    torch.testing.assert_close(
        weights.grad, torch.stack([sd["b.weight"].double().sum() for sd in clients]), rtol=1e-6, atol=1e-6
    )


def test_no_graph_without_grad_and_no_out_with_it():
    _, clients = make(3, SHAPES)
    clients[0]["b.weight"].requires_grad_()
    assert not any(v.requires_grad for v in fastagg.mix(clients, [1, 1, 1]).values())
    out = fastagg.mix(clients, [1, 1, 1])
    with pytest.raises(fastagg.InputError, match="weights require grad"):
        fastagg.mix(clients, torch.ones(3, requires_grad=True), out=out)


def test_compiles_without_graph_breaks():
    g, clients = lists(torch.float32)

    def step(weights):
        mixed = torch.ops.fastagg.mix(clients, weights, [0, 0])
        return sum((x**2).sum() for x in mixed) + torch.ops.fastagg.gram(g, clients, [0, 0], 1, True).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    weights = torch.rand(1, 1, 3, dtype=torch.float64, requires_grad=True)
    compiled(weights).backward()
    grad, weights.grad = weights.grad.clone(), None
    step(weights).backward()
    torch.testing.assert_close(grad, weights.grad)


def test_bad_lists():
    g, clients = lists()
    with pytest.raises(fastagg.InputError, match="do not divide"):
        torch.ops.fastagg.gram(g, clients[:-1], [0, 0], 1, True)
    with pytest.raises(fastagg.InputError, match=r"client 2: key '1' has shape"):
        torch.ops.fastagg.gram(g, [*clients[:-1], torch.ones(2, dtype=torch.float64)], [0, 0], 1, True)


def test_reference_and_native_agree_on_dots():
    _, clients = make(7, {"a.weight": (3000,), "b.weight": (33,)})
    left = [v for sd in clients[:2] for v in sd.values()]
    flat_clients = [t for sd in clients for t in sd.values()]
    got = torch.ops.fastagg.dots(left, flat_clients, [0, 1], 2).sum(0)
    expected = torch.stack([flat(sd) for sd in clients[:2]]) @ torch.stack([flat(sd) for sd in clients]).T
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(
    "left", [[torch.ones(1)], [torch.ones(40, dtype=torch.float64)], [torch.ones(40)] * 3, []], ids=len
)
def test_dots_checks_what_it_is_given(left):
    with pytest.raises(fastagg.InputError, match="left"):
        torch.ops.fastagg.dots(left, [torch.ones(40), torch.ones(40)], [0, 0], 1)
    for bad in (torch.ones(1), torch.ones(40, dtype=torch.float64)):
        with pytest.raises(fastagg.InputError, match="left: key '1' has"):
            torch.ops.fastagg.dots([torch.ones(40), bad], [torch.ones(40), torch.ones(40)], [0, 0], 1)


@pytest.mark.filterwarnings("error")
def test_one_gradient_for_two_outputs_is_no_reason_to_warn():
    clients = [torch.randn(5, requires_grad=True) for _ in range(3)]
    a, b = torch.ops.fastagg.mix(clients, torch.rand(1, 2, 3, dtype=torch.float64), [0])
    torch.exp(a + b).sum().backward()
    assert all(x.grad is not None for x in clients)
