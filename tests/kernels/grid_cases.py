"""The cases of the grid on a card, the lengths that find most first, and one of them against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from kernels_attention_plain import plain
from torch import Tensor

from curvescope.kernels.attention import attention

WIDTHS = (128, 80, 64, 96, 16, 32, 72, 112, 24, 8, 160, 192, 256)
PRECISIONS = {"full": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
BOUND = {"full": 1e-5, "tf32": 5e-3, "bf16": 4e-2}
MASKS = ("causal", "full", "window", "padded")
LAYOUTS = ("contiguous", "by token", "packed")
HEADS = ((4, 2), (2, 2), (3, 1))
SQUARE = (131, 17, 15, 2, 1024, 16, 1)
UNEQUAL = ((131, 17), (17, 131), (16, 131), (131, 16), (1, 131), (1024, 131))
KINDS = ("even", "odd", "one")  # of a number of queries: Triton compiles kernels for each
NAMES = ("O", "dQ", "dK", "dV", "hQ", "hK", "hV", "h_dO", "J v")


class Case(NamedTuple):
    """One call of attention: batch of two, H query heads on G key heads."""

    mask: str
    Lq: int
    Lk: int
    H: int
    G: int
    layout: str

    def __str__(self) -> str:
        return f"{self.mask}, {self.Lq}×{self.Lk}, {self.H}/{self.G} heads, {self.layout}"


def cases() -> list[Case]:
    """Every mask × lengths × heads × layout."""
    lengths = [(n, n) for n in SQUARE] + list(UNEQUAL)
    return [
        Case(mask, *length, *heads, layout)
        for mask in MASKS
        for length in lengths
        for heads in HEADS
        for layout in LAYOUTS
        if length[0] == length[1] or mask in ("full", "padded")
    ]


def kind_of(queries: int) -> str:
    """Whether Triton knows that a multiple of 16 is one, or that one is one."""
    return "one" if queries == 1 else "even" if queries % 16 == 0 else "odd"


def few() -> list[Case]:
    """For compute-sanitizer: all kernels of a tile, with rows and keys beyond the last whole tile."""
    return [
        Case("causal", 131, 131, 4, 2, "by token"),
        Case("causal", 17, 17, 4, 2, "packed"),
        Case("full", 131, 17, 4, 2, "contiguous"),
        Case("padded", 112, 112, 4, 2, "packed"),
    ]


def errors(case: Case, precision: str, width: int, *, device: str, exact_on: str, **how: Any) -> list[float]:
    """Error of O, dQ, dK, dV, hQ, hK, hV, h_dO and J v, in the order of `NAMES`.

    ‖found − exact‖ / max(‖exact‖, √(n/Lk)) for n entries: where only one key is seen the derivatives are zero
    and what is left is rounding. NaN counts as infinite.
    """
    dtype = PRECISIONS[precision]
    made = [x.to(dtype) for x in _draw(case, width)]
    lengths = torch.tensor([case.Lk // 2, case.Lk])
    options = {
        "causal": {"causal": True},
        "full": {},
        "window": {"causal": True, "window": max(1, case.Lq // 3)},
        "padded": {"lengths": lengths},
    }[case.mask]
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    placed = [x.to(device) for x in made]
    laid = [*_laid(case.layout, placed[:3]), placed[3], *placed[4:]]
    found = derivatives(attention, laid, options, **how)
    exact = derivatives(plain, [x.to(exact_on, torch.float64) for x in made], options)
    if device == "cuda":
        torch.cuda.synchronize()
    return [_error(a, b.to(a.device), case.Lk) for a, b in zip(found, exact, strict=True)]


def derivatives(function: Any, x: list[Tensor], options: dict[str, Any], **how: Any) -> list[Tensor]:
    """All of `NAMES` for q, k, v, dO and directions gQ, gK, gV; J v as a GGN takes it."""
    q, k, v, do = (t.detach().requires_grad_() for t in x[:4])
    o = function(q, k, v, **options, **how)
    first = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    second = torch.autograd.grad(first, (q, k, v, do), x[4:])
    if function is plain:
        return [t.detach() for t in (o, *first, *second, second[3])]
    u = torch.zeros_like(o, requires_grad=True)
    pulled = torch.autograd.grad(
        function(q, k, v, **options, **how, second_order=False), (q, k, v), u, create_graph=True
    )
    (Jv,) = torch.autograd.grad(pulled, u, x[4:])
    return [t.detach() for t in (o, *first, *second, Jv)]


def _draw(case: Case, width: int) -> list[Tensor]:
    """q, k, v, dO, gQ, gK, gV, standard normal."""
    source = torch.Generator().manual_seed(width)
    queries, keys = (2, case.H, case.Lq, width), (2, case.G, case.Lk, width)
    shapes = [queries, keys, keys, queries, queries, keys, keys]
    return [torch.randn(s, generator=source) for s in shapes]


def _laid(layout: str, x: list[Tensor]) -> list[Tensor]:
    """The same q, k, v, laid out in memory in another way; packed are slices of one tensor."""
    if layout == "contiguous":
        return x
    by_token = [t.transpose(1, 2).contiguous() for t in x]  # (B, L, H, d)
    if layout == "by token":
        return [t.transpose(1, 2) for t in by_token]
    if x[0].shape[2] != x[1].shape[2]:
        both = torch.cat(by_token[1:], 2)
        return [by_token[0].transpose(1, 2), *(t.transpose(1, 2) for t in both.chunk(2, 2))]
    counts = [t.shape[2] for t in by_token]
    return [t.transpose(1, 2) for t in torch.cat(by_token, 2).split(counts, 2)]


def _error(found: Tensor, exact: Tensor, keys: int) -> float:
    scale = max(float(exact.norm()), (exact.numel() / keys) ** 0.5)
    error = float((found.double() - exact).norm()) / scale
    return error if error == error else float("inf")
