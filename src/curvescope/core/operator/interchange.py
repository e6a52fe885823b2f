"""Conversion of operators of other libraries to ours; `exports.py` converts the other way.

| library | in | out |
|---|---|---|
| NumPy, SciPy | `as_operator(A)` | `A.to_scipy()`, `A.to_dense().numpy()` |
| curvlinops | `as_operator(A)` | `A.to_curvlinops()` |
| GPyTorch's linear_operator | `as_operator(A)` | `A.to_linear_operator()` |
| hessian-eigenthings | `as_operator(A)` | `A.to_eigenthings()` |

Flat vectors keep their order: all of these libraries take parameters in torch's order, like curvescope.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.operator.base import LinearOperator
from curvescope.core.operator.matrices import FunctionOperator, Matrix


def as_operator(A: Any, *, symmetric: bool | None = None, psd: bool = False) -> LinearOperator:
    """Return a matrix or an operator of another library as a `LinearOperator`.

    Example:
        >>> cs.eigsh(cs.as_operator(scipy.sparse.linalg.aslinearoperator(S), symmetric=True), k=3)

    Args:
        A: A tensor, an array, a sparse matrix or `LinearOperator` of SciPy, or an operator of curvlinops,
            linear_operator or hessian-eigenthings. A `LinearOperator` of curvescope is returned unchanged.
        symmetric: If None, dense matrices are compared with their transpose, operators of curvlinops declare
                it, operators of hessian-eigenthings are symmetric, and all others count as not symmetric.
        psd: State that no eigenvalue is negative.
    """
    if isinstance(A, LinearOperator):
        return A
    if isinstance(A, Tensor):
        return Matrix(A, symmetric=symmetric, psd=psd)
    if isinstance(A, np.ndarray):
        return Matrix(torch.as_tensor(A), symmetric=symmetric, psd=psd)
    package = {cls.__module__.partition(".")[0] for cls in type(A).__mro__}
    for name, adapt in _INCOMING.items():
        if name in package:
            return adapt(A, symmetric, psd)
    raise UsageError(
        f"expected a matrix or an operator of {', '.join(_INCOMING)}, got {type(A).__name__}",
        hint="curvescope.core.operator.FunctionOperator takes any function of columns",
    )


def _from_scipy(A: Any, symmetric: bool | None, psd: bool) -> LinearOperator:
    from scipy.sparse.linalg import aslinearoperator

    S = aslinearoperator(A)
    dtype = torch.as_tensor(np.empty(0, dtype=S.dtype)).dtype
    if not dtype.is_floating_point:
        raise UsageError(f"expected an operator of real numbers, got {S.dtype}")

    def through(product: Any) -> Any:
        return lambda V: torch.as_tensor(np.asarray(product(V.numpy())), dtype=dtype)

    return FunctionOperator(
        through(S.matmat),
        S.shape,
        dtype=dtype,
        symmetric=bool(symmetric),
        psd=psd,
        rmatmat=through(S.rmatmat),
    )


def _from_curvlinops(A: Any, symmetric: bool | None, psd: bool) -> LinearOperator:
    return FunctionOperator(
        lambda V: (A @ V).detach(),
        (A.shape[0], A.shape[1]),
        dtype=A.dtype,
        device=A.device,
        symmetric=A.SELF_ADJOINT if symmetric is None else symmetric,
        psd=psd,
        rmatmat=lambda U: (A.adjoint() @ U).detach(),
    )


def _from_linear_operator(A: Any, symmetric: bool | None, psd: bool) -> LinearOperator:
    if A.dim() != 2:
        raise UsageError(f"expected an operator without batch dimensions, got shape {tuple(A.shape)}")
    return FunctionOperator(
        lambda V: A.matmul(V).detach(),
        (A.shape[0], A.shape[1]),
        dtype=A.dtype,
        device=A.device,
        symmetric=bool(symmetric),
        psd=psd,
        rmatmat=lambda U: A.mT.matmul(U).detach(),
    )


def _from_eigenthings(A: Any, symmetric: bool | None, psd: bool) -> LinearOperator:
    return FunctionOperator(
        lambda V: torch.stack([A.matvec(v).detach() for v in V.T], dim=1),
        (A.size, A.size),
        dtype=A.dtype,
        device=A.device,
        symmetric=True if symmetric is None else symmetric,
        psd=psd,
    )


_INCOMING = {
    "scipy": _from_scipy,
    "curvlinops": _from_curvlinops,
    "linear_operator": _from_linear_operator,
    "hessian_eigenthings": _from_eigenthings,
}
