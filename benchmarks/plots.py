"""The plots of a benchmark run: speed-ups, scaling, many clients, how near the roofs we are. Each as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import measure

if TYPE_CHECKING:
    from benchmarks.records import Record

OURS, BEST, USUAL, FLOOR = "#0b6e4f", "#e0a526", "#b23a48", "#555555"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10,
         "svg.hashsalt": "fastagg", "svg.fonttype": "none"}  # fmt: skip
SHOWN = ("resnet18", 20, "float32")  # the round that most tables and plots are about


def draw(records: list[Record], folder: Path) -> list[Path]:
    paths = []
    with plt.rc_context(STYLE):
        for name, plot in (("speedup", speedup), ("scaling", scaling), ("roofs", roofs), ("clients", clients)):
            figure = plot(records)
            if figure is None:  # nothing of it was measured
                continue
            for kind in ("png", "svg"):
                paths.append(folder / f"{name}.{kind}")
                metadata = {"Date": None} if kind == "svg" else None
                figure.savefig(paths[-1], dpi=130, bbox_inches="tight", metadata=metadata)
            plt.close(figure)
    return paths


def speedup(records: list[Record]):
    """How many times faster than PyTorch, by method, on 20 ResNet-18s"""
    chosen = [r for r in records if r.cohort == SHOWN and r.usual]
    chosen.sort(key=lambda r: r.usual / r.ours)
    figure, axes = plt.subplots(figsize=(7.5, 0.55 * len(chosen) + 1.2))
    for y, r in enumerate(chosen):
        for offset, other, colour in ((0.18, r.usual, USUAL), (-0.18, r.best, BEST)):
            if other:
                times = other / r.ours
                axes.barh(y + offset, times, 0.34, color=colour)
                axes.text(times * 1.04, y + offset, measure.faster(other, r.ours), va="center", size=9)
    axes.axvline(1, color=OURS, lw=2)
    axes.set_yticks(range(len(chosen)), [r["job"] for r in chosen])
    axes.set(xscale="log", xlabel="times faster with fastagg (log scale)", title="20 x ResNet-18, float32")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (USUAL, BEST)]
    axes.legend(handles, ["than the usual PyTorch code", "than the best PyTorch"], loc="lower right", frameon=False)
    axes.grid(axis="y", visible=False)
    return figure


def line(axes, records: list[Record], x, y, label: str, **style) -> None:
    points = sorted((x(r), y(r)) for r in records if y(r) is not None)
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", label=label, **style)


def scaling(records: list[Record]):
    """Time against the number of clients, the model and the optimiser's steps; log axes, with one read of memory"""
    figure, (by_k, by_d, by_steps) = plt.subplots(1, 3, figsize=(15, 4.4))

    def of(job: str, **cohort) -> list[Record]:
        wanted = {"dtype": "float32"} | cohort
        return [r for r in records if r["job"] == job and r["model"] != "in_cache"
                and all(r[k] == v for k, v in wanted.items())]  # fmt: skip

    for axes, x, cohort in (
        (by_k, lambda r: r["K"], {"model": "resnet18"}),
        (by_d, lambda r: r["numel"], {"K": 20}),
    ):
        fedavg, gram = of("fedavg", **cohort), of("gram", **cohort)
        line(axes, fedavg, x, lambda r: r.median("R"), "R: one read of the clients", color=FLOOR, ls="--")
        line(axes, gram, x, lambda r: r.median("F"), "F: the Gram's multiply-adds", color=FLOOR, ls=":")
        line(axes, fedavg, x, lambda r: r.median(), "FedAvg, fastagg", color=OURS)
        line(axes, fedavg, x, lambda r: r.best, "FedAvg, best PyTorch", color=BEST)
        line(axes, fedavg, x, lambda r: r.usual, "FedAvg, usual loop", color=USUAL)
        line(axes, gram, x, lambda r: r.median(), "Gram, fastagg", color=OURS, ls="-.")
        line(axes, gram, x, lambda r: r.best, "Gram, best PyTorch", color=BEST, ls="-.")
        axes.set(xscale="log", yscale="log", ylabel="ms")
    by_k.set(xlabel="clients K", title="ResNet-18")
    by_k.set_xticks([5, 20, 100], ["5", "20", "100"])
    by_k.minorticks_off()
    by_d.set(xlabel="parameters", title="20 clients: ResNet-20, LoRA, ResNet-18, ViT-B")
    if by_d.lines:
        by_d.legend(fontsize=8, frameon=False)
    paper = of("fedawa_paper")
    line(by_steps, paper, lambda r: r["steps"], lambda r: r.median(), "FedAWA as in the paper, fastagg", color=OURS)
    line(by_steps, paper, lambda r: r["steps"], lambda r: r.median("R"), "R", color=FLOOR, ls="--")
    line(by_steps, paper, lambda r: r["steps"], lambda r: 2 * r.median("R"), "2 R", color=FLOOR, ls=":")
    usual = next((r.usual for r in of("fedawa", model="resnet18", K=20)), None)
    if usual:
        by_steps.axhline(usual, color=USUAL, label="5 steps in the usual PyTorch")
    by_steps.set(xscale="log", yscale="log", xlabel="optimiser steps", ylabel="ms", title="20 x ResNet-18")
    if paper:
        by_steps.legend(fontsize=8, frameon=False, loc="center right")
    figure.tight_layout()
    return figure


def roofs(records: list[Record]):
    """What is reached of the memory's bandwidth and of the cores' multiply-adds"""
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.4))
    for axes, job, floor, unit, amount in (
        (panels[0], "fedavg", "R", "GB/s", lambda r: r["bytes"] / 1e6),
        (panels[1], "gram", "F", "GF/s", lambda r: r["numel"] * (r["K"] + 1) * (r["K"] + 2) / 1e6),
    ):
        chosen = sorted((r for r in records if r["job"] == job), key=lambda r: (r["dtype"] != "float32", r["bytes"]))
        for x, r in enumerate(chosen):
            axes.bar(x, amount(r) / r.median(), 0.7, color=OURS)
            axes.hlines(amount(r) / r.median(floor), x - 0.45, x + 0.45, color="black", lw=2)
            if job == "gram":  # what memory allows, where it is the lower roof
                allowed = amount(r) / r.roof
                axes.hlines(allowed, x - 0.45, x + 0.45, color=USUAL, lw=2)
        axes.set_xticks(range(len(chosen)), [r.where for r in chosen], rotation=40, ha="right", size=8)
        roof = "one read of the clients" if job == "fedavg" else "multiply-adds at peak; red: or one read, if lower"
        axes.set(ylabel=unit, title=f"{job}: reached (green), and the roof (black: {roof})")
        axes.title.set_size(10)
        axes.grid(axis="x", visible=False)
    figure.tight_layout()
    return figure


def clients(records: list[Record]):
    """FedAWA next to FedAvg, for 20 to 1,000 clients: time, and reads of memory"""
    figure, (by_time, by_reads) = plt.subplots(1, 2, figsize=(12, 4.4))
    of = {
        name: [r for r in records if r["job"] == f"over_k_{name}"] for name in ("fedavg", "fedawa_released", "fedawa")
    }
    if not any(of.values()):
        plt.close(figure)
        return None
    every = [r for some in of.values() for r in some]
    roof = {K: min(r.median("R") for r in every if r["K"] == K) for K in {r["K"] for r in every}}
    by_time.plot(*zip(*sorted(roof.items()), strict=True), color=FLOOR, ls="--", label="R: one read of the clients")
    styles = (
        ("fedavg", "FedAvg", {"color": OURS}),
        ("fedawa_released", "FedAWA, released (one step)", {"color": BEST}),
        ("fedawa", "FedAWA (five steps)", {"color": USUAL}),
    )
    for name, label, style in styles:
        line(by_time, of[name], lambda r: r["K"], lambda r: r.median(), label, **style)
        line(by_reads, of[name], lambda r: r["K"], lambda r: r.median() / r.median("R"), label, **style)
    ticks = sorted(roof)
    for axes, what in ((by_time, "ms"), (by_reads, "reads of memory")):
        axes.set(xscale="log", yscale="log", xlabel="clients K", ylabel=what, title="1 million parameters, float32")
        axes.set_xticks(ticks, [f"{K:,}" for K in ticks])
        axes.minorticks_off()
    by_reads.set_yticks([1, 2, 3, 5, 10, 20], ["1", "2", "3", "5", "10", "20"])
    by_reads.axhline(1, color=FLOOR, ls="--")
    by_time.legend(fontsize=9, frameon=False)
    figure.tight_layout()
    return figure
