"""Models of the simulator: shapes, parameter counts, seeds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fastagg.sim.models import IMAGES, MODELS, TEXT, check_outputs, head_of, make, needed_head

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
COUNTS = {  # parameters for ten classes, by shape
    "mlp": (55_210, 199_210, 656_810),
    "lenet": (14_538, 28_938, 34_538),  # 28,938: FedLAW's
    "cnn": (72_842, 93_322, 122_570),  # 122,570: FedLAW's and FedAWA's
    "cnn4": (188_810, 582_026, 878_538),  # PFLlib's FedAvgCNN, which cwFedAvg's code has: 1024 and 1600 features to 512
    "alexnet": (20_125_386, 20_125_386, 23_272_266),  # as lists of networks for CIFAR-10 have it
    "resnet8": (77_754, 77_754, 78_042),
    "resnet20": (272_186, 272_186, 272_474),  # 0.27 million, as He et al. say
    "resnet56": (855_482, 855_482, 855_770),  # 0.85 million
    "resnet110": (1_730_426, 1_730_426, 1_730_714),  # 1.7 million
    "wrn56-4": (13_627_082, 13_627_082, 13_628_234),
    "resnet18": (11_172_810, 11_172_810, 11_173_962),
    "densenet121": (6_955_146, 6_955_146, 6_956_298),  # 6,956,298: the same; torchvision's: see below
    "vit": (136_010, 138_890, 141_898),
}
HEAVY = ("alexnet", "resnet56", "resnet110", "wrn56-4", "resnet18", "densenet121")
NORMED = ("resnet", "wrn", "densenet")


@pytest.mark.parametrize("name", IMAGES)
def test_shapes_counts_and_head(name):
    for shape, count in zip(SHAPES, COUNTS[name], strict=True):
        model = make(name, shape, 10, seed=0)
        assert model.training
        assert sum(p.numel() for p in model.parameters()) == count
        assert head_of(model, 10) == "fc.weight"
        assert model.fc.weight.shape[0] == 10
        model.eval()
        with torch.no_grad():
            assert model(torch.rand(2, *shape)).shape == (2, 10)
        assert all(type(value) in (torch.Tensor, nn.Parameter) for value in model.state_dict().values())
        assert bool(list(model.buffers())) == name.startswith(NORMED)
        assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def convolutions(model):
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def test_counts_of_the_papers():
    """What is in torchvision's models.densenet121 (7,978,856), and the layers that the names count"""
    ours = make("densenet121", (3, 32, 32), 1000, seed=0)
    assert sum(p.numel() for p in ours.parameters()) == 7_978_856 - (64 * 3 * 49 + 2 * 64) + 64 * 3 * 9
    for name, layers in (("resnet56", 56), ("resnet110", 110), ("wrn56-4", 56), ("densenet121", 121)):
        found = convolutions(make(name, (3, 32, 32), 10, seed=0))
        shortcuts = 2 if name != "densenet121" else 0  # which are not counted
        assert len(found) - shortcuts + 1 == layers
    narrow, wide = (convolutions(make(name, (3, 32, 32), 10, seed=0)) for name in ("resnet56", "wrn56-4"))
    assert [c.out_channels for c in wide] == [4 * c.out_channels for c in narrow]


def test_alexnets_layers():
    """Krizhevsky et al.'s on one GPU, as in torchvision, with 3 x 3 convolutions and what 32 x 32 pixels leave"""
    model = make("alexnet", (3, 32, 32), 10, seed=0)
    assert [c.out_channels for c in convolutions(model)] == [64, 192, 384, 256, 256]
    linear = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert linear == [(256 * 2 * 2, 4096), (4096, 4096), (4096, 10)]


@pytest.mark.parametrize("name", [name for name in IMAGES if name not in HEAVY])
def test_sizes_between(name):
    for shape in [(3, 8, 8), (1, 12, 16), (3, 16, 16), (1, 20, 20), (3, 24, 20)]:
        assert make(name, shape, 3, seed=0)(torch.rand(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", IMAGES)
def test_a_training_step_moves_every_parameter(name):
    torch.manual_seed(0)
    model = make(name, (3, 16, 16), 3, seed=0)
    before = [p.detach().clone() for p in model.parameters()]
    nn.functional.cross_entropy(model(torch.rand(4, 3, 16, 16)), torch.tensor([0, 1, 2, 0])).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in HEAVY and not name.startswith(NORMED)])
def test_clients_can_train_together(name):
    """Models without buffers under vmap, each client with weights and samples of its own"""
    text = name in TEXT
    shape, vocabulary = ((6,), 30) if text else ((1, 16, 16), 0)
    models = [make(name, shape, 3, seed, vocabulary) for seed in (0, 1)]
    x = torch.randint(0, 30, (2, 4, 6)) if text else torch.rand(2, 4, *shape)
    y = torch.tensor([[0, 1, 2, 0], [1, 1, 2, 2]])

    def loss(params, x, y):
        return nn.functional.cross_entropy(functional_call(models[0], params, (x,)), y)

    stacked = {key: torch.stack([dict(m.named_parameters())[key] for m in models]) for key in models[0].state_dict()}
    together = vmap(grad(loss))(stacked, x, y)
    for k, model in enumerate(models):
        alone = torch.autograd.grad(loss(dict(model.named_parameters()), x[k], y[k]), list(model.parameters()))
        for (key, _), expected in zip(model.named_parameters(), alone, strict=True):
            torch.testing.assert_close(together[key][k], expected, rtol=1e-4, atol=1e-6)


def test_text():
    model = make("embedding", (5,), 4, seed=0, vocabulary=50)
    assert sum(p.numel() for p in model.parameters()) == 50 * 32 + 4 * 33
    assert head_of(model, 4) == "fc.weight"
    assert not list(model.buffers())
    x = torch.tensor([[3, 7, 0, 0, 0], [7, 0, 0, 3, 0], [0, 0, 0, 0, 0]])
    words = model.body.words.weight
    expected = torch.stack([(words[3] + words[7]) / 2, (words[3] + words[7]) / 2, torch.zeros(32)])
    torch.testing.assert_close(model(x), expected @ model.fc.weight.T + model.fc.bias)
    model(x).sum().backward()
    assert set(words.grad.abs().sum(1).nonzero().flatten().tolist()) == {3, 7}  # what fills up is never trained
    for shape, vocabulary in (((5,), 0), ((3, 32, 32), 50), ((5,), 1)):
        with pytest.raises(ValueError, match=r"expected text, .length,. with a vocabulary of at least 2"):
            make("embedding", shape, 4, 0, vocabulary)
    with pytest.raises(ValueError, match="'cnn' takes images, and the data are text; choose embedding"):
        make("cnn", (5,), 4, 0, vocabulary=50)


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn", "cnn4", "resnet8"])
@pytest.mark.parametrize("side", [9, 11, 15, 17, 18, 19])
def test_odd_sides(name, side):
    assert make(name, (1, side, side), 4, seed=0)(torch.rand(2, 1, side, side)).shape == (2, 4)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8", "vit"])
def test_seeds(name):
    before = torch.random.get_rng_state()
    models = [make(name, (1, 8, 8), 10, seed).state_dict() for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    again = make(name, (1, 8, 8), 10, 3).state_dict()
    for key, value in models[0].items():
        assert torch.equal(value, models[1][key])
        assert torch.equal(value, again[key])
    assert not torch.equal(models[0]["fc.weight"], models[2]["fc.weight"])


def test_attention_is_torchs():
    """Our few lines against nn.MultiheadAttention with the same weights"""
    attention = make("vit", (1, 8, 8), 10, seed=1).body.blocks[0].attention[1]
    theirs = nn.MultiheadAttention(64, 4, batch_first=True)
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj.weight": "out.weight"}
    ours = attention.state_dict()
    theirs.load_state_dict({**{a: ours[b] for a, b in names.items()}, "out_proj.bias": ours["out.bias"]})
    x = torch.rand(2, 5, 64)
    torch.testing.assert_close(attention(x), theirs(x, x, x, need_weights=False)[0])


class Own(nn.Module):
    """With its layers out of order"""

    def __init__(self, shape, classes, hidden=6):
        super().__init__()
        self.out = nn.Linear(hidden, classes)
        self.first = nn.Linear(shape[0], hidden)

    def forward(self, x):
        return self.out(self.first(x).relu())


def positional(form, number, /, scale=1):
    return Own(form, number)


def by_name(*, classes, shape=(7,), other=None):
    assert other is None
    return Own(shape, classes)


@pytest.mark.parametrize("factory", [Own, positional, by_name, lambda: Own((5,), 3), partial(Own, hidden=6)])
def test_own_factories(factory):
    before = torch.random.get_rng_state()
    models = [make(factory, (5,), 3, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(model.training for model in models)
    a, b, c = (model.state_dict()["first.weight"] for model in models)
    assert a.shape == (6, 5)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_own_factory_by_name(tmp_path, monkeypatch):
    (tmp_path / "own_nets_for_a_test.py").write_text(
        "from torch import nn\ndef text(vocabulary, classes): return nn.Embedding(vocabulary, classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert make("own_nets_for_a_test:text", (9,), 3, 0, vocabulary=20).weight.shape == (20, 3)
    with pytest.raises(
        ValueError, match="model: 'own_nets_for_a_test:net': own_nets_for_a_test has no attribute 'net'"
    ):
        make("own_nets_for_a_test:net", (9,), 3, 0)


def test_own_model():
    model = Own((5,), 3).eval()
    made = make(model, (5,), 3, seed=0)
    assert made is not model
    assert made.training
    assert not model.training
    assert torch.equal(made.out.weight, model.out.weight)
    assert made.out.weight.data_ptr() != model.out.weight.data_ptr()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda a, b, c: None, "requires a, b, c; expected a function without required arguments, or of .shape, cl"),
        (lambda *, a, b: None, "requires a, b"),
        (lambda: 3, "returned a int; expected a torch.nn.Module"),
        (nn.ReLU, "ReLU has no parameters to train"),
        (3, "model: 3; expected a name, a function that returns a model, or a model"),
    ],
)
def test_own_factories_that_cannot_be(factory, message):
    with pytest.raises(ValueError, match=message):
        make(factory, (5,), 3, 0)


def test_errors_of_a_factory_are_its_own():
    def fails(shape, classes):
        raise KeyError("mine")

    before = torch.random.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        make(fails, (5,), 3, 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_outputs():
    x = torch.rand(3, 5)
    for model in (Own((5,), 3).eval(), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        training = model.training
        check_outputs(model, x, 3)
        assert model.training == training
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    check_outputs(Own((5,), 3), x[:1], 3)
    with pytest.raises(
        ValueError, match=r"Own gives \(2, 3\) for 2 samples; expected \(2, 4\), a number for each class"
    ):
        check_outputs(Own((5,), 3), x, 4)
    with pytest.raises(ValueError, match=r"Own cannot take samples of shape \(5,\), float32: RuntimeError: .*mat1"):
        check_outputs(Own((6,), 3), x, 3)
    with pytest.raises(ValueError, match="LSTM gives tuple for 2 samples"):
        check_outputs(nn.LSTM(5, 3), x, 3)


def test_head_of_other_models():
    two = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    assert head_of(two) == "2.weight"
    assert head_of(two, 3) == "0.weight"
    assert head_of(two, 5) is None
    assert head_of(Own((5,), 3), 3) == "out.weight"
    assert head_of(nn.Linear(2, 3)) == "weight"
    assert head_of(nn.Sequential(nn.Conv2d(3, 10, 1), nn.Flatten())) is None
    assert head_of(nn.ReLU()) is None
    assert needed_head(two, 4, "cwfedavg") == "2.weight"
    with pytest.raises(
        ValueError, match="cwfedavg needs the model's output layer, and ReLU has neither a layer 'fc' nor"
    ):
        needed_head(nn.ReLU(), 10, "cwfedavg")


def test_errors():
    with pytest.raises(ValueError, match=r"no model 'vgg'.*; there are mlp, lenet"):
        make("vgg", (1, 8, 8), 10, 0)
    with pytest.raises(ValueError, match=r"'vit' cannot take images of shape .*multiples of 4"):
        make("vit", (1, 10, 10), 10, 0)
    for shape in [(1, 7, 8), (8, 8), (0, 8, 8)]:
        with pytest.raises(ValueError, match="sides of at least 8"):
            make("lenet", shape, 10, 0)
    with pytest.raises(ValueError, match="classes=1"):
        make("mlp", (1, 8, 8), 1, 0)
