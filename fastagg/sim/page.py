"""report.html: the table, the figures, and what was run in words, in one file that needs nothing else."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastagg._engine import atomic
from fastagg.sim.report import Groups, averaged, differences, metric_of, options_of, sections, table
from fastagg.sim.report.tables import by_setting, cells_of, difference_cells, difference_notes, notes_of
from fastagg.sim.statistics import CONFIDENCE

if TYPE_CHECKING:
    from fastagg.sim.plots import Drawn

CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #fff; --card: #f6f8fa; --line: #d1d9e0;
  --best: #ddf4e4 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4ae; --page: #12161b; --card: #1a2027;
  --line: #333c46; --best: #173626 } }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 960px; margin: 0 auto; padding: 2rem 1.2rem 4rem }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem } h2 { font-size: 1.15rem; margin: 0 }
h2.setting { font-size: 1.3rem; margin: 2.4rem 0 .6rem } table + table { margin-top: 1.2rem }
.lead, .note, figcaption, summary { color: var(--soft) } .note, figcaption, details { font-size: .9rem }
.verdict { font-size: 1.1rem } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .9rem .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right }
th { color: var(--soft); font-weight: normal } th:first-child, td:first-child { text-align: left }
main > .scroll td + td { white-space: nowrap }
tr.bold td { background: var(--best); font-weight: 600 }
figure { margin: 2rem 0 0; padding: 1rem 1.2rem; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card) }
figcaption { margin: .2rem 0 .6rem } svg { display: block; width: 100%; height: auto; color: var(--ink) }
h1, li { overflow-wrap: anywhere } .hint { display: none }
main > details { margin-top: 2rem } figure > details { margin: 0 } summary { cursor: pointer }
figure:has(> details:not([open])) { margin-top: .6rem; padding: .5rem 1.2rem }
@media (max-width: 700px) { main { padding: 1rem .8rem 3rem } h1 { font-size: 1.35rem }
  figure, figure:has(> details:not([open])) { padding: .6rem .7rem } th, td { padding: .3rem .5rem .3rem .2rem }
  .scroll svg { width: 640px } .hint { display: block } }
@media print { figure { break-inside: avoid } }
"""


def heading(groups: Groups) -> str:
    labels = list(dict.fromkeys(label for methods in sections(groups).values() for label in methods))
    data = _said(groups, "data")
    if len(labels) > 3:
        return f"{len(labels)} methods on {data}"
    return f"{' against '.join(labels)} on {data}" if len(labels) < 3 else f"{', '.join(labels)} on {data}"


def described(groups: Groups) -> str:
    """What was run, in a sentence"""
    say = lambda name: _said(groups, name)  # noqa: E731
    split = {
        "iid": "at random (IID)", "dirichlet": f"by label with Dirichlet({say('alpha')})",
        "pathological": f"with {say('classes_per_client')} classes each",
        "hybrid": f"half of them balanced, the others by Dirichlet({say('alpha')})",
        "entropy": "from one class for the first to all for the last",
        "groups": "in three groups: the first half of the classes, the second, all",
    }.get(say("partition"), f"(partition {say('partition')}, alpha {say('alpha')})")  # fmt: skip
    parts = [f"{say('data')} split over {say('clients')} clients {split}"]
    if say("participation") not in ("1", "?"):
        parts.append(f"a share of {say('participation')} of them in a round")
    for name, words in (("dropout", "dropout"), ("stragglers", "stragglers"), ("corrupted", "corrupted clients")):
        if say(name) not in ("0", "?"):
            parts.append(f"{words} {say(name)}")
    if say("speeds") not in ("None", "?"):
        parts.append(f"client speeds {say('speeds')}")
    parts.append(f"model {say('model')}")
    parts.append(f"{say('rounds')} rounds of {say('epochs')} local epochs at learning rate {say('lr')}")
    said = [run.summary.get("seed") for runs in groups.values() for run in runs]
    seeds = sorted({seed for seed in said if seed is not None})
    parts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds)) or 'unknown'}")
    return "; ".join(parts) + "."


def _said(groups: Groups, name: str) -> str:
    values = options_of([run for runs in groups.values() for run in runs]).get(name, ["?"])
    return " or ".join(f"{v:g}" if isinstance(v, int | float) else str(v) for v in values)


def verdict(groups: Groups) -> str:
    """What came out in one setting, in a sentence"""
    rows, metric = table(groups), metric_of(groups)
    best = [row for row in rows if row["best"]]
    if not best:
        return f"No run has a finite {metric.plain}."
    *first, last = [row["label"] for row in best]
    who = f"{', '.join(first)} and {last}" if first else last
    spread = metric.text(best[0]["mean"], best[0]["std"] if len(best) == 1 else None)
    text = f"{who} reached {spread} % {metric.words}" if metric.unit else f"{who} reached {metric.words} {spread}"
    others = [row for row in rows if row["mean"] is not None and not row["best"]]
    if not others:
        return text + "."
    next_ = max(others, key=lambda row: metric.better(row["mean"], 0))
    behind = metric.change(metric.better(best[0]["mean"], next_["mean"])).lstrip("+")
    noise = ", which is within noise" if next_["within_noise"] else ""
    unit, where = " points" if metric.unit else "", "below" if metric.best == "min" else "above"
    return f"{text}, {behind}{unit} {where} {next_['label']}{noise}."


def write(
    groups: Groups, out: Path, title: str | None = None, *, name: str = "report.html", baseline: str | None = None,
    score: str = "last_5", confidence: float = CONFIDENCE,
) -> Path:  # fmt: skip
    """Writes out/<name> and out/plots/*.png; each file appears whole or not at all. Returns the page's path.

    baseline, score, confidence   of the differences; see report.differences()
    """
    if not any(groups.values()):
        raise ValueError("a report needs at least one run")
    from fastagg.sim import plots  # only here: tables do not need matplotlib

    found = differences(groups, baseline, score, confidence)
    out = Path(out)
    (out / "plots").mkdir(parents=True, exist_ok=True)
    parts = []
    for setting, methods in sections(groups).items():
        mine = by_setting(found).get(setting, [])
        tables = [_table(*cells_of(methods))] + ([_table(*difference_cells(mine, confidence))] if mine else [])
        parts.append(f'<h2 class="setting">{_safe(setting)}</h2>' if setting else "")
        parts.append(f'<p class="verdict">{_safe(verdict(methods))}</p><div class="scroll">{"".join(tables)}</div>')
    parts.append(f'<p class="note">{_safe(" ".join(notes_of(groups) + difference_notes(groups, found, score)))}</p>')
    parts.append(f'<p class="note hint">The tables and the figures scroll sideways. Lines: {_keys(groups)}.</p>')
    setting, pictures = "", Pictures(out / "plots")
    for drawn in plots.every_figure(groups, found, averaged(groups, score), confidence):
        parts.append(f'<h2 class="setting">{_safe(drawn.setting)}</h2>' if drawn.setting != setting else "")
        parts.append(pictures.placed(drawn))
        setting = drawn.setting
    page = out / name
    atomic.write(page, _page(groups, title or heading(groups), parts))
    return page


class Pictures:
    """Figures written as PNG files to a folder, each under a name of its own that begins with the prefix"""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self.prefix, self.names = folder, prefix, set()

    def written(self, drawn: Drawn) -> str:
        """Returns its name"""
        from fastagg.sim import plots

        name = re.sub(r"[^a-z0-9]+", "-", f"{drawn.setting}-{drawn.name}".lower()).strip("-")[:80]
        while name in self.names:
            name += "-2"
        self.names.add(name)
        picture = io.BytesIO()
        plots.save(drawn.figure, picture, "png")
        atomic.write(self.folder / f"{self.prefix}{name}.png", picture.getvalue())
        return name

    def placed(self, drawn: Drawn) -> str:
        """Returns it as part of a page"""
        from fastagg.sim import plots

        name, drawing = self.written(drawn), io.StringIO()
        plots.save(drawn.figure, drawing, "svg")
        title, words = _safe(drawn.title), _safe(drawn.caption)
        svg = _inline(drawing.getvalue().replace(plots.INK, "currentColor"), name, title)
        part = f'<figcaption>{words}</figcaption><div class="scroll">{svg}</div>'
        part = f"<details><summary>{title}</summary>{part}</details>" if drawn.folded else f"<h2>{title}</h2>{part}"
        return f'<figure id="{name}">{part}</figure>'


def _table(headings: list[str], lines: list[tuple[bool, list[str]]]) -> str:
    rows = "".join(
        f"<tr{' class=bold' if bold else ''}>{''.join(f'<td>{_safe(cell)}</td>' for cell in cells)}</tr>"
        for bold, cells in lines
    )
    return f"<table><tr>{''.join(f'<th>{_safe(h)}</th>' for h in headings)}</tr>{rows}</table>"


def _keys(groups: Groups) -> str:
    """The labels in the colours of their lines"""
    from fastagg.sim import plots

    colours = {}
    for methods in sections(groups).values():
        for label in methods:
            colours.setdefault(label, plots.look(methods, label)["color"].replace(plots.INK, "currentColor"))
    return ", ".join(f'<span style="color: {colour}">━ {_safe(label)}</span>' for label, colour in colours.items())


def _page(groups: Groups, title: str, parts: list[str]) -> str:
    runs = [run for members in groups.values() for run in members]
    options = "".join(
        f"<tr><td>{_safe(name)}</td><td>{_safe(' or '.join(map(json.dumps, values)))}</td></tr>"
        for name, values in options_of(runs).items()
    )
    versions = dict.fromkeys(f"{k} {v}" for run in runs for k, v in (run.summary.get("versions") or {}).items())
    folders = "".join(f"<li>{_safe(run.path)}</li>" for run in runs if run.path is not None)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_safe(title)}</title><style>{CSS}</style></head><body><main>
<h1>{_safe(title)}</h1><p class="lead">{_safe(described(groups))}</p>
{"".join(parts)}
<details><summary>All options, and where the runs are</summary>
<div class="scroll"><table>{options}</table></div><ul>{folders}</ul>
<p>{_safe(", ".join(versions))}</p></details>
</main></body></html>
"""


def _safe(text: Any) -> str:
    return html.escape(str(text))


def _inline(svg: str, name: str, title: str) -> str:
    """An SVG file as part of a page: with ids of its own, and no address of anything outside"""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))  # of the others some come twice
    svg = re.sub(r'\sid="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
