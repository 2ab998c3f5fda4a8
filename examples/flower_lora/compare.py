"""The same rounds without Flower, for each way to aggregate adapters, and a plot of them.

python examples/flower_lora/compare.py --out lora.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from fastagg_lora import text
from fastagg_lora.training import ADAPTERS, Server, client_round, learned_before


def run(name: str, base: dict, rounds: int, steps: int) -> list[float]:
    server = Server(base, name)
    curve = [server.bits()]
    for server_round in range(1, rounds + 1):
        clients = range(len(text.CLIENTS))
        trained = [client_round(server.base, server.adapter, client, server_round, steps) for client in clients]
        new = server.finish_round([adapter for adapter, _ in trained], [letters for _, letters in trained])
        curve.append(server.bits())
        weights = " ".join(f"{weight:.2f}" for weight in new.weights.tolist())
        print(f"{name:<10} round {server_round}: {curve[-1]:.3f} bits per letter, weights {weights}", flush=True)
    return curve


def plot(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(curve, label=name, marker=".")
    axes.set(xlabel="round", ylabel="bits per letter, on text that no client trains on")
    axes.set_title("Six clients with adapters of ranks 4, 8 and 16", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=10, help="(default: 10)")
    p.add_argument("--local-steps", type=int, default=15, help="of a client in a round (default: 15)")
    p.add_argument("--base-steps", type=int, default=400, help="of the base model, before (default: 400)")
    p.add_argument("--out", type=Path, help="where the plot goes: a .svg or .png file")
    args = p.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    base = learned_before(args.base_steps)
    print(f"before: {Server(base, 'exact').bits():.3f} bits per letter", flush=True)
    curves = {name: run(name, base, args.rounds, args.local_steps) for name in ADAPTERS}
    if args.out is not None:
        plot(curves, args.out)


if __name__ == "__main__":
    main()
