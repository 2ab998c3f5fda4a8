"""The tables of a benchmark run, each (title, headings, rows of strings, note)."""

from __future__ import annotations

from benchmarks import measure
from benchmarks.plots import SHOWN
from benchmarks.records import FRESH, Record, find, in_ms, spread
from benchmarks.targets import aims

PAPER_SECONDS = {
    "fedavg": 0.10, "ldawa": 2.52, "fedlaw": 10.11, "fedawa": 0.82, "fedawa_released": 0.82, "fedawa_layerwise": 15.21,
}  # fmt: skip
NAMES = {
    "fedavg": "FedAvg", "ldawa": "L-DAWA", "fedlaw": "FedLAW", "fedawa": "FedAWA (paper)",
    "fedawa_released": "FedAWA (released)", "fedawa_layerwise": "FedAWA-L (paper)",
}  # fmt: skip


def contests(records: list[Record], jobs: tuple[str, ...], title: str, note: str = "") -> tuple:
    """Every contestant of some jobs in R, one row per cohort"""
    chosen = [r for r in records if r["job"] in jobs]
    columns = list(dict.fromkeys(name for r in chosen for name in r.others))
    rows = []
    for r in sorted(chosen, key=lambda r: (jobs.index(r["job"]), r["bytes"])):
        R = r.median("R")
        cells = [f"{r.median(c) / R:.1f}" if c in r["ms"] else "" for c in columns]
        job = f"{r['job']}, " if len(jobs) > 1 else ""
        rows.append(
            [job + r.where, in_ms(R), f"{in_ms(r.median())} ± {spread(r):.0f} %", f"{r.median() / R:.2f}", *cells]
        )
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
    chosen = [
        r
        for r in records
        if r.cohort == SHOWN and r["job"] not in skip and not r["job"].startswith(("level_", "arrivals: "))
    ]
    rows = []
    for r in sorted(chosen, key=Record.median):
        faster = [f"{measure.faster(x, r.ours)} x" if x else "" for x in (r.usual, r.best)]
        fresh = in_ms(r.ours) if FRESH in r["ms"] else ""
        ours = [f"{in_ms(r.median())} ± {spread(r):.0f} %", f"{r.median() / r.median('R'):.2f}", fresh]
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
            shown, in_ms(r.ours), f"{r.ours / R:.1f}", in_ms(r.usual), f"{r.usual / R:.0f}",
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
            NAMES[name], f"{PAPER_SECONDS[name]:.2f} s", f"{PAPER_SECONDS[name] / 0.10:.0f}", in_ms(usual),
            f"{usual / base['usual PyTorch']:.1f}", in_ms(ours), f"{ours / base[None]:.1f}",
            f"{measure.faster(usual, ours)} x",
        ])  # fmt: skip
    relative = "relative to FedAvg"
    headings = ["method", "paper", relative, "usual PyTorch", relative, "fastagg", relative, "faster"]
    note = (
        "FedLAW: scaled to 100 epochs from 2 measured ones; nearly all of the time is training ResNet-20 on the proxy "
        "data."
    )
    return "Table 2 of the FedAWA paper: 20 x ResNet-20", headings, rows, note


def many(records: list[Record]) -> tuple:
    """FedAWA and others next to FedAvg, for many clients"""
    rows = []
    for r in sorted((r for r in records if r["job"].startswith(("many_", "over_k_"))), key=_by_size):
        prefix = "many_" if r["job"].startswith("many_") else "over_k_"
        fedavg = find(records, f"{prefix}fedavg", r.cohort)
        ours = [f"{in_ms(r.median())} ± {spread(r):.0f} %", f"{r.median() / r.median('R'):.2f}"]
        times = f"{r.median() / fedavg.median():.1f}" if fedavg else ""
        formed = {True: "formed", False: "not formed"}.get(r.get("formed"), "")
        rows.append([r.where, r["job"].removeprefix(prefix), in_ms(r.median("R")), *ours, times, formed])
    headings = ["round", "method", "R", "fastagg", "in R", "times FedAvg", "Gram"]
    return "Many clients", headings, rows, "A mlp_half has 0.5, a mlp_1m 1 and a mlp_6m 6 million parameters."


def _by_size(record: Record) -> tuple:
    return record["model"], record["K"], record.median()


def levels(records: list[Record]) -> tuple:
    rows = []
    for r in (r for r in records if r["job"].startswith("level_")):
        cells = [f"{r.median(c) / r.median('R'):.2f}" if c in r["ms"] else "" for c in ("avx2", "avx512")]
        share = f"{100 * r.median('F') / r.median():.0f} %" if r["job"] == "level_gram" else ""
        rows.append([f"{r['job'].removeprefix('level_')}, {r.where}", in_ms(r.median("R")),
                     f"{r.median() / r.median('R'):.2f}", *cells, share])  # fmt: skip
    headings = ["kernel", "R", "as chosen, in R", "AVX2, in R", "AVX-512, in R", "of the FMA peak, as chosen"]
    return "SIMD levels", headings, rows, "Through Python, with what checking the tensors costs."


def simulator(records: list[Record]) -> tuple:
    rows = []
    for r in (r for r in records if r["job"] == "simulator"):
        plain, library, ours, files = (r.median(who) for who in ("plain PyTorch", "as PFLlib", "simulator", "files"))
        phases = [[r["phases"][who][phase] for who in ("plain PyTorch", "simulator")]
                  for phase in ("train", "aggregate", "evaluate")]  # fmt: skip
        threads = f"{r['threads']} thread{'s' * (r['threads'] > 1)}"
        rows.append([
            f"{r.where}, {r['data']}, {threads}", f"{1e3 / library:.2f}", f"{1e3 / plain:.2f}",
            f"{1e3 / ours:.2f} ± {spread(r):.0f} %", f"{library / ours:.2f} x", f"{plain / ours:.2f} x",
            *(" / ".join(map(in_ms, pair)) for pair in phases), in_ms(files), f"{plain / (ours + files):.2f} x",
        ])  # fmt: skip
    note = (
        "FedAvg, alpha 0.1, one epoch in batches of 50 (digits: 32), images of noise in the size of those of the data "
        "set (6,000 for mlp, 1,000 for the others; digits: its own). After one round all have the same model, up to "
        "rounding. Plain PyTorch and the loop built as PFLlib (benchmarks/loops.py) train one client after the other, "
        "with a DataLoader, in processes of their own. Training, aggregation, evaluation: plain PyTorch / simulator, "
        "whose evaluation includes norms and cosines of the updates. Files: metrics and checkpoint, which the "
        "simulator writes every round, with fsync, and the others do not."
    )
    speeds = ["as PFLlib, rounds/s", "plain PyTorch, rounds/s", "simulator, rounds/s", "faster than as PFLlib"]
    headings = ["round", *speeds, "faster than plain", "training", "aggregation", "evaluation", "files"]
    return "The simulator", [*headings, "faster than plain, with files"], rows, note


def arrivals(records: list[Record]) -> tuple:
    rows = []
    for r in (r for r in records if r["job"].startswith("arrivals: ")):
        other = next(name for name in ("at once", "a copy") if name in r["ms"])
        rows.append([f"{r['job'].removeprefix('arrivals: ')}, {r.where}", f"{in_ms(r.median())} ± {spread(r):.0f} %",
                     f"{other}: {in_ms(r.median(other))}", f"{r.median() / r.median(other):.2f}"])  # fmt: skip
    note = "From the last client's arrival to the new model, against server.aggregate() of all; and one client's add()."
    return "Clients that arrive one by one", ["method, sent, kept", "fastagg", "compared with", "ratio"], rows, note


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
        contests(records, ("median", "trimmed_mean"), "Medians and trimmed means of every element (f = K / 5)"),
        many(records), levels(records), methods(records), table2(records), arrivals(records), simulator(records),
        memory(records),
    ]  # fmt: skip
    return [table for table in tables if table[2]]
