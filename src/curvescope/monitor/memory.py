"""Vectors that are carried from one measurement to the next, by name, on the CPU.

They are kept with the names of their blocks: where parameters were frozen or thawed meanwhile, what is still
there is carried over, and the rest begins with zeros.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace

FILE = "vectors.safetensors"


class Kept(NamedTuple):
    """Rows (m, n), and the name and size of each block of a row."""

    rows: Tensor
    blocks: tuple[tuple[str, int], ...]


@final
class Memory:
    """Vectors by name."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def put(self, name: str, rows: Tensor, space: ParamSpace) -> None:
        """Keep rows (m, n) over a space."""
        self._kept[name] = Kept(rows.detach().cpu().clone(), _blocks(space))

    def take(self, name: str, space: ParamSpace) -> Tensor | None:
        """The rows over a space, in its type and on its device; None if none are kept."""
        kept = self._kept.get(name)
        if kept is None:
            return None
        if kept.blocks != _blocks(space):
            kept = _carried(kept, _blocks(space))
        rows = kept.rows.to(space.device, space.dtype)
        nonzero = (rows != 0).any(dim=1)
        return rows[nonzero] if bool(nonzero.any()) else None

    def save(self, folder: Path) -> None:
        """Write all of them into a folder; complete or not at all."""
        from safetensors.torch import save_file

        tensors = {name: kept.rows.contiguous() for name, kept in self._kept.items()}
        words = {name: json.dumps(kept.blocks) for name, kept in self._kept.items()}
        partial = folder / f"{FILE}.partial"
        save_file(tensors, partial, metadata=words)
        partial.replace(folder / FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; nothing if it is not there, or damaged: vectors are only a good start."""
        from safetensors import SafetensorError, safe_open

        loaded = {}
        with suppress(OSError, SafetensorError, ValueError, KeyError):
            with safe_open(folder / FILE, framework="pt") as file:
                words = file.metadata() or {}
                for name in file.keys():  # noqa: SIM118
                    blocks = tuple((str(block), int(size)) for block, size in json.loads(words[name]))
                    loaded[name] = Kept(file.get_tensor(name), blocks)
            self._kept |= {name: kept for name, kept in loaded.items() if bool(kept.rows.isfinite().all())}


def _blocks(space: ParamSpace) -> tuple[tuple[str, int], ...]:
    return tuple((block.name, block.size) for block in space.blocks)


def _carried(kept: Kept, blocks: tuple[tuple[str, int], ...]) -> Kept:
    """The same rows over other blocks."""
    sizes = [size for _, size in kept.blocks]
    parts = dict(zip(kept.blocks, kept.rows.split(sizes, dim=1), strict=True))
    rows = [parts.get(block, kept.rows.new_zeros(len(kept.rows), block[1])) for block in blocks]
    return Kept(torch.cat(rows, dim=1), blocks)
