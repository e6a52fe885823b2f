"""The networks that are trained: Transformers and MLPs that read the same sums and answer at the same places.

All have cross-entropy on the digits of x + y, no biases but those of norms, and weights of a seed.
Transformers of one seed share every weight that they have in common, and merged queries and keys begin as the
product of the single ones, W_QK = W_Q W_Kᵀ for each head: the same function with other parameters.

Many runs at once: every seed with every learning rate, as one stack of parameters.

The gradient of a stack is vmap of the gradient of one network, the steps of Adam and of SGD go entry by
entry, so a run does not know of the others. Runs of one seed take the same batches. A run that diverges has a
loss of infinity and disturbs no other.

How different the curvature of blocks is, and of the entries of one: exact, from dense blocks.

A block is a weight matrix. Of the diagonal block A_b (n_b × n_b) of the GGN or of the Hessian there are

    size        mean |λ| of A_b; of the GGN that is tr A_b / n_b
    spectrum    all eigenvalues of A_b
    diagonal    |a_ii|

and of a network three numbers of heterogeneity:

    sizes       between blocks: standard deviation over blocks of log₁₀ size
    spectra     between blocks: mean over pairs of the Jensen–Shannon divergence of spectra, in bits
    entries     within blocks: mean over blocks of the standard deviation of log₁₀ |a_ii| inside one

Entries that are zero, a position that no counted output sees, have no logarithm and are left out.

Learning rates: a grid that grows until the best one is inside, and a choice that does not judge itself.

Rates are …, 0.01, 0.03, 0.1, 0.3, … . The rate of a seed is the one with the lowest mean of the final losses
of the *other* seeds, so that the noise that chooses is not the noise that is judged. A rate that diverges for
one of them is not chosen.

Heterogeneity beside the gap, over configurations and seeds: rank correlations and paired changes.

Seeds and configurations could both have been others, and every number depends on one of each. So a
correlation's interval is that of a bootstrap that draws both (Owen 2007), and the variance of a mean over P
configurations and S seeds is

    s²_P / P + s²_S / S,    s²_P of the means over seeds, s²_S of the means over configurations,

which counts what is left of both twice and is not too small; Student's quantile has min(P, S) − 1 degrees of
freedom. Of these very configurations, `fixed`, there is the second term alone: a statement about them that
is decided sooner, and that says nothing of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from curvescope.algorithms.blocks.heterogeneity import spectra_divergence
from curvescope.algorithms.estimates.ranks import FEWEST, Correlation, spearman
from curvescope.core.config import Config as BaseConfig
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.tasks.algorithmic import VOCAB_SIZE, addition
from curvescope.models.zoo.transformer import ACTIVATIONS, Norm, Transformer, TransformerConfig
from curvescope.runs.shown import FAILS, HOLDS, OPEN
from curvescope.studies.common.statistics import Interval, above, crossed_bootstrap

if TYPE_CHECKING:
    from curvescope.studies.why_adam import study

HEADS = 2
EMBEDDED = 4  # entries of a token in an MLP, which has them side by side


class Choice(NamedTuple):
    """What a configuration is, beside the size that all share."""

    family: Literal["transformer", "mlp"]
    norm: bool
    attention: Literal["softmax", "linear"] = "softmax"
    merged: bool = False
    hidden: int = 0  # layers of an MLP


def _choices() -> dict[str, Choice]:
    norms = {"norm": True, "bare": False}
    found = {
        f"{attention}-{'merged' if merged else 'single'}-{norm}": Choice(
            "transformer", norms[norm], attention, merged
        )
        for attention, merged, norm in product(("softmax", "linear"), (False, True), norms)
    }
    return found | {f"mlp{h}-{norm}": Choice("mlp", norms[norm], hidden=h) for h in (1, 3) for norm in norms}


CHOICES = _choices()
"""The configurations by name: eight Transformers, four MLPs."""
FACTORS = {"merged": ("single", "merged"), "linear": ("softmax", "linear"), "bare": ("norm", "bare")}
"""What two configurations of a pair differ in: the words in their names, before and after."""


def pairs(factor: str, names: list[str]) -> list[tuple[str, str]]:
    """Configurations of `names` that differ in one factor alone: before, after."""
    before, after = FACTORS[factor]
    return [(name, name.replace(before, after)) for name in names
            if before in name.split("-") and name.replace(before, after) in names]  # fmt: skip


@dataclass(frozen=True)
class Size(BaseConfig):
    """What all networks of a run have in common."""

    width: int = 16  # of the stream, and half of a hidden layer
    layers: int = 1  # of a Transformer
    digits: int = 2

    @property
    def length(self) -> int:
        """Tokens of a sum."""
        return 3 * self.digits + 3


def network(choice: Choice, size: Size, seed: int) -> nn.Module:
    """Tokens (B, T) to logits (B, T, V), at the random weights of a seed."""
    if choice.family == "mlp":
        return PrefixMLP(size, choice.hidden, norm=choice.norm, seed=seed)
    single = _transformer(choice, size, seed, merged=False)
    return _merge(single, _transformer(choice, size, seed, merged=True)) if choice.merged else single


def _transformer(choice: Choice, size: Size, seed: int, *, merged: bool) -> Transformer:
    return Transformer(
        TransformerConfig(
            n_layers=size.layers, d_model=size.width, n_heads=HEADS, d_ff=2 * size.width, n_ctx=size.length,
            vocab_size=VOCAB_SIZE, attention=choice.attention, merged_qk=merged,
            norm="pre" if choice.norm else "none", bias_qkv=False, bias_o=False, bias_ff=False,
            init="scaled", seed=seed,
        )
    )  # fmt: skip


def _merge(single: Transformer, merged: Transformer) -> Transformer:
    """The merged network with the function of the single one: W_QK,h = W_Q,h W_K,hᵀ."""
    own = single.state_dict()
    queries = [name for name in own if name.endswith("W_Q")]
    for name in queries:
        Q, K = (own.pop(key).unflatten(1, (HEADS, -1)) for key in (name, name[:-1] + "K"))
        own[name + "K"] = torch.einsum("ahk,bhk->ahb", Q, K).flatten(1)
    merged.load_state_dict(own)
    return merged


class PrefixMLP(nn.Module):
    """At position t an MLP of the embeddings of tokens 0 … t, side by side, with zeros after t.

    x W_1, then norm and activation, as often as there are hidden layers, then U: tokens (B, T) to (B, T, V).
    Matrices are drawn from N(0, 1/rows), E from N(0, 1).
    """

    def __init__(self, size: Size, hidden: int, *, norm: bool, seed: int):
        super().__init__()
        T, H, source = size.length, 2 * size.width, generator(seed)
        self.hidden, self.norm = hidden, norm
        self.E = nn.Parameter(torch.randn(VOCAB_SIZE, EMBEDDED, generator=source))
        for i in range(1, hidden + 1):
            rows = T * EMBEDDED if i == 1 else H
            self.register_parameter(f"W_{i}", _drawn(rows, H, source))
            if norm:
                self.add_module(f"ln{i}", Norm(TransformerConfig(d_model=H, n_heads=1)))
        self.U = _drawn(H, VOCAB_SIZE, source)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.E)
        T = x.shape[1]
        seen = torch.ones(T, T, dtype=x.dtype, device=x.device).tril()
        x = (x[:, None] * seen[:, :, None]).flatten(2)
        for i in range(1, self.hidden + 1):
            x = x @ getattr(self, f"W_{i}")
            x = ACTIVATIONS["gelu"](self.get_submodule(f"ln{i}")(x) if self.norm else x)
        return x @ self.U


def _drawn(rows: int, columns: int, source: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=source) / math.sqrt(rows))


# --------------------------------------------------------------------------------------------------- ensemble

Optimizer = Literal["adam", "sgd"]
MOMENTUM = 0.9  # of SGD
BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam


class Flat(NamedTuple):
    """A network as a function of one vector of n parameters."""

    network: nn.Module
    names: list[str]
    shapes: list[torch.Size]
    digits: int

    @property
    def sizes(self) -> list[int]:
        """Entries of each parameter."""
        return [shape.numel() for shape in self.shapes]

    def tree(self, theta: Tensor) -> dict[str, Tensor]:
        """The vector (n,), cut into parameters."""
        parts = theta.split(self.sizes)
        return {name: part.view(shape) for name, part, shape in
                zip(self.names, parts, self.shapes, strict=True)}  # fmt: skip

    def logits(self, tree: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """At the positions that count, from "=" to the last but one: (B, D + 1, V)."""
        return functional_call(self.network, tree, (tokens,))[:, 2 * self.digits + 1 : -1]

    def loss_of(self, tree: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the digits of the sum."""
        z, following = self.logits(tree, tokens), tokens[:, 2 * self.digits + 2 :]
        return nn.functional.cross_entropy(z.flatten(0, 1), following.flatten())

    def loss(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """The same, of a vector."""
        return self.loss_of(self.tree(theta), tokens)


def flatten(network: nn.Module, digits: int) -> tuple[Flat, Tensor]:
    """A network as a function, and its parameters (n,)."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    flat = Flat(network, list(parameters), [p.shape for p in parameters.values()], digits)
    return flat, torch.cat([p.flatten() for p in parameters.values()])


class Courses(NamedTuple):
    """Runs of S seeds with R rates."""

    loss: Tensor  # (S, R, K) at the looks, infinite where it is not finite
    kept: Tensor  # (C, S, R, n) parameters at the checkpoints


def train(
    flat: Flat,
    start: Tensor,
    batches: Tensor,
    rates: Sequence[float],
    optimizer: Optimizer,
    *,
    evaluated: Tensor,
    looks: Sequence[int],
    checkpoints: Sequence[int],
) -> Courses:
    """Train from `start` (S, n) on the tokens `batches` (S, steps, B, T), with each rate and no schedule.

    Args:
        evaluated: tokens (N, T) whose loss is looked at.
        looks: steps after which it is; 0 is before the first.
        checkpoints: steps after which parameters are kept.
    """
    steps = batches.shape[1]
    theta = start[:, None].repeat(1, len(rates), 1)
    lr = torch.tensor(list(rates), dtype=theta.dtype, device=theta.device)[:, None]
    move = STEPS[optimizer](theta, lr)
    gradient = vmap(vmap(grad(flat.loss), in_dims=(0, None)), in_dims=(0, 0))
    value = vmap(vmap(flat.loss, in_dims=(0, None)), in_dims=(0, None))
    losses, kept = [], []
    for step in range(steps + 1):
        if step in looks:
            losses.append(value(theta, evaluated))
        if step in checkpoints:
            kept.append(theta)
        if step < steps:
            theta = move(theta, gradient(theta, batches[:, step]))
    found = torch.stack(losses, dim=-1)
    return Courses(found.nan_to_num(math.inf, math.inf), torch.stack(kept))


Move = Callable[[Tensor, Tensor], Tensor]
"""Parameters and gradients, (S, R, n) each, to the parameters after a step."""


def adam(theta: Tensor, lr: Tensor) -> Move:
    """θ − η m̂ / (√v̂ + ε), as torch.optim.Adam."""
    m, v, count = torch.zeros_like(theta), torch.zeros_like(theta), 0
    first, second = BETAS

    def move(theta: Tensor, g: Tensor) -> Tensor:
        nonlocal count
        count += 1
        m.lerp_(g, 1 - first)
        v.mul_(second).addcmul_(g, g, value=1 - second)
        root = v.sqrt().div_(math.sqrt(1 - second**count)).add_(EPS)
        return theta - lr / (1 - first**count) * m / root

    return move


def sgd(theta: Tensor, lr: Tensor) -> Move:
    """θ − η b with b ← 0.9 b + g, as torch.optim.SGD with momentum."""
    b = torch.zeros_like(theta)

    def move(theta: Tensor, g: Tensor) -> Tensor:
        return theta - lr * b.mul_(MOMENTUM).add_(g)

    return move


STEPS: dict[Optimizer, Callable[[Tensor, Tensor], Move]] = {"adam": adam, "sgd": sgd}


# -------------------------------------------------------------------------------------------------- curvature

MEASURES = {
    "sizes": "between blocks, spread of log₁₀ mean |λ|",
    "spectra": "between blocks, mean divergence of spectra",
    "entries": "within blocks, spread of log₁₀ |diagonal|",
}
CHUNK = 128  # unit vectors at a time
ZERO = 1e-12  # of the largest entry of its block: what is left out


@dataclass(frozen=True)
class Blocks(Result):
    """Sizes, spectra and diagonals of the blocks of one network with its weights."""

    names: list[str]
    spectra: list[np.ndarray]  # (n_b,) each
    diagonals: list[np.ndarray]  # (n_b,) each

    @property
    def sizes(self) -> np.ndarray:
        """Mean |λ| of each block."""
        return np.array([np.abs(values).mean() for values in self.spectra])

    @property
    def heterogeneity(self) -> np.ndarray:
        """The MEASURES, (3,)."""
        divergences = [spectra_divergence(a, b) for a, b in combinations(self.spectra, 2)]
        within = [_spread_of_logs(values) for values in self.diagonals]
        return np.array([_spread_of_logs(self.sizes), np.mean(divergences), np.mean(within)])


def _spread_of_logs(values: np.ndarray) -> float:
    """Standard deviation of log₁₀ |x|, without zeros."""
    size = np.abs(values)
    return float(np.log10(size[size > ZERO * size.max(initial=0.0)]).std())


def ggn_blocks(flat: Flat, theta: Tensor, tokens: Tensor) -> Blocks:
    """Of the GGN of the mean loss over the tokens (N, T).

    A_b = R_bᵀ R_b with a row J_bᵀ √(p_c / M) (e_c − p) for each of the M counted digits and each class c.
    Where a block has more entries than there are rows, its eigenvalues are those of R_b R_bᵀ, and zeros.
    """
    spectra, diagonals = [], []
    found = _ggn_rows(flat, theta, tokens)
    for R in found.values():
        short = R @ R.T if R.shape[0] < R.shape[1] else R.T @ R
        values = torch.linalg.eigvalsh(short).clamp(min=0.0).cpu().numpy()
        spectra.append(np.concatenate([np.zeros(R.shape[1] - len(values)), values]))
        diagonals.append((R * R).sum(0).cpu().numpy())
    return Blocks(list(found), spectra, diagonals)


def _ggn_rows(flat: Flat, theta: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """R_b (rows, n_b) of each block."""
    blocks, rest = _parted(flat, theta)

    def rows(sequence: Tensor) -> dict[str, Tensor]:
        z, pull, *_ = vjp(lambda own: flat.logits({**rest, **own}, sequence[None])[0], blocks)
        D, V = z.shape
        p = z.softmax(-1)
        own = p.sqrt()[:, :, None] * (torch.eye(V).to(p) - p[:, None])  # (D, c, V)
        placed = torch.einsum("dcv,de->dcev", own, torch.eye(D).to(p)).reshape(D * V, D, V)
        return vmap(lambda r: pull(r)[0])(placed)

    count = len(tokens) * (flat.digits + 1)
    return {name: part.reshape(-1, blocks[name].numel()) / count**0.5
            for name, part in vmap(rows)(tokens).items()}  # fmt: skip


def hessian_blocks(flat: Flat, theta: Tensor, tokens: Tensor) -> Blocks:
    """Of the Hessian of the mean loss over the tokens, from products with all unit vectors of a block."""
    names, spectra, diagonals = [], [], []
    for name, A in _hessians(flat, theta, tokens):
        names.append(name)
        spectra.append(torch.linalg.eigvalsh(A / 2 + A.T / 2).cpu().numpy())
        diagonals.append(A.diagonal().cpu().numpy())
    return Blocks(names, spectra, diagonals)


def _hessians(flat: Flat, theta: Tensor, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A_b (n_b, n_b) of one block after the other; forward over reverse."""
    blocks, rest = _parted(flat, theta)
    for name, W in blocks.items():

        def slope(own: Tensor, name: str = name) -> Tensor:
            return grad(lambda w: flat.loss_of({**rest, **blocks, name: w}, tokens))(own)

        def column(v: Tensor, W: Tensor = W, slope=slope) -> Tensor:
            return jvp(slope, (W,), (v,))[1]

        units = torch.eye(W.numel()).to(W).reshape(-1, *W.shape)
        yield name, vmap(column, chunk_size=CHUNK)(units).flatten(1)


def _parted(flat: Flat, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Matrices, which are the blocks, and the rest: gains and shifts of norms."""
    tree = flat.tree(theta)
    blocks = {name: W for name, W in tree.items() if W.dim() == 2}
    return blocks, {name: w for name, w in tree.items() if name not in blocks}


# ----------------------------------------------------------------------------------------------------- tuning

FIRST = {"adam": (-5, -4, -3), "sgd": (-4, -3, -2, -1)}
"""Rungs of the ladder that are tried first; those beside them follow where the best is an end."""
MOST = 6  # rungs that a grid may grow by
LAST = 4  # looks whose mean is the final loss


def rate_of(rung: int) -> float:
    """… −2: 0.1, −1: 0.3, 0: 1, 1: 3, …"""
    power, half = divmod(rung, 2)
    return float(f"{3 if half else 1}e{power}")


@dataclass(frozen=True)
class Tuned(Result):
    """Runs of one configuration with one optimizer: S seeds, R rates, what the chosen ones kept."""

    rates: np.ndarray  # (R,)
    course: np.ndarray  # (S, R, K) loss on the evaluated sums
    chosen: np.ndarray  # (S,) index of the rate that the other seeds choose
    at_edge: bool  # a chosen rate is the first or the last, and the grid has stopped growing
    parameters: np.ndarray  # (C, S, n) of the chosen runs at the checkpoints; empty in the study's result

    @property
    def final(self) -> np.ndarray:
        """Mean loss of the last looks, (S, R); infinite where a run diverged."""
        return self.course[..., -LAST:].mean(axis=-1)

    @property
    def loss(self) -> np.ndarray:
        """Final loss of the chosen run of each seed, (S,)."""
        return self.final[np.arange(len(self.chosen)), self.chosen]


def choose(final: np.ndarray) -> np.ndarray:
    """For each seed the rate with the lowest mean over the others: (S, R) to (S,), the smaller of equals."""
    total = np.stack([np.delete(final, s, axis=0).mean(axis=0) for s in range(len(final))])
    return total.argmin(axis=1)


def tune(first: tuple[int, ...], train: Callable[[list[float]], Courses]) -> Tuned:
    """Train with the first rates, then with further ones at an end where a seed has chosen it."""
    rungs = list(first)
    found = train([rate_of(rung) for rung in rungs])
    for _ in range(MOST):
        picked = choose(_final(found.loss))
        low, high = int(picked.min()) == 0, int(picked.max()) == len(rungs) - 1
        if not low and not high:
            break
        new = ([rungs[0] - 1] if low else []) + ([rungs[-1] + 1] if high else [])
        found = _joined(found, train([rate_of(rung) for rung in new]), low=low)
        rungs = sorted(rungs + new)
    picked = choose(_final(found.loss))
    seeds = torch.arange(len(picked))
    return Tuned(
        rates=np.array([rate_of(rung) for rung in rungs]),
        course=found.loss.double().cpu().numpy(),
        chosen=picked,
        at_edge=bool(picked.min() == 0 or picked.max() == len(rungs) - 1),
        parameters=found.kept.cpu()[:, seeds, torch.as_tensor(picked)].numpy(),
    )


def _final(loss: Tensor) -> np.ndarray:
    return loss[..., -LAST:].double().mean(dim=-1).cpu().numpy()


def _joined(found: Courses, new: Courses, *, low: bool) -> Courses:
    """One rate before all others where `low`, one after them where there is another."""
    parts = []
    for old, fresh, axis in ((found.loss, new.loss, 1), (found.kept, new.kept, 2)):
        before, after = fresh.split([int(low), fresh.shape[axis] - int(low)], dim=axis)
        parts.append(torch.cat([before, old, after], dim=axis))
    return Courses(*parts)


def log_ratio(sgd: np.ndarray, adam: np.ndarray) -> np.ndarray:
    """log₁₀ (loss with SGD / loss with Adam), (S,); ±∞ where one has diverged, nan where both have."""
    with np.errstate(invalid="ignore"):
        return np.log10(sgd) - np.log10(adam)


# ------------------------------------------------------------------------------------------------------- work

LOOKS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.925, 0.95, 0.975, 1.0)
"""Shares of a run after which its loss is looked at; the mean of the last four is the final loss."""
CHECKPOINTS = (0.25, 0.5, 1.0)
"""Shares after which curvature is measured."""
EVALUATED = 128  # sums whose loss is looked at
APART = 1000  # seeds of one run of the study and of the next
OPTIMIZERS: tuple[Optimizer, ...] = ("adam", "sgd")
MOMENTS = ["start", *(f"{name} {share:.0%}" for name in OPTIMIZERS for share in CHECKPOINTS)]
"""When curvature is measured: before training, and along the chosen run of each optimizer."""


@dataclass(frozen=True)
class Measured(Result):
    """Heterogeneity of one configuration: M moments, S seeds, the MEASURES."""

    blocks: list[str]
    num_parameters: int
    ggn: np.ndarray  # (M, S, 3) nan where a run diverged
    hessian: np.ndarray  # (S, 3) at the start
    ggn_sizes: np.ndarray  # (S, B) mean |λ| of each block at the start
    hessian_sizes: np.ndarray  # (S, B)


def starts(cfg: study.Config, name: str, dtype: torch.dtype = torch.float32) -> tuple[Flat, Tensor]:
    """A configuration as a function, and the weights of every seed, (S, n)."""
    flats, weights = zip(
        *(
            flatten(network(CHOICES[name], cfg.profile.size, seed), cfg.profile.size.digits)
            for seed in seeds(cfg)
        ),
        strict=True,
    )
    return flats[0], torch.stack(weights).to(cfg.device, dtype)


def seeds(cfg: study.Config) -> range:
    """Seeds of weights and batches."""
    return range(APART * cfg.seed, APART * cfg.seed + cfg.profile.seeds)


def batches(cfg: study.Config) -> Tensor:
    """Tokens of all steps of every seed, (S, steps, B, T): drawn anew for each step."""
    profile = cfg.profile
    shape = (profile.steps, profile.batch_size, profile.size.length)
    count = profile.steps * profile.batch_size
    return torch.stack([_sums(cfg, count, seed).reshape(shape) for seed in seeds(cfg)])


def evaluated(cfg: study.Config) -> Tensor:
    """The sums whose loss is looked at, the same for all runs: (N, T)."""
    return _sums(cfg, EVALUATED, APART * (cfg.seed + 1) - 1)


def _sums(cfg: study.Config, count: int, seed: int) -> Tensor:
    drawn = addition(num_sequences=count, digits=cfg.profile.size.digits, seed=seed)
    return drawn[0].inputs.to(cfg.device)


def tuned(cfg: study.Config, name: str, optimizer: Optimizer) -> Tuned:
    """All runs of a configuration with an optimizer."""
    flat, start = starts(cfg, name)
    data, looked_at = batches(cfg), evaluated(cfg)
    looks, checkpoints = cfg.after(LOOKS), cfg.after(CHECKPOINTS)

    def run(rates: list[float]) -> Courses:
        return train(
            flat, start, data, rates, optimizer, evaluated=looked_at, looks=looks, checkpoints=checkpoints
        )

    return tune(FIRST[optimizer], run)


def measured(cfg: study.Config, name: str, adam: Result, sgd: Result) -> Measured:
    """Curvature at the start and along the chosen runs, in double precision."""
    assert isinstance(adam, Tuned)
    assert isinstance(sgd, Tuned)
    flat, start = starts(cfg, name, torch.float64)
    tokens = evaluated(cfg)[: cfg.measured]
    along = [torch.as_tensor(kept).to(start) for run in (adam, sgd) for kept in run.parameters]
    first = [ggn_blocks(flat, theta, tokens) for theta in start]
    exact = [hessian_blocks(flat, theta, tokens) for theta in start]
    return Measured(
        blocks=first[0].names,
        num_parameters=start.shape[1],
        ggn=np.stack([_stacked(first), *([_later(flat, theta, tokens) for theta in kept] for kept in along)]),
        hessian=_stacked(exact),
        ggn_sizes=np.stack([one.sizes for one in first]),
        hessian_sizes=np.stack([one.sizes for one in exact]),
    )


def _stacked(found: list[Blocks]) -> np.ndarray:
    return np.stack([one.heterogeneity for one in found])


def _later(flat: Flat, theta: Tensor, tokens: Tensor) -> np.ndarray:
    """Of a run that may have diverged."""
    if not bool(torch.isfinite(flat.loss(theta, tokens))):
        return np.full(len(MEASURES), np.nan)
    return ggn_blocks(flat, theta, tokens).heterogeneity


# ------------------------------------------------------------------------------------------------- comparison


def correlation(x: np.ndarray, y: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Spearman's ρ over configurations of means over seeds: x and y are (configurations, S).

    Configurations without a number are left out.
    """
    known = ~np.isnan(x + y).any(axis=1)
    x, y = x[known], y[known]
    C, S = x.shape
    value = float(spearman(x.mean(axis=1), y.mean(axis=1)))
    if C < FEWEST:
        return Correlation(value, math.nan, math.nan, C * S, C)

    def of_means(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return spearman(a.mean(axis=-1), b.mean(axis=-1))

    return crossed_bootstrap(of_means, x, y, draws=draws, seed=seed, groups=C)


def together(one: Interval, other: Interval) -> str:
    """Whether two changes go the same way, both of them decided."""
    signs = {above(interval) for interval in (one, other)}
    return OPEN if OPEN in signs else HOLDS if len(signs) == 1 else FAILS


def words(interval: Interval) -> str:
    """`+0.31 [+0.05, +0.52]`."""
    mean, low, high = interval
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if math.isfinite(mean) else "a run diverged"
