"""The theorems as printed, with the readings that make them exact, against the efficient closed form."""

import pytest
import torch

from curvescope.closed_form import attention
from curvescope.closed_form.objectives import squared_error
from curvescope.closed_form.printed.kronecker import (
    Theorem,
    commutation,
    khatri_rao,
    kron,
    softmax_derivatives,
)
from curvescope.core.errors import ShapeError
from curvescope.core.seeds import generator


def make(seed, L=4, d=3, d_K=2, d_V=2):
    source = generator(seed)
    shapes = (L, d), (d, d_K), (d, d_K), (d, d_V), (L, d_V)
    return Theorem(*(torch.randn(*s, generator=source, dtype=torch.float64) for s in shapes))


def efficient(theorem):
    F = theorem.moments.M1 @ theorem.W_V
    G, B = squared_error(F, theorem.Y)
    return attention.curvature(theorem.X, theorem.W_Q, theorem.W_K, theorem.W_V, G, B).blocks()


@pytest.mark.parametrize(
    "sizes", [(4, 3, 2, 2), (3, 2, 3, 4), (5, 3, 3, 3), (2, 1, 2, 3), (1, 3, 2, 2), (3, 4, 1, 1)]
)
@pytest.mark.parametrize("part", ["outer", "functional"])
def test_theorems_equal_the_efficient_form(sizes, part):
    theorem = make(sum(sizes), *sizes)
    found, want = getattr(theorem, part)(), efficient(theorem)
    largest = max(split.total.abs().max() for split in want.values())
    assert len(found) == 7
    for pair, block in found.items():
        reference = getattr(want[pair], part).flatten(0, 1).flatten(1)
        assert (block - reference).abs().max() < 1e-12 * largest


def test_printed_definitions_of_z_equal_the_moments():
    theorem = make(3, L=3, d=2)
    X, eye = theorem.X, torch.eye(3, dtype=torch.float64)
    first, second = softmax_derivatives(theorem.A)
    torch.testing.assert_close(kron(eye, X.T) @ first @ kron(X, X), theorem.Z1)
    torch.testing.assert_close(kron(eye, X.T, X.T, X.T) @ second @ kron(X, X), theorem.Z2)


def test_softmax_derivatives_agree_with_automatic_differentiation():
    T = torch.randn(3, 3, generator=generator(1), dtype=torch.float64)
    first, second = softmax_derivatives(torch.softmax(T, -1))

    def jacobian(t):
        return torch.func.jacfwd(lambda s: torch.softmax(s, -1))(t).reshape(9, 9)

    torch.testing.assert_close(first, jacobian(T))
    torch.testing.assert_close(second, torch.func.jacfwd(jacobian)(T).reshape(81, 9))


def test_commutation_transposes():
    N = torch.randn(3, 5, generator=generator(2), dtype=torch.float64)
    assert torch.equal(commutation(5, 3) @ N.reshape(-1), N.T.reshape(-1))
    assert torch.equal(commutation(5, 3).T, commutation(3, 5))
    assert torch.equal(commutation(3, 5) @ N.T.reshape(-1), N.reshape(-1))


def test_khatri_rao_multiplies_row_blocks():
    P, Q = torch.randn(2, 1, 3, generator=generator(4)), torch.randn(2, 2, 2, generator=generator(5))
    product = khatri_rao(P, Q)
    assert torch.equal(product[2:], torch.kron(P[1], Q[1]))


def test_shuffling_matrices_are_what_they_say():
    theorem = make(6, d=3, d_V=2)
    for size in (2, 3):
        S = theorem.S(size).reshape(size, 3, size, 3)
        want = torch.einsum("vw,ab->vawb", torch.eye(size).double(), torch.eye(3).double())
        assert torch.equal(S, want)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_other_commutation_matrix_is_seen(swapped):
    """K_{d,d_K} for K_{d_K,d} gives an error of the size of the block."""
    theorem = make(8, L=5, d=3, d_K=2, d_V=3)
    commute = commutation(3, 2) if swapped else commutation(2, 3)
    U = kron(theorem.W_Q, torch.eye(3, dtype=torch.float64)) @ commute
    middle = theorem.Z1.T @ kron(torch.eye(5).double(), theorem.W_V @ theorem.W_V.T) @ theorem.Z1
    block = 2 / (5 * 3 * 2) * U.T @ middle @ U
    want = efficient(theorem)["K", "K"].outer.flatten(0, 1).flatten(1)
    error = (block - want).abs().max() / want.abs().max()
    assert error > 0.1 if swapped else error < 1e-12


def test_targets_must_fit():
    theorem = make(9)
    with pytest.raises(ShapeError, match="expected Y"):
        Theorem(theorem.X, theorem.W_Q, theorem.W_K, theorem.W_V, theorem.Y.T)
