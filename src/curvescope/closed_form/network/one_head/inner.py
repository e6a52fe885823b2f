"""Products with the blocks of W_Q and W_V in any layer but the last, for many probes at once.

A tangent propagates from the block to the outputs, and cotangents propagate back. The cotangent of H_o starts
with ∂²L/∂z² dz and ignores curvature. The cotangent of H_f starts with zero and adds the curvature of every
attention layer. The cotangent of H does both. So H_f is computed directly, H = H_o + H_f holds for every
probe, and all parts share one tangent. ReLU has no curvature. Tangents are (n, k, T, d) for k probes,
cotangents (n, p k, T, d) for p parts.

With γ_i = g_i W_VOᵀ, g the gradient at attention's output, τ that at its scores, and tangents dx, dA, the
curvature of attention adds to the cotangents of the scores and of the stream

    scores   ∂²A [dA, ∂L/∂A] + ∂A (γ_i · dx_j)
    x_j      Σ_i dA_ij γ_i + Σ_i τ_ij dx_i W_QK
    x_i      Σ_j τ_ij dx_j W_QKᵀ.

Each probe and inner layer costs 29 products of T n rows with a d × d matrix, 24 of them in the
feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from curvescope.closed_form.network.one_head.layers import LayerPoint, Task, slope_of_outputs
from curvescope.core.hessian_terms import Part

Block = Literal["W_Q", "W_V"]
Record = TypeVar("Record", LayerPoint, "Slopes", "End")
CACHE_BYTES = 10_000_000  # size of the widest tensor, on a CPU


@dataclass(frozen=True)
class Slopes:
    """First derivatives of L at one layer: in its attention output (γ), in A and in its scores (τ)."""

    gamma: Tensor  # (n, Q, d)
    A: Tensor  # (n, Q, T), ∂L/∂A
    tau: Tensor  # (n, Q, T)


@dataclass(frozen=True)
class End:
    """Map from the last layer's attention to the outputs, as small matrices per query."""

    z: Tensor  # (n, s, V)
    straight: Tensor  # (n, s, d, V): ∂z_i/∂r_i
    value: Tensor  # (n, s, d, V): W_VO ∂z_i/∂r_i
    seen: Tensor  # (n, s, T, V): x_j W_VO ∂z_i/∂r_i


@dataclass(frozen=True)
class Suffix:
    """A network at a point, with the derivatives for products with its inner blocks."""

    layers: list[LayerPoint]
    slopes: list[Slopes]
    end: End
    task: Task

    def products(self, layer: int, block: Block, V: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return parts of the block of an inner layer times V (k, d, d): (parts, k, d, d)."""
        assert 0 <= layer < len(self.layers) - 1, "the last layer has exact norms"
        size = self._rows_at_once(V.shape[0] * len(parts))
        total = V.new_zeros(len(parts), *V.shape)
        for start in range(0, len(self.end.z), size):
            total += self._slice(slice(start, start + size))._products(layer, block, V, parts)
        return total

    def _rows_at_once(self, wide: int) -> int:
        """Return the number of sequences whose widest tensor fits a CPU's cache; all of them on a GPU."""
        if self.end.z.is_cuda:
            return len(self.end.z)
        first = self.layers[0]
        width = first.x.shape[-1] if first.active is None else first.active.shape[-1]
        return max(1, CACHE_BYTES // (8 * wide * first.x.shape[1] * width))

    def _slice(self, rows: slice) -> Suffix:
        layers = [_sliced(layer, rows) for layer in self.layers]
        return Suffix(layers, [_sliced(s, rows) for s in self.slopes], _sliced(self.end, rows), self.task)

    def _products(self, layer: int, block: Block, V: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return the sum over the sequences of this slice."""
        target_layer, curved = self.layers[layer], [i for i, part in enumerate(parts) if part != "outer"]
        dA, dr = _begin(target_layer, block, V)
        dx, steps = target_layer.feed(dr), [(dr, dA)]
        for middle in self.layers[layer + 1 : -1]:
            dA, dr = _tangent(middle, dx)
            steps.append((dx, dA))
            dx = middle.feed(dr)
        dA, dz = _last_tangent(self.layers[-1], self.end, dx)
        steps.append((dx, dA))
        start = self.task.curve(self.end.z, dz)
        c = torch.cat([torch.zeros_like(start) if p == "functional" else start for p in parts], dim=1)
        c = _last_cotangent(self.layers[-1], self.end, self.slopes[-1], c, steps[-1], curved)
        for index in range(len(self.layers) - 2, layer, -1):
            middle = self.layers[index]
            c = _cotangent(middle, self.slopes[index], middle.feed_back(c), steps[index - layer], curved)
        result = _finish(
            target_layer, self.slopes[layer], block, target_layer.feed_back(c), steps[0][1], curved
        )
        return result.unflatten(0, (len(parts), -1))


def suffix(layers: list[LayerPoint], U: Tensor, task: Task) -> Suffix:
    """Return the derivatives that all products share, by one backward pass."""
    last = layers[-1]
    z = last.feed(last.r) @ U
    straight = slope_of_outputs(last, U)
    value = last.weights["W_VO"] @ straight
    end = End(z, straight, value, last.values[:, None] @ straight)
    g_r, slopes = (straight @ task.gradient(z)[..., None])[..., 0], []
    for index in range(len(layers) - 1, -1, -1):
        layer = layers[index]
        gamma, g_A = g_r @ layer.weights["W_VO"].T, g_r @ layer.values.mT
        slopes.append(Slopes(gamma, g_A, layer.attend(g_A)))
        if index:
            tau = slopes[-1].tau
            g_x = tau.mT @ layer.queries + layer.A.mT @ gamma
            g_x[:, -_queries(layer) :] += layer.skip * g_r + tau @ layer.keys
            g_r = layers[index - 1].feed_back(g_x)
    return Suffix(layers, slopes[::-1], end, task)


def _begin(own: LayerPoint, block: Block, V: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tangents of A and of the stream after attention, for a change V of the block."""
    if block == "W_V":
        return V.new_zeros(0), _times_each(own.A @ own.x, V) @ own.weights["W_O"]
    dA = own.attend(_rowwise(_times_each(own.x_Q, V), _projected_keys(own).mT))
    return dA, _rowwise(dA, own.values)


def _finish(
    own: LayerPoint, slopes: Slopes, block: Block, c: Tensor, dA: Tensor, curved: list[int]
) -> Tensor:
    """Pull the cotangent after attention, (n, p k, T, d), back to that of the block: (p k, d, d)."""
    if block == "W_V":
        return _summed(own.A @ own.x, c @ own.weights["W_O"].T)
    c_s = own.attend(_rowwise(c, own.values.mT))
    _add(c_s, _softmax_curvature(own, slopes, dA), curved)
    return _summed(own.x_Q, _rowwise(c_s, _projected_keys(own)))


def _tangent(layer: LayerPoint, dx: Tensor) -> tuple[Tensor, Tensor]:
    """Return dA (n, k, Q, T) and the tangent of the stream after attention."""
    dA = layer.attend(_score_tangent(layer, dx, dx))
    dr = layer.skip * dx + _rowwise(dA, layer.values)
    return dA, dr + (layer.A[:, None] @ dx) @ layer.weights["W_VO"]


def _score_tangent(layer: LayerPoint, dx: Tensor, dx_Q: Tensor) -> Tensor:
    """Return dx_i · x_j W_QKᵀ + x_i W_QK · dx_j."""
    return _rowwise(dx_Q, layer.keys.mT) + _rowwise(dx, layer.queries.mT).mT


def _last_tangent(layer: LayerPoint, end: End, dx: Tensor) -> tuple[Tensor, Tensor]:
    """Return dA (n, k, s, T) and dz (n, k, s, V)."""
    dx_Q = dx[:, :, -_queries(layer) :]
    dA = layer.attend(_score_tangent(layer, dx, dx_Q))
    dz = layer.skip * _per_query(dx_Q, end.straight) + _per_query(layer.A[:, None] @ dx, end.value)
    return dA, dz + _per_query(dA, end.seen)


def _last_cotangent(
    layer: LayerPoint, end: End, slopes: Slopes, c: Tensor, step: tuple[Tensor, Tensor], curved: list[int]
) -> Tensor:
    """Pull cotangents of the outputs (n, p k, s, V) back to the input of the last layer, (n, p k, T, d)."""
    c_A = _per_query(c, end.seen.mT)
    c_x = layer.A.mT[:, None] @ _per_query(c, end.value.mT)
    return _scores_back(layer, slopes, c_A, c_x, layer.skip * _per_query(c, end.straight.mT), step, curved)


def _cotangent(
    layer: LayerPoint, slopes: Slopes, c: Tensor, step: tuple[Tensor, Tensor], curved: list[int]
) -> Tensor:
    """Pull cotangents of the stream after attention back to those before it, (n, p k, T, d) both."""
    c_A = _rowwise(c, layer.values.mT)
    c_x = (layer.A.mT[:, None] @ c) @ layer.weights["W_VO"].T
    return _scores_back(layer, slopes, c_A, c_x, layer.skip * c, step, curved)


def _scores_back(
    layer: LayerPoint,
    slopes: Slopes,
    c_A: Tensor,
    c_x: Tensor,
    c_Q: Tensor,
    step: tuple[Tensor, Tensor],
    curved: list[int],
) -> Tensor:
    """Pull cotangents back through A and the scores: c_A of A, c_x of all tokens, c_Q of the queries."""
    (dx, dA), Q, W_QK = step, _queries(layer), layer.weights["W_QK"]
    _add(c_A, _rowwise(dx, slopes.gamma.mT).mT, curved)
    c_s = layer.attend(c_A)
    _add(c_s, _softmax_curvature(layer, slopes, dA), curved)
    c_x += _rowwise(c_s.mT, layer.queries)
    c_Q += _rowwise(c_s, layer.keys)
    tau = slopes.tau[:, None]
    _add(c_x, _rowwise(dA.mT, slopes.gamma) + tau.mT @ (dx[:, :, -Q:].contiguous() @ W_QK), curved)
    _add(c_Q, (tau @ dx) @ W_QK.T, curved)
    c_x[:, :, -Q:] += c_Q
    return c_x


def _softmax_curvature(layer: LayerPoint, slopes: Slopes, dA: Tensor) -> Tensor | None:
    """Return ∂²A [dA, ∂L/∂A] as a cotangent of the scores, dA ∘ (g − ḡ) − A Σ dA g; None if linear."""
    if layer.kind == "linear" or dA.numel() == 0:
        return None
    A, g = layer.A, slopes.A
    weighted = dA * (g - (A * g).sum(-1, keepdim=True))[:, None]
    return weighted - A[:, None] * weighted.sum(-1, keepdim=True)


def _queries(layer: LayerPoint) -> int:
    return layer.A.shape[1]


def _projected_keys(layer: LayerPoint) -> Tensor:
    """Return k_j/√d: (n, T, d)."""
    return layer.x @ layer.weights["W_K"] / layer.weights["W_K"].shape[1] ** 0.5


def _times_each(x: Tensor, V: Tensor) -> Tensor:
    """Return x V for every V: (n, T, d), (k, d, e) to (n, k, T, e)."""
    n, T, d = x.shape
    wide = x.reshape(n * T, d) @ V.transpose(0, 1).reshape(d, -1)
    return wide.reshape(n, T, len(V), -1).transpose(1, 2)


def _summed(x: Tensor, c: Tensor) -> Tensor:
    """Return Σ x_iᵀ c_i over tokens and sequences: (n, T, d), (n, k, T, e) to (k, d, e)."""
    wide = c.transpose(1, 2).reshape(x.shape[0] * x.shape[1], -1)
    return (x.flatten(0, 1).T @ wide).reshape(x.shape[2], c.shape[1], -1).transpose(0, 1)


def _rowwise(t: Tensor, M: Tensor) -> Tensor:
    """Return t M for all probes, without copies of M: (n, k, a, b), (n, b, c) to (n, k, a, c)."""
    n, k, a, b = t.shape
    return (t.reshape(n, k * a, b) @ M).reshape(n, k, a, -1)


def _per_query(t: Tensor, M: Tensor) -> Tensor:
    """Multiply by one matrix per query: (n, k, q, b), (n, q, b, c) to (n, k, q, c)."""
    return (t.transpose(1, 2) @ M).transpose(1, 2)


def _add(total: Tensor, term: Tensor | None, curved: list[int]) -> None:
    """Add a term (n, k, …) to the chosen parts of (n, p k, …)."""
    if term is not None:
        view = total.unflatten(1, (-1, term.shape[1]))
        for part in curved:
            view[:, part] += term


def _sliced(record: Record, rows: slice) -> Record:
    """Return the record with the first axis of its tensors sliced; weights and masks stay."""
    cut = {
        field.name: getattr(record, field.name)[rows]
        for field in fields(record)
        if field.name != "mask" and isinstance(getattr(record, field.name), Tensor)
    }
    return replace(record, **cut)
