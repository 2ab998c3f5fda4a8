"""Adapters in folders, as PEFT saves them: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastagg._engine import atomic, saved
from fastagg._engine.checks import InputError
from fastagg._engine.files.mapped import open_model
from fastagg._engine.regular import open_regular
from fastagg._engine.table import as_tensor

MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LONGEST = 10_000_000  # bytes of a config


class Adapter(dict):
    """A state dict with the config that says how its factors are scaled: a dict like adapter_config.json's, or a
    peft.LoraConfig."""

    def __init__(self, tensors: Mapping[str, Any], config: Any = None) -> None:
        super().__init__(tensors)
        self.config = config if config is None or isinstance(config, Mapping) else config.to_dict()


def load(path: str | os.PathLike) -> Adapter:
    """An adapter's folder, or the .safetensors file in it. The tensors look at the mapped file: nothing is read yet, and
    the file must not be changed while they are used."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a {type(path).__name__} is no adapter: expected a state dict, or its folder")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    model = open_model(folder / MODEL if Path(path).is_dir() else path)
    config = folder / CONFIG
    if not config.exists():
        raise InputError(f"{folder} has no {CONFIG}, which says how the adapter is scaled")
    return Adapter(model.tensors, read_config(config))


def read_config(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            text = file.read(LONGEST + 1)
        content = json.loads(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object")
    return content


def save(adapter: Mapping[str, Any], folder: str | os.PathLike, config: Any = None) -> Path:
    """Writes an adapter as PEFT does, for PeftModel.from_pretrained: each file as a whole. config: default, its own"""
    config = getattr(adapter, "config", None) if config is None else config
    config = config if config is None or isinstance(config, Mapping) else config.to_dict()
    if config is None:
        raise InputError("the adapter has no config: pass config=, a dict like adapter_config.json's or a LoraConfig")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    new = prepare_model(adapter, folder, {})
    atomic.write_json(folder / CONFIG, plain_config(config))
    atomic.put(new)
    return folder / MODEL


def prepare_model(adapter: Mapping[str, Any], folder: Path, metadata: Mapping[str, str]) -> atomic.Temporary:
    """The file of the tensors, complete on the disk, and not yet in its place"""
    tensors = {key: as_tensor(value, "the adapter", key).detach().cpu().contiguous() for key, value in adapter.items()}
    order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
    parts = [(key, tensors[key].dtype, tensors[key].shape) for key in order]
    with atomic.prepared(folder / MODEL) as (new, file):
        file.write(saved.header(parts, {"format": "pt", **metadata}))
        for key in order:
            file.write(tensors[key].view(-1).view(torch.uint8).numpy().data)
    return new


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it: a LoraConfig has sets"""
    return {key: sorted(value) if isinstance(value, set | frozenset) else value for key, value in config.items()}
