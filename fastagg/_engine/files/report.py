"""What a round on files was like: a table, the updates' cosines as a picture, and all numbers as JSON."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fastagg._engine import atomic
from fastagg._engine.files.file_result import FileResult

SHOWN = 40  # clients that are named beside the picture, and listed in the table


def numbers(result: FileResult) -> dict[str, Any]:
    """By client: the weight (the mean over layers, where they differ), the length of the update, its mean cosine with
    those of others; and the cosines of all who took part"""
    weights = result.weights if result.weights is not None else result.mixing
    assert weights is not None
    facts: dict[str, Any] = {
        "method": result.method,
        "clients": result.clients,
        "dropped": dict(result.dropped),
        "weights": weights.tolist(),
        "layers": result.layers,
        "clusters": result.clusters,
    }
    if result.gram is None:
        return facts
    gram = result.gram.model().present()
    facts |= {
        "took_part": [name for name in result.clients if name not in result.dropped],
        "norms": gram.norms().tolist(),
    }
    if not gram.formed:
        return facts
    cosine = gram.cosine().numpy()
    others = max(len(cosine) - 1, 1)
    return facts | {
        "mean_cosine": ((cosine.sum(1) - cosine.diagonal()) / others).tolist(),
        "cosine": cosine.tolist(),
    }


def text(result: FileResult) -> str:
    """The table that is printed"""
    facts = numbers(result)
    width = max(len("client"), *(len(str(name)) for name in result.clients))
    norms = dict(zip(facts.get("took_part", ()), facts.get("norms", ()), strict=True))
    cosines = dict(zip(facts.get("took_part", ()), facts.get("mean_cosine", ()), strict=True))
    lines = [f"{'client':<{width}}  {'weight':>9}  {'update':>9}  {'mean cosine':>11}"]
    weights = np.array(facts["weights"])
    one = (
        weights.reshape(-1, weights.shape[-1]).mean(0)
        if result.mixing is None
        else [float("nan")] * len(result.clients)
    )
    for name, weight in list(zip(result.clients, one, strict=True))[:SHOWN]:
        if name in result.dropped:
            lines.append(f"{name!s:<{width}}  left out: {result.dropped[name]}")
            continue
        norm, cosine = norms.get(name, float("nan")), cosines.get(name, float("nan"))
        lines.append(f"{name!s:<{width}}  {weight:9.4g}  {norm:9.4g}  {cosine:11.3f}".replace("nan", "  -"))
    if len(result.clients) > SHOWN:
        lines.append(f"and {len(result.clients) - SHOWN} more")
    return "\n".join(lines)


def paths(place: Path) -> tuple[Path, Path]:
    """cosine.png and report.json in a folder; or a .png of any name, and a .json beside it"""
    if place.suffix == ".png":
        return place, place.with_suffix(".json")
    return place / "cosine.png", place / "report.json"


def save(result: FileResult, place: Path) -> None:
    picture, table = paths(place)
    picture.parent.mkdir(parents=True, exist_ok=True)
    facts = numbers(result)
    atomic.write_json(table, facts)
    if "cosine" in facts:
        atomic.write(picture, _picture(facts["cosine"], facts["took_part"], result.method))


def _picture(cosine: list[list[float]], names: list[Any], method: str) -> bytes:
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(cosine, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
    axes.set_title(f"{method}: cosines of the clients' updates")
    if len(names) <= SHOWN:
        axes.set_xticks(range(len(names)), [str(n) for n in names], rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), [str(n) for n in names], fontsize=7)
    figure.colorbar(shown)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
