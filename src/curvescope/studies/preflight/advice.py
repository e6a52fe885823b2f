"""What to change where a study does not fit (batch, checkpoint, vectors, blocks, ranks) or takes too long."""

from __future__ import annotations

import math

import torch

from curvescope.core.numbers import DAY, data_size
from curvescope.studies import find
from curvescope.studies.preflight.forecast import Forecast
from curvescope.studies.preflight.predict import BUFFERS
from curvescope.studies.setting import TASK

AGAIN = 2  # layers whose results are there at once where they are computed again
LENGTHS = {
    "eigenvalues": ("num_steps",), "parts of the data": ("part_steps",), "ceilings": ("block_steps",),
    "ends": ("num_sharp_steps",), "": ("num_density_steps", "num_steps", "num_sharp_steps"),
}  # fmt: skip
"""By how a stage is called, the settings that say how many vectors it keeps, as studies call them."""
COUNTS = ("num_probes", "num_density_probes", "num_trace_probes", "num_steps", "num_density_steps")
"""Settings that products are proportional to, as studies call them."""


def advice(found: Forecast) -> list[str]:
    """Lines on what would fit, one where all does; and on what takes less time where it takes over a day."""
    return [*_memory(found), *_time(found)]


def _time(found: Forecast) -> list[str]:
    """Products grow as probes and steps do, and one as the tokens do."""
    if found.prediction.seconds <= DAY:
        return []
    names = found.cfg.to_dict()
    counts = [f"{name} ({names[name]})" for name in COUNTS if names.get(name)]
    fewer = f"fewer tokens ({found.cfg.tokens:,})"
    if found.cfg.data.startswith(TASK):
        fewer = "a smaller task"
    fewer += f", smaller {', '.join(counts)}" if counts else ""
    card = "; --device cuda, if there is one" if found.problem.device.type == "cpu" else ""
    return [
        f"it takes over a day. What would help: {fewer}: time falls as each of them does; --budget 1h "
        f"chooses those that are not given{card}"
    ]


def _memory(found: Forecast) -> list[str]:
    p = found.prediction
    if p.fits:
        return [f"it fits: {data_size(p.base + p.free - p.memory)} are left"]
    top = p.largest
    passing = top.memory - p.base - top.graphs - top.vectors
    lines = [f"it does not fit: {data_size(p.memory - p.base - p.free)} are missing. What would help:"]
    lines += _smaller_batch(found, passing, p.free - top.vectors)
    lines += _computed_again(found, passing)
    lines += _fewer_vectors(found, p.free - passing)
    lines += _fewer_blocks(found, p.free - passing)
    return lines + _ranks(found, passing)


def _smaller_batch(found: Forecast, passing: int, room: int) -> list[str]:
    """Results of layers grow as a batch does."""
    now = found.problem.batches[0].num_sequences
    fitting = int(now * room / max(passing, 1))
    if not 1 <= fitting < now:
        return []
    return [
        f"  batch: --set batch_size={fitting}, not {now}: a product passes {data_size(passing)} through "
        "memory, and that falls as the batch does; no number changes beyond rounding"
    ]


def _computed_again(found: Forecast, passing: int) -> list[str]:
    depth = found.problem.model.facts.get("n_layers")
    if found.cfg.checkpoint or not isinstance(depth, int) or depth <= AGAIN:
        return []
    less = data_size(AGAIN * passing // depth)
    return [
        f"  checkpoint: --set checkpoint=true: layers are computed again, about {less} in the place of "
        f"{data_size(passing)}, two to three times the time"
    ]


def _fewer_vectors(found: Forecast, room: int) -> list[str]:
    """Where an algorithm's basis is the larger part; eigenvalues take what memory they may, whatever is set.

    Fewer probes help where several go at once.
    """
    top, names = found.prediction.largest, found.cfg.to_dict()
    column, buffers = _column(found), BUFFERS * top.columns
    fitting, now = room // column - buffers, top.vectors // column - buffers
    known = next(those for start, those in LENGTHS.items() if top.what.startswith(start))
    setting = next((name for name in known if name in names), None)
    if setting is None or top.most > top.seconds or not 2 <= fitting < now:
        return []
    return [
        f"  vectors: {top.what} keeps {now} of {data_size(column)} each, {fitting} would fit: a smaller "
        f"{setting}{', or fewer probes' if top.columns > 1 else ''}"
    ]


def _fewer_blocks(found: Forecast, room: int) -> list[str]:
    top, size = found.prediction.largest, found.problem.space().size
    if "blocks" not in found.cfg.to_dict() or top.vectors <= room or room <= 0:
        return []
    most = int(size * room / top.vectors)
    return [f"  blocks: --blocks 'L0.*', say: vectors over at most {most:,} of {size:,} parameters fit"]


def _ranks(found: Forecast, passing: int) -> list[str]:
    """Parameters and vectors are cut over ranks; what passes through a layer is not."""
    p = found.prediction
    room = p.base + p.free - passing
    if room <= 0:
        return ["  ranks: none are enough while one product does not fit: the batch first"]
    count = math.ceil((p.base + p.largest.vectors) / room)
    if count < 2:
        return []
    if not find(found.study).on_pieces:
        return []
    return [
        f"  ranks: torchrun --nproc-per-node {count} -m curvescope … --parallel shards: parameters and "
        f"vectors in {count} parts"
    ]


def _column(found: Forecast) -> int:
    """Bytes of a vector over all that varies."""
    return found.problem.space().size * torch.finfo(found.problem.dtype).bits // 8
