"""Tables and plots of what `make bench` measured.

python -m benchmarks.report                 # benchmarks/results/bench.json -> tables on the screen, plots beside it
python -m benchmarks.report --publish       # also into docs/performance.md, docs/performance/ and README.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import measure, plots
from benchmarks.plots import SHOWN
from benchmarks.publish import DOCS, ROOT, publish
from benchmarks.records import FRESH, Record, find, load

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAPER_SECONDS = {
    "fedavg": 0.10, "ldawa": 2.52, "fedlaw": 10.11, "fedawa": 0.82, "fedawa_released": 0.82, "fedawa_layerwise": 15.21,
}  # fmt: skip
NAMES = {
    "fedavg": "FedAvg", "ldawa": "L-DAWA", "fedlaw": "FedLAW", "fedawa": "FedAWA (paper)",
    "fedawa_released": "FedAWA (released)", "fedawa_layerwise": "FedAWA-L (paper)",
}  # fmt: skip


# ---- tables: (title, headings, rows of strings, note) ----


def aims(records: list[Record]) -> tuple:
    """Our targets, and whether the measurements reach them"""
    rows = []

    def row(job: str, record: Record | None, limit_ms, words: str, who: str | None = None) -> None:
        if record is None:
            return
        value, best = record.median(who), record["ms"][who or record["job"]]["best"]
        best_roof = max(record["ms"]["R"]["best"], record["ms"]["F"]["best"])
        limit = limit_ms(record)
        verdict = "reached" if value <= limit else f"missed by {100 * (value / limit - 1):.0f} %"
        rows.append([f"{job}, {record.where}", _ms(value), f"{value / record.median('R'):.2f}",
                     f"{value / record.roof:.2f}", _ms(best), f"{best / best_roof:.2f}", words, verdict])  # fmt: skip

    bf16 = ("resnet18", 20, "bfloat16")
    fp32_mix, fp32_gram = find(records, "fedavg"), find(records, "gram")
    row("fedavg, out=", fp32_mix, lambda r: 1.15 * r.median("R"), "1.15 R")
    row("fedavg, fresh output", fp32_mix, lambda r: 1.75 * r.median("R"), "1.75 R", FRESH)
    row("gram", fp32_gram, lambda r: 1.6 * r.roof, "1.6 roofs")
    row("gram_mix", find(records, "gram_mix"), lambda r: 1.8 * r.roof, "1.8 roofs")
    row("fedawa released", find(records, "fedawa_released"), lambda r: 1.9 * r.roof, "1.9 roofs")
    two_reads = lambda r: 1.6 * r.roof + 1.4 * r.median("R")  # noqa: E731
    row("fedawa (paper)", find(records, "fedawa"), two_reads, "1.6 roofs + 1.4 R")
    row("fedawa layerwise (paper)", find(records, "fedawa_layerwise"), two_reads, "1.6 roofs + 1.4 R")
    row("fedawa paper, 100 steps", find(records, "fedawa_paper", steps=100), two_reads, "1.6 roofs + 1.4 R")
    if fp32_mix and fp32_gram:
        row("fedavg", find(records, "fedavg", bf16), lambda r: 0.6 * fp32_mix.median(), "0.6 of float32")
        row("gram", find(records, "gram", bf16), lambda r: fp32_gram.median(), "float32's time")
    row("fedawa released", find(records, "fedawa_released", ("resnet20", 20, "float32")),
        lambda r: r.median("torch._foreach_ FedAvg"), "torch._foreach_ FedAvg")  # fmt: skip
    row("fedavg, out=", find(records, "fedavg", ("lora", 20, "float32")), lambda r: 1.6 * r.median("R"), "1.6 R")
    row("gram", find(records, "gram", ("in_cache", 100, "float32")),
        lambda r: r.median("F") * (100 * 101) / (101 * 102) / 0.6, "60 % of the peak")  # fmt: skip
    headings = ["job", "median", "in R", "in roofs", "best round", "in best roofs", "target, at most", "result"]
    return "Targets", headings, rows, "Medians are compared with the targets."


def contests(records: list[Record], jobs: tuple[str, ...], title: str, note: str = "") -> tuple:
    """Every contestant of some jobs in R, one row per cohort"""
    chosen = [r for r in records if r["job"] in jobs]
    columns = list(dict.fromkeys(name for r in chosen for name in r.others))
    rows = []
    for r in sorted(chosen, key=lambda r: (jobs.index(r["job"]), r["bytes"])):
        R = r.median("R")
        cells = [f"{r.median(c) / R:.1f}" if c in r["ms"] else "" for c in columns]
        job = f"{r['job']}, " if len(jobs) > 1 else ""
        rows.append([job + r.where, _ms(R), f"{_ms(r.median())} ± {_spread(r):.0f} %", f"{r.median() / R:.2f}", *cells])
    return title, ["round", "R", "fastagg", "in R", *(f"{c}, in R" for c in columns)], rows, note


def gram_note(records: list[Record]) -> str:
    error, where = max(((r["usual_error"], r.where) for r in records if "usual_error" in r), default=(0, ""))
    if not error:
        return ""
    return (
        "The usual PyTorch multiplies in float32 over the whole model: its entries have errors of up to "
        f"{error:.1g} ({where})."
    )


def methods(records: list[Record]) -> tuple:
    skip = ("fedawa_paper", "gram", "gram_mix")
    chosen = [r for r in records if r.cohort == SHOWN and r["job"] not in skip]
    rows = []
    for r in sorted(chosen, key=Record.median):
        faster = [f"{measure.faster(x, r.ours)} x" if x else "" for x in (r.usual, r.best)]
        fresh = _ms(r.ours) if FRESH in r["ms"] else ""
        ours = [f"{_ms(r.median())} ± {_spread(r):.0f} %", f"{r.median() / r.median('R'):.2f}", fresh]
        rows.append([r["job"], *ours, *faster])
    note = (
        "Methods with one set of weights that is known in advance read the clients once, the others twice. "
        '"Faster" is PyTorch\'s time divided by that of fastagg with a new model as result, as PyTorch returns one.'
    )
    headings = ["method", "fastagg, out=", "in R", "new model", "faster than usual PyTorch", "faster than best PyTorch"]
    return "Every method, 20 x ResNet-18", headings, rows, note


def front(records: list[Record]) -> tuple:
    """The table of the README, of the same rounds as the plot beneath it"""
    rows, R, size = [], None, 0
    for name, shown in (
        ("fedavg", "FedAvg"),
        ("fedawa", "FedAWA (the default: paper)"),
        ("fedawa_layerwise", "FedAWA-L (weights per layer)"),
        ("fedawa_released", "FedAWA (released)"),
    ):
        r = find(records, name)
        if r is None or r.usual is None:
            continue
        R, size = r.median("R"), r["bytes"]
        extra = [r.get("extra_bytes", {}).get(who) for who in (FRESH, r.usual_name)]
        memory = " / ".join("?" if b is None else f"{b / 1e6:.0f} MB" for b in extra)
        rows.append([
            shown, _ms(r.ours), f"{r.ours / R:.1f}", _ms(r.usual), f"{r.usual / R:.0f}",
            f"{measure.faster(r.usual, r.ours)} x", memory,
        ])  # fmt: skip
    title = f"20 x ResNet-18, float32 ({size / 1e9:.2f} GB)"
    extra = "extra memory, fastagg / PyTorch"
    headings = [title, "fastagg", "reads of memory", "PyTorch", "reads of memory", "faster", extra]
    return title, headings, rows, ""


def table2(records: list[Record]) -> tuple:
    cohort = ("resnet20", 20, "float32")
    found = {name: find(records, f"table2_{name}", cohort) for name in PAPER_SECONDS}
    found = {name: r for name, r in found.items() if r}
    base = {c: found["fedavg"].median(c) for c in (None, "usual PyTorch")} if "fedavg" in found else {}
    rows = []
    for name, r in found.items() if base else ():
        scale = r.get("paper_epochs", 1) / r.get("epochs", 1)
        ours, usual = r.median() * scale, r.median("usual PyTorch") * scale
        rows.append([
            NAMES[name], f"{PAPER_SECONDS[name]:.2f} s", f"{PAPER_SECONDS[name] / 0.10:.0f}", _ms(usual),
            f"{usual / base['usual PyTorch']:.1f}", _ms(ours), f"{ours / base[None]:.1f}",
            f"{measure.faster(usual, ours)} x",
        ])  # fmt: skip
    relative = "relative to FedAvg"
    headings = ["method", "paper", relative, "usual PyTorch", relative, "fastagg", relative, "faster"]
    note = (
        "FedLAW: scaled to 100 epochs from 2 measured ones; nearly all of the time is training ResNet-20 on the proxy "
        "data."
    )
    return "Table 2 of the FedAWA paper: 20 x ResNet-20", headings, rows, note


def simulator(records: list[Record]) -> tuple:
    rows = []
    for r in (r for r in records if r["job"] == "simulator"):
        plain, ours, files = (r.median(who) for who in ("plain PyTorch", "simulator", "files"))
        phases = [[r["phases"][who][phase] for who in ("plain PyTorch", "simulator")]
                  for phase in ("train", "aggregate", "evaluate")]  # fmt: skip
        rows.append([
            r.where, f"{1e3 / plain:.1f}", f"{1e3 / ours:.1f} ± {_spread(r):.0f} %",
            f"{plain / ours:.2f} x", *(" / ".join(map(_ms, pair)) for pair in phases), _ms(files),
            f"{plain / (ours + files):.2f} x",
        ])  # fmt: skip
    note = (
        "FedAvg on digits, alpha 0.1, one epoch in batches of 32, one thread. After one round both have the same "
        "model, up to rounding. Training, aggregation, evaluation: plain PyTorch / simulator, whose evaluation "
        "includes norms and cosines of the updates. Files: metrics and checkpoint, which the simulator writes every "
        "round, with fsync, and plain PyTorch does not."
    )
    both = ["plain PyTorch, rounds/s", "simulator, rounds/s", "faster"]
    headings = ["round", *both, "training", "aggregation", "evaluation", "files", "faster, with files"]
    return "The simulator", headings, rows, note


def memory(records: list[Record]) -> tuple:
    rows = [[f"{r['job']}, {r.where}", who, "?" if b is None else f"{b / 1e6:.0f} MB"]
            for r in records for who, b in r.get("extra_bytes", {}).items()]  # fmt: skip
    return "Extra memory, including outputs", ["job", "code", "peak"], rows, "One ResNet-18 is 45 MB."


def all_tables(records: list[Record]) -> list[tuple]:
    tables = [
        aims(records),
        contests(records, ("fedavg",), "FedAvg"),
        contests(records, ("gram", "gram_mix"), "The Gram", gram_note(records)),
        contests(records, ("fedawa", "fedawa_layerwise", "fedawa_released"),
                 "FedAWA and FedAWA-L as in the paper (5 steps), and FedAWA as released (one step)"),
        methods(records), table2(records), simulator(records), memory(records),
    ]  # fmt: skip
    return [table for table in tables if table[2]]


def _ms(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2f} ms"


def _spread(record: Record) -> float:
    """Half the distance of the quartiles, in per cent of the median"""
    ms = record["ms"][record["job"]]
    return 50 * (ms["high"] - ms["low"]) / ms["median"]


def about(records: list[Record], path: Path) -> str:
    r, date = records[0], json.loads(path.read_text())["datetime"][:10]
    most = max(r["threads"] for r in records)  # the simulator's rounds have one
    threads = "one thread" if most == 1 else f"{most} threads"
    return (
        f"{date}, {r['cpu']}, {threads}, {r['simd']}, PyTorch {r['torch']}. Medians; ± is half the "
        "interquartile range. R is one read of the clients' bytes, F is the Gram's multiply-adds at the cores' peak, "
        "and the roof is the larger of the two. All were measured in the same rounds."
    )


def markdown(tables: list[tuple], intro: str) -> str:
    parts = [intro]
    for title, headings, rows, note in tables:
        parts.append(f"### {title}\n\n" + lines_of(headings, rows) + (f"\n\n{note}" if note else ""))
    return "\n\n".join(parts) + "\n"


def lines_of(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *rows))


def show(tables: list[tuple], intro: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170)
    for title, headings, rows, note in tables:
        table = Table(
            title=f"\n{title}", title_style="bold", title_justify="left", caption=note, caption_justify="left"
        )
        for heading in headings:
            table.add_column(heading, justify="left" if heading == headings[0] else "right")
        for cells in rows:
            table.add_row(*cells, style="yellow" if cells[-1].startswith("missed") else None)
        console.print(table)
    console.print(intro)


def publish_all(text: str, readme: str, drawn: list[Path]) -> None:
    publish(DOCS / "performance.md", "measured", text)
    publish(README, "speed", readme)
    (DOCS / "performance").mkdir(exist_ok=True)
    for path in drawn:
        shutil.copy(path, DOCS / "performance" / path.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "bench.json", help="what pytest-benchmark wrote")
    parser.add_argument(
        "--publish", action="store_true", help="also write docs/performance.md, its plots, and the table of README.md"
    )
    args = parser.parse_args()
    if not args.json.exists():
        parser.error(f"{args.json} does not exist; run `make bench` first")
    records = load(args.json)
    tables, intro = all_tables(records), about(records, args.json)
    show(tables, intro)
    (args.json.parent / "tables.md").write_text(markdown(tables, intro))
    drawn = plots.draw(records, args.json.parent)
    print(f"Written to {args.json.parent}: tables.md, {', '.join(path.name for path in drawn)}")
    if args.publish:
        _, headings, rows, _ = front(records)
        publish_all(markdown(tables, intro), lines_of(headings, rows), drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
