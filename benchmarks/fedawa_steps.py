"""How many optimiser steps FedAWA takes in a round, and how long they are: what its defaults were chosen by.

python -m benchmarks.fedawa_steps             64 runs on digits and Fashion-MNIST; those in --out are not made again
python -m benchmarks.fedawa_steps --write     also puts the table into docs/methods.md
python -m benchmarks.fedawa_steps --quick     one choice, one seed, a few rounds of digits: does it work?

Fashion-MNIST is read from FASTAGG_DATA or Debian's package dataset-fashion-mnist.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks import simulations
from benchmarks.publish import DOCS
from fastagg.sim import comparison, report
from fastagg.sim.config import Config, from_dict

PAGE = DOCS / "methods.md"
SKEWED = {"alpha": 0.1}
CORRUPTED = {"alpha": 0.5, "corrupted": 0.3}
DATA = {"digits": {"data": "digits"}, "Fashion-MNIST": {"data": "fashion-mnist", "samples": 10_000}}
SETTINGS = {
    f"{name}, alpha {s['alpha']}" + (", 30 % corrupted" if "corrupted" in s else ""): {**data, **s}
    for name, data in DATA.items() for s in (SKEWED, CORRUPTED)
}  # fmt: skip
CHOICES = [(5, 0.02), (5, 0.05), (5, 0.1), (10, 0.02), (10, 0.05), (10, 0.1)]
METHODS = {
    "FedAvg": ("fedavg", {}),
    "FedAWA released": ("fedawa", {"variant": "released"}),
    **{f"FedAWA, {s} steps of {lr:g}": ("fedawa", {"variant": "paper", "steps": s, "lr": lr}) for s, lr in CHOICES},
}
ROUNDS, CLIENTS, SEEDS = 30, 20, 2


def config_of(method: str, setting: str, seed: int, quick: bool) -> Config:
    name, options = METHODS[method]
    values = {"method": name, "options": options, "seed": seed, "clients": CLIENTS, **SETTINGS[setting]}
    return from_dict(values | {"rounds": 3 if quick else ROUNDS})


def place(out: Path, setting: str, options: Config) -> Path:
    return comparison.place(out / "".join(c if c.isalnum() else "-" for c in setting.lower()), options)


def spread(run: report.Run) -> float:
    """How much more the heaviest tenth of the clients counts than the lightest, relative to their data: the mean over
    rounds of the ratio of the 90th to the 10th percentile of weight / data share"""
    sizes = np.array(run.partition["counts"], dtype=float).sum(1)
    ratios = []
    for record in run.metrics[1:]:
        n = sizes[record["clients"]]
        relative = np.array(record["weights"]) / (n / n.sum())
        low, high = np.percentile(relative, [10, 90])
        ratios.append(high / low)
    return float(np.mean(ratios))


def table(found: dict[tuple[str, str], list[report.Run]], settings: list[str], methods: list[str]) -> str:
    lines = [["method", *settings, "spread of weight / data share"], ["---", *["---:"] * (len(settings) + 1)]]
    for method in methods:
        cells = []
        for setting in settings:
            values = [100 * run.summary["accuracy"] for run in found[setting, method]]
            cells.append(f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""))
        spreads = [spread(run) for setting in settings for run in found[setting, method]]
        lines.append([method, *cells, f"{np.mean(spreads):.2f}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    args = simulations.parse(
        argv, __doc__, out="runs/fedawa-steps", page=PAGE, seeds=SEEDS,
        quick="two methods, one setting, one seed, a few rounds",
    )  # fmt: skip
    methods, settings = list(METHODS), list(SETTINGS)
    if args.quick:
        methods, settings = [methods[0], methods[-1]], settings[:1]

    def plan() -> dict[tuple[str, str], list[tuple[Config, Path]]]:
        runs = {
            (setting, m): [config_of(m, setting, seed, args.quick) for seed in range(args.seeds)]
            for setting in settings for m in methods
        }  # fmt: skip
        return {(s, m): [(o, place(args.out, s, o)) for o in some] for (s, m), some in runs.items()}

    def show(found: dict[tuple[str, str], list[report.Run]]) -> str:
        return table(found, settings, methods) + (
            f"\nTest accuracy in %: mean of the last {report.AVERAGED} of {ROUNDS} rounds ± standard deviation over "
            f"{args.seeds} seeds. {CLIENTS} clients, mlp; Fashion-MNIST with 10,000 training samples. Last column: the "
            "90th percentile of weight / data share divided by its 10th percentile, averaged over rounds and "
            "settings.\n"
        )

    return simulations.run(args, PAGE, "fedawa steps", plan, show)


if __name__ == "__main__":
    sys.exit(main())
