"""What malicious clients do to each robust method: the tables and the picture of docs/robustness.md.

python -m benchmarks.poisoning             every robust method, with and without NNM, against every attack, on
                                           scikit-learn's digits; about 3,300 runs of 2 s, an hour on two cores. Runs in
                                           --out already are not made again, and the same command goes on after a stop
python -m benchmarks.poisoning --write     also puts the tables and the picture into docs
python -m benchmarks.poisoning --rules median krum --attacks alie    a part of it
python -m benchmarks.poisoning --alone     what the samples that FLTrust's server has are worth without any client
python -m benchmarks.poisoning --quick     two methods, one seed, a few rounds: does it work?
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks import heatmap, simulations
from benchmarks.publish import DOCS
from fastagg._engine import registry
from fastagg._engine.options import options_of
from fastagg.sim import comparison, report, supplied
from fastagg.sim.choices import ATTACKS
from fastagg.sim.config import Config, from_dict
from fastagg.sim.simulation import Simulation

PAGE = DOCS / "robustness.md"
PICTURE = DOCS / "robustness" / "poisoning"
CLIENTS, ALPHA, SEEDS, ROUNDS, EPOCHS = 20, 0.5, 3, 30, 2
SHARES = (0.1, 0.2, 0.4)
# Others as the simulator has them by default. Loud ones: chosen after trials with 10, 30 and 100: at 10, noise and
# scaling hardly hurt even FedAvg. ALIE: the paper's own formula gives 0, 0.16 and 0.67 for these numbers of attackers
STRENGTHS = {"noise": 100.0, "flip": 100.0, "scale": 100.0, "alie": 1.5}
# What a server that expects attackers would set; nothing is tuned. tau is of the order of FedAvg's updates without an
# attack, whose median length is printed below the tables
OPTIONS: dict[str, dict[str, Any]] = {"centred_clipping": {"tau": 0.3}, "geometric_median": {"weighted": False}}


class Rule(NamedTuple):
    """A row of the tables"""

    method: str
    mixed: bool = False  # with NNM before it

    @property
    def label(self) -> str:
        return self.method + " + nnm" * self.mixed

    def options(self, f: int) -> dict[str, Any]:
        """With f attackers expected; where a method cannot have so many, the most that it can"""
        cls, options = registry.registry()[self.method], dict(OPTIONS.get(self.method, {}))
        if "f" in options_of(cls):
            options["f"] = max(n for n in range(f + 1) if cls(**options, f=n).min_clients <= CLIENTS)
        return options | ({"pre": f"nnm f={f}"} if self.mixed else {})

    def why_not(self) -> str:
        try:
            registry.make(registry.registry()[self.method], self.options(1))
        except (ValueError, TypeError) as error:
            return str(error)
        return ""


class Cell(NamedTuple):
    """A rule against an attack, which is "none" where attackers are only expected"""

    rule: Rule
    attack: str
    share: float

    def config(self, seed: int, rounds: int = ROUNDS) -> Config:
        attacked = {"attack": self.attack, "attackers": self.share} if self.attack != "none" else {}
        attacked |= {"attack_strength": STRENGTHS[self.attack]} if self.attack in STRENGTHS else {}
        return from_dict({
            "method": self.rule.method, "options": self.rule.options(round(self.share * CLIENTS)), "seed": seed,
            "clients": CLIENTS, "alpha": ALPHA, "rounds": rounds, "epochs": EPOCHS, **attacked,
        })  # fmt: skip


Found = dict[Cell, list[report.Run]]


def rules() -> list[Rule]:
    """FedAWA and FedAvg to compare with, then every robust method: each with NNM too, where that can be before it"""
    methods = [name for name, cls in sorted(registry.registry().items()) if cls.buffers == "median"]
    found = [Rule("fedawa")]
    for method in ("fedavg", *methods):
        found.append(Rule(method))
        if why := Rule(method, mixed=True).why_not():
            print(f"no nnm before {method} ({why})", file=sys.stderr)
        else:
            found.append(Rule(method, mixed=True))
    return found


def table(found: Found, share: float, attacks: Sequence[str], rules: Sequence[Rule]) -> str:
    """Markdown: a row per rule, a column per attack; the best of every column in bold"""
    rows: dict[str, list[str]] = {rule.label: [rule.label] for rule in rules}
    for attack in ("none", *attacks):
        groups = {rule.label: found[Cell(rule, attack, share)] for rule in rules}
        for row in report.table(groups):
            rows[row["label"]].append(text_of(row, groups[row["label"]]))
    heads = ["rule", "no attack", *attacks]
    if "backdoor" in attacks:
        heads.append("its success")
        for rule in rules:
            opened = [run.summary.get("attack_success") for run in found[Cell(rule, "backdoor", share)]]
            known = [rate for rate in opened if rate is not None]
            rows[rule.label].append(f"{100 * mean(known):.1f}" if known else "-")
    heads.append("worst")
    for rule in rules:
        means = [accuracy(found[Cell(rule, attack, share)]) for attack in attacks]
        worst = [value for value in means if value is not None]
        rows[rule.label].append("diverged" if len(worst) < len(means) else f"{100 * min(worst):.1f}")
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows.values()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def text_of(row: dict[str, Any], runs: list[report.Run]) -> str:
    lost = sum(bool(run.summary.get("diverged")) for run in runs)
    if lost:
        return "diverged" + (f" ({lost} of {len(runs)} seeds)" if lost < len(runs) else "")
    text = f"{100 * row['mean']:.1f}"
    return f"**{text}**" if row["best"] else "≈ " + text if row["within_noise"] else text


def accuracy(runs: list[report.Run]) -> float | None:
    """Mean over seeds; None where one has diverged"""
    values = [run.summary.get("accuracy") for run in runs]
    return None if None in values else mean(values)


def notes(found: Found) -> str:
    """What the tables show, and of what"""
    every = [run for some in found.values() for run in some]
    seeds, c = len({run.summary["seed"] for run in every}), every[0].config
    # FedAvg without an attack is the same run in all tables
    honest = [
        x for cell, runs in found.items() if cell[:2] == (Rule("fedavg"), "none")
        for run in runs for record in run.metrics[1:] for x in record["norms"]
    ]  # fmt: skip
    length = f" (the median length of an honest update is {median(honest):.2f}: FedAvg, no attack)" if honest else ""
    fewer = sorted({
        f"{cell.rule.method} {f}" for cell in found
        if (f := cell.rule.options(n := round(cell.share * CLIENTS)).get("f", n)) < n and not cell.rule.mixed
    })  # fmt: skip
    few = f", or the most that a method allows ({', '.join(fewer)})" if fewer else ""
    seconds = sum({run.path: run.summary["seconds"]["total"] for run in every}.values())
    return (
        f"Test accuracy in %: mean of the last {report.AVERAGED} rounds, and over {seeds} seed{'s' * (seeds > 1)}. "
        "Bold marks the best value of a column, ≈ a value within noise of it (the 95 % confidence interval of the "
        'difference over the same seeds includes 0). "Its success": of test images of other classes with the trigger, '
        'the part that is taken for the target; lower is better. "Worst": the lowest accuracy of the row under an '
        'attack. "Diverged": the model\'s values grew until training could not continue.'
        "\n\n"
        f"{c['data']}, {c['clients']} clients, Dirichlet({c['alpha']}), {c['model']}, {c['rounds']} rounds of "
        f"{c['epochs']} local epochs; strengths: {', '.join(f'{k} {v:g}' for k, v in STRENGTHS.items())}, others by "
        f"default. f is the number of attackers{few}, also in the column without an attack. Centred clipping has tau = "
        f"{OPTIONS['centred_clipping']['tau']}{length}, the geometric median weighted=False. "
        f"{len({run.path for run in every})} runs; total time {seconds / 60:.1f} minutes of one process.\n"
    )


def picture(found: Found, attacks: Sequence[str], rules: Sequence[Rule], shares: Sequence[float], at: Path) -> None:
    columns = ["no attack", *attacks]
    panels = {
        f"{100 * share:g} % attackers": [
            [accuracy(found[Cell(rule, attack, share)]) for attack in ("none", *attacks)] for rule in rules
        ]
        for share in shares
    }
    heatmap.draw(panels, [rule.label for rule in rules], columns, at)


def alone(seeds: int, rounds: int = ROUNDS) -> str:
    """A model trained on the server's samples only, for as many rounds as with clients"""
    found = []
    for seed in range(seeds):
        sim = Simulation(Cell(Rule("fltrust"), "none", SHARES[0]).config(seed, rounds))
        seen = []
        for _ in range(rounds):
            sim.models = [supplied.server_model(sim)]
            sim.round += 1
            seen.append(sim.evaluated()["accuracy"])
        found.append(100 * mean(seen[-report.AVERAGED :]))
    each = ", ".join(f"{value:.1f}" for value in found)
    return f"the server's {len(sim.proxy[0])} samples alone: {mean(found):.1f} % (by seed: {each})"


def main(argv: list[str] | None = None) -> int:
    some = {"nargs": "+", "metavar": "NAME"}
    args = simulations.parse(
        argv, __doc__, out="runs/poisoning", page=PAGE, seeds=SEEDS, quick="two methods, one seed, a few rounds",
        more={"--rules": some | {"help": "only these methods"}, "--attacks": some | {"help": "only these attacks"},
              "--alone": {"action": "store_true", "help": "the server's own samples, without clients"}},
    )  # fmt: skip
    if args.alone:
        print(alone(args.seeds, 2 if args.quick else ROUNDS))
        return 0
    if args.write and (args.rules or args.attacks):
        print("a part of the tables is not for the documents: leave out --rules and --attacks", file=sys.stderr)
        return 2
    shown, attacks, shares, rounds = rules(), ATTACKS[1:], SHARES, ROUNDS
    if args.quick:
        shown, attacks, shares, rounds = [Rule("fedavg"), Rule("multi_krum")], ("flip", "backdoor"), (0.4,), 8
    for name, wanted, known in (("rule", args.rules, {r.method for r in shown}), ("attack", args.attacks, {*attacks})):
        if unknown := sorted(set(wanted or ()) - known):
            print(f"no {name} {', '.join(unknown)}; there are {', '.join(sorted(known))}", file=sys.stderr)
            return 2
    shown = [rule for rule in shown if rule.method in (args.rules or [rule.method])]
    attacks = [attack for attack in attacks if attack in (args.attacks or attacks)]
    cells = [Cell(rule, attack, share) for share in shares for attack in ("none", *attacks) for rule in shown]

    def plan() -> dict[Cell, list[tuple[Config, Path]]]:
        runs = {cell: [cell.config(seed, rounds) for seed in range(args.seeds)] for cell in cells}
        return {cell: [(o, comparison.place(args.out, o)) for o in configs] for cell, configs in runs.items()}

    def show(found: Found) -> str:
        picture(found, attacks, shown, shares, PICTURE if args.write else args.out / "poisoning")
        text = "".join(f"{100 * s:g} % attackers:\n\n{table(found, s, attacks, shown)}\n" for s in shares) + notes(
            found
        )
        seen = f"\n![Accuracy by rule and attack]({PICTURE.relative_to(DOCS)}.svg)\n" if args.write else ""
        return text + seen

    return simulations.run(args, PAGE, "poisoning table", plan, show)


if __name__ == "__main__":
    sys.exit(main())
