"""The small networks of the papers, for images of 8 x 8 and more.

    mlp        784-200-200-C                                                                    (FedLAW, Fashion-MNIST)
    lenet      5x5 convolutions to 16 and 32 channels, padded, each pooled; no hidden layer     (FedLAW's released code)
    cnn        3x3 convolutions to 32, 64 and 64 channels, the first two pooled; hidden layer of 64     (FedLAW, FedAWA)
    resnet8, resnet20, resnet56      CIFAR ResNets of 16, 32 and 64 channels, shortcuts of 1x1 convolutions     (FedLAW)
    resnet18   64 to 512 channels with a 3x3 first convolution, no pooling before the blocks                   (SimProx)
    vit        patches of 4 x 4, width 64, 4 blocks of 4 heads, mean of the patches; no class token

The output layer is "fc" in all of them. No dropout: a seed decides everything. Only the ResNets have buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, int, int]  # channels, height, width
SMALLEST = 8  # pixels of a side: below it the pooling layers run out


class Classifier(nn.Module):
    """Layers that give a vector of features, and the output layer"""

    def __init__(self, body: nn.Module, shape: Shape, classes: int):
        super().__init__()
        self.body = body
        with torch.no_grad():
            features = body.eval()(torch.zeros(1, *shape)).shape[1]
        self.fc = nn.Linear(features, classes)
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def mlp(shape: Shape) -> nn.Module:
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU())


def lenet(shape: Shape) -> nn.Module:
    return nn.Sequential(*pooled(shape[0], 16, 5, padding=2), *pooled(16, 32, 5, padding=2), nn.Flatten())


def cnn(shape: Shape) -> nn.Module:
    padding = 0 if min(shape[1:]) >= 18 else 1  # the papers do not pad; below 18 pixels nothing would be left
    layers = [*pooled(shape[0], 32, 3, padding), *pooled(32, 64, 3, padding), nn.Conv2d(64, 64, 3, padding=padding)]
    body = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
    with torch.no_grad():
        features = body(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*body, nn.Linear(features, 64), nn.ReLU())


def pooled(inputs: int, outputs: int, kernel: int, padding: int) -> list[nn.Module]:
    """Pooled before the ReLU: the same in value and gradient, and a ReLU of a quarter of the numbers"""
    return [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU()]


class Block(nn.Module):
    """Two convolutions and a way around them"""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(*normed(inputs, outputs, 3, stride), nn.ReLU(), *normed(outputs, outputs, 3, 1))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*normed(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def normed(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet(widths: tuple[int, ...], blocks: int) -> Callable[[Shape], nn.Module]:
    """A stage of so many blocks for each width; every stage but the first halves the image"""

    def body(shape: Shape) -> nn.Module:
        layers = [*normed(shape[0], widths[0], 3, 1), nn.ReLU()]
        inputs = widths[0]
        for width in widths:
            for i in range(blocks):
                layers.append(Block(inputs, width, stride=2 if i == 0 and width != widths[0] else 1))
                inputs = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    return body


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [batch, heads, patches, :]
        near = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((near @ v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Attention and a hidden layer, each normalised before and added to what went in"""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        hidden = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
        self.hidden = nn.Sequential(nn.LayerNorm(width), *hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.hidden(x)


class ViT(nn.Module):
    def __init__(self, shape: Shape, patch: int = 4, width: int = 64, blocks: int = 4, heads: int = 4):
        super().__init__()
        if shape[1] % patch or shape[2] % patch:
            raise ValueError(f"model 'vit' cannot take images of shape {shape}: sides must be multiples of {patch}")
        self.patches = nn.Conv2d(shape[0], width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(shape[1] * shape[2] // patch**2, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(blocks)), nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position  # [batch, patches, width]
        return self.blocks(x).mean(1)


MODELS: dict[str, Callable[[Shape], nn.Module]] = {  # each gives the layers before the output layer
    "mlp": mlp,
    "lenet": lenet,
    "cnn": cnn,
    "resnet8": resnet((16, 32, 64), blocks=1),
    "resnet20": resnet((16, 32, 64), blocks=3),
    "resnet56": resnet((16, 32, 64), blocks=9),
    "resnet18": resnet((64, 128, 256, 512), blocks=2),
    "vit": ViT,
}


def make(name: str, shape: Sequence[int], classes: int, seed: int) -> nn.Module:
    """A new model for images of this shape (channels, height, width), in training mode.

    The seed decides its weights (torch's own initialisation); torch's global random numbers are left alone.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < SMALLEST:
        what = f"expected (channels, height, width) with sides of at least {SMALLEST}"
        raise ValueError(f"model {name!r} cannot take images of shape {tuple(shape)}: {what}")
    if classes < 2:
        raise ValueError(f"classes={classes}; expected at least 2")
    channels, height, width = shape
    form: Shape = channels, height, width
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone: no GPU's generator is touched
        return Classifier(MODELS[name](form), form, classes)


def head_of(model: nn.Module) -> str:
    """Key of the output layer's weight: "fc.weight", or else the last matrix of the model"""
    matrices = [key for key, value in model.named_parameters() if value.dim() >= 2]
    if not matrices:
        raise ValueError(f"{type(model).__name__} has no parameter with a row per class, so no output layer")
    return "fc.weight" if "fc.weight" in matrices else matrices[-1]
