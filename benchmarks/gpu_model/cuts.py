"""How the Gram is cut into groups, pairs and tiles: as in csrc/cuda/products.cu and tensor_cores.cu.

tests/project/test_gpu_model.py compares these cuts with the kernels'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """shape_of in csrc/cuda/products.cu, for a triangle"""

    size: int
    groups: int
    slices: int
    tensor: bool

    @property
    def pairs(self) -> int:
        return self.groups * (self.groups + 1) // 2

    @property
    def kind(self) -> str:
        return "tensor" if self.tensor else "alone" if self.groups == 1 else "pairs"

    @property
    def tiles(self) -> int:  # of a block, at most
        side = self.size // 8
        return side * (side + 1) // 2 if self.groups == 1 else side * side

    @property
    def threads(self) -> int:
        return 256 if self.tensor else 32 * self.tiles * self.slices

    @property
    def elements(self) -> int:  # of a stage
        return 64 if self.tensor else 256 * self.slices

    def staged(self, diagonal: bool) -> int:
        return self.size if diagonal else 2 * self.size

    @property
    def shared(self) -> int:
        rows = self.staged(self.groups == 1 and not self.tensor)
        return (4 * (68 if self.tensor else self.elements) + 12) * rows + 8


def shape(rows: int, tensor: bool) -> Shape:
    if tensor:
        return Shape(64, -(-rows // 64), 1, True)
    most = 24 if rows <= 24 else 16
    groups = -(-rows // most)
    size = (rows + 8 * groups - 1) // (8 * groups) * 8
    groups = -(-rows // size)
    slices, warps = 4, 6 if groups == 1 else 4
    cut = Shape(size, groups, slices, False)
    while slices > 1 and (slices * cut.tiles > warps or 4 * cut.elements * cut.staged(groups == 1) > 40 << 10):
        slices //= 2
        cut = Shape(size, groups, slices, False)
    return cut


def pairs(s: Shape, rows: int) -> list[tuple[int, int, bool]]:
    """(rows of a, rows of b, diagonal) of every pair"""
    real = [min(s.size, rows - g * s.size) for g in range(s.groups)]
    return [(real[i], real[j], i == j) for i in range(s.groups) for j in range(i + 1)]


def tiles(s: Shape, na: int, nb: int, diagonal: bool) -> tuple[int, int]:
    """Tiles with work of a pair: (whole ones, half ones on the diagonal)"""
    if s.tensor:
        spots = [(i, j) for i in range(0, 64, 16) for j in range(0, 64, 32)]
        return sum(i < na and j < nb and not (diagonal and i + 16 <= j) for i, j in spots), 0
    a, b = -(-na // 8), -(-nb // 8)
    return (a * (a - 1) // 2, a) if diagonal else (a * b, 0)
