"""One vocabulary for the Hessian and its parts, and for the target that does not count."""

import pytest

from curvescope.core import parts
from curvescope.core.errors import UsageError
from curvescope.core.tensors import IGNORED
from curvescope.data import batches
from curvescope.losses import cross_entropy


def test_symbols_of_parts_and_of_matrices_agree():
    matrices = {"outer": "ggn", "functional": "functional", "total": "hessian"}
    assert set(matrices) == set(parts.PARTS) == {*parts.HALVES, "total"}
    assert set(matrices.values()) == set(parts.MATRICES) == set(parts.TITLES)
    for part, matrix in matrices.items():
        assert parts.SYMBOLS[part] == parts.MATRIX_SYMBOLS[matrix]
        assert parts.PART_OF[parts.SYMBOLS[part]] == part


def test_other_names_are_refused_with_those_that_exist():
    with pytest.raises(UsageError, match="expected part of outer, functional, total, got 'ggn'"):
        parts.check_part("ggn")
    with pytest.raises(UsageError, match="expected part 'hessian', 'ggn' or 'functional', got 'outer'"):
        parts.check_matrix_name("outer")


def test_data_and_losses_ignore_the_same_target():
    assert batches.IGNORED == cross_entropy.IGNORED == IGNORED == -100
