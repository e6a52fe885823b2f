"""One vocabulary for the Hessian and its parts, and for the target that does not count."""

import pytest

from curvescope.core import hessian_terms
from curvescope.core.errors import UsageError
from curvescope.core.tensors import IGNORED
from curvescope.data import batches
from curvescope.losses import cross_entropy


def test_symbols_of_parts_and_of_matrices_agree():
    matrices = {"outer": "ggn", "functional": "functional", "total": "hessian"}
    assert set(matrices) == set(hessian_terms.PARTS) == {*hessian_terms.HALVES, "total"}
    assert set(matrices.values()) == set(hessian_terms.MATRICES) == set(hessian_terms.TITLES)
    for part, matrix in matrices.items():
        assert hessian_terms.SYMBOLS[part] == hessian_terms.MATRIX_SYMBOLS[matrix]
        assert hessian_terms.PART_OF[hessian_terms.SYMBOLS[part]] == part


def test_other_names_are_refused_with_those_that_exist():
    with pytest.raises(UsageError, match="expected part of outer, functional, total, got 'ggn'"):
        hessian_terms.check_part("ggn")
    with pytest.raises(UsageError, match="expected part 'hessian', 'ggn' or 'functional', got 'outer'"):
        hessian_terms.check_matrix_name("outer")


def test_data_and_losses_ignore_the_same_target():
    assert batches.IGNORED == cross_entropy.IGNORED == IGNORED == -100
