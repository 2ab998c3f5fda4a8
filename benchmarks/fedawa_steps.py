"""How many optimiser steps FedAWA takes in a round, and how long they are: what its defaults were chosen by.

python -m benchmarks.fedawa_steps             64 runs on digits and Fashion-MNIST; those in --out are not made again
python -m benchmarks.fedawa_steps --write     also puts the table into docs/methods.md
python -m benchmarks.fedawa_steps --quick     one choice, one seed, a few rounds of digits: does it work?

Fashion-MNIST is read from FASTAGG_DATA or Debian's package dataset-fashion-mnist.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from benchmarks.publish import DOCS, publish
from fastagg.sim import compare, report
from fastagg.sim.config import Config, from_dict

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
    return compare.place(out / "".join(c if c.isalnum() else "-" for c in setting.lower()), options)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/fedawa-steps"), help="folder for the runs")
    parser.add_argument("--quick", action="store_true", help="two methods, one setting, one seed, a few rounds")
    parser.add_argument("--write", action="store_true", help="put the table into docs/methods.md")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="runs made side by side (default: one for every core)")
    args = parser.parse_args(argv)
    if args.quick and args.write:
        parser.error("--quick is to see that it works; its table is not for the documents")
    methods, settings, seeds = list(METHODS), list(SETTINGS), args.seeds
    if args.quick:
        methods, settings, seeds, args.jobs = [methods[0], methods[-1]], settings[:1], 1, args.jobs or 1
    runs = {
        (setting, m): [config_of(m, setting, seed, args.quick) for seed in range(seeds)]
        for setting in settings for m in methods
    }  # fmt: skip
    flat = [(o, place(args.out, setting, o)) for (setting, _), some in runs.items() for o in some]
    try:
        todo = [(o, folder) for o, folder in flat if not compare.is_done(o, folder)]
        print(f"{len(flat)} runs, {len(flat) - len(todo)} of them made before in {args.out}", file=sys.stderr)
        if compare.make_runs(todo, True, args.jobs):
            print("stopped; the same command goes on", file=sys.stderr)
            return 130
        found = {
            (setting, m): [report.read_run(place(args.out, setting, o)) for o in some]
            for (setting, m), some in runs.items()
        }
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    text = table(found, settings, methods)
    text += (
        f"\nTest accuracy in %: mean of the last {report.AVERAGED} of {ROUNDS} rounds ± standard deviation over "
        f"{seeds} seeds. {CLIENTS} clients, mlp; Fashion-MNIST with 10,000 training samples. Last column: the 90th "
        "percentile of weight / data share divided by its 10th percentile, averaged over rounds and settings.\n"
    )
    print(text)
    if args.write:
        publish(DOCS / "methods.md", "fedawa steps", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
