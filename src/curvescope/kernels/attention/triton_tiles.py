"""Sizes of the tiles of attention's Triton kernels, and the rule that they keep.

A warp multiplies 16 rows, and from 64 rows on four warps do it together, with factors from shared memory. A
second group of four in a tile of 64 rows gets the 64 rows after them, which are outside the tile: Triton 3.6
then reads past the tile's shared memory, which kills the process, or not, as the compiler happens to lay out
the factors. So eight warps need 128 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from curvescope.core.errors import UsageError

OVER_KEYS = ("dkv", "hkv")  # kernels with a program for each tile of keys
WARP_ROWS = 16
GROUP = 4  # warps that multiply together


class Tile(NamedTuple):
    """Queries and keys of one tile, warps of one program, stages of the pipeline of its loads."""

    rows: int
    cols: int
    warps: int
    stages: int


FULL_PRECISION = "tf32x3"  # three products in TF32, to about 2⁻²²; "ieee" is without tensor cores

# Tile of a kernel by how entries are multiplied and the larger head size, rounded up to a power of two.
TILES: dict[str, dict[tuple[str, int], Tile]] = {
    "forward": {
        ("half", 64): Tile(128, 64, 4, 3),
        ("half", 128): Tile(128, 64, 8, 3),
        ("half", 256): Tile(64, 32, 4, 2),
        ("tf32", 64): Tile(64, 64, 4, 2),
        ("tf32", 128): Tile(64, 32, 4, 2),
        ("tf32", 256): Tile(32, 32, 4, 1),
        ("full", 64): Tile(64, 32, 4, 2),
        ("full", 128): Tile(64, 16, 4, 2),
        ("full", 256): Tile(32, 16, 4, 1),
    },
    "dq": {
        ("half", 64): Tile(128, 64, 8, 2),
        ("half", 128): Tile(64, 64, 4, 2),
        ("half", 256): Tile(128, 16, 8, 2),
        ("tf32", 64): Tile(64, 32, 4, 2),
        ("tf32", 128): Tile(128, 16, 8, 2),
        ("tf32", 256): Tile(32, 16, 4, 1),
        ("full", 64): Tile(64, 32, 4, 2),
        ("full", 128): Tile(64, 16, 4, 2),
        ("full", 256): Tile(16, 16, 4, 1),
    },
    "dkv": {
        ("half", 64): Tile(64, 128, 8, 2),
        ("half", 128): Tile(64, 64, 4, 2),
        ("half", 256): Tile(16, 64, 4, 2),
        ("tf32", 64): Tile(64, 128, 8, 2),
        ("tf32", 128): Tile(16, 64, 4, 2),
        ("tf32", 256): Tile(16, 32, 4, 1),
        ("full", 64): Tile(32, 64, 4, 2),
        ("full", 128): Tile(16, 64, 4, 2),
        ("full", 256): Tile(16, 16, 4, 1),
    },
    "ho": {
        ("half", 64): Tile(128, 64, 8, 2),
        ("half", 128): Tile(128, 32, 8, 2),
        ("half", 256): Tile(64, 16, 4, 2),
        ("tf32", 64): Tile(64, 64, 4, 1),
        ("tf32", 128): Tile(64, 16, 4, 2),
        ("tf32", 256): Tile(16, 16, 4, 1),
        ("full", 64): Tile(64, 32, 4, 2),
        ("full", 128): Tile(64, 16, 4, 1),
        ("full", 256): Tile(16, 16, 4, 1),
    },
    "hq": {
        ("half", 64): Tile(128, 64, 8, 2),
        ("half", 128): Tile(128, 32, 8, 2),
        ("half", 256): Tile(64, 16, 4, 2),
        ("tf32", 64): Tile(128, 64, 8, 2),
        ("tf32", 128): Tile(64, 16, 4, 2),
        ("tf32", 256): Tile(16, 16, 4, 1),
        ("full", 64): Tile(64, 16, 4, 2),
        ("full", 128): Tile(64, 16, 4, 1),
        ("full", 256): Tile(16, 16, 4, 1),
    },
    "hkv": {
        ("half", 64): Tile(32, 128, 8, 2),
        ("half", 128): Tile(16, 128, 8, 2),
        ("half", 256): Tile(16, 16, 4, 2),
        ("tf32", 64): Tile(64, 128, 8, 2),
        ("tf32", 128): Tile(16, 64, 4, 2),
        ("tf32", 256): Tile(16, 16, 4, 1),
        ("full", 64): Tile(16, 64, 4, 2),
        ("full", 128): Tile(16, 32, 4, 1),
        ("full", 256): Tile(16, 16, 4, 1),
    },
}


def tile_of(name: str, dtype: torch.dtype, head: int) -> Tile:
    """The tile of a kernel from `TILES`."""
    kind = "half" if dtype.itemsize == 2 else "tf32" if precision() == "tf32" else "full"
    return TILES[name][kind, max(64, triton.next_power_of_2(head))]


def precision() -> str:
    """Precision of products of float32: TF32 if PyTorch's products may use it."""
    return FULL_PRECISION if torch.get_float32_matmul_precision() == "highest" else "tf32"


def check_tile(name: str, tile: Tile) -> None:
    """Raise unless the warps of a kernel's program fit into its tile.

    The left factors of its products are queries, except in the kernels of keys, where they are transposed.
    """
    rows = tile.cols if name in OVER_KEYS else tile.rows
    if tile.warps > GROUP and rows < WARP_ROWS * tile.warps:
        raise UsageError(
            f"expected at least {WARP_ROWS * tile.warps} rows for {tile.warps} warps of {name}, got {rows}",
            hint="take four warps: a second group would read past the tile",
        )


for _name, _table in TILES.items():
    for _tile in _table.values():
        check_tile(_name, _tile)
