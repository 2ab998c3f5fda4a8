"""Adapters in folders, as PEFT saves them: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastagg._engine import atomic, saved
from fastagg._engine.adapters.peft import FACTOR
from fastagg._engine.checks import InputError
from fastagg._engine.files.mapped import MappedModel, open_model
from fastagg._engine.files.target import ADAPTER, ADAPTER_CONFIG, adapter_config
from fastagg._engine.table import as_tensor

MODEL = f"{ADAPTER}.safetensors"


class Adapter(dict):
    """A state dict with the config that says how its factors are scaled: a dict like adapter_config.json's, or a
    peft.LoraConfig."""

    def __init__(self, tensors: Mapping[str, Any], config: Any = None) -> None:
        super().__init__(tensors)
        self.config = config if config is None or isinstance(config, Mapping) else config.to_dict()


def load(path: str | os.PathLike) -> Adapter:
    """An adapter's folder, or the .safetensors file in it. The tensors look at the mapped file: nothing is read yet,
    and the file must not be changed while they are used."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a {type(path).__name__} is no adapter: expected a state dict, or its folder")
    return with_config(open_model(path))


def with_config(model: MappedModel) -> Adapter:
    config = model.path.with_name(ADAPTER_CONFIG)
    if not os.path.lexists(config):
        raise InputError(f"{model.path} has no {ADAPTER_CONFIG} beside it, which says how the adapter is scaled")
    return Adapter(model.tensors, read_config(config))


def is_adapter(model: MappedModel) -> bool:
    """Whether a model has the factors of an adapter, and a config beside it. What is wrong with that is said later: not
    to take it for one would be to average factors."""
    return any(FACTOR.fullmatch(key) for key in model.tensors) and os.path.lexists(model.path.with_name(ADAPTER_CONFIG))


def read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(adapter_config(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def save(adapter: Mapping[str, Any], folder: str | os.PathLike, config: Any = None) -> Path:
    """Writes an adapter as PEFT does, for PeftModel.from_pretrained: each file as a whole. config: default, its own"""
    config = getattr(adapter, "config", None) if config is None else config
    config = config if config is None or isinstance(config, Mapping) else config.to_dict()
    if config is None:
        raise InputError("the adapter has no config: pass config=, a dict like adapter_config.json's or a LoraConfig")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: as_tensor(value, "the adapter", key).detach().cpu().contiguous() for key, value in adapter.items()}
    order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
    with atomic.prepared(folder / MODEL) as (new, file):
        file.write(saved.header([(key, tensors[key].dtype, tensors[key].shape) for key in order], {"format": "pt"}))
        for key in order:
            file.write(tensors[key].view(-1).view(torch.uint8).numpy().data)
    atomic.write(folder / ADAPTER_CONFIG, as_json(config))
    atomic.put(new)
    return folder / MODEL


def as_json(config: Mapping[str, Any]) -> str:
    """A LoraConfig has sets"""
    plain = {key: sorted(value) if isinstance(value, set | frozenset) else value for key, value in config.items()}
    return json.dumps(plain, indent=1, default=str) + "\n"
