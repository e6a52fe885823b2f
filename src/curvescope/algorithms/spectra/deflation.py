"""An operator without the eigenpairs that are known."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import check_symmetric
from curvescope.algorithms.spectra.lanczos import Eigenpairs
from curvescope.algorithms.vectors import orthonormalize
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Identity, LinearOperator, LowRank, as_columns


def deflate(op: LinearOperator, pairs: Eigenpairs | Tensor | np.ndarray) -> LinearOperator:
    """P A P with P = I − V Vᵀ, for orthonormal columns V (n, k): the eigenvalues of V become zero.

    With eigenvectors V it is A − V Λ Vᵀ; with vectors that are so up to a residual it is still symmetric, and
    positive semi-definite where A is. The part that is taken out is known: tr A = Σ vᵢᵀ A vᵢ + tr P A P, and
    the values of `pairs` are those vᵢᵀ A vᵢ. Memory: k vectors. A product takes one product with A.

    Args:
        pairs: what `eigsh` found, or vectors (n,) or (n, k), which are made orthonormal.
    """
    check_symmetric(op, "deflate")
    vectors = pairs.vectors if isinstance(pairs, Eigenpairs) else pairs
    if vectors is None:
        raise UsageError("expected eigenpairs with vectors", hint="eigsh(…, vectors=True) returns them")
    V = as_columns(op, vectors).clone()
    if not bool(torch.isfinite(V).all()):
        raise UsageError("expected finite vectors to deflate, got nan or inf")
    if V.shape[1] > V.shape[0]:
        raise ShapeError(f"expected at most {V.shape[0]} vectors to deflate, got {V.shape[1]}")
    R = orthonormalize(V).diagonal().abs() if V.shape[1] else torch.ones(0)
    if bool((100 * torch.finfo(op.dtype).eps * R.max() >= R).any()) if len(R) else False:
        raise UsageError("expected vectors that are independent, got one in the span of the others, or zero")
    P = Identity(op.shape[0], dtype=op.dtype, device=op.device) - LowRank(V)
    return P @ op @ P
