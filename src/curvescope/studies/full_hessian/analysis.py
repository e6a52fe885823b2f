"""Network of the study and its training: a one-block Vision Transformer, post-norm, mean-pooled.

Stripe of the query–key block: the share that is a Kronecker product of a matrix with the identity over d_K.

With entries (r, t) of W_Q and (r', t') of W_K, t the coordinate of a key, the functional Hessian of the
block has the term s (Σ_i x_i (Σ_i u_i)ᵀ) ⊗ I, which is nonzero only at t = t' (Ormaniec et al., Theorem
3.2).

Full Hessian matrix: computed from products with all unit vectors, and summarized.

The matrix is symmetric, so the columns of a block are computed only at rows of later blocks. Most columns
belong to the feed-forward network, and products between later blocks do not run the attention. This takes
half the time of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.blocks.probes import own_probes
from curvescope.algorithms.columns import columns_at_once, to_numpy
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks.pictures import Pictures, pictures
from curvescope.models.model import Model
from curvescope.models.zoo.folder import zoo_model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.train import Stream, TrainConfig, train
from curvescope.viz.matrix import colors

if TYPE_CHECKING:
    from curvescope.studies.full_hessian.study import Config

MOST_IMAGES = 10_000  # default number of images of a large dataset
SMALL, SMALL_PATCH, PATCH = 8, 2, 4  # images of 8 × 8 have patches of 2 × 2, others of 4 × 4
EVALUATIONS = 100  # number of evaluations of the validation accuracy
SLOW_START = 50  # warm-up steps, fewer in short training runs
PATH = (
    "E", "P", "L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O", "L0.ln1.g", "L0.ln1.b",
    "L0.W_1", "L0.b_1", "L0.W_2", "L0.b_2", "L0.ln2.g", "L0.ln2.b", "U", "b_U",
)  # fmt: skip
"""Blocks in order from input to output."""


@dataclass(frozen=True)
class Trained(Result):
    """Training run of one network: weights as vectors over all blocks, in the order of the model."""

    seed: int
    steps: np.ndarray  # (S,) steps after which weights are stored
    weights: np.ndarray  # (S, n)
    trained_step: int  # first evaluated step with enough accuracy, or the last step
    trained_weights: np.ndarray  # (n,)
    reached: bool  # True if the accuracy was reached
    evaluated: np.ndarray  # (A,) steps
    accuracy: np.ndarray  # (A,) validation accuracy
    loss: np.ndarray  # (steps,) loss on the batch of each step

    @property
    def trained_accuracy(self) -> float:
        """Validation accuracy at the trained step."""
        return float(self.accuracy[self.evaluated == self.trained_step][0])


def read_pictures(cfg: Config) -> Pictures:
    """Read the images for all networks, split into training and validation with the first seed."""
    num = cfg.num_images if cfg.data == "digits" or cfg.num_images is not None else MOST_IMAGES
    found = pictures(cfg.data, num=num, seed=cfg.seed)
    if cfg.batch_size > len(found.classes):
        raise UsageError(f"batch_size: expected at most {len(found.classes)} images, got {cfg.batch_size}")
    return found


def make_model(cfg: Config, seed: int, data: Pictures) -> Model:
    """Build a new network; attention has no biases, as in the paper's formulas."""
    channels, size = data.images.shape[1:3]
    patch = cfg.patch_size if cfg.patch_size is not None else SMALL_PATCH if size <= SMALL else PATCH
    if not 1 <= patch <= size or size % patch:
        raise UsageError(f"patch_size: expected a divisor of the image size {size}, got {patch}")
    if cfg.d_model % cfg.n_heads:
        raise UsageError(f"n_heads: expected a divisor of d_model={cfg.d_model}, got {cfg.n_heads}")
    zoo = TransformerConfig(
        n_layers=1, d_model=cfg.d_model, n_heads=cfg.n_heads, d_ff=cfg.d_ff, n_ctx=(size // patch) ** 2,
        inputs="patches", outputs="class", n_out=data.num_classes, image_size=size, patch_size=patch,
        channels=channels, norm="post", causal=False, activation="relu", bias_qkv=False, bias_o=False,
        bias_u=True, init=cfg.init, seed=seed,
    )  # fmt: skip
    module = Transformer(zoo).to(cfg.device, getattr(torch, cfg.dtype))
    return zoo_model(module, name=f"one-block ViT on {cfg.data}")


def make_stream(cfg: Config, seed: int, data: Pictures) -> Stream:
    """Return the batch of every step; (seed, epoch) determine the order of each epoch."""
    per_epoch = len(data.classes) // cfg.batch_size

    def batch(step: int) -> Batch:
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(data.classes), generator=generator(seed, epoch))
        chosen = order[place * cfg.batch_size : (place + 1) * cfg.batch_size]
        return Batch(data.images[chosen], data.classes[chosen])

    return batch


def make_problem(cfg: Config, seed: int, data: Pictures) -> Problem:
    """Build the problem of the network before training, on the batch of the first step."""
    first = make_stream(cfg, seed, data)(0)
    return Problem(make_model(cfg, seed, data), Batches([first], name=cfg.data))


def train_one(cfg: Config, seed: int, data: Pictures) -> Trained:
    """Train a seed's network; store weights at `cfg.points` and at the first step with enough accuracy."""
    model = make_model(cfg, seed, data)
    every = max(1, cfg.steps // EVALUATIONS)
    evaluated = sorted({*range(0, cfg.steps + 1, every), cfg.steps})
    how = TrainConfig(
        steps=cfg.steps,
        lr=cfg.lr,
        warmup=min(SLOW_START, max(1, cfg.steps // 10)),
        weight_decay=cfg.weight_decay,
        snapshots=tuple(sorted({*cfg.points, *evaluated})),
    )
    _, history, kept = train(model, make_stream(cfg, seed, data), how)
    accuracy = np.array([_accuracy(model, kept[step], data) for step in evaluated])
    enough = np.flatnonzero(accuracy[1:] > cfg.until) + 1
    chosen = evaluated[enough[0]] if len(enough) else cfg.steps
    space = model.space()

    def vector(step: int) -> np.ndarray:
        return to_numpy(space.gather(kept[step]))

    return Trained(
        seed=seed,
        steps=np.array(cfg.points),
        weights=np.stack([vector(step) for step in cfg.points]),
        trained_step=chosen,
        trained_weights=vector(chosen),
        reached=len(enough) > 0,
        evaluated=np.array(evaluated),
        accuracy=accuracy,
        loss=history.loss,
    )


def _accuracy(model: Model, weights: dict[str, Tensor], data: Pictures) -> float:
    """Validation accuracy."""
    placed = {name: value.to(model.device) for name, value in weights.items()}
    with torch.no_grad():
        logits = model.forward(placed, data.validation_images.to(model.device, model.dtype))
    return float((logits.argmax(-1).cpu() == data.validation_classes).double().mean())


def at(problem: Problem, weights: np.ndarray) -> Problem:
    """Return the problem at stored weights."""
    return problem.at(torch.as_tensor(weights, dtype=problem.dtype, device=problem.device))


# ------------------------------------------------------------------------------------------------------ norms

GROUPS = {
    "Q": ("L0.W_Q",),
    "K": ("L0.W_K",),
    "V": ("L0.W_V",),
    "O": ("L0.W_O",),
    "norms": ("L0.ln*",),
    "feed-forward": ("L0.W_[12]", "L0.b_[12]"),
    "embedding": ("E", "P"),
    "head": ("U", "b_U"),
}
"""Blocks by the name of their group; the paper draws all but the output matrix O, embedding and head."""
MAX_EXACT = 64  # groups with at most this many rows are computed in full


@dataclass(frozen=True)
class Norms(Result):
    """Norms of weights and Hessian blocks at S steps, for G groups."""

    groups: list[str]
    sizes: np.ndarray  # (G,) parameters
    steps: np.ndarray  # (S,)
    weights: np.ndarray  # (S, G) ‖w‖
    hessian: np.ndarray  # (S, G) ‖H_gg‖_F
    low: np.ndarray  # (S, G) ends of its 95 % interval
    high: np.ndarray
    exact: np.ndarray  # (G,) True if computed in full, without probes

    def of(self, values: np.ndarray, group: str) -> np.ndarray:
        """Return the values (S,) of a group."""
        return values[:, self.groups.index(group)]


def norm_measure(problem: Problem, cfg: Config, found: Trained) -> Norms:
    """Measure the norms of one network, on the batch of its Hessian."""
    names = list(GROUPS)
    shape = (len(found.steps), len(names))
    weights, hessian, low, high = (np.empty(shape) for _ in range(4))
    exact = np.zeros(len(names), dtype=bool)
    for s, point in track(list(enumerate(found.weights)), "norms of blocks"):
        here = at(problem, point)
        H = Hessian(here)
        for g, globs in enumerate(GROUPS.values()):
            A = H.block(list(globs))
            own = own_probes(
                A, num_probes=cfg.num_probes, num_steps=cfg.num_steps, max_exact=MAX_EXACT, seed=found.seed
            )
            weights[s, g] = float(
                torch.linalg.vector_norm(A.space.gather(dict(here.named_parameters())).double())
            )
            hessian[s, g], low[s, g], high[s, g] = own.norm, own.norm_low, own.norm_high
            exact[g] = own.exact
    sizes = np.array([problem.space(*globs).size for globs in GROUPS.values()])
    return Norms(names, sizes, found.steps, weights, hessian, low, high, exact)


# ----------------------------------------------------------------------------------------------------- stripe


class Stripe(NamedTuple):
    """Two measures of the stripe, independent of the scale of the block."""

    ratio: float  # root mean square entry at t = t' divided by that at t ≠ t'
    share: float  # share of ‖H_QK‖² in the span of all A ⊗ I; 1/d_K² for independent entries


def stripe(block: np.ndarray, d_model: int) -> Stripe:
    """Measure the block (d k, d k) between W_Q and W_K, both d × k and row-major; nan if it is empty."""
    k = block.shape[0] // d_model
    entries = block.reshape(d_model, k, d_model, k).astype(np.float64)
    on = np.einsum("ptqt->tpq", entries)  # (k, d, d)
    total, diagonal = float((entries**2).sum()), float((on**2).sum())
    count = on.size
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.float64(max(total - diagonal, 0.0)) / np.float64(entries.size - count)
        ratio = float(np.sqrt(np.float64(diagonal / count) / off))
        share = float(k * (on.mean(0) ** 2).sum() / np.float64(total))
    return Stripe(ratio, share)


# ------------------------------------------------------------------------------------------------------ dense

ATTENTION = ("L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O")
CELL = 4  # entries per pixel along one axis of the large image


@dataclass(frozen=True)
class Dense(Result):
    """Hessian of one network at one step: numbers for every pair of blocks, and images."""

    names: list[str]  # b blocks, from input to output
    sizes: list[int]
    loss: float
    frobenius: np.ndarray  # (b, b), as the next two
    brightness: np.ndarray  # mean of log10(|entry| + 1e-6)
    max_abs: np.ndarray
    stripe_ratio: float
    stripe_share: float
    picture: np.ndarray  # colors, means over cells of one pair of blocks each; (0, 0) if not stored
    attention: np.ndarray  # entries between matrices of attention; (0, 0) if not stored

    @property
    def rms(self) -> np.ndarray:
        """Root mean square entry of every pair of blocks, (b, b)."""
        return self.frobenius / np.sqrt(np.outer(self.sizes, self.sizes))

    @property
    def norm(self) -> float:
        """Frobenius norm of the Hessian."""
        return float(np.linalg.norm(self.frobenius))

    @property
    def pixels(self) -> list[int]:
        """Pixels of each block in the picture."""
        return [-(-size // CELL) for size in self.sizes]

    def pick(self, values: np.ndarray, one: str, two: str) -> float:
        """Return the value of a pair of blocks, by their names."""
        return float(values[self.names.index(one), self.names.index(two)])


def written_out(problem: Problem, names: Sequence[str]) -> np.ndarray:
    """Compute the full matrix over these blocks, in order: (n, n), exactly symmetric."""
    H = Hessian(problem)
    stops = np.cumsum([problem.model.blocks[name].size for name in names]).tolist()
    where = {
        name: slice(stop - problem.model.blocks[name].size, stop)
        for name, stop in zip(names, stops, strict=True)
    }
    found = np.empty((stops[-1], stops[-1]), dtype=np.float64 if problem.dtype.itemsize == 8 else np.float32)
    for i, name in track(list(enumerate(names)), "columns of the Hessian"):
        part = H.block(list(names[i:]), [name])
        columns = to_numpy(part.to_dense(chunk=columns_at_once(part)))
        for row, place in part.space.slices.items():
            found[where[row], where[name]] = columns[place]
            found[where[name], where[row]] = columns[place].T
        own = found[where[name], where[name]]
        found[where[name], where[name]] = (own + own.T) / 2
    if not np.isfinite(found).all():
        raise CurvescopeError("the Hessian has entries that are not finite", hint="use a smaller lr")
    return found


def dense_measure(problem: Problem, *, keep: bool) -> Dense:
    """Measure the Hessian of a one-block network; `keep` stores the images, too."""
    names = [name for name in PATH if name in problem.model.blocks]
    sizes = [problem.model.blocks[name].size for name in names]
    H = written_out(problem, names)
    starts = np.cumsum([0, *sizes[:-1]])
    where = {name: slice(start, start + size) for name, start, size in zip(names, starts, sizes, strict=True)}
    log = colors(H)
    found = stripe(H[where["L0.W_Q"], where["L0.W_K"]], problem.model.facts["d_model"])
    inside = slice(where[ATTENTION[0]].start, where[ATTENTION[-1]].stop)
    none = np.zeros((0, 0), np.float32)
    return Dense(
        names=names,
        sizes=sizes,
        loss=problem.loss_value(),
        frobenius=np.sqrt(_sums(np.square(H, dtype=np.float64), starts)),
        brightness=_sums(log, starts) / np.outer(sizes, sizes),
        max_abs=np.maximum.reduceat(np.maximum.reduceat(np.abs(H), starts, axis=0), starts, axis=1),
        stripe_ratio=found.ratio,
        stripe_share=found.share,
        picture=pooled(log, sizes).astype(np.float32) if keep else none,
        attention=H[inside, inside].astype(np.float32) if keep else none,
    )


def pooled(values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Means over cells of CELL × CELL entries; cells at the end of a block can be smaller."""
    starts, stop = [], 0
    for size in sizes:
        starts += range(stop, stop + size, CELL)
        stop += size
    counts = np.diff([*starts, stop])
    return _sums(values, np.array(starts)) / np.outer(counts, counts)


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sums over rectangles that begin at `starts` along both axes."""
    rows = np.add.reduceat(values, starts, axis=0, dtype=np.float64)
    return np.add.reduceat(rows, starts, axis=1)
