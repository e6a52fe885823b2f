"""The largest curvature from step to step: a few Lanczos steps from the direction found last."""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.algorithms.vectors import check_finite
from curvescope.core.operator import LinearOperator

SPENT = 10.0  # roundings: a remainder below this many of the product adds no direction


def follow(op: LinearOperator, start: Tensor, num_products: int) -> tuple[float, Tensor]:
    """The Ritz value of largest magnitude in the Krylov space of `start`, and its unit vector (n,).

    A Ritz value lies within the spectrum, so |λ| is at most the true one; from an eigenvector it is exact.
    One vector for each product is in memory.
    """
    q = start / start.norm()
    basis, images = [q], []
    for _ in range(min(num_products, op.shape[0])):
        image = op @ basis[-1]
        images.append(image)
        rest = image.clone()
        for _ in range(2):  # twice is enough
            for b in basis:
                rest = rest - (b @ rest) * b
        if float(rest.norm()) <= SPENT * torch.finfo(q.dtype).eps * float(image.norm()):
            break
        basis.append(rest / rest.norm())
    Q, A = torch.stack(basis[: len(images)]), torch.stack(images)
    T = (Q @ A.T).double()
    check_finite(float(T.sum()))
    values, vectors = torch.linalg.eigh((T + T.T) / 2)
    at = int(values.abs().argmax())
    found = vectors[:, at].to(Q.dtype) @ Q
    return float(values[at]), found / found.norm()
