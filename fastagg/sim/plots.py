"""The figures of a report: each function takes runs and gives a matplotlib Figure, or None where nothing is to show.

No pyplot and no global state: any number of reports can be drawn in one process. Colours are Okabe and Ito's, which
people with any colour vision tell apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from functools import wraps
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

try:
    import matplotlib
    from matplotlib.colors import FuncNorm, LinearSegmentedColormap, to_rgba
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        f"a report needs matplotlib, which cannot be imported ({error}): pip install '.[sim]' in a clone of fastagg"
    ) from error

from fastagg.sim.report import AVERAGED, PHASES, Run, averaged, spent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1f2328"  # text and axes: the report's HTML replaces it by the colour of its own text
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
COLOURS = (BLUE, VERMILLION, GREEN, "#CC79A7", ORANGE, "#56B4E9", INK)
DASHES = ("-", "--", ":")
STYLE: dict[Any, Any] = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.15, "font.size": 10,
    "axes.titlesize": 10, "legend.frameon": False, "svg.hashsalt": "fastagg", "text.parse_math": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": INK, "axes.axisbelow": True,
}  # fmt: skip
WIDTH = 9.2  # inches

Groups = dict[str, list["Run"]]


def _ramp(name: str, *stops: tuple[float, str, float]) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list(name, [(at, to_rgba(c, alpha)) for at, c, alpha in stops])


# From transparent, so that "nothing" is the page's own colour, light or dark
SHARES = _ramp("shares", (0, BLUE, 0), (1, BLUE, 1))
MODELS = _ramp("models", (0, VERMILLION, 0.1), (1, VERMILLION, 1))  # the lowest is not blank
COSINES = _ramp("cosines", (0, BLUE, 1), (0.5, BLUE, 0), (0.5, VERMILLION, 0), (1, VERMILLION, 1))
# The square root makes cosines of 0.1, which late rounds have, visible beside those of 1
COSINE_NORM = FuncNorm((lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda y: np.sign(y) * np.square(y)), -1, 1)


def styled(draw: Callable) -> Callable:
    @wraps(draw)
    def in_style(*args: Any, **kwargs: Any) -> Figure | None:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


class Drawn(NamedTuple):
    name: str
    title: str
    caption: str
    figure: Figure
    folded: bool = False  # one of many of its kind: the page shows it when asked


def figures(groups: Groups, measure: str) -> Iterator[Drawn]:
    """All there is to show, in a report's order; measure is the accuracy that labels are compared by"""
    several = any(len(runs) > 1 for runs in groups.values())
    band = " Lines are means over seeds, bands reach from the lowest to the highest seed." if several else ""
    tested = "test set" if measure == "accuracy" else "each client's model on that client's own test share, averaged"
    dots = f" Right: {averaged(groups)}" + (", one dot per seed." if several else ".")
    dots = dots if len(groups) > 1 else ""
    if figure := accuracy(groups, measure):
        words = f"Higher and earlier is better ({tested}; round 0 is the untrained model).{band}{dots}"
        yield Drawn("accuracy", "Accuracy", words, figure)
    if figure := loss(groups):
        words = (
            f"Lower is better; where it rises and accuracy does not fall, the model is too sure of its errors.{band}"
        )
        yield Drawn("loss", "Test loss", words, figure)
    yield from _of_clients(groups, weights, "weights", "who counts for how much", (
        "Each row is a client, the largest on top. Left: its weight in every round (blank where it sent no model); "
        "colours span the weights that occur, they do not begin at 0. Middle: its average weight (dot) beside what "
        "its share of the data would give it (bar). Right: which labels it has."
    ))  # fmt: skip
    yield from _of_clients(groups, cosines, "cosine", "do updates mirror the data?", (
        "Each cell is the cosine of the angle between two clients, ordered so that those with similar labels are "
        "neighbours (labels on the left). Blocks along the diagonal mean that clients with the same labels move the "
        "same way. Models are nearly parallel: their colours span what occurs in each panel. Below each: the span of "
        "the cosines, and r, their correlation with how alike the labels of the two clients are."
    ))  # fmt: skip
    if figure := coherence(groups):
        words = f"How much the clients' updates agree: above 0 they help each other, below 0 they pull apart.{band}"
        yield Drawn("coherence", "Coherence of the clients", words, figure)
    if figure := gamma(groups):
        words = f"What the new global model is multiplied by: below 1 it is shrunk, which acts like weight decay.{band}"
        yield Drawn("gamma", "Shrinking", words, figure)
    if figure := time(groups):
        yield Drawn("time", "Where the time goes", "Average seconds of one round, by phase.", figure)


def _of_clients(groups: Groups, draw: Callable, name: str, title: str, caption: str) -> Iterator[Drawn]:
    """One figure per label, of its first seed; from the second on they are folded where there are many"""
    shown = 0
    for label, runs in groups.items():
        if figure := draw(runs[0]):
            seed = f" Shown is seed {runs[0].summary.get('seed')}." if len(runs) > 1 else ""
            yield Drawn(f"{name}-{label}", f"{label}: {title}", caption + seed, figure, len(groups) > 3 and shown > 0)
            shown += 1


@styled
def accuracy(groups: Groups, measure: str = "accuracy") -> Figure | None:
    """Accuracy against rounds, and at the end of each seed; measure is accuracy or personal_accuracy"""
    value = lambda m: None if m.get(measure) is None else 100 * m[measure]  # noqa: E731
    name = measure.replace("_", " ")
    if len(groups) == 1:
        return _curves(groups, value, f"{name} (%)")
    if not any(_finite(run, value) for runs in groups.values() for run in runs):
        return None
    layout = ConstrainedLayoutEngine(wspace=0.06)
    figure = Figure(figsize=(WIDTH, max(4.2, 0.3 * len(groups) + 1)), layout=layout)
    axes, ends = figure.subplots(1, 2, width_ratios=(2, 1))
    _lines(axes, groups, value)
    axes.set(ylabel=f"{name} (%)")
    seeds = {
        label: [mean(last) for run in runs if (last := _finite(run, value)[-AVERAGED:])]
        for label, runs in groups.items()
    }
    order = sorted(groups, key=lambda label: mean(seeds[label]) if seeds[label] else -1)
    known = [x for values in seeds.values() for x in values]
    left = min(known) - 0.15 * (max(known) - min(known) or 1)
    for y, label in enumerate(order):
        if seeds[label]:
            line = look(groups, label)
            ends.plot([left, mean(seeds[label])], [y, y], lw=1.8, **line)
            ends.plot(seeds[label], [y] * len(seeds[label]), "o", ms=4.5, alpha=0.75, mew=0, color=line["color"])
    ends.set_yticks(range(len(order)), [textwrap.fill(label, 24) for label in order])
    ends.yaxis.tick_right()
    ends.tick_params(axis="y", length=0)
    ends.spines.left.set_visible(False)
    ends.grid(axis="y", visible=False)
    ends.set(xlabel=f"{averaged(groups)} (%)", ylim=(-0.6, len(order) - 0.4))
    ends.set_xlim(left=left)
    return figure


def loss(groups: Groups) -> Figure | None:
    """Loss on the test set against rounds; logarithmic where it spans much"""
    return _curves(groups, lambda m: m.get("loss"), "test loss", may_be_log=True)


def coherence(groups: Groups) -> Figure | None:
    return _curves(groups, lambda m: m.get("coherence"), "coherence", reference=0)


def gamma(groups: Groups) -> Figure | None:
    return _curves(groups, lambda m: m.get("gamma"), "gamma", reference=1)


@styled
def _curves(groups: Groups, value: Callable, ylabel: str, *, reference: float | None = None, may_be_log: bool = False):
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    axes = figure.subplots()
    lines = _lines(axes, groups, value)
    if not lines:
        return None
    if reference is not None:
        axes.axhline(reference, color=INK, lw=0.8, alpha=0.6, zorder=1)
    shown = np.concatenate([line.get_ydata() for line in lines.values()])
    if may_be_log and shown.min() > 0 and shown.max() > 30 * shown.min():
        axes.set_yscale("log")
        ylabel += ", log scale"
    axes.set(ylabel=ylabel)
    order = sorted(lines, key=lambda label: -lines[label].get_ydata()[-1])  # from the top as the lines end
    names = [textwrap.fill(label, 24) for label in order]
    figure.legend([lines[label] for label in order], names, loc="outside right upper", handlelength=2.6)
    return figure


def _lines(axes: Axes, groups: Groups, value: Callable) -> dict[str, Any]:
    """A line and a band for every label that has values"""
    lines = {}
    for label, runs in groups.items():
        rounds, average, low, high = over_seeds(runs, value)
        if len(rounds) == 0:
            continue
        line = look(groups, label)
        marker = "o" if len(rounds) < 3 else None  # a line of one point would be invisible
        [lines[label]] = axes.plot(rounds, average, lw=1.8, marker=marker, ms=4, **line)
        if (low < high).any():
            axes.fill_between(rounds, low, high, color=line["color"], alpha=0.15, lw=0)
    axes.set(xlabel="round")
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.margins(x=0.01)
    return lines


class Look(TypedDict):
    """Of a line, by matplotlib's names"""

    color: str
    ls: str


def look(groups: Groups, label: str) -> Look:
    """The same colour and dash in every figure"""
    i = list(groups).index(label)
    return {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[i // len(COLOURS) % len(DASHES)]}


def _whole_numbers(most: int = 9) -> MaxNLocator:
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])


def over_seeds(runs: list[Run], value: Callable[[dict], float | None]) -> tuple[np.ndarray, ...]:
    """Rounds, and mean, lowest and highest value of the runs that have a finite one there"""
    found: dict[int, list[float]] = {}
    for run in runs:
        for m in run.metrics:
            x = value(m)
            if x is not None and np.isfinite(x):
                found.setdefault(m["round"], []).append(x)
    rounds = sorted(found)
    return np.array(rounds), *(np.array([f(found[r]) for r in rounds], float) for f in (mean, min, max))


def _finite(run: Run, value: Callable) -> list[float]:
    """Of the rounds after the first model"""
    values = [value(m) for m in run.metrics if m["round"] > 0]
    return [x for x in values if x is not None and np.isfinite(x)]


def weight_matrix(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """[clients, rounds] of weights, and of what sample counts alone would give; NaN where a client sent nothing.

    None where a run has no weights, or its weights are the sample counts' in every round: nothing adapts.
    """
    sizes = _counts(run).sum(1)
    rounds = [m for m in run.metrics if m["round"] > 0]
    if len(sizes) == 0 or not rounds:
        return None
    given = np.full((len(sizes), len(rounds)), np.nan)
    plain = given.copy()
    for t, m in enumerate(rounds):
        ids, w = np.array(m.get("clients") or [], int), np.array(m.get("weights") or [], float)
        if len(ids) and w.shape == ids.shape:
            given[ids, t], plain[ids, t] = w, sizes[ids] / max(sizes[ids].sum(), 1)
    if not np.isfinite(given).any():
        return None
    total = np.nansum(given, 0)
    off = given / np.where(total == 0, 1, total) - plain  # FedLAW's may be scaled by gamma
    return (given, plain) if np.nanmax(np.abs(off)) > 1e-3 * np.nanmax(plain) else None


def span(values: np.ndarray) -> tuple[tuple[float, float], str]:
    """What colours span, and which of its ends is exceeded: one outlier would make all others look alike"""
    low, high = np.nanmin(values), np.nanmax(values)
    few, many = np.nanpercentile(values, [1, 99])
    room = 2 * (many - few)
    below, above = few - low > room > 0, high - many > room > 0
    ends = float(few if below else low), float(many if above else high)
    if ends[1] - ends[0] < 1e-9 * max(abs(ends[1]), 1):
        ends = ends[0] - 0.5, ends[1] + 0.5
    return ends, {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")


@styled
def weights(run: Run) -> Figure | None:
    """Weights over rounds, beside each client's data: clients ordered by how much they have"""
    matrices = weight_matrix(run)
    if matrices is None:
        return None
    counts = _counts(run)
    order = np.argsort(-counts.sum(1), kind="stable")
    given, plain = (100 * m[order] for m in matrices)
    K, rounds = given.shape
    figure = Figure(figsize=(WIDTH, float(np.clip(0.2 * K + 1.3, 3, 8))), layout="constrained")
    heat, average, labels = figure.subplots(1, 3, sharey=True, width_ratios=(5, 2, 2.2))
    (low, high), extend = span(given)
    image = heat.imshow(given, aspect="auto", cmap="viridis", interpolation="none", vmin=low, vmax=high,
                        extent=(0.5, rounds + 0.5, K - 0.5, -0.5))  # fmt: skip
    heat.set(xlabel="round", ylabel="client", title=f"weight (%), colours from {low:.3g} to {high:.3g}")
    heat.xaxis.set_major_locator(_whole_numbers(6))
    _bar(figure, image, heat, extend=extend)
    present = np.isfinite(given).any(1)
    y = np.arange(K)[present]
    average.barh(y, np.nanmean(plain[present], 1), 0.75, color=INK, alpha=0.25, label="by data share")
    average.plot(np.nanmean(given[present], 1), y, "o", ms=4 if K <= 40 else 2.5, color=VERMILLION, label="weight")
    average.set(xlabel="% of a round", title="average weight")
    average.grid(axis="y", visible=False)
    average.set_xlim(left=min(0, average.get_xlim()[0]))
    figure.legend(*average.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    image = _label_shares(labels, counts[order])
    labels.set_title("labels (% of its data)")
    _bar(figure, image, labels)
    _client_ticks(heat, order)
    _bare(heat)
    for axes in (average, labels):
        axes.tick_params(axis="y", left=False)
    return figure


@styled
def cosines(run: Run) -> Figure | None:
    """Cosines of client vectors, and below of the models, in the rounds that have them"""
    rounds = [m for m in run.metrics if m.get("cosine") is not None and len(m.get("clients") or []) > 1]
    counts = _counts(run)
    if not rounds or len(counts) == 0:
        return None
    rounds = [rounds[i] for i in sorted({0, len(rounds) // 2, len(rounds) - 1})]  # a longer second run adds more
    kinds = [(key, name) for key, name in (("cosine", "client vectors"), ("model_cosine", "models"))
             if any(m.get(key) is not None for m in rounds)]  # fmt: skip
    same_clients = all(m["clients"] == rounds[0]["clients"] for m in rounds)
    figure = Figure(figsize=(WIDTH, (2.75 if same_clients else 2.4) * len(kinds) + 0.2), layout="constrained")
    panels = figure.subplots(len(kinds), len(rounds), squeeze=False)
    for (key, name), row in zip(kinds, panels, strict=True):
        image = None
        for axes, m in zip(row, rounds, strict=True):
            _bare(axes)
            ids = np.array(m["clients"], int)
            order = by_labels(counts[ids])
            cosine = np.array(m[key] if m.get(key) is not None else np.full((len(ids),) * 2, np.nan), float)
            scale = (
                {"cmap": COSINES, "norm": COSINE_NORM} if key == "cosine" else {"cmap": MODELS, "vmin": 0, "vmax": 1}
            )
            shown = cosine if key == "cosine" else between_ends(cosine)
            image = axes.imshow(shown[np.ix_(order, order)], interpolation="none", aspect="equal", **scale)
            axes.set(title=f"{name}, round {m['round']}", xticks=[], xlabel=likeness(cosine, counts[ids]))
            axes.xaxis.label.set_size(8.5)
            first = axes is row[0]
            if first or not same_clients:
                strip = axes.inset_axes((-0.36, 0, 0.3, 1), sharey=axes)
                _label_shares(strip, counts[ids][order])
                strip.set_xlabel("label", size=8.5)
                strip.set_ylabel("client" if first else "")
                strip.xaxis.set_major_locator(_whole_numbers(3))
                strip.tick_params(labelsize=7)
                _client_ticks(strip, ids[order], most=20)
            axes.tick_params(labelleft=False, left=False)
        ticks = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1] if key == "cosine" else [0, 1]
        assert image is not None  # there are rounds
        bar = figure.colorbar(image, ax=row, shrink=0.8, pad=0.02, ticks=ticks)
        bar.ax.set_yticklabels([f"{t:g}" for t in ticks] if key == "cosine" else ["lowest", "highest"])
        bar.set_label("cosine (square-root scale)" if key == "cosine" else "cosine, scaled in each panel")
        bar.outline.set_visible(False)
    return figure


def between_ends(cosine: np.ndarray) -> np.ndarray:
    """From 0, the lowest cosine of two different clients, to 1, the highest; nothing on the diagonal, which is above"""
    pairs = np.where(np.eye(len(cosine), dtype=bool), np.nan, cosine)
    if not np.isfinite(pairs).any():
        return pairs
    low, high = np.nanmin(pairs), np.nanmax(pairs)
    return (pairs - low) / (high - low if high > low else 1)


def by_labels(counts: np.ndarray) -> np.ndarray:
    """An order of clients in which each is followed by the one most like it in labels, so that groups are blocks.

    Sorting by dominant label would tear apart clients that have several labels in equal parts.
    """
    shares = _shares(counts)
    left = set(range(len(shares)))
    order = [int(np.argmin(shares @ np.arange(shares.shape[1])))]
    while left := left - {order[-1]}:
        order.append(min(left, key=lambda k: (round(float(np.abs(shares[k] - shares[order[-1]]).sum()), 6), k)))
    return np.array(order)


def likeness(cosine: np.ndarray, counts: np.ndarray) -> str:
    """The span of the cosines of two different clients, and their correlation with the cosines of label counts"""
    pairs = np.triu_indices(len(cosine), 1)
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    unit = counts / np.where(lengths == 0, 1, lengths)
    x, y = cosine[pairs], (unit @ unit.T)[pairs]
    keep = np.isfinite(x)
    x, y = x[keep], y[keep]
    if len(x) == 0:
        return "no finite cosine"
    digits = 2 if np.ptp(x) > 0.05 else 4  # models are nearly parallel
    span = f"{x.min():.{digits}f} to {x.max():.{digits}f}"
    if len(x) < 3 or np.std(x) < 1e-9 or np.std(y) < 1e-9:
        return span
    return f"{span}, r = {np.corrcoef(x, y)[0, 1]:.2f}"


def _counts(run: Run) -> np.ndarray:
    counts = np.array(run.partition.get("counts") or [], float)
    return counts if counts.ndim == 2 else np.zeros((0, 0))


def _shares(counts: np.ndarray) -> np.ndarray:
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _label_shares(axes: Axes, counts: np.ndarray) -> Any:
    image = axes.imshow(100 * _shares(counts), aspect="auto", cmap=SHARES, vmin=0, vmax=100, interpolation="none")
    axes.set(xlabel="label")
    axes.xaxis.set_major_locator(_whole_numbers(5))
    _bare(axes)
    return image


def _bare(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _client_ticks(axes: Axes, ids: np.ndarray, most: int = 40) -> None:
    step = -(-len(ids) // most)
    axes.set_yticks(range(0, len(ids), step), [str(i) for i in ids[::step]], fontsize=7.5)


def _bar(figure: Figure, image: Any, axes: Axes, **more: Any) -> None:
    figure.colorbar(image, ax=axes, pad=0.02, aspect=30, **more).outline.set_visible(False)


@styled
def time(groups: Groups) -> Figure | None:
    """Seconds of a round by phase, one bar per label; beside it rounds per second and the share of aggregation"""
    bars = {}
    for label, runs in groups.items():
        seconds, count = spent([m for run in runs for m in run.metrics])
        if count:
            bars[label] = [seconds[phase] / count for phase in PHASES]
    if not bars:
        return None
    figure = Figure(figsize=(WIDTH, 0.42 * len(bars) + 1.4), layout="constrained")
    axes = figure.subplots()
    ends = np.zeros(len(bars))
    for i, (phase, colour) in enumerate(zip(PHASES, (BLUE, VERMILLION, ORANGE), strict=True)):
        lengths = np.array([values[i] for values in bars.values()])
        axes.barh(range(len(bars)), lengths, 0.62, left=ends, color=colour, label=phase)
        ends += lengths
    for y, (label, values) in enumerate(bars.items()):
        total = sum(values) or 1
        how = " and ".join(dict.fromkeys(r.summary["training"] for r in groups[label] if r.summary.get("training")))
        text = f"  {1 / total:.3g} rounds/s, aggregation {100 * values[1] / total:.2g} %" + (f", {how}" if how else "")
        axes.text(ends[y], y, text, va="center", size=8.5)
    axes.set_yticks(range(len(bars)), [textwrap.fill(label, 28) for label in bars])
    axes.set(xlabel="seconds per round", xlim=(0, 1.55 * max(ends.max(), 1e-9)), ylim=(len(bars) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


@styled
def save(figure: Figure, file: Any, kind: str) -> None:
    """png on white, or svg without a background; the same bytes for the same figure"""
    more = {"dpi": 150, "facecolor": "white"} if kind == "png" else {"transparent": True, "metadata": {"Date": None}}
    figure.savefig(file, format=kind, **more)
    figure.set_layout_engine("none")  # it is laid out now: another time would give the same, slowly
