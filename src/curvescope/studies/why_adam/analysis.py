"""Training, block curvature and statistics of the study `why_adam`.

Networks. Transformers and MLPs read the same sums and answer at the same positions. All have cross-entropy on
the digits of x + y, no biases except those of norms, and random weights given by a seed. Transformers of one
seed share every weight that they have in common. Merged queries and keys start as the product of the separate
ones, W_QK = W_Q W_Kᵀ for each head: the same function with other parameters.

Training. All seeds and learning rates train at once as one stack of parameters. The gradient of a stack is
vmap of the gradient of one network, and steps of Adam and SGD are elementwise, so the runs are independent.
Runs of one seed see the same batches. A run that diverges has infinite loss and does not affect others.

Curvature, exact from dense blocks. A block is a weight matrix. For the diagonal block A_b (n_b × n_b) of the
GGN or of the Hessian,

    size        mean |λ| of A_b; for the GGN this is tr A_b / n_b

    spectrum    all eigenvalues of A_b

    diagonal    |a_ii|

and a network has three measures of heterogeneity:

    sizes       between blocks: standard deviation over blocks of log₁₀ size

    spectra     between blocks: mean over pairs of the Jensen–Shannon divergence of spectra, in bits

    entries     within blocks: mean over blocks of the standard deviation of log₁₀ |a_ii| in one block

Zero entries (positions that no counted output depends on) have no logarithm and are left out.

Learning rates …, 0.01, 0.03, 0.1, 0.3, … form a grid that grows until the best rate is inside. The rate of a
seed is the one with the lowest mean final loss over the *other* seeds, so that a seed's noise cannot select
its own rate. A rate that diverges for one of them is not chosen.

Statistics. Seeds and configurations are both samples, and every number depends on one of each. The interval
of a correlation is therefore a bootstrap that draws both (Owen 2007), and the variance of a mean over P
configurations and S seeds is

    s²_P / P + s²_S / S,    s²_P of the means over seeds, s²_S of the means over configurations,

which counts the residual variance twice and so is not too small; Student's quantile has min(P, S) − 1 degrees
of freedom. With `fixed`, only the second term counts: a statement about these configurations alone, which
needs less data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from curvescope.runs.study_result import FAILS, HOLDS, OPEN
from curvescope.studies.common.statistics import Interval, above, crossed_bootstrap
from curvescope.studies.common.training import Move, Optimizer, adam, rate_of, sgd

if TYPE_CHECKING:
    from curvescope.studies.why_adam import study

HEADS = 2
EMBEDDED = 4  # embedding size of a token in an MLP, which concatenates the embeddings


class NetworkChoice(NamedTuple):
    """Properties of a configuration besides the shared size."""

    family: Literal["transformer", "mlp"]
    norm: bool
    attention: Literal["softmax", "linear"] = "softmax"
    merged: bool = False
    hidden: int = 0  # hidden layers of an MLP


def _choices() -> dict[str, NetworkChoice]:
    norms = {"norm": True, "bare": False}
    transformers = {
        f"{attention}-{'merged' if merged else 'single'}-{norm}": NetworkChoice(
            "transformer", norms[norm], attention, merged
        )
        for attention, merged, norm in product(("softmax", "linear"), (False, True), norms)
    }
    return transformers | {
        f"mlp{h}-{norm}": NetworkChoice("mlp", norms[norm], hidden=h) for h in (1, 3) for norm in norms
    }


CHOICES = _choices()
"""Configurations by name: eight Transformers, four MLPs."""
FACTORS = {"merged": ("single", "merged"), "linear": ("softmax", "linear"), "bare": ("norm", "bare")}
"""Words in the names of two configurations of a pair, before and after the change of one factor."""


def pairs(factor: str, names: list[str]) -> list[tuple[str, str]]:
    """Return pairs of configurations in `names` that differ in one factor only: before, after."""
    before, after = FACTORS[factor]
    return [(name, name.replace(before, after)) for name in names
            if before in name.split("-") and name.replace(before, after) in names]  # fmt: skip


@dataclass(frozen=True)
class NetworkSize(BaseConfig):
    """Properties that all networks of a run share."""

    width: int = 16  # width of the residual stream, and half of a hidden layer's
    layers: int = 1  # layers of a Transformer
    digits: int = 2

    @property
    def length(self) -> int:
        """Number of tokens of a sum."""
        return 3 * self.digits + 3


def network(choice: NetworkChoice, size: NetworkSize, seed: int) -> nn.Module:
    """Return a network that maps tokens (B, T) to logits (B, T, V), with the random weights of a seed."""
    if choice.family == "mlp":
        return PrefixMLP(size, choice.hidden, norm=choice.norm, seed=seed)
    single = _transformer(choice, size, seed, merged=False)
    return _merge(single, _transformer(choice, size, seed, merged=True)) if choice.merged else single


def _transformer(choice: NetworkChoice, size: NetworkSize, seed: int, *, merged: bool) -> Transformer:
    return Transformer(
        TransformerConfig(
            n_layers=size.layers, d_model=size.width, n_heads=HEADS, d_ff=2 * size.width, n_ctx=size.length,
            vocab_size=VOCAB_SIZE, attention=choice.attention, merged_qk=merged,
            norm="pre" if choice.norm else "none", bias_qkv=False, bias_o=False, bias_ff=False,
            init="scaled", seed=seed,
        )
    )  # fmt: skip


def _merge(single: Transformer, merged: Transformer) -> Transformer:
    """Return the merged network that computes the same function: W_QK,h = W_Q,h W_K,hᵀ."""
    own = single.state_dict()
    queries = [name for name in own if name.endswith("W_Q")]
    for name in queries:
        Q, K = (own.pop(key).unflatten(1, (HEADS, -1)) for key in (name, name[:-1] + "K"))
        own[name + "K"] = torch.einsum("ahk,bhk->ahb", Q, K).flatten(1)
    merged.load_state_dict(own)
    return merged


class PrefixMLP(nn.Module):
    """MLP that reads at position t the concatenated embeddings of tokens 0 … t, with zeros after t.

    It computes x W_1, then norm and activation, once per hidden layer, then U: tokens (B, T) to (B, T, V).
    Matrices are drawn from N(0, 1/rows), E from N(0, 1).
    """

    def __init__(self, size: NetworkSize, hidden: int, *, norm: bool, seed: int):
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

MOMENTUM = 0.9  # momentum of SGD


class FlatNetwork(NamedTuple):
    """A network as a function of one vector of n parameters."""

    network: nn.Module
    names: list[str]
    shapes: list[torch.Size]
    digits: int

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each parameter."""
        return [shape.numel() for shape in self.shapes]

    def tree(self, theta: Tensor) -> dict[str, Tensor]:
        """Split the vector (n,) into parameters."""
        parts = theta.split(self.sizes)
        return {name: part.view(shape) for name, part, shape in
                zip(self.names, parts, self.shapes, strict=True)}  # fmt: skip

    def logits(self, tree: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Logits at the positions that count, from "=" to the last but one: (B, D + 1, V)."""
        return functional_call(self.network, tree, (tokens,))[:, 2 * self.digits + 1 : -1]

    def loss_of(self, tree: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the digits of the sum, for a dict of parameters."""
        z, following = self.logits(tree, tokens), tokens[:, 2 * self.digits + 2 :]
        return nn.functional.cross_entropy(z.flatten(0, 1), following.flatten())

    def loss(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the digits of the sum, for a vector of parameters."""
        return self.loss_of(self.tree(theta), tokens)


def flatten(network: nn.Module, digits: int) -> tuple[FlatNetwork, Tensor]:
    """Return a network as a function of a vector, and its parameters (n,)."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    flat = FlatNetwork(network, list(parameters), [p.shape for p in parameters.values()], digits)
    return flat, torch.cat([p.flatten() for p in parameters.values()])


class TrainingRuns(NamedTuple):
    """Training runs of S seeds with R rates."""

    loss: Tensor  # (S, R, K) losses during training, infinite if not finite
    kept: Tensor  # (C, S, R, n) parameters at the checkpoints


def train(
    flat: FlatNetwork,
    start: Tensor,
    batches: Tensor,
    rates: Sequence[float],
    optimizer: Optimizer,
    *,
    evaluated: Tensor,
    looks: Sequence[int],
    checkpoints: Sequence[int],
) -> TrainingRuns:
    """Train from `start` (S, n) on the tokens `batches` (S, steps, B, T), with each rate and no schedule.

    Args:
        evaluated: tokens (N, T) on which the loss is measured.
        looks: steps after which the loss is measured; 0 is before training.
        checkpoints: steps after which parameters are stored.
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
    return TrainingRuns(found.nan_to_num(math.inf, math.inf), torch.stack(kept))


STEPS: dict[Optimizer, Callable[[Tensor, Tensor], Move]] = {
    "adam": adam,
    "sgd": partial(sgd, momentum=MOMENTUM),
}


# -------------------------------------------------------------------------------------------------- curvature

MEASURES = {
    "sizes": "between blocks, spread of log₁₀ mean |λ|",
    "spectra": "between blocks, mean divergence of spectra",
    "entries": "within blocks, spread of log₁₀ |diagonal|",
}
CHUNK = 128  # unit vectors multiplied at once
ZERO = 1e-12  # smaller entries are left out, relative to the largest entry of the block


@dataclass(frozen=True)
class BlockSpectra(Result):
    """Sizes, spectra and diagonals of the blocks of one network at given weights."""

    names: list[str]
    spectra: list[np.ndarray]  # (n_b,) each
    diagonals: list[np.ndarray]  # (n_b,) each

    @property
    def sizes(self) -> np.ndarray:
        """Mean |λ| of each block."""
        return np.array([np.abs(values).mean() for values in self.spectra])

    @property
    def heterogeneity(self) -> np.ndarray:
        """The three MEASURES of heterogeneity: (3,)."""
        divergences = [spectra_divergence(a, b) for a, b in combinations(self.spectra, 2)]
        within = [_spread_of_logs(values) for values in self.diagonals]
        return np.array([_spread_of_logs(self.sizes), np.mean(divergences), np.mean(within)])


def _spread_of_logs(values: np.ndarray) -> float:
    """Standard deviation of log₁₀ |x|, without zeros."""
    size = np.abs(values)
    return float(np.log10(size[size > ZERO * size.max(initial=0.0)]).std())


def ggn_blocks(flat: FlatNetwork, theta: Tensor, tokens: Tensor) -> BlockSpectra:
    """Compute the blocks of the GGN of the mean loss over the tokens (N, T).

    A_b = R_bᵀ R_b, with a row J_bᵀ √(p_c / M) (e_c − p) for each of the M counted digits and each class c. If
    a block has more entries than there are rows, its eigenvalues are those of R_b R_bᵀ, and zeros.
    """
    spectra, diagonals = [], []
    found = _ggn_rows(flat, theta, tokens)
    for R in found.values():
        short = R @ R.T if R.shape[0] < R.shape[1] else R.T @ R
        values = torch.linalg.eigvalsh(short).clamp(min=0.0).cpu().numpy()
        spectra.append(np.concatenate([np.zeros(R.shape[1] - len(values)), values]))
        diagonals.append((R * R).sum(0).cpu().numpy())
    return BlockSpectra(list(found), spectra, diagonals)


def _ggn_rows(flat: FlatNetwork, theta: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Return R_b (rows, n_b) for each block."""
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


def hessian_blocks(flat: FlatNetwork, theta: Tensor, tokens: Tensor) -> BlockSpectra:
    """Blocks of the Hessian of the mean loss over the tokens, from products with all unit vectors."""
    names, spectra, diagonals = [], [], []
    for name, A in _hessians(flat, theta, tokens):
        names.append(name)
        spectra.append(torch.linalg.eigvalsh(A / 2 + A.T / 2).cpu().numpy())
        diagonals.append(A.diagonal().cpu().numpy())
    return BlockSpectra(names, spectra, diagonals)


def _hessians(flat: FlatNetwork, theta: Tensor, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield A_b (n_b, n_b) block by block, with forward over reverse differentiation."""
    blocks, rest = _parted(flat, theta)
    for name, W in blocks.items():

        def slope(own: Tensor, name: str = name) -> Tensor:
            return grad(lambda w: flat.loss_of({**rest, **blocks, name: w}, tokens))(own)

        def column(v: Tensor, W: Tensor = W, slope=slope) -> Tensor:
            return jvp(slope, (W,), (v,))[1]

        units = torch.eye(W.numel()).to(W).reshape(-1, *W.shape)
        yield name, vmap(column, chunk_size=CHUNK)(units).flatten(1)


def _parted(flat: FlatNetwork, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split parameters into matrices, which are the blocks, and the rest: gains and shifts of norms."""
    tree = flat.tree(theta)
    blocks = {name: W for name, W in tree.items() if W.dim() == 2}
    return blocks, {name: w for name, w in tree.items() if name not in blocks}


# ----------------------------------------------------------------------------------------------------- tuning

FIRST = {"adam": (-5, -4, -3), "sgd": (-4, -3, -2, -1)}
"""Rungs of the ladder that are tried first; neighbors follow if the best rung is at an end."""
MOST = 6  # most rungs that a grid may grow by
LAST = 4  # number of last measurements whose mean is the final loss


@dataclass(frozen=True)
class TunedRuns(Result):
    """Runs of one configuration with one optimizer: S seeds and R rates, and the chosen rate of each seed."""

    rates: np.ndarray  # (R,)
    course: np.ndarray  # (S, R, K) loss on the evaluated sums
    chosen: np.ndarray  # (S,) index of the rate selected by the other seeds
    at_edge: bool  # True if a chosen rate is the first or the last of the final grid
    parameters: np.ndarray  # (C, S, n) of the chosen runs at the checkpoints; empty in the study's result

    @property
    def final(self) -> np.ndarray:
        """Mean loss of the last measurements, (S, R); infinite if a run diverged."""
        return self.course[..., -LAST:].mean(axis=-1)

    @property
    def loss(self) -> np.ndarray:
        """Final loss of the chosen run of each seed: (S,)."""
        return self.final[np.arange(len(self.chosen)), self.chosen]


def choose(final: np.ndarray) -> np.ndarray:
    """Return for each seed the rate with the lowest mean loss over the other seeds: (S, R) to (S,)."""
    total = np.stack([np.delete(final, s, axis=0).mean(axis=0) for s in range(len(final))])
    return total.argmin(axis=1)


def tune(first: tuple[int, ...], train: Callable[[list[float]], TrainingRuns]) -> TunedRuns:
    """Train with the first rates, then add rates beyond an end of the grid if a seed chose that end."""
    rungs = list(first)
    runs = train([rate_of(rung) for rung in rungs])
    for _ in range(MOST):
        picked = choose(_final(runs.loss))
        low, high = int(picked.min()) == 0, int(picked.max()) == len(rungs) - 1
        if not low and not high:
            break
        new = ([rungs[0] - 1] if low else []) + ([rungs[-1] + 1] if high else [])
        runs = _joined(runs, train([rate_of(rung) for rung in new]), low=low)
        rungs = sorted(rungs + new)
    picked = choose(_final(runs.loss))
    seeds = torch.arange(len(picked))
    return TunedRuns(
        rates=np.array([rate_of(rung) for rung in rungs]),
        course=runs.loss.double().cpu().numpy(),
        chosen=picked,
        at_edge=bool(picked.min() == 0 or picked.max() == len(rungs) - 1),
        parameters=runs.kept.cpu()[:, seeds, torch.as_tensor(picked)].numpy(),
    )


def _final(loss: Tensor) -> np.ndarray:
    return loss[..., -LAST:].double().mean(dim=-1).cpu().numpy()


def _joined(runs: TrainingRuns, new: TrainingRuns, *, low: bool) -> TrainingRuns:
    """Add runs with one rate before all others if `low`, and with one rate after them if there is another."""
    parts = []
    for old, fresh, axis in ((runs.loss, new.loss, 1), (runs.kept, new.kept, 2)):
        before, after = fresh.split([int(low), fresh.shape[axis] - int(low)], dim=axis)
        parts.append(torch.cat([before, old, after], dim=axis))
    return TrainingRuns(*parts)


def log_ratio(sgd: np.ndarray, adam: np.ndarray) -> np.ndarray:
    """log₁₀ (loss with SGD / loss with Adam), (S,); ±∞ if one diverged, nan if both did."""
    with np.errstate(invalid="ignore"):
        return np.log10(sgd) - np.log10(adam)


# ------------------------------------------------------------------------------------------------------- work

LOOKS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.925, 0.95, 0.975, 1.0)
"""Shares of a run after which the loss is measured; the final loss is the mean of the last four."""
CHECKPOINTS = (0.25, 0.5, 1.0)
"""Shares of a run after which curvature is measured."""
EVALUATED = 128  # sums on which the loss is measured
APART = 1000  # distance between the seeds of two runs of the study
OPTIMIZERS: tuple[Optimizer, ...] = ("adam", "sgd")
MOMENTS = ["start", *(f"{name} {share:.0%}" for name in OPTIMIZERS for share in CHECKPOINTS)]
"""Moments at which curvature is measured: before training, and along the chosen run of each optimizer."""


@dataclass(frozen=True)
class CurvatureMeasures(Result):
    """Heterogeneity of one configuration: M moments, S seeds, the three MEASURES."""

    blocks: list[str]
    num_parameters: int
    ggn: np.ndarray  # (M, S, 3) nan if a run diverged
    hessian: np.ndarray  # (S, 3) at the start
    ggn_sizes: np.ndarray  # (S, B) mean |λ| of each block at the start
    hessian_sizes: np.ndarray  # (S, B)


def starts(cfg: study.Config, name: str, dtype: torch.dtype = torch.float32) -> tuple[FlatNetwork, Tensor]:
    """Return a configuration as a function, and the weights of every seed: (S, n)."""
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
    """Draw the tokens of all steps of every seed: (S, steps, B, T), new for each step."""
    profile = cfg.profile
    shape = (profile.steps, profile.batch_size, profile.size.length)
    count = profile.steps * profile.batch_size
    return torch.stack([_sums(cfg, count, seed).reshape(shape) for seed in seeds(cfg)])


def evaluated(cfg: study.Config) -> Tensor:
    """Draw the sums on which the loss is measured, the same for all runs: (N, T)."""
    return _sums(cfg, EVALUATED, APART * (cfg.seed + 1) - 1)


def _sums(cfg: study.Config, count: int, seed: int) -> Tensor:
    drawn = addition(num_sequences=count, digits=cfg.profile.size.digits, seed=seed)
    return drawn[0].inputs.to(cfg.device)


def tuned(cfg: study.Config, name: str, optimizer: Optimizer) -> TunedRuns:
    """Tune a configuration with an optimizer: train all seeds with all rates."""
    flat, start = starts(cfg, name)
    data, sums = batches(cfg), evaluated(cfg)
    looks, checkpoints = cfg.after(LOOKS), cfg.after(CHECKPOINTS)

    def run(rates: list[float]) -> TrainingRuns:
        return train(
            flat, start, data, rates, optimizer, evaluated=sums, looks=looks, checkpoints=checkpoints
        )

    return tune(FIRST[optimizer], run)


def measured(cfg: study.Config, name: str, adam: Result, sgd: Result) -> CurvatureMeasures:
    """Measure curvature at the start and along the chosen runs, in double precision."""
    assert isinstance(adam, TunedRuns)
    assert isinstance(sgd, TunedRuns)
    flat, start = starts(cfg, name, torch.float64)
    tokens = evaluated(cfg)[: cfg.measured]
    along = [torch.as_tensor(kept).to(start) for run in (adam, sgd) for kept in run.parameters]
    first = [ggn_blocks(flat, theta, tokens) for theta in start]
    exact = [hessian_blocks(flat, theta, tokens) for theta in start]
    return CurvatureMeasures(
        blocks=first[0].names,
        num_parameters=start.shape[1],
        ggn=np.stack([_stacked(first), *([_later(flat, theta, tokens) for theta in kept] for kept in along)]),
        hessian=_stacked(exact),
        ggn_sizes=np.stack([one.sizes for one in first]),
        hessian_sizes=np.stack([one.sizes for one in exact]),
    )


def _stacked(blocks: list[BlockSpectra]) -> np.ndarray:
    return np.stack([network.heterogeneity for network in blocks])


def _later(flat: FlatNetwork, theta: Tensor, tokens: Tensor) -> np.ndarray:
    """Return the heterogeneity of a run, or nan if it diverged."""
    if not bool(torch.isfinite(flat.loss(theta, tokens))):
        return np.full(len(MEASURES), np.nan)
    return ggn_blocks(flat, theta, tokens).heterogeneity


# ------------------------------------------------------------------------------------------------- comparison


def correlation(x: np.ndarray, y: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Spearman's ρ over configurations of means over seeds; x and y are (configurations, S).

    Configurations without a finite value are left out.
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
    """Verdict on whether two changes have the same sign; open unless both are decided."""
    signs = {above(interval) for interval in (one, other)}
    return OPEN if OPEN in signs else HOLDS if len(signs) == 1 else FAILS


def words(interval: Interval) -> str:
    """Format an interval, such as `+0.31 [+0.05, +0.52]`."""
    mean, low, high = interval
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if math.isfinite(mean) else "a run diverged"
