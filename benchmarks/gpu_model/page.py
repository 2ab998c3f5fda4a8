"""All tables in markdown, as they are printed and as they stand in docs/gpu.md."""

from __future__ import annotations

from benchmarks.gpu_model.arithmetic import arithmetic
from benchmarks.gpu_model.tables import registers_table, times_table, work_table
from benchmarks.publish import DOCS

DOC = DOCS / "gpu.md"
BEGIN, END = "<!-- predicted -->", "<!-- end of predicted -->"
KINDS = (
    "mix 1, mix 4: one or four outputs at once, of every dtype. alone: one group of rows, K <= 23; pairs: pairs of "
    "groups of 16; tensor: pairs of groups of 64, on tensor cores. ... mix: gram_mix. ... again: the second pass, in "
    "float64."
)


def markdown() -> str:
    lines = ["### ResNet-18, 11.17 M parameters: predicted, not measured", "", *times_table("resnet18"), ""]
    lines += ["### ViT-B, 86.6 M parameters: predicted, not measured", "", *times_table("vit_b"), ""]
    lines += ["### The work of gram, per element of the model", "", *work_table(), ""]
    lines += ["### Registers and occupancy, nvcc 13.0", "", *registers_table(), "", KINDS, ""]
    lines += ["### The arithmetic of 20 x ResNet-18, float32, on an A100", "", *arithmetic()]
    return "\n".join(lines)


def write() -> None:
    text = DOC.read_text()
    before, rest = text.split(BEGIN)
    DOC.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{rest.split(END)[1]}")
