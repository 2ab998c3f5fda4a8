"""What each site runs: receive the global model, measure it, train on this site's digits, send the result."""

import argparse
import zlib

import numpy as np
import nvflare.client as flare
import torch
from model import DigitsNet
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy


def digits_of(site: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This site's part of the training data: 150 to 500 images, with many of some digits and few of others"""
    x, y = load_digits(return_X_y=True)
    x, y = x[:1400] / 16, y[:1400]
    random = np.random.default_rng(zlib.crc32(site.encode()))
    shares = random.dirichlet([0.5] * 10)[y] / np.bincount(y)[y]
    mine = random.choice(len(y), random.integers(150, 500), p=shares / shares.sum())
    return torch.tensor(x[mine], dtype=torch.float32), torch.tensor(y[mine])


def held_out_digits() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[1400:] / 16, dtype=torch.float32), torch.tensor(y[1400:])


def train(model: DigitsNet, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            if len(batch) > 1:  # BatchNorm needs two
                optimizer.zero_grad()
                cross_entropy(model(x[batch]).float(), y[batch]).backward()
                optimizer.step()


def accuracy(model: DigitsNet, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--broken", default="", help="name of a site that sends NaN")
    options = parser.parse_args()

    torch.set_num_threads(1)
    flare.init()
    site = flare.get_site_name()
    model, (x, y), held_out = DigitsNet(options.dtype), digits_of(site), held_out_digits()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        before = accuracy(model, *held_out)
        train(model, x, y, options.epochs)
        params = {key: value.clone() for key, value in model.state_dict().items()}
        if site == options.broken:
            params["body.0.weight"].fill_(float("nan"))
        meta = {"NUM_STEPS_CURRENT_ROUND": len(x)}  # what NVFlare weighs by; the amount of data is meant here
        flare.send(flare.FLModel(params=params, metrics={"accuracy": before}, meta=meta))


if __name__ == "__main__":
    main()
