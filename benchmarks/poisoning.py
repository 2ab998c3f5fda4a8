"""What malicious clients do to each method: the table of docs/robustness.md.

python -m benchmarks.poisoning             147 runs on scikit-learn's digits; those in --out already are not made again
python -m benchmarks.poisoning --write     also puts the table into docs/robustness.md
python -m benchmarks.poisoning --quick     two methods, one seed, a few rounds: does it work?
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from benchmarks import simulations
from benchmarks.publish import DOCS
from fastagg.sim import comparison, report
from fastagg.sim.config import Config, from_dict

PAGE = DOCS / "robustness.md"
METHODS = ("fedavg", "fedawa", "simprox", "krum", "multi_krum", "geometric_median", "centred_clipping")
ATTACKS = (("none", 0.0), *((kind, share) for kind in ("noise", "flip", "scale") for share in (0.1, 0.3)))
CLIENTS, ALPHA, SEEDS = 20, 0.5, 3
# Chosen after trials with 10, 30 and 100 (one seed, 30 rounds of 2 epochs): at 10, noise and scaling hardly hurt even
# FedAvg. Noise averages out, and an update that is scaled still points the right way.
STRENGTH = 100.0
TAU = 0.3  # of centred clipping: the median length of FedAvg's updates without an attack is 0.28 (printed below)


def options_of(method: str, attackers: int) -> dict[str, float]:
    """What a server that expects so many attackers would set; nothing is tuned"""
    if method in ("krum", "multi_krum"):
        return {"f": max(1, attackers)}
    return {"tau": TAU} if method == "centred_clipping" else {}


def config_of(method: str, attack: tuple[str, float], seed: int, strength: float, quick: bool) -> Config:
    kind, share = attack
    values = {
        "method": method, "options": options_of(method, round(share * CLIENTS)), "seed": seed, "clients": CLIENTS,
        "alpha": ALPHA, "attack": kind, "attackers": share,
    }  # fmt: skip
    values |= {"attack_strength": strength} if share else {}
    return from_dict(values | ({"rounds": 8} if quick else {}))


def table(runs: dict[tuple[str, float], dict[str, list[report.Run]]], methods: tuple[str, ...]) -> str:
    """Markdown: a row per method, a column per attack; the best of every column in bold"""
    rows: dict[str, list[str]] = {method: [] for method in methods}
    for groups in runs.values():
        for row in report.table(groups):
            rows[row["label"]].append(cell(row, groups[row["label"]]))
    heads = ["no attack" if not share else f"{kind} {100 * share:g} %" for kind, share in runs]
    lines = [["method", *heads], ["---", *["---:"] * len(heads)], *([m, *cells] for m, cells in rows.items())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def cell(row: dict, runs: list[report.Run]) -> str:
    lost = sum(bool(run.summary.get("diverged")) for run in runs)
    if lost:
        return "diverged" + (f" ({lost} of {len(runs)} seeds)" if lost < len(runs) else "")
    text = report.Metric().text(row["mean"], row["std"])
    return f"**{text}**" if row["best"] else "≈ " + text if row["within_noise"] else text


def notes(runs: dict[tuple[str, float], dict[str, list[report.Run]]], strength: float) -> str:
    """What the table shows, and of what"""
    every = [run for groups in runs.values() for some in groups.values() for run in some]
    seeds, c = len({run.summary["seed"] for run in every}), every[0].config
    honest = [x for run in runs[ATTACKS[0]]["fedavg"] for record in run.metrics[1:] for x in record["norms"]]
    seconds = sum(run.summary["seconds"]["total"] for run in every)
    return (
        f"Test accuracy in %: mean of the last {report.AVERAGED} rounds ± standard deviation over {seeds} "
        f"seed{'s' * (seeds > 1)}. Bold marks the best value of a column, ≈ a value within noise of it (the 95 % "
        "confidence interval of the difference over the same seeds includes 0). "
        '"Diverged": the model\'s values grew until training could not continue.'
        "\n\n"
        f"{c['data']}, {c['clients']} clients, Dirichlet({c['alpha']}), {c['model']}, {c['rounds']} rounds of "
        f"{c['epochs']} local epochs; attack strength {strength:g}. Krum and Multi-Krum are told the number of "
        f"attackers (f, at least 1). Centred clipping has tau = {TAU}; the median length of an honest update is "
        f"{median(honest):.2f} (FedAvg, no attack). {len(every)} runs; total time {seconds / 60:.1f} minutes of one "
        "process.\n"
    )


def main(argv: list[str] | None = None) -> int:
    strength = {"type": float, "default": STRENGTH, "help": "of the attacks (default: %(default)g)"}
    args = simulations.parse(
        argv, __doc__, out="runs/poisoning", page=PAGE, seeds=SEEDS, quick="two methods, one seed, a few rounds",
        more={"--strength": strength},
    )  # fmt: skip
    methods, attacks = METHODS, ATTACKS
    if args.quick:
        methods, attacks = ("fedavg", "multi_krum"), (ATTACKS[0], ("flip", 0.3))

    def plan() -> dict[tuple[str, tuple[str, float]], list[tuple[Config, Path]]]:
        runs = {
            (m, a): [config_of(m, a, s, args.strength, args.quick) for s in range(args.seeds)]
            for m in methods for a in attacks
        }  # fmt: skip
        return {key: [(o, comparison.place(args.out, o)) for o in some] for key, some in runs.items()}

    def show(found: dict[tuple[str, tuple[str, float]], list[report.Run]]) -> str:
        runs = {a: {m: found[m, a] for m in methods} for a in attacks}
        return table(runs, methods) + "\n" + notes(runs, args.strength)

    return simulations.run(args, PAGE, "poisoning table", plan, show)


if __name__ == "__main__":
    sys.exit(main())
