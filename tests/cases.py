"""Small problems of every kind, each with its dense truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import curvescope as cs
from dense import IGNORED, Data, Dense, as_package_loss


def shaken(module: nn.Module, seed: int = 0, scale: float = 0.4) -> nn.Module:
    """The module in float64 with noise on every parameter, so that no bias is 0 and no gain is 1."""
    source = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p += scale * torch.randn(p.shape, generator=source, dtype=torch.float64)
    return module


def drawn(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module whose own initialization is drawn from the seed, the global random numbers left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def transformer(**settings: Any) -> nn.Module:
    """A shaken zoo Transformer of a few hundred parameters."""
    small = {"n_layers": 1, "d_model": 4, "n_heads": 2, "d_ff": 5, "n_ctx": 5, "vocab_size": 5}
    return shaken(cs.Transformer(cs.TransformerConfig(**{**small, "init_std": 0.3, **settings})))


class PlainNet(nn.Module):
    """Torch's own layers, a packed attention and a tied head: what a user brings."""

    def __init__(self, vocab: int = 5, d: int = 4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d, bias=False)
        self.final = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        pattern = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, -torch.inf).softmax(-1)
        return self.head(self.final(x + self.out(pattern @ v)))


class NormedMLP(nn.Module):
    """Linear, layer norm with weights, GELU, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.norm(self.up(x))))


@dataclass(frozen=True)
class Case:
    """A problem small enough for dense matrices."""

    name: str
    make: Callable[[], nn.Module]
    kind: str = "cross_entropy"
    inputs: tuple[str, int] = ("tokens", 5)  # what x is, and its width or vocabulary
    outputs: tuple[int, ...] = (4,)  # shape of one sequence's targets
    classes: int = 5
    weights: str = "none"  # none, sequence, term, integer
    ignored: int = 0


def _zoo(name: str, make: dict[str, Any], **rest: Any) -> Case:
    return Case(name, lambda: transformer(**make), **rest)


REAL = {"inputs": ("real", 4), "kind": "mse", "outputs": (4, 4)}
CASES = [
    _zoo("pre-layernorm-gelu-2layers", {"n_layers": 2, "d_ff": 4}),
    _zoo(
        "post-layernorm-relu-ignored", {"norm": "post", "activation": "relu", "positions": "none"}, ignored=4
    ),
    _zoo(
        "pre-rmsnorm-swiglu-rope-grouped",
        {
            "norm_kind": "rmsnorm",
            "activation": "swiglu",
            "positions": "rope",
            "n_kv_heads": 1,
            "bias_qkv": False,
            "bias_o": False,
        },
        weights="term",
    ),
    _zoo(
        "post-rmsnorm-plain-silu-bidirectional",
        {"norm": "post", "norm_kind": "rmsnorm", "norm_affine": False, "activation": "silu", "causal": False},
        kind="smoothed",
        ignored=3,
    ),
    _zoo(
        "no-norm-linear-gelu_tanh-tied",
        {"norm": "none", "attention": "linear", "activation": "gelu_tanh", "tied": True},
    ),
    _zoo(
        "merged-alibi-scaled-residual",
        {"merged_qk": True, "score_bias": "alibi", "residual_scale": 0.5, "positions": "none"},
        weights="sequence",
        ignored=2,
    ),
    _zoo(
        "score-bias-no-ff-tied",
        {"score_bias": "learned", "norm_affine": False, "d_ff": 0, "tied": True, "bias_u": True},
    ),
    _zoo(
        "real-to-real-identity",
        {
            "inputs": "continuous",
            "outputs": "regression",
            "d_in": 3,
            "n_out": 2,
            "norm": "none",
            "activation": "identity",
        },
        kind="mse",
        inputs=("real", 3),
        outputs=(4, 2),
        weights="sequence",
    ),
    _zoo(
        "stream-linear-no-residual",
        {
            "inputs": "continuous",
            "outputs": "regression",
            "norm": "none",
            "attention": "linear",
            "residual": False,
            "causal": False,
            "positions": "none",
            "activation": "relu",
        },
        **{**REAL, "kind": "mse_mean"},
        weights="sequence",
    ),
    _zoo(
        "patches-to-class",
        {
            "inputs": "patches",
            "outputs": "class",
            "n_out": 3,
            "image_size": 4,
            "causal": False,
            "activation": "silu",
        },
        kind="smoothed",
        inputs=("image", 4),
        outputs=(),
        classes=3,
    ),
    _zoo(
        "tokens-to-class-rope",
        {
            "outputs": "class",
            "n_out": 3,
            "positions": "rope",
            "causal": False,
            "activation": "swiglu",
            "bias_u": True,
        },
        outputs=(),
        classes=3,
        weights="integer",
    ),
    _zoo(
        "linear-merged-score-bias-post-rms",
        {
            "inputs": "continuous",
            "outputs": "regression",
            "attention": "linear",
            "merged_qk": True,
            "score_bias": "learned",
            "norm": "post",
            "norm_kind": "rmsnorm",
            "d_ff": 0,
        },
        **REAL,
    ),
    _zoo(
        "custom-loss-pre-layernorm",
        {"inputs": "continuous", "outputs": "regression", "n_out": 2, "d_ff": 4, "norm_affine": False},
        kind="custom",
        inputs=("real", 4),
        outputs=(4, 2),
    ),
    _zoo(
        "wide-heads",
        {"d_model": 3, "n_heads": 3, "d_head": 2, "n_kv_heads": 3, "bias_norm": False, "d_ff": 3},
    ),
    Case(
        "mlp-tokens-gelu",
        lambda: shaken(
            cs.MLP(
                cs.MLPConfig(d_in=3, d_hidden=4, d_out=5, depth=3, activation="gelu", bias=True, vocab_size=5)
            )
        ),
        ignored=2,
    ),
    Case(
        "mlp-relu-mse",
        lambda: shaken(cs.MLP(cs.MLPConfig(d_in=3, d_hidden=6, d_out=2))),
        kind="mse",
        inputs=("real", 3),
        outputs=(4, 2),
        weights="sequence",
    ),
    Case("plain-attention-tied", lambda: shaken(drawn(PlainNet), scale=0.2), ignored=3, weights="term"),
    Case(
        "plain-normed-mlp",
        lambda: shaken(drawn(NormedMLP)),
        kind="mse_mean",
        inputs=("real", 3),
        outputs=(4, 2),
    ),
]
CASE = {case.name: case for case in CASES}
NAMES = list(CASE)
NUM_SEQUENCES = 5


def make_data(case: Case, seed: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, targets and weights of NUM_SEQUENCES sequences of four positions."""
    source = torch.Generator().manual_seed(seed)
    B, (what, size) = NUM_SEQUENCES, case.inputs
    if what == "tokens":
        x = torch.randint(0, size, (B, 4), generator=source)
    else:
        x = torch.randn((B, 4, size) if what == "real" else (B, 1, size, size), generator=source).double()
    if case.kind in ("cross_entropy", "smoothed"):
        y = torch.randint(0, case.classes, (B, *case.outputs), generator=source)
        y.view(-1)[torch.randperm(y.numel(), generator=source)[: case.ignored]] = IGNORED
    else:
        y = torch.randn((B, *case.outputs), generator=source).double()
    shapes = {"none": None, "sequence": (B,), "term": tuple(y.shape), "integer": (B,)}
    shape = shapes[case.weights]
    if shape is None:
        return x, y, None
    w = torch.rand(shape, generator=source, dtype=torch.float64) + 0.2
    return x, y, (w * 4).long() if case.weights == "integer" else w


def cut(data: tuple[Tensor, Tensor, Tensor | None], sizes: Sequence[int]) -> Data:
    """The data in consecutive batches of these sizes."""
    x, y, w = data
    assert sum(sizes) == len(x)
    parts = [None] * len(sizes) if w is None else w.split(list(sizes))
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), parts, strict=True))


def as_batches(data: Data) -> cs.Batches:
    """The package's batches of that data."""
    return cs.Batches([cs.Batch(x, y, w) for x, y, w in data])


class Bench:
    """One case with its problem, its dense truth and what the package's operators say, all kept."""

    OPERATORS: ClassVar[dict[str, Any]] = {
        "hessian": cs.Hessian,
        "ggn": cs.GGN,
        "functional": cs.FunctionalHessian,
        "fisher": cs.EmpiricalFisher,
    }

    def __init__(self, case: Case):
        self.case, self.module = case, case.make()
        self.data = cut(make_data(case), [2, 3])
        self.model = cs.load(self.module)
        self.problem = cs.Problem(self.model, as_batches(self.data), as_package_loss(case.kind))
        self.dense = Dense(self.module, self.data, case.kind)
        self.order = torch.arange(len(self.dense.theta))  # vectors over a whole problem are in torch's order
        self._found: dict[str, Tensor] = {}

    def truth(self, name: str) -> Tensor:
        """A dense matrix in torch's order."""
        raw = getattr(self.dense, name)
        raw = raw() if callable(raw) else raw
        return raw[self.order][:, self.order]

    def operator(self, name: str) -> Any:
        return self.OPERATORS[name](self.problem)

    def found(self, name: str) -> Tensor:
        """The operator as a dense matrix."""
        if name not in self._found:
            self._found[name] = self.operator(name).to_dense()
        return self._found[name]

    def probe(self, *shape: int, seed: int = 5) -> Tensor:
        """Gaussian vectors of the problem's size."""
        source = torch.Generator().manual_seed(seed)
        return torch.randn(len(self.order), *shape, generator=source, dtype=torch.float64)


@cache
def bench(name: str) -> Bench:
    """The bench of a case, made once per run."""
    return Bench(CASE[name])
