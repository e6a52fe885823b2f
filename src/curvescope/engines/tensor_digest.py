"""Digests of tensors that change if any entry changes, however it was written.

Autograd's version counters miss writes through `tensor.data`, NumPy and other processes. Reading everything
once is cheap compared with a product. Small tensors are copied. For large ones the digest has two parts: the
sum of the bits as integers modulo 2⁶⁴, which changes with any single entry; and products of the rows with
random weights, which detect other changes (swapped entries, pairs of signs).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

import torch
from torch import Tensor

from curvescope.core.seeds import generator

MAX_COPIED_TENSOR = 4096  # entries
ROW = 2**14  # entries of a row at most
MIN_ROW = 64  # entries of a row below which the digest would be as long as the tensor
COPIED = 2**22  # entries that are copied at once to a type that sums well
CUT_ROW = 2**10  # entries of the rows that are cut from a tensor without rows of such lengths


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return a few tensors that stay equal, bit for bit, as long as the given ones do."""
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    large: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        if t.layout != torch.strided:
            continue
        t = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
        if t.numel() <= MAX_COPIED_TENSOR:
            small.setdefault((t.device, t.dtype), []).append(t.reshape(-1))
        else:
            for part in (_bits(t), _projections(t)):
                large.setdefault((part.device, part.dtype), []).append(part)
    return tuple(torch.cat(parts) for group in (small, large) for parts in group.values())


def same(current: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> bool:
    """Return True if two digests are of the same numbers; undefined ones count as equal to themselves."""
    return len(current) == len(before) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and _equal(a, b)
        for a, b in zip(current, before, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def _bits(t: Tensor) -> Tensor:
    """The sum of the bits, 8 bytes to a word, and the bytes that are left."""
    flat = t.contiguous().view(-1)
    count, num_left = divmod(flat.numel() * flat.element_size(), 8)
    if not num_left and not flat.storage_offset() * flat.element_size() % 8:
        return flat.view(torch.int64).sum().view(1)
    data = flat.clone().view(torch.uint8)
    return torch.cat([data[: 8 * count].view(torch.int64).sum().view(1), data[8 * count :].to(torch.int64)])


def _projections(t: Tensor) -> Tensor:
    """Multiply every row by random weights in (1/2, 3/2): integers in float64, halves in float32, row by row.

    A sum in half precision would be too inaccurate to distinguish similar entries.
    """
    rows = t.flatten(1) if t.dim() > 1 else t.view(1, -1)
    if MIN_ROW <= rows.shape[1] <= ROW:
        return _weighted(rows)
    flat = t.contiguous().view(-1)
    num_cut = flat.numel() // CUT_ROW * CUT_ROW
    return torch.cat([_weighted(flat[:num_cut].view(-1, CUT_ROW)), _weighted(flat[num_cut:].view(1, -1))])


def _weighted(rows: Tensor) -> Tensor:
    if rows.dtype in (torch.float32, torch.float64):
        return rows @ _weights(rows.device, rows.dtype)[: rows.shape[1]]
    wide = torch.float32 if rows.is_floating_point() else torch.float64
    chunks = rows.split(max(1, COPIED // rows.shape[1])) if rows.numel() else [rows]
    return torch.cat([chunk.to(wide) @ _weights(rows.device, wide)[: rows.shape[1]] for chunk in chunks])


@cache
def _weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    return (torch.rand(ROW, generator=generator(0), dtype=torch.float64) + 0.5).to(device, dtype)


@torch.no_grad()
def weighted_sum(t: Tensor) -> Tensor:
    """Return wᵀ T r for the rows T of a tensor; all entries have different weights, so swaps are detected."""
    rows = t.reshape(-1, t.shape[-1]) if t.dim() and t.numel() else t.reshape(1, -1)
    left, right = (_fixed_weights(n, t.device, t.dtype) for n in rows.shape)
    return left @ (rows @ right)


@torch.no_grad()
def sums(t: Tensor) -> Tensor:
    """The weighted sum of a tensor, and that of its absolute values: (2,)."""
    return torch.stack([weighted_sum(t), t.abs().sum()])


def same_sums(current: Tensor, before: Tensor, tolerance: float) -> Tensor:
    """Compare rows of `sums` up to rounding, relative to the absolute values; undefined values are equal."""
    close = (current - before).abs() <= tolerance * before[:, 1:]
    return close | (current == before) | (current.isnan() & before.isnan())


@lru_cache(maxsize=64)
def _fixed_weights(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """n numbers from 1/2 to 3/2, always the same."""
    return (torch.rand(n, generator=generator(0, n), dtype=torch.float64) + 0.5).to(device, dtype)
