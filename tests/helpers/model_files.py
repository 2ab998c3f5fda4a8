"""Rounds in safetensors files for the tests, written by the library that others use."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file


def write_round(folder, g, clients, names=None):
    """(path of the global model, paths of the clients)"""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.safetensors" for name in names or (f"c{k}" for k in range(len(clients)))]
    for path, sd in zip([folder / "global.safetensors", *paths], [g, *clients], strict=True):
        save_file(sd, path, {"format": "pt"})
    return folder / "global.safetensors", paths


def read_round(center, paths):
    """The same in memory"""
    return load_file(center), [load_file(path) for path in paths]


def load_model(path):
    """A model in one file or in several"""
    if path.name.endswith(".index.json"):
        listed = json.loads(path.read_text())["weight_map"]
        loaded = {name: load_file(path.parent / name) for name in set(listed.values())}
        assert sorted(listed) == sorted(key for sd in loaded.values() for key in sd)
        return {key: loaded[name][key] for key, name in listed.items()}
    return load_file(path)


def assert_same_model(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert torch.equal(a[key], b[key]), key


def write_raw(path, header, data=b""):
    """A file with a header of our choice: an object, or bytes"""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_shards(folder, sd, cuts=2, stem="model"):
    """Hugging Face's layout: shards and an index"""
    folder.mkdir(exist_ok=True)
    keys, listed = list(sd), {}
    for i in range(cuts):
        name = f"{stem}-{i + 1:05}-of-{cuts:05}.safetensors"
        part = {key: sd[key] for key in keys[i::cuts]}
        save_file(part, folder / name, {"format": "pt"})
        listed |= dict.fromkeys(part, name)
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": listed}))
    return index
