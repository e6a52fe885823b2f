"""Matrices of NumPy and SciPy as operators."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch

import curvescope as cs
from curvescope.core.errors import UsageError

A = np.random.default_rng(0).normal(size=(6, 4))


@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        torch.as_tensor,
        scipy.sparse.csr_matrix,
        scipy.sparse.linalg.aslinearoperator,
        lambda array: cs.Matrix(torch.as_tensor(array)).to_scipy(),
    ],
    ids=["array", "tensor", "sparse", "scipy", "ours"],
)
def test_a_matrix_of_any_kind_is_an_operator(make):
    found = cs.as_operator(make(A))
    assert found.shape == (6, 4)
    np.testing.assert_allclose(found.to_dense().numpy(), A)
    np.testing.assert_allclose(found.T.to_dense().numpy(), A.T)


def test_one_of_ours_stays_as_it_is():
    ours = cs.Identity(3)
    assert cs.as_operator(ours) is ours


def test_symmetry_is_found_for_dense_matrices_and_stated_for_others():
    S = A.T @ A
    S = (S + S.T) / 2
    assert cs.as_operator(S).symmetric
    assert not cs.as_operator(scipy.sparse.csr_matrix(S)).symmetric
    stated = cs.as_operator(scipy.sparse.csr_matrix(S), symmetric=True, psd=True)
    assert stated.psd
    assert cs.eigsh(stated, k=1).values[0] == pytest.approx(np.linalg.eigvalsh(S)[-1])


def test_something_else_is_refused_with_what_is_taken():
    with pytest.raises(UsageError, match="str"):
        cs.as_operator("matrix")
    with pytest.raises(UsageError, match="real numbers"):
        cs.as_operator(scipy.sparse.csr_matrix(A.astype(complex)))
