"""How all figures look: colours, lines, and the helpers that draw parts of them.

No pyplot and no global state: any number of reports can be drawn in one process. Colours are Okabe and Ito's, which
people with any colour vision tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

try:
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap, to_rgba
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        f"a report needs matplotlib, which cannot be imported ({error}): pip install '.[sim]' in a clone of fastagg"
    ) from error

from fastagg.sim.report import Groups, Run

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


def ramp(name: str, *stops: tuple[float, str, float]) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list(name, [(at, to_rgba(c, alpha)) for at, c, alpha in stops])


# From transparent, so that "nothing" is the page's own colour, light or dark
SHARES = ramp("shares", (0, BLUE, 0), (1, BLUE, 1))


def styled(draw: Callable) -> Callable:
    @wraps(draw)
    def in_style(*args: Any, **kwargs: Any) -> Figure | None:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


class Look(TypedDict):
    """Of a line, by matplotlib's names"""

    color: str
    ls: str


def look(groups: Groups, label: str) -> Look:
    """The same colour and dash in every figure"""
    i = list(groups).index(label)
    return {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[i // len(COLOURS) % len(DASHES)]}


def whole_numbers(most: int = 9) -> MaxNLocator:
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])


def label_counts(run: Run) -> np.ndarray:
    """[clients, labels], how many samples of each label a client has; empty where that is not known"""
    counts = np.array(run.partition.get("counts") or run.summary.get("label_counts") or [], float)
    return counts if counts.ndim == 2 and counts.size else np.zeros((0, 0))


def shares_of(counts: np.ndarray) -> np.ndarray:
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def draw_shares(axes: Axes, counts: np.ndarray) -> Any:
    image = axes.imshow(100 * shares_of(counts), aspect="auto", cmap=SHARES, vmin=0, vmax=100, interpolation="none")
    axes.set(xlabel="label")
    axes.xaxis.set_major_locator(whole_numbers(5))
    bare(axes)
    return image


def bare(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def client_ticks(axes: Axes, ids: np.ndarray, most: int = 40) -> None:
    step = -(-len(ids) // most)
    axes.set_yticks(range(0, len(ids), step), [str(i) for i in ids[::step]], fontsize=7.5)


def colour_bar(figure: Figure, image: Any, axes: Axes | list[Axes], **more: Any) -> None:
    figure.colorbar(image, ax=axes, pad=0.02, aspect=30, **more).outline.set_visible(False)


@styled
def save(figure: Figure, file: Any, kind: str) -> None:
    """png on white, or svg without a background; the same bytes for the same figure"""
    more: dict[str, Any] = {"facecolor": "white"}
    if kind == "svg":
        more = {"transparent": True, "metadata": {"Date": None}}
    figure.savefig(file, format=kind, dpi=150, **more)
    figure.set_layout_engine("none")  # it is laid out now: another time would give the same, slowly
