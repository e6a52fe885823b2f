"""The vector algebra that algorithms share."""

from __future__ import annotations

import pytest
import torch

from curvescope.algorithms.accurate_sums import CPU_CHUNK
from curvescope.algorithms.vectors import orthonormalize


@pytest.mark.parametrize(("n", "k"), [(5, 3), (3 * CPU_CHUNK + 17, 4), (2 * CPU_CHUNK, 1)])
def test_tall_columns_are_orthonormalized_part_by_part(n, k):
    Y = torch.randn(n, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Q = Y.clone()
    R = orthonormalize(Q)
    assert torch.allclose(Q.T @ Q, torch.eye(k, dtype=torch.float64), atol=1e-14)
    assert torch.equal(R, R.triu())
    assert torch.allclose(Q @ R, Y, atol=1e-12)
