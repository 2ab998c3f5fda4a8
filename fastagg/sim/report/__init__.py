"""Runs read back from their folders, what they came to, and the tables of them.

reading    files of a run, checked
scores     the numbers that sum up a curve
metric     what is measured, and how it is written
grouping   seeds of a method, methods of a setting
pairs      methods against a baseline, seed by seed
tables     rows, markdown, DataFrame
"""

from fastagg.sim.report.grouping import Groups, group, options_of, sections, settings
from fastagg.sim.report.metric import Metric, metric_of
from fastagg.sim.report.pairs import Comparison, differences
from fastagg.sim.report.reading import SUMMARY, Run, read_json, read_metrics, read_run, runs_in
from fastagg.sim.report.scores import AVERAGED, PHASES, SCORES, score, spent, summarise
from fastagg.sim.report.tables import averaged, frame, frame_of, lined, markdown, rows, table

__all__ = [
    "AVERAGED",
    "PHASES",
    "SCORES",
    "SUMMARY",
    "Comparison",
    "Groups",
    "Metric",
    "Run",
    "averaged",
    "differences",
    "frame",
    "frame_of",
    "group",
    "lined",
    "markdown",
    "metric_of",
    "options_of",
    "read_json",
    "read_metrics",
    "read_run",
    "rows",
    "runs_in",
    "score",
    "sections",
    "settings",
    "spent",
    "summarise",
    "table",
]
