"""The calls whose time is predicted: a kernel, on so many clients of a model."""

from __future__ import annotations

from dataclasses import dataclass

CLIENTS = (5, 20, 64, 100)


@dataclass(frozen=True)
class Model:
    name: str
    D: int
    largest: float  # share of its largest layer


MODELS = {
    "resnet18": Model("ResNet-18", 11_173_962, 0.21),
    "vit_b": Model("ViT-B", 86_567_656, 0.027),
}


@dataclass(frozen=True)
class Job:
    kernel: str  # mix, gram, gram_mix
    K: int
    dtype: str = "float32"
    model: str = "resnet18"
    M: int = 1
    tensor_cores: bool | None = None  # None: as backends/cuda.py chooses on these GPUs

    @property
    def name(self) -> str:
        return f"{self.kernel} to {self.M}" if self.kernel == "mix" else self.kernel

    @property
    def bytes(self) -> int:  # of an element
        return 4 if self.dtype == "float32" else 2

    @property
    def on_tensor_cores(self) -> bool:
        return self.K > 64 if self.tensor_cores is None else self.tensor_cores


def jobs(model: str, dtype: str) -> list[Job]:
    kinds = [("mix", lambda K: 1), ("mix", lambda K: K), ("gram", lambda K: 1), ("gram_mix", lambda K: 1)]
    return [Job(kernel, K, dtype, model, M(K)) for kernel, M in kinds for K in CLIENTS]
