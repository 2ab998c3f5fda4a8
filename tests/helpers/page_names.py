"""What the pages of the documentation take as given: models, data, files."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import fastagg
from fastagg.extend import Cohort, GlobalAggregator
from helpers import adapters

IDS = ["hospital-3", "hospital-7", "hospital-9"]
SIZES = [600, 150, 420]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.body(x).relu())


class MyMethod(GlobalAggregator):
    """A method of the reader's own."""

    name, paper = "my_method", "none"

    def weigh(self, cohort: Cohort) -> np.ndarray:
        return cohort.shares


def trained(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Net().state_dict()


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def given() -> dict[str, Any]:
    """Names, made anew for every page"""
    x, y = samples(400, 0)
    test_x, test_y = samples(60, 1)
    models = [trained(seed) for seed in range(1, 9)]
    model = Net()
    global_adapter, client_adapters = adapters.cohort(3)
    names = {
        "fastagg": fastagg, "torch": torch, "np": np, "dist": torch.distributed, "__name__": "page",
        "model": model, "make_net": lambda: Net(), "global_sd": model.state_dict(), "client_sds": models[:3],
        "sizes": SIZES, "ids": IDS, "client_ids": IDS, "g": model.state_dict(), "clients": models, "K": len(models),
        "server_sd": trained(9), "proxy": [(x[:50], y[:50])], "x": x, "y": y, "test_x": test_x, "test_y": test_y,
        "MyMethod": MyMethod, "counts": torch.tensor([[5, 1, 0], [0, 3, 3], [2, 2, 2]]),
        "paths": [f"clients/{name}.safetensors" for name in IDS],
        "global_adapter": global_adapter, "client_adapters": client_adapters,
        "peft": SimpleNamespace(set_peft_model_state_dict=lambda model, new: None),  # make test-peft has the real one
        "client_sd": models[0], "diff_sd": {key: value / 100 for key, value in models[1].items()}, "folder": "spill",
        "receive": lambda round: [round.add(name, sd) for name, sd in zip(IDS, models, strict=False)],
        "arrivals": ((str(k), {key: v / 100 for key, v in models[k % 8].items()}, 10, 0) for k in count()),
        "os": os, "save_file": save_file, "my_client_sds": models[:3], "my_ids": IDS, "my_sizes": SIZES, "group": True,
    }  # fmt: skip
    return names


def write_files(folder: Path) -> None:
    """The files that commands name: models, and the clients' data sizes"""
    (folder / "clients").mkdir()
    save_file(trained(0), folder / "g.safetensors")
    for seed, name in enumerate(IDS, 1):
        save_file(trained(seed), folder / f"clients/{name}.safetensors")
    global_adapter, client_adapters = adapters.cohort(3)
    for name, adapter in zip(
        ["round-3", *(f"adapters/{name}" for name in IDS)], [global_adapter, *client_adapters], strict=True
    ):
        (folder / name).mkdir(parents=True)
        save_file(adapter, folder / name / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    (folder / "sizes.json").write_text(json.dumps(dict(zip(IDS, SIZES, strict=True))))


def few_rounds(monkeypatch) -> None:
    """What a page trains for a hundred rounds is trained for three"""
    from fastagg.sim import library

    whole = library._config

    def config(values, own=None):
        return whole(values | {"rounds": min(values.get("rounds", 3), 3)}, own)

    monkeypatch.setattr(library, "_config", config)


def one_rank(monkeypatch) -> None:
    """As torchrun --nproc-per-node 1 sets it"""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setitem(os.environ, name, str(value))
