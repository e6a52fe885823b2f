"""Fused last linear map and cross-entropy, computed one slice of logits at a time.

    L = Σ_t w_t ℓ_t,   ℓ_t = −Σ_c q_tc log p_tc,   p_t = softmax(z_t),   z = h Wᵀ + b,
    q_t = (1 − ε) one-hot(y_t) + ε/V, and w_t = 0 where the target is −100.

With D = p − q, dh = w∘(D W), dW = Dᵀ(w∘h), db = Dᵀ w. For cotangents gh, gW, gb of these,

    ż = gh Wᵀ + h gWᵀ + gb,     Ż = p∘(ż − p·ż),
    hh = w∘(Ż W + D gW),        hW = Żᵀ(w∘h) + Dᵀ(w∘gh),        hb = Żᵀ w.

The terms with Ż are the GGN (in the outputs), those with D the functional one. The weights multiply h, which
is cheap, instead of the logits. At most two slices of logits exist at any time; on a CPU a third one is
cached if it holds all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.hessian_terms import LossPart as Part
from curvescope.core.tensors import IGNORED
from curvescope.kernels.autograd import Function
from curvescope.kernels.backends import (
    Backend,
    Tensors,
    forward_mode,
    launch,
    plain_second,
    recorded,
    refuse_batched,
    refuse_third,
    transformed,
    use_triton,
)
from curvescope.kernels.cross_entropy.rows import RowStatistics
from curvescope.kernels.cross_entropy.sweeps import (
    SlicePlan,
    make_plan,
    probabilities,
    second_products,
    sweep,
)
from curvescope.kernels.tensors import given, plus, widen


def cross_entropy_head(
    h: Tensor,
    W: Tensor,
    b: Tensor | None,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    part: Part = "hessian",
    chunk: int | None = None,
    second_order: bool = True,
    third_order: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Σ_t w_t ℓ_t for h (T, d), W (V, d) of any strides, b (V,) and targets (T,), of which −100 is ignored.

    Args:
        weights: One for each term, (T,); not differentiated.
        part: "functional" leaves the softmax's own curvature out of the second derivative: it is that of
            ⟨D, z⟩ with D held fixed. First derivatives are the same.
        chunk: Rows of logits at a time; by default as many as fit a slice of moderate size.
        second_order: False records only the derivative in the cotangent of the loss.
        third_order: Use plain operations, which store all logits, if a third derivative is recorded;
            otherwise that raises.
    """
    _check(h, W, b, targets, weights)
    if part not in get_args(Part):
        raise UsageError(f"expected part='hessian' or 'functional', got {part!r}")
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"expected a label_smoothing in [0, 1), got {label_smoothing}")
    plan = make_plan(h, W, label_smoothing, chunk, use_triton(backend, h, W, b))
    differentiates_all = transformed() or forward_mode()
    grad = torch.is_grad_enabled()
    wants = tuple(t is not None and (differentiates_all or (grad and t.requires_grad)) for t in (h, W, b))
    options = HeadOptions(plan, part, second_order, wants, label_smoothing if third_order else None)
    return _Head.apply(h, W, b, targets.clamp(min=0), term_weights(h, targets, weights), options)[0]


class HeadCurvature:
    """GGN of the head at h, W, b; parts that do not depend on a direction are computed once."""

    def __init__(
        self,
        h: Tensor,
        W: Tensor,
        b: Tensor | None,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        chunk: int | None = None,
        backend: Backend = "auto",
    ):
        _check(h, W, b, targets, weights)
        self._plan = make_plan(h, W, 0.0, chunk, use_triton(backend, h, W, b))
        h, W, b = h.detach(), W.detach(), None if b is None else b.detach()
        terms = targets.clamp(min=0), term_weights(h, targets, weights)
        with torch.no_grad():
            rows = RowStatistics(*map(given, sweep(self._plan, (False,) * 3, h, W, b, *terms)[1:4]))
        self._constants = (h, W, b, *terms, *rows, probabilities(self._plan, h, W, b, rows.lse))

    @torch.no_grad()
    def times(
        self,
        h_dot: Tensor | None,
        W_dot: Tensor | None,
        b_dot: Tensor | None,
        *,
        rows: tuple[str, ...] = ("h", "W", "b"),
    ) -> Tensors:
        """w∘(Ż W), Żᵀ(w∘h) and Żᵀw of those in `rows`, for ż = ḣWᵀ + hẆᵀ + ḃ; all have k directions first."""
        if h_dot is None and W_dot is None and b_dot is None:
            return None, None, None
        needs = ("h" in rows, "W" in rows, "b" in rows and self._constants[2] is not None)
        return second_products(self._plan, "ggn", needs, self._constants, (h_dot, W_dot, b_dot))


def log_partition(
    h: Tensor, W: Tensor, b: Tensor | None, *, chunk: int | None = None, backend: Backend = "auto"
) -> Tensor:
    """Compute log Σ_c exp z_tc of each term, (T,), without recording a graph."""
    plan = make_plan(h, W, 0.0, chunk, use_triton(backend, h, W, b))
    nothing = torch.zeros(h.shape[0], dtype=torch.int64, device=h.device)
    with torch.no_grad():
        return given(sweep(plan, (False,) * 3, h, W, b, nothing, widen(h).new_zeros(h.shape[0]))[1])


def term_weights(h: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Weights w (T,), zero for ignored targets."""
    counted = (targets != IGNORED).to(widen(h[:0]).dtype)
    return counted if weights is None else counted * weights.to(counted)


class HeadOptions(NamedTuple):
    """Options of the head; `wants` are the gradients that the forward pass computes at once."""

    plan: SlicePlan
    part: str
    second_order: bool
    wants: tuple[bool, ...]
    plain: (
        float | None
    )  # label smoothing of the plain operations of third derivatives, None if there are none


class _Head(Function):
    """h, W, b ↦ L. The forward pass also computes the gradients for a cotangent of one."""

    @staticmethod
    def forward(
        h: Tensor, W: Tensor, b: Tensor | None, targets: Tensor, w: Tensor, options: HeadOptions
    ) -> Tensors:
        return sweep(options.plan, options.wants, h, W, b, targets, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.options = inputs
        _, lse, top, slope, *ctx.cached = output
        ctx.mark_non_differentiable(lse, top, slope, *(t for t in ctx.cached if t is not None))
        ctx.save_for_backward(*tensors, lse, top, slope)
        ctx.save_for_forward(*ctx.cached)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        c, options = cotangents[0], ctx.options
        if c is None:
            return (None,) * 6
        refuse_batched(c)
        h, W, b, *rest = ctx.saved_tensors
        cached = ctx.cached
        if cached is None:
            with torch.no_grad():
                cached = sweep(options.plan, ctx.needs_input_grad[:3], h, W, b, *rest[:2])[4:]
        if not recorded():
            return *(None if t is None else c * t for t in cached), None, None, None
        ctx.cached = cached if transformed() else None  # the graph of the gradients holds them now
        if not options.second_order:
            h, W, b = h.detach(), W.detach(), None if b is None else b.detach()
        return *_HeadGradient.apply(c, h, W, b, *rest, *cached, options), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _inner(tangents[:3], ctx.saved_tensors), *(None,) * 6


class _HeadGradient(Function):
    """c, h, W, b ↦ c times the gradients of L, which come with the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(c: Tensor, *rest: Any) -> Any:
        return tuple(None if t is None else c * t for t in rest[8:11])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        c, h, W, b, targets, w, lse, top, slope, *cached, ctx.options = inputs
        of_c = cached if ctx.needs_input_grad[0] else [None, None, None]
        p = probabilities(ctx.options.plan, h, W, b, lse) if ctx.options.second_order else None
        constants = (h, W, b, targets, w * c.to(w.dtype), lse, top, slope, p)
        ctx.save_for_backward(*constants, *of_c, *(() if ctx.options.plain is None else (c, w)))
        ctx.save_for_forward(*constants, *cached)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        if all(t is None for t in cotangents):
            return (None,) * 13
        constants, cached, point = ctx.saved_tensors[:9], ctx.saved_tensors[9:12], ctx.saved_tensors[12:]
        needs = ctx.needs_input_grad
        if ctx.options.plain is not None and recorded() and not transformed():
            (h, W, b, targets, *_), (c, w) = constants, point
            value = _plain(targets, w, ctx.options.plain)
            return *plain_second("a cross-entropy", value, (h, W, b), c, cotangents), *(None,) * 9
        refuse_third()
        along_c = _inner(cotangents, cached) if needs[0] else None
        gradients = (None, None, None)
        if any(needs[1:4]):
            gradients = _run_second(ctx.options, needs[1:4], constants, cotangents)
        return along_c, *gradients, *(None,) * 9

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        dc, directions = tangents[0], tangents[1:4]
        constants, cached = ctx.saved_tensors[:9], ctx.saved_tensors[9:]
        needs = [t is not None for t in cached]
        found: Tensors = [None, None, None]
        if any(t is not None for t in directions):
            found = _run_second(ctx.options, needs, constants, directions)
        if dc is not None:
            found = [plus(u, None if t is None else dc * t) for u, t in zip(found, cached, strict=True)]
        return tuple(
            torch.zeros_like(t) if u is None and t is not None else u
            for u, t in zip(found, cached, strict=True)
        )


def _plain(targets: Tensor, w: Tensor, label_smoothing: float) -> Callable[..., Tensor]:
    """Return the loss as a function of h, W and b that stores all logits."""

    def value(h: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        terms = F.cross_entropy(
            widen(F.linear(h, W, b)), targets, reduction="none", label_smoothing=label_smoothing
        )
        return (w * terms).sum().to(h.dtype)

    return value


def _run_second(options: HeadOptions, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """hh, hW, hb, None where not needed."""

    def core(constants: Tensors, directions: Tensors) -> Tensors:
        return second_products(options.plan, options.part, needs, constants, directions)

    return launch(core, constants, directions)


def _inner(directions: Any, gradients: Any) -> Tensor | None:
    """Σ ⟨direction, gradient⟩."""
    total = None
    for u, t in zip(directions, gradients, strict=True):
        total = total if u is None or t is None else plus(total, (u * t).sum())
    return total


def _check(h: Tensor, W: Tensor, b: Tensor | None, targets: Tensor, weights: Tensor | None) -> None:
    T, V = h.shape[0], W.shape[0]
    shapes = {"h": (h, (T, W.shape[-1])), "W": (W, (V, h.shape[-1])), "b": (b, (V,))}
    shapes |= {"targets": (targets, (T,)), "weights": (weights, (T,))}
    for name, (t, want) in shapes.items():
        if t is not None and t.shape != want:
            raise ShapeError(f"expected {name} of shape {want}, got {tuple(t.shape)}")
    if targets.is_floating_point() or not all(t is None or t.dtype == h.dtype for t in (W, b)):
        raise ShapeError(
            f"expected integer targets and one dtype for h, W and b, got {targets.dtype}, "
            + ", ".join(str(t.dtype) for t in (h, W, b) if t is not None)
        )
    if weights is not None and weights.requires_grad:
        raise UsageError("expected constant weights, got weights that require a gradient")
    outside = (targets != IGNORED) & ((targets < 0) | (targets >= V))
    if bool(outside.any()):
        raise UsageError(f"expected targets below {V} (or {IGNORED} to ignore one), got others")
