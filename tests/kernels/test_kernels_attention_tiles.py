"""Tiles of the Triton kernels as the compiler sees them, for cards that need not be there."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402

from curvescope.core.errors import UsageError  # noqa: E402
from curvescope.kernels.attention import triton_passes  # noqa: E402
from curvescope.kernels.attention.triton_tiles import OVER_KEYS, TILES, Tile, check_tile  # noqa: E402

EVERY = [(name, kind, width) for name, table in TILES.items() for kind, width in table]
NUMBERS = ("queries", "keys", "heads", "group", "window")


def source(name: str, kind: str, width: int, tile: Tile) -> ASTSource:
    """A kernel with the types of its arguments, all of them divisible by 16."""
    kernel = getattr(triton_passes, f"{name}_kernel")
    fixed = {"d": width, "e": width, "D": width, "E": width, "CAUSAL": True, "WINDOW": False, "GQ": True}
    fixed |= {"LENGTHS": False, "GK": True, "GV": True, "STATS": True, "ROWS": tile.rows, "COLS": tile.cols}
    fixed |= {"PRECISION": "tf32x3" if kind == "full" else "tf32"}
    types, even = {}, {}
    for i, arg in enumerate(kernel.arg_names):
        if arg.endswith("_s"):
            types[arg] = ("i32",) * (4 if arg[0] in "gh" else 3)
            even |= {(i, j): [["tt.divisibility", 16]] for j in range(len(types[arg]))}
        elif arg in fixed or arg in NUMBERS or arg == "scale":
            types[arg] = "constexpr" if arg in fixed else "fp32" if arg == "scale" else "i32"
        else:
            single = kind != "half" or arg in ("lse", "mean", "cross", "delta")
            types[arg] = "*i32" if arg == "lengths" else "*fp32" if single else "*bf16"
            even[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, {arg: fixed[arg] for arg in types if arg in fixed}, even)


def lower(name: str, kind: str, width: int, tile: Tile, arch: int) -> str:
    """The kernel as Triton lays it out over warps for an architecture, before any machine code."""
    from triton._C.libtriton import ir

    target, made = GPUTarget("cuda", arch, 32), source(name, kind, width, tile)
    backend, context, stages = make_backend(target), ir.context(), {}
    options = backend.parse_options({"num_warps": tile.warps, "num_stages": tile.stages})
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, made.language)
    implementation = backend.get_codegen_implementation(options)
    module = made.make_ir(target, options, implementation, backend.get_module_map(), context)
    metadata = {"hash": "", "target": target, **vars(options)}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return str(module)


def outside(text: str) -> list[str]:
    """Products of groups of warps that have more rows, 16 for a warp, than the tile."""
    layouts = re.findall(r"(#mma\d*) = #ttg.nvidia_mma<\{.*?warpsPerCTA = \[(\d+)", text)
    warps = {layout: int(count) for layout, count in layouts}
    found = re.findall(r"warp_group_dot .*-> tensor<(\d+)x(\d+)xf32, (#mma\d*)>", text)
    return [f"{m}×{n}" for m, n, layout in found if 16 * warps[layout] > int(m)]


@pytest.mark.parametrize(("name", "kind", "width"), EVERY)
def test_no_group_of_warps_reaches_past_its_tile(name, kind, width):
    text = lower(name, kind, width, TILES[name][kind, width], 90)
    assert "dot" in text
    assert outside(text) == []


def test_what_reached_past_its_tile_is_seen_and_refused():
    tile = Tile(64, 16, 8, 1)
    assert outside(lower("hq", "full", 128, tile, 90))
    with pytest.raises(UsageError, match="at least 128 rows for 8 warps"):
        check_tile("hq", tile)


@pytest.mark.parametrize("name", TILES)
def test_the_rule_counts_the_rows_of_left_factors(name):
    tall, wide = Tile(128, 64, 8, 1), Tile(64, 128, 8, 1)
    fits, not_fits = (wide, tall) if name in OVER_KEYS else (tall, wide)
    check_tile(name, fits)
    with pytest.raises(UsageError):
        check_tile(name, not_fits)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89])
@pytest.mark.parametrize(("name", "kind", "width"), EVERY)
def test_tiles_lower_for_older_cards(name, kind, width, arch):
    assert outside(lower(name, kind, width, TILES[name][kind, width], arch)) == []
