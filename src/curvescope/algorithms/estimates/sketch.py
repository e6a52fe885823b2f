"""What a few products say of the range of an operator: a basis Q of A Ω, for probes Ω (n, m).

Hutch++, XTrace and XDiag begin with it. Probes are drawn again where they are needed a second time, and
products go into the memory of the basis, so that a sketch takes m vectors and a block of products.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from curvescope.algorithms.columns import column_blocks, column_dots, gather_samples, probe_batches
from curvescope.algorithms.sums import gram, to_numpy
from curvescope.algorithms.vectors import columns_of, comfortable, fresh, orthonormalize
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import Probe, probes


class Sketch(NamedTuple):
    """c A Ω = Q R, for a power of two c that keeps squares in range."""

    Q: Tensor  # (n, m) orthonormal columns
    R: np.ndarray  # (m, m)
    forms: np.ndarray  # (m,) c ωᵢᵀ A ωᵢ
    scale: float  # c


def range_sketch(op: LinearOperator, count: int, *, kind: Probe, seed: int) -> Sketch:
    """From the first `count` probes of a seed; `count` is at most the number of rows."""
    Q, forms = fresh(op, op.local_shape[0], count), []
    blocks = column_blocks(op, count)
    for V in probe_batches(op, count, seed=seed, kind=kind, what="sketch"):
        place = Q[:, next(blocks)].copy_(op @ V)
        forms.append(column_dots(V, place))
    scale = comfortable(Q) or 1.0  # zero for a zero operator
    if scale != 1.0:
        Q.mul_(scale)
    R = orthonormalize(Q)
    return Sketch(Q, to_numpy(R), gather_samples(forms) * scale, scale)


def small_matrices(op: LinearOperator, sketch: Sketch, kind: Probe, seed: int) -> tuple[np.ndarray, ...]:
    """R, Qᵀ Z, Qᵀ Ω, Ωᵀ Z, Qᵀ Y and the forms, for Y = c A Ω and Z = c A Q; see `xtrace`.

    Qᵀ Y is R, and of a symmetric operator Ωᵀ Z is its transpose. For any other all probes are kept.
    """
    Q, m = sketch.Q, sketch.Q.shape[1]
    H, W, ZOmega = np.empty((m, m)), np.empty((m, m)), sketch.R.T.copy()
    where = {"seed": seed, "kind": kind}
    kinds = {"dtype": op.dtype, "device": op.device, "pieces": columns_of(op)}
    Omega = None if op.symmetric else probes(op.shape[1], m, **where, **kinds)
    for block in column_blocks(op, m):
        Z = op @ Q[:, block]
        H[:, block] = gram(Q.T, Z.T) * sketch.scale
        if Omega is not None:
            ZOmega[:, block] = gram(Omega.T, Z.T) * sketch.scale
    blocks = column_blocks(op, m)
    for V in probe_batches(op, m, **where, what="sketch"):
        W[:, next(blocks)] = gram(Q.T, V.T)
    return sketch.R, H, W, ZOmega, sketch.R, sketch.forms
