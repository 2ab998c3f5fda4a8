"""The networks of the papers, and those of the user's own.

    for images of 8 x 8 and more
    mlp        784-200-200-C                                                                    (FedLAW, Fashion-MNIST)
    lenet      5x5 convolutions to 16 and 32 channels, padded, each pooled; no hidden layer     (FedLAW's released code)
    cnn        3x3 convolutions to 32, 64 and 64 channels, the first two pooled; hidden layer of 64     (FedLAW, FedAWA)
    cnn4       5x5 convolutions to 32 and 64 channels, each pooled; hidden layer of 512            (cwFedAvg's 4 layers)
    alexnet    five 3x3 convolutions to 64, 192, 384, 256 and 256 channels, the first of stride 2, the first two and the
               last pooled; two hidden layers of 4096     (FedLAW, which neither says nor releases which AlexNet it has)
    resnet8, resnet20, resnet56, resnet110   CIFAR ResNets of 16, 32 and 64 channels, shortcuts of 1x1 convolutions
                                                                                                                (FedLAW)
    wrn56-4    resnet56 with four times as many channels in all layers                                  (FedLAW, FedAWA)
    resnet18   64 to 512 channels with a 3x3 first convolution, no pooling before the blocks                   (SimProx)
    densenet121   6, 12, 24 and 16 dense layers that add 32 channels each, a 3x3 first convolution      (FedLAW, FedAWA)
    vit        patches of 4 x 4, width 64, 4 blocks of 4 heads, mean of the patches; no class token

    for text
    embedding  the mean of the words' vectors of width 32

The output layer is "fc" in all of them. No dropout: a seed decides everything. Those with BatchNorm (the ResNets,
wrn56-4 and densenet121) have buffers, so their clients train one by one; the others can train as one computation.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastagg._engine.checks import suggest
from fastagg.sim.imports import is_reference, resolve
from fastagg.sim.networks import Shape
from fastagg.sim.networks.densenet import densenet
from fastagg.sim.networks.plain import alexnet, cnn, cnn4, lenet, mlp
from fastagg.sim.networks.residual import resnet
from fastagg.sim.networks.text import Embedding
from fastagg.sim.networks.vit import ViT
from fastagg.sim.outcomes import evaluating

SMALLEST = 8  # pixels of a side: below it the pooling layers run out

# Each gives the layers before the output layer, for images of a shape, or for a vocabulary
IMAGES: dict[str, Callable[[Shape], nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "cnn": cnn,
    "cnn4": cnn4,
    "alexnet": alexnet,
    "resnet8": resnet((16, 32, 64), blocks=1),
    "resnet20": resnet((16, 32, 64), blocks=3),
    "resnet56": resnet((16, 32, 64), blocks=9),
    "resnet110": resnet((16, 32, 64), blocks=18),
    "wrn56-4": resnet((64, 128, 256), blocks=9),
    "resnet18": resnet((64, 128, 256, 512), blocks=2),
    "densenet121": densenet((6, 12, 24, 16), growth=32),
    "vit": ViT,
}
TEXT: dict[str, Callable[[int], nn.Module]] = {"embedding": Embedding}
MODELS = (*IMAGES, *TEXT)


class Classifier(nn.Module):
    """Layers that give a vector of features, and the output layer; sample is what the first of them takes"""

    def __init__(self, body: nn.Module, sample: Tensor, classes: int):
        super().__init__()
        self.body = body
        with torch.no_grad():
            features = body.eval()(sample).shape[1]
        self.fc = nn.Linear(features, classes)
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


Factory = Callable[..., nn.Module]


def make(
    model: str | Factory | nn.Module, shape: Sequence[int], classes: int, seed: int, vocabulary: int = 0
) -> nn.Module:
    """A new model in training mode, for samples of this shape: images (channels, height, width), or text (length,).

    model        one of MODELS; "package.module:factory"; a function or class that returns a model, called without
                 arguments or with those that it names of shape, classes and vocabulary, or with (shape, classes) if it
                 requires two; or a model, of which a copy is made, with its weights
    classes      0: values are predicted, by a model of the user's own
    vocabulary   of text: how many words there are

    The seed decides the weights (torch's own initialisation); torch's global random numbers are left alone.
    """
    if is_reference(model):
        model = cast(Factory, resolve(cast(str, model), "model"))
    if isinstance(model, str):
        build = lambda: built(model, tuple(shape), classes, vocabulary)  # noqa: E731
    elif isinstance(model, nn.Module):
        build = lambda: copy.deepcopy(model)  # noqa: E731
    elif callable(model):
        build = lambda: call(model, tuple(shape), classes, vocabulary)  # noqa: E731
    else:
        raise ValueError(f"model: {model!r}; expected a name, a function that returns a model, or a model")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone: no GPU's generator is touched
        made = build()
    if not isinstance(made, nn.Module):
        raise ValueError(f"model: {name_of(model)} returned a {type(made).__name__}; expected a torch.nn.Module")
    if not any(p.requires_grad for p in made.parameters()):
        raise ValueError(f"model: {name_of(model)} has no parameters to train")
    return made.train()


def built(name: str, shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """A network of MODELS"""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}{suggest(name, MODELS)}; there are {', '.join(MODELS)}")
    if classes < 2:
        raise ValueError(f"classes={classes}; expected at least 2")
    if name in TEXT:
        if len(shape) != 1 or shape[0] < 1 or vocabulary < 2:
            raise ValueError(
                f"model {name!r} cannot take samples of shape {shape} with a vocabulary of {vocabulary}: expected text,"
                " (length,) with a vocabulary of at least 2"
            )
        return Classifier(TEXT[name](vocabulary), torch.zeros(1, *shape, dtype=torch.int64), classes)
    if vocabulary:
        raise ValueError(f"model {name!r} takes images, and the data are text; choose {', '.join(TEXT)}")
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < SMALLEST:
        what = f"expected (channels, height, width) with sides of at least {SMALLEST}"
        raise ValueError(f"model {name!r} cannot take images of shape {tuple(shape)}: {what}")
    channels, height, width = shape
    form: Shape = channels, height, width
    return Classifier(IMAGES[name](form), torch.zeros(1, *form), classes)


def call(factory: Factory, shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """A model of the user's own; see make"""
    offered = {"shape": shape, "classes": classes, "vocabulary": vocabulary}
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of something built in
        return factory()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind not in variable]
    named = [p.name for p in parameters if p.name in offered and p.kind is not p.POSITIONAL_ONLY]
    if all(p.name in named for p in required):
        return factory(**{name: offered[name] for name in named})
    if len(required) == 2 and all(p.kind is not p.KEYWORD_ONLY for p in required):
        return factory(shape, classes)
    raise ValueError(
        f"model: {name_of(factory)} requires {', '.join(p.name for p in required)}; expected a function without"
        " required arguments, or of (shape, classes)"
    )


def check_outputs(model: nn.Module, x: Tensor, classes: int) -> None:
    """That a model takes samples like these, and gives a number for each class. The model is not changed"""
    try:
        with evaluating(model):
            outputs = model(x[:2])
    except Exception as error:  # whatever the user's code raises
        what = f"samples of shape {tuple(x.shape[1:])}, {str(x.dtype).removeprefix('torch.')}"
        raise ValueError(f"model: {name_of(model)} cannot take {what}: {type(error).__name__}: {error}") from error
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if shape != (len(x[:2]), classes):
        raise ValueError(
            f"model: {name_of(model)} gives {shape} for {len(x[:2])} samples; expected {(len(x[:2]), classes)}, a"
            " number for each class"
        )


def name_of(model: Any) -> str:
    return repr(model) if isinstance(model, str) else getattr(model, "__qualname__", type(model).__name__)


def head_of(model: nn.Module, classes: int = 0) -> str | None:
    """Key of the output layer's weight: "fc.weight" if there is one, or else that of the last nn.Linear (with as many
    outputs as classes, if those are given); None if there is none"""
    parameters = dict(model.named_parameters())
    linear = [
        key
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (key := f"{name}.weight".lstrip(".")) in parameters
        if not classes or module.out_features == classes
    ]
    fits = "fc.weight" in parameters and (not classes or len(parameters["fc.weight"]) == classes)
    return "fc.weight" if fits else linear[-1] if linear else None


def needed_head(model: nn.Module, classes: int, who: str) -> str:
    """The same, for someone who cannot do without"""
    if (head := head_of(model, classes)) is None:
        outputs = f" with {classes} outputs" if classes else ""
        raise ValueError(
            f"{who} needs the model's output layer, and {type(model).__name__} has neither a layer 'fc' nor an"
            f" nn.Linear{outputs}; give it one, or choose another method"
        )
    return head
