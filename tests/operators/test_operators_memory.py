"""Memory that runs out: half as many columns at a time, the same numbers; at one, what would fit."""

import logging
import re

import pytest
import torch

import curvescope as cs
from curvescope.core.errors import CurvescopeError
from curvescope.engines import GaussNewton, SecondDerivative
from curvescope.operators import GGN, Hessian

pytestmark = pytest.mark.usefixtures("few_sequences")


def problem():
    shape = cs.TransformerConfig(n_layers=1, d_model=8, n_heads=2, d_ff=16, vocab_size=12, n_ctx=18)
    return cs.Problem(cs.load(shape, dtype="float64"), cs.task_data("addition", num_sequences=8))


def limit(monkeypatch, kind, most, error=torch.OutOfMemoryError):
    """Products of more columns than `most` run out of memory; how many each try had."""
    form = SecondDerivative if kind is Hessian else GaussNewton
    own, tries = form.apply, []

    def product(self, engine, index, batch, rows, tangents, receive):
        tries.append(len(next(iter(tangents.values()))))
        if tries[-1] > most:
            raise error("out of memory; can't allocate memory")
        own(self, engine, index, batch, rows, tangents, receive)

    monkeypatch.setattr(form, "apply", product)
    return tries


@pytest.mark.parametrize("kind", [Hessian, GGN])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_half_as_many_columns_at_a_time(kind, error, monkeypatch, caplog):
    right = kind(problem())
    V = torch.randn(right.shape[0], 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want, op = right @ V, kind(problem())
    op.engine.consistent(lambda: None)
    op.engine.caching._directions |= {"fast": 12}
    tries = limit(monkeypatch, kind, 4, error)
    with caplog.at_level(logging.WARNING, "curvescope"):
        torch.testing.assert_close(op @ V, want)
    assert tries == [12, 6, 3, 3, 3, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "memory ran out: from now on 6 columns at a time",
        "memory ran out: from now on 3 columns at a time",
    ]
    tries.clear()
    op.block("L0.W_Q") @ V[:64]
    assert tries == [3] * 4  # for good, of its blocks too


def test_where_one_is_too_much_it_is_said_what_would_fit(monkeypatch):
    op = Hessian(problem())
    v = torch.ones(op.shape[0], dtype=torch.float64)
    op @ v
    limit(monkeypatch, Hessian, 0)
    with pytest.raises(CurvescopeError, match="one direction through a batch of 8 sequences") as told:
        op @ v
    assert "batches of 4 should fit (batch_size=4)" in str(told.value)
    for free, words in ((3 * 10**5, "batches of 1 should fit"), (10**4, "free (take shorter sequences")):
        monkeypatch.setattr("curvescope.engines.memory.free_bytes", lambda device, free=free: free)
        with pytest.raises(CurvescopeError, match=re.escape(words)):
            op @ v


def test_other_errors_are_raised_as_they_are(monkeypatch):
    def product(*rest):
        raise RuntimeError("something else")

    op = Hessian(problem())
    monkeypatch.setattr(SecondDerivative, "apply", product)
    with pytest.raises(RuntimeError, match="something else"):
        op @ torch.ones(op.shape[0], dtype=torch.float64)
