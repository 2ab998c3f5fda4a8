"""What users bring of their own: objects in the place of names, and the texts that stand for them in a run's records.

A Config holds plain values only, so that a run can be written down, compared and continued. In Python, an option that
names something (a model, data, a method, ...) may be an object instead: the Config then has a text for it, which is
`package.module:name` if the object can be found there, and `own:name` if it cannot, as in a notebook.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastagg._engine import registry
from fastagg._engine.aggregator import Aggregator
from fastagg._engine.options import options_of
from fastagg.sim.config import NAMES, Config, is_own, short
from fastagg.sim.data import Dataset
from fastagg.sim.imports import resolve
from fastagg.sim.local import Algorithm
from fastagg.sim.own import Parts, dataset_of


@dataclass(frozen=True)
class Own:
    """Objects by the option they are given as; None: what the option's text names"""

    method: Any = None
    data: Any = None
    model: Any = None
    partition: Any = None
    attack: Any = None
    algorithm: Any = None
    loss: Any = None
    metric: Any = None

    def get(self, options: Config, name: str) -> Any:
        """What an option stands for: an object, or the name of something built in"""
        value, text = getattr(self, name), getattr(options, name)
        if value is not None or text is None or ":" not in text:
            return text if value is None else value
        if is_own(text):
            raise ValueError(
                f"sim: {name} is {short(text)}, which exists only in the program that made it: call "
                f"fastagg.sim.simulate or fastagg.sim.compare there, with {name}= and the same folder"
            )
        return resolve(text)

    def aggregator_class(self, options: Config) -> type[Aggregator]:
        found = self.get(options, "method")
        return options.aggregator_class if isinstance(found, str) else found

    def dataset(self, options: Config) -> Brought | None:
        """Data of the user's own, None where the option names a data set"""
        found = self.get(options, "data")
        return (
            found if isinstance(found, Brought) else None if isinstance(found, str) else brought(found, options.pixels)
        )


class Brought(NamedTuple):
    """Data that a user has brought, and who has which samples if that is given"""

    dataset: Dataset
    parts: Parts | None


def brought(data: Any, pixels: str) -> Brought:
    """From anything that own.dataset_of takes, or a function that returns it"""
    data = data() if callable(data) and not hasattr(data, "__getitem__") else data
    return Brought(*dataset_of(data, pixels=pixels))


def separated(values: Mapping[str, Any]) -> tuple[dict[str, Any], Own]:
    """Options as a Config takes them, and the objects among them"""
    plain, own = {name: value if name in NAMES else as_plain(value) for name, value in values.items()}, {}
    for name in NAMES:
        value = plain.get(name)
        if value is None or isinstance(value, str):
            continue
        if name == "method":
            cls, options = method_of(value)
            plain["options"] = as_plain(options) | dict(plain.get("options") or {})
            plain[name], known = text_of(cls), registry.registry()
            if known.get(cls.name) is cls:
                plain[name] = cls.name
            else:
                own[name] = cls
        elif name == "data":
            own[name] = brought(value, plain.get("pixels", "standard"))
            plain[name] = text_of_data(own[name])
            if own[name].parts is not None:
                plain.setdefault("clients", len(own[name].parts))
        else:
            if name in ("loss", "metric") and (isinstance(value, type) or not callable(value)):
                raise TypeError(f"{name}={value!r}; expected a function of outputs and targets, or an object like one")
            own[name], plain[name] = value, text_of(value)
    return plain, Own(**own)


def as_plain(value: Any) -> Any:
    """Numbers of NumPy and paths as Python and JSON have them; also those within a method's options"""
    if isinstance(value, dict):
        return {key: as_plain(each) for key, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


def method_of(value: Any) -> tuple[type[Aggregator], dict[str, Any]]:
    """The class of an aggregator, and the options that it was made with, if it was"""
    if isinstance(value, type) and issubclass(value, Aggregator):
        return value, {}
    if isinstance(value, Aggregator):
        made = {name: getattr(value, name) for name in options_of(type(value))}
        try:
            usual = type(value)()
        except (TypeError, ValueError):  # some of its options have no default
            return type(value), made
        return type(value), {name: v for name, v in made.items() if v != getattr(usual, name)}
    raise TypeError(f"method={value!r}; expected a name, or an aggregator or its class")


def text_of(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and module != "__main__":
        try:
            if resolve(f"{module}:{name}") is value:
                return f"{module}:{name}"
        except ValueError:
            pass  # a function inside of another
    if isinstance(value, Algorithm):  # a dataclass: with its options, in which two of a kind may differ
        name = repr(value)
    return f"own:{name or type(value).__qualname__}"


def text_of_data(data: Brought) -> str:
    """Its shape, and a hash by which a run that is continued recognises it"""
    d, digest = data.dataset, hashlib.blake2b(digest_size=6)
    for tensor in (d.x, d.y, d.test_x, d.test_y):
        digest.update(memoryview(as_bytes(tensor)))  # type: ignore[arg-type]  NumPy's arrays are buffers
    for rows in data.parts or ():
        digest.update(np.asarray(rows, dtype=np.int64).tobytes())
    return f"own:{d.name} {'x'.join(map(str, d.x.shape))} {digest.hexdigest()}"


def as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
