"""Export of operators to curvlinops, linear_operator and hessian-eigenthings, on flat vectors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvescope.core.errors import MissingExtra

if TYPE_CHECKING:
    from curvlinops._torch_base import PyTorchLinearOperator
    from hessian_eigenthings.operators.base import CurvatureOperator
    from linear_operator.operators import LinearOperator as GPyTorchOperator

    from curvescope.core.operator.base import LinearOperator


def to_curvlinops(A: LinearOperator) -> PyTorchLinearOperator:
    """Return the operator for curvlinops, on flat vectors."""
    peer = _imported("curvlinops", "curvlinops-for-pytorch").HessianLinearOperator
    base = next(cls for cls in peer.__mro__ if cls.__name__ == "PyTorchLinearOperator")

    class CurvlinopsOperator(base):
        SELF_ADJOINT = A.symmetric
        device, dtype = A.device, A.dtype

        def __init__(self) -> None:
            super().__init__([(A.shape[1],)], [(A.shape[0],)])

        def _matmat(self, X: list[Tensor]) -> list[Tensor]:
            return [A._matmat(X[0])]

        def _adjoint(self) -> Any:
            return to_curvlinops(A.T)

    return CurvlinopsOperator()


def to_linear_operator(A: LinearOperator) -> GPyTorchOperator:
    """Return the operator for GPyTorch's linear_operator."""
    peer = _imported("linear_operator.operators", "linear_operator")

    class GPyTorchAdapter(peer.LinearOperator):
        def __init__(self, representative: Tensor):
            super().__init__(representative)  # the library takes dtype and device from it
            self.representative = representative

        def _matmul(self, rhs: Tensor) -> Tensor:
            columns = rhs if rhs.dim() == 2 else rhs[:, None]
            return A._matmat(columns).reshape(-1, *rhs.shape[1:])

        def _size(self) -> torch.Size:
            return torch.Size(A.shape)

        def _transpose_nonbatch(self) -> Any:
            return self if A.symmetric else to_linear_operator(A.T)

    return GPyTorchAdapter(torch.empty(0, dtype=A.dtype, device=A.device))


def to_eigenthings(A: LinearOperator) -> CurvatureOperator:
    """Return a symmetric operator for the algorithms of hessian-eigenthings."""
    peer = _imported("hessian_eigenthings.operators.base", "hessian-eigenthings")
    return peer.LambdaOperator(lambda v: A @ v, A.shape[0], A.device, A.dtype)


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"this needs the package {package}", hint=f"pip install {package}") from error
