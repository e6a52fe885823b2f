"""Random expressions of operators against the same expressions of dense matrices, and what they know."""

from __future__ import annotations

import random as chance
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.operator import (
    Diagonal,
    FunctionOperator,
    Identity,
    LinearOperator,
    LowRank,
    Matrix,
)

Pair = tuple[LinearOperator, Tensor]
SIZES = (1, 4, 7)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(m: int, n: int, pick: chance.Random, dtype: torch.dtype) -> Pair:
    """A matrix, or one of the structured square ones; some of them strided."""
    seed, kind = (
        pick.randrange(10**6),
        pick.choice(["matrix", "matrix", "symmetric", "diagonal", "low", "one"]),
    )
    if m != n or kind == "matrix":
        A = numbers(n, m, seed=seed, dtype=dtype).T  # not contiguous
        return Matrix(A), A
    if kind == "symmetric":
        A = numbers(n, n, seed=seed, dtype=dtype)
        A = A + A.T
        return FunctionOperator(lambda V: A @ V, (n, n), dtype=dtype, symmetric=True), A
    if kind == "diagonal":
        d = numbers(2 * n, seed=seed, dtype=dtype)[::2]
        return Diagonal(d), torch.diag(d)
    if kind == "low":
        U, s = numbers(n, 2, seed=seed, dtype=dtype), numbers(2, seed=seed + 1, dtype=dtype)
        return LowRank(U, s), U @ torch.diag(s) @ U.T
    return Identity(n, dtype=dtype), torch.eye(n, dtype=dtype)


def expression(m: int, n: int, depth: int, pick: chance.Random, dtype: torch.dtype) -> Pair:
    """A random expression of so many rows and columns, as an operator and as a matrix."""
    rule = (
        pick.choice(["leaf", "sum", "scaled", "product", "transpose", "part", "mirror"]) if depth else "leaf"
    )
    inner = pick.choice(SIZES)
    if rule == "sum":
        (A, a), (B, b) = (expression(m, n, depth - 1, pick, dtype) for _ in range(2))
        return (A + B, a + b) if pick.random() < 0.5 else (A - B, a - b)
    if rule == "scaled":
        A, a = expression(m, n, depth - 1, pick, dtype)
        c = pick.choice([-2.0, 0.5, 0.0, 3])
        return (A / (c or 1.0), a / (c or 1.0)) if pick.random() < 0.5 else (c * A, c * a)
    if rule == "product":
        A, a = expression(m, inner, depth - 1, pick, dtype)
        B, b = expression(inner, n, depth - 1, pick, dtype)
        return A @ B, a @ b
    if rule == "transpose":
        A, a = expression(n, m, depth - 1, pick, dtype)
        return A.T, a.T
    if rule == "part":
        A, a = expression(m + 2, n + 1, depth - 1, pick, dtype)
        rows, columns = [pick.randrange(-m - 2, m + 2) for _ in range(m)], slice(1, None)
        return A.submatrix(rows, columns), a[rows][:, columns]
    if rule == "mirror" and m == n:
        (P, p), (A, a) = (
            expression(inner, n, depth - 1, pick, dtype),
            expression(inner, inner, 0, pick, dtype),
        )
        return P.T @ A @ P, p.T @ a @ p
    return leaf(m, n, pick, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(60))
def test_random_expressions_are_those_of_the_matrices(seed: int, dtype: torch.dtype):
    pick = chance.Random(seed)
    m, n = pick.choice(SIZES), pick.choice(SIZES)
    A, dense = expression(m, n, 4, pick, dtype)
    close = {"rtol": 0, "atol": float(dense.abs().max() + 1) * (1e-10 if dtype is torch.float64 else 1e-2)}
    assert A.shape == (m, n)
    assert A.dtype == dtype
    V, U = numbers(6, n, seed=1, dtype=dtype).T, numbers(6, m, seed=2, dtype=dtype)[::2]
    torch.testing.assert_close(A @ V, dense @ V, **close)
    torch.testing.assert_close(A.T @ U.T, dense.T @ U.T, **close)
    torch.testing.assert_close(U @ A, U @ dense, **close)
    torch.testing.assert_close(U[0] @ A, U[0] @ dense, **close)
    np.testing.assert_allclose(U.numpy() @ A, (U @ dense).numpy(), **close)
    np.testing.assert_allclose(A @ V.numpy(), (dense @ V).numpy(), **close)
    if A.symmetric:
        torch.testing.assert_close(dense, dense.T, **close)
    if A.psd:
        assert float(torch.linalg.eigvalsh(((dense + dense.T) / 2).double()).min()) > -close["atol"]


H, P, J = numbers(6, 6, seed=0), numbers(6, 3, seed=1), numbers(4, 6, seed=2)
H = H + H.T
OP: Any = FunctionOperator(lambda V: H @ V, (6, 6), symmetric=True)
PSD = Matrix(H @ H, psd=True, symmetric=True)
D, MP, MJ = Diagonal(numbers(6, seed=3)), Matrix(P), Matrix(J)
ANY = Matrix(numbers(6, 6, seed=9))
SYMMETRIC = {
    "D H D": (D @ OP @ D, False),
    "D (H D)": (D @ (OP @ D), False),
    "D G D": (D @ PSD @ D, True),
    "−D G D": (-D @ PSD @ D, False),
    "(−D) G (−D)": ((-D) @ PSD @ (-D), True),
    "Pᵀ H P": (MP.T @ OP @ MP, False),
    "Pᵀ G P": (MP.T @ PSD @ MP, True),
    "Pᵀ D G D P": (MP.T @ D @ PSD @ D @ MP, True),
    "Jᵀ J": (MJ.T @ MJ, True),
    "J Jᵀ": (MJ @ MJ.T, True),
    "Jᵀ I J": (MJ.T @ (2 * Identity(4)) @ MJ, True),
    "(J P)ᵀ (J P)": ((MJ @ MP).T @ (MJ @ MP), True),
    "(J + J)ᵀ J': twice": ((MJ + 2 * MJ).T @ (MJ + 2 * MJ), True),
    "H H": (OP @ OP, True),
    "H H H": (OP @ OP @ OP, False),
    "G G G": (PSD @ PSD @ PSD, True),
    "A + Aᵀ": (ANY + ANY.T, False),
    "Aᵀ + A": (ANY.T + ANY, False),
    "(A + 2 D)ᵀ H (A + 2 D)": ((ANY + 2 * D).T @ OP @ (ANY + 2 * D), False),
    "2 A B + 2 Bᵀ Aᵀ": (2 * (ANY @ D) + 2 * (D @ ANY.T), False),
    "H[i, i]": (OP.submatrix([0, 3, 3]), False),
    "G[i, i]": (PSD.submatrix(slice(1, 4)), True),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_by_structure(name: str):
    A, psd = SYMMETRIC[name]
    assert A.symmetric
    assert A.psd is psd
    assert A.T is A
    torch.testing.assert_close(A.to_dense(), A.to_dense().T)


def test_long_sums_and_products_are_made_quickly():
    A = B = Matrix(numbers(4, 4, seed=1))
    total, product = A, A
    for i in range(60):
        B = Matrix(numbers(4, 4, seed=i) / 4)
        total, product = total + B, product @ B
    assert (total + total.T).symmetric
    assert (product @ product.T).psd
    torch.testing.assert_close(total.T.to_dense(), total.to_dense().T)


def test_what_is_not_known_to_be_symmetric_is_not_said_to_be():
    other = Diagonal(D.d.clone())
    for A in (D @ OP @ other, D @ OP, MP.T @ PSD @ Matrix(P + 1), MJ.T @ Matrix(numbers(4, 4, seed=4)) @ MJ):
        assert not A.symmetric
        assert not A.psd


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(1, 5, 2),
        slice(None, None, -2),
        [0, 2, 2],
        [-1],
        torch.tensor([3, 1]),
        np.array([5, 0]),
    ],
)
def test_submatrices_are_those_of_the_matrix(index):
    where = torch.arange(6).numpy()[index].copy()
    torch.testing.assert_close(OP.submatrix(index).to_dense(), H[where][:, where])
    torch.testing.assert_close(OP.submatrix(index, [1]).to_dense(), H[where][:, [1]])
    torch.testing.assert_close(MJ.submatrix([2, 0], index).to_dense(), J[[2, 0]][:, where])


def test_brackets_choose_rows_and_columns():
    torch.testing.assert_close(OP[0:3].to_dense(), H[0:3])
    torch.testing.assert_close(OP[[2, 0], 1:4].to_dense(), H[[2, 0], 1:4])
    torch.testing.assert_close(MJ[:, [1]].to_dense(), J[:, [1]])
    assert OP[1:3, 1:3].symmetric
    with pytest.raises(TypeError, match="not iterable"):
        list(OP)


def test_a_mask_or_a_single_number_chooses_entries():
    mask = torch.tensor([True, False, True, False, False, True])
    torch.testing.assert_close(OP.submatrix(mask).to_dense(), H[mask][:, mask])
    torch.testing.assert_close(OP.submatrix(2).to_dense(), H[2:3, 2:3])
    assert OP.submatrix([]).shape == (0, 0)


def test_tiny_and_huge_multiples_are_exact_powers():
    for c in (2.0**-100, 2.0**100):
        torch.testing.assert_close((OP / c).to_dense() * c, H, rtol=0, atol=0)
    small = Matrix(torch.full((2, 2), 1e-30)) * 1e-10
    torch.testing.assert_close(small.to_dense(), torch.full((2, 2), 1e-30) * 1e-10)


def test_functions_of_a_diagonal_follow_it():
    d = torch.tensor([1.0, 4.0])
    root, square, D = Diagonal(d).inverse_root(damping=1.0), Diagonal(d).power(0.5).power(4), Diagonal(d)
    d.mul_(2)
    torch.testing.assert_close(root @ torch.ones(2), (d + 1) ** -0.5)
    torch.testing.assert_close(square @ torch.ones(2), d**2)
    assert (root @ Matrix(torch.eye(2)) @ root).symmetric
    assert D.psd
    d[0] = -1
    assert not D.psd
    with pytest.raises(UsageError, match="is not finite: the smallest entry is 0"):
        _ = root @ torch.ones(2)


def test_powers_of_a_diagonal():
    d = torch.tensor([4.0, 0.25])
    torch.testing.assert_close(Diagonal(d).inverse_root().d, torch.tensor([0.5, 2.0]))
    with pytest.raises(UsageError, match=r"power of -0.5 is not finite: the smallest entry is 0"):
        Diagonal(torch.tensor([1.0, 0.0])).inverse_root()
    with pytest.raises(UsageError, match=r"the smallest entry is -1"):
        Diagonal(torch.tensor([1.0, -1.0])).power(0.5)


WRONG = {
    "division by zero": (lambda: OP / 0, "cannot divide an operator by 0.0"),
    "division by nothing much": (lambda: OP / 1e-320, "cannot divide an operator by"),
    "complex factor": (lambda: OP * 2j, "expected a finite real number to multiply an operator with, got 2j"),
    "complex tensor": (lambda: OP * torch.tensor(1j), "expected a finite real number"),
    "nan": (lambda: OP * float("nan"), "expected a finite real number .* got nan"),
    "word": (lambda: OP * "2", "expected a finite real number .* got '2'"),
    "times an operator": (lambda: OP * OP, r"expected a finite real number .* FunctionOperator\(6 × 6"),
    "vector as factor": (lambda: OP * torch.ones(6), "expected a finite real number"),
    "number added": (lambda: OP + 1.0, "cannot add a float to an operator"),
    "number taken off": (lambda: OP - 1.0, "cannot add a float to an operator"),
    "dtypes added": (
        lambda: OP + Identity(6, dtype=torch.float32),
        "cannot add operators of torch.float64 on cpu",
    ),
    "dtypes multiplied": (lambda: Diagonal(torch.ones(6)) @ OP, "cannot multiply operators of torch.float32"),
    "devices": (lambda: OP + Identity(6, device="meta"), "torch.float64 on cpu and of torch.float64 on meta"),
    "rows to the left": (lambda: torch.ones(2, 5).double() @ OP, r"rows \(k, 6\) to the left, got \(2, 5\)"),
    "complex matrix": (lambda: Matrix(torch.ones(2, 2) * 1j), "expected a matrix of real numbers, got"),
    "whole numbers": (lambda: Diagonal(torch.ones(2).int()), "expected a diagonal of real numbers, got"),
    "list as diagonal": (lambda: Diagonal([1.0]), "expected a diagonal, got list"),  # pyright: ignore
    "square diagonal": (lambda: Diagonal(torch.eye(2)), r"got a tensor of shape \(2, 2\)"),
    "other rank": (lambda: LowRank(torch.ones(3, 2), torch.ones(3)), "each of 2 columns, got 3"),
    "other dtype": (lambda: LowRank(torch.ones(3, 2), torch.ones(2).double()), "of torch.float32 on cpu as"),
    "entry outside": (lambda: OP.submatrix([6]), "expected entries from -6 to 5, got 6"),
    "real entries": (lambda: OP.submatrix([0.5]), "expected a slice, whole numbers or a mask of 6"),
    "short mask": (lambda: OP.submatrix(torch.ones(5).bool()), "a mask of 6 booleans"),
    "names": (lambda: OP.submatrix("L0.*"), "has no named blocks to choose 'L0"),
    "dictionary": (lambda: OP @ {"a": torch.ones(6)}, "got a dictionary, and FunctionOperator"),
    "tensors": (lambda: OP @ [torch.ones(6)], "got a list, and FunctionOperator"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_algebra_is_refused_in_one_sentence(name: str):
    call, message = WRONG[name]
    with pytest.raises(CurvescopeError, match=message) as caught:
        call()
    assert isinstance(caught.value, UsageError | ShapeError)
    assert "\n" not in str(caught.value)
