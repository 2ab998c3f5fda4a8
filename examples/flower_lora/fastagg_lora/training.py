"""What clients and the server do in a round. Neither knows whether Flower carries the tensors between them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import fastagg
from fastagg_lora import text
from fastagg_lora.model import SCALING, Transformer, adapter_of, add, base_of, first

RANKS = (4, 8, 16)  # of clients, in turn: what their machines can train
LARGEST = max(RANKS)
ADAPTERS = {  # how adapters are aggregated: the method, and what the new one is made of
    "FedIT": ("fedavg", "separate"),
    "exact": ("fedavg", "exact"),
    "best rank": ("fedavg", "rank"),
    "FedAWA": ("fedawa", "rank"),
}


def learned_before(steps: int) -> dict[str, Tensor]:
    """The base model, which has read Python's manual"""
    torch.manual_seed(0)
    model, letters = Transformer(1), text.manual()
    train(model, letters, steps, 3e-3, seed=0, parameters=[p for n, p in model.named_parameters() if ".lora_" not in n])
    return base_of(model)


def train(model: Transformer, letters: Tensor, steps: int, lr: float, seed: int, parameters=None) -> None:
    """Trains the adapter, or the parameters given"""
    generator = torch.Generator().manual_seed(seed)
    parameters = parameters or [p for name, p in model.named_parameters() if ".lora_" in name]
    optimiser = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    for _ in range(steps):
        x, y = text.batch(letters, 16, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@torch.no_grad()
def bits(model: Transformer) -> float:
    """Per letter, of what clients have not trained on: the mean over all clients"""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for client in range(len(text.CLIENTS)):
        x, y = text.batch(text.source(client)[1], 64, generator)
        losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    return float(torch.stack(losses).mean()) / 0.6931


def client_round(
    base: dict[str, Tensor], adapter: dict[str, Tensor], client: int, server_round: int, steps: int
) -> tuple[dict[str, Tensor], int]:
    """A client's adapter after a round, and how much text it has. It begins with the first components of the server's
    adapter, or with a fresh one."""
    rank = RANKS[client % len(RANKS)]
    torch.manual_seed(100 * server_round + client)
    model = Transformer(rank)
    model.load_state_dict(base | (first(adapter, rank) if adapter else adapter_of(model)))
    letters = text.source(client)[0]
    train(model, letters, steps, 2e-3, seed=100 * server_round + client)
    return {key: value.clone() for key, value in adapter_of(model).items()}, len(letters)


class Server:
    """base, adapter   what clients get: an empty adapter says that they begin with fresh ones"""

    def __init__(self, base: dict[str, Tensor], name: str) -> None:
        method, self.form = ADAPTERS[name]
        self.method = fastagg.aggregator(method)
        torch.manual_seed(1)
        self.base = base
        self.adapter = {} if self.form == "exact" else adapter_of(Transformer(LARGEST))

    def finish_round(self, adapters: list[dict[str, Tensor]], sizes: list[int]) -> fastagg.lora.AdapterResult:
        new = fastagg.lora.aggregate(
            self.adapter or None, adapters, sizes, method=self.method, form=self.form, scaling=SCALING
        )
        if self.form == "exact":
            self.base = add(self.base, new)
        else:
            self.adapter = dict(new)
        return new

    def bits(self) -> float:
        model = Transformer(LARGEST)
        model.load_state_dict(add(self.base, self.adapter), strict=False)  # its B = 0
        return bits(model)
