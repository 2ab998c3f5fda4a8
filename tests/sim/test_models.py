"""Models of the simulator: shapes, parameter counts, seeds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastagg.sim.models import MODELS, head_of, make

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
COUNTS = {  # parameters for ten classes, by shape
    "mlp": (55_210, 199_210, 656_810),
    "lenet": (14_538, 28_938, 34_538),  # 28,938: FedLAW's
    "cnn": (72_842, 93_322, 122_570),  # 122,570: FedLAW's and FedAWA's
    "resnet8": (77_754, 77_754, 78_042),
    "resnet20": (272_186, 272_186, 272_474),  # 0.27 million, as He et al. say
    "resnet56": (855_482, 855_482, 855_770),  # 0.85 million
    "resnet18": (11_172_810, 11_172_810, 11_173_962),
    "vit": (136_010, 138_890, 141_898),
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_counts_and_head(name):
    for shape, count in zip(SHAPES, COUNTS[name], strict=True):
        model = make(name, shape, 10, seed=0)
        assert model.training
        assert sum(p.numel() for p in model.parameters()) == count
        assert head_of(model) == "fc.weight"
        assert model.fc.weight.shape[0] == 10
        model.eval()
        with torch.no_grad():
            assert model(torch.rand(2, *shape)).shape == (2, 10)
        assert all(type(value) in (torch.Tensor, nn.Parameter) for value in model.state_dict().values())
        assert bool(list(model.buffers())) == name.startswith("resnet")
        assert not any(isinstance(module, nn.Dropout) for module in model.modules())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet18"])
def test_sizes_between(name):
    for shape in [(3, 8, 8), (1, 12, 16), (3, 16, 16), (1, 20, 20), (3, 24, 20)]:
        assert make(name, shape, 3, seed=0)(torch.rand(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn", "resnet8"])
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


def test_head_of_other_models():
    assert head_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))) == "2.weight"
    with pytest.raises(ValueError, match="no output layer"):
        head_of(nn.ReLU())


def test_errors():
    with pytest.raises(ValueError, match="no model 'vgg'; there are mlp, lenet"):
        make("vgg", (1, 8, 8), 10, 0)
    with pytest.raises(ValueError, match=r"'vit' cannot take images of shape .*multiples of 4"):
        make("vit", (1, 10, 10), 10, 0)
    for shape in [(1, 7, 8), (8, 8), (0, 8, 8)]:
        with pytest.raises(ValueError, match="sides of at least 8"):
            make("lenet", shape, 10, 0)
    with pytest.raises(ValueError, match="classes=1"):
        make("mlp", (1, 8, 8), 1, 0)
