"""Blocks of operators are slices of the whole matrix."""

from __future__ import annotations

import pytest
import torch

import curvescope as cs
import oracles
from oracles import Bench, relative_error
from selection import one_in, pairs

NAMES = ["hessian", "ggn", "functional", "fisher"]
SCALE = 1e-11


def slice_of(bench: Bench, name: str, rows: list[str], columns: list[str]) -> torch.Tensor:
    """The dense truth between named blocks."""
    raw = getattr(bench.dense, name)
    raw = raw() if callable(raw) else raw
    return raw[bench.dense.entries(bench.model, *rows)][:, bench.dense.entries(bench.model, *columns)]


def names_of(space) -> list[str]:
    return [block.name for block in space]


def assert_slice(bench: Bench, name: str, found: torch.Tensor, rows: list[str], columns: list[str]) -> None:
    truth = slice_of(bench, name, rows, columns)
    assert found.shape == truth.shape
    largest = float(bench.truth(name).abs().max())
    assert float((found - truth).abs().max()) < SCALE * largest


@pytest.mark.parametrize(("bench", "name"), pairs(oracles.NAMES, NAMES, shift=2, every=4), indirect=["bench"])
def test_square_and_rectangular_blocks(bench: Bench, name: str):
    A, blocks = bench.operator(name), list(bench.model.blocks)
    first, second = blocks[:2], blocks[1:4]
    square = A.block(first)
    assert square.symmetric
    assert square.psd == A.psd
    assert_slice(bench, name, square.to_dense(), first, first)
    mixed = A.block(first, second)
    assert not mixed.symmetric
    assert not mixed.psd
    assert_slice(bench, name, mixed.to_dense(), first, second)
    assert_slice(bench, name, mixed.T.to_dense(), second, first)
    assert mixed.T.T is mixed
    v = torch.ones(mixed.shape[1], dtype=torch.float64)
    torch.testing.assert_close(
        torch.as_tensor(mixed.to_scipy().matvec(v.numpy())), mixed @ v, rtol=1e-12, atol=1e-14
    )


HEADED = [
    "pre-layernorm-gelu-2layers",
    "pre-rmsnorm-swiglu-rope-grouped",
    "merged-alibi-scaled-residual",
    "wide-heads",
]


@pytest.mark.parametrize(("case", "name"), pairs(HEADED, ["hessian", "ggn"], shift=1, every=2))
def test_blocks_of_single_heads(case: str, name: str):
    bench = oracles.bench(case)
    A, heads = bench.operator(name), list(bench.model.heads)
    for head in heads[::3]:  # other roles of other heads
        assert_slice(bench, name, A.block(head).to_dense(), [head], [head])
    last = heads[-1]
    assert_slice(bench, name, A.block(last, "E").to_dense(), [last], ["E"])
    assert_slice(bench, name, A.block("E", heads[0]).to_dense(), ["E"], [heads[0]])
    assert_slice(bench, name, A.block(["E", last], heads[:2]).to_dense(), ["E", last], heads[:2])


@pytest.mark.parametrize("case", one_in(HEADED, 4, shift=2))
def test_all_heads_of_a_role_are_that_role_in_another_order(case: str):
    bench = oracles.bench(case)
    role = "W_QK" if "merged" in case else "W_Q"
    H = bench.operator("hessian")
    heads = [name for name in bench.model.heads if name.startswith("L0.") and name.endswith(role)]
    found = H.block(f"L0.h*.{role}")
    assert names_of(found.space) == heads
    assert_slice(bench, "hessian", found.to_dense(), heads, heads)
    whole, trace = H.block(f"L0.{role}").to_dense(), found.to_dense().trace()
    torch.testing.assert_close(torch.linalg.eigvalsh(found.to_dense()), torch.linalg.eigvalsh(whole))
    torch.testing.assert_close(trace, whole.trace())


def test_operator_of_chosen_blocks_is_the_block(tiny: Bench):
    direct = cs.Hessian(tiny.problem, "L0.W_[QK]", "U")
    assert names_of(direct.space) == ["L0.W_Q", "L0.W_K", "U"]
    assert torch.equal(direct.to_dense(), cs.Hessian(tiny.problem).block(["L0.W_[QK]", "U"]).to_dense())


def test_order_of_patterns_does_not_matter(tiny: Bench):
    H = cs.Hessian(tiny.problem)
    assert names_of(H.block(["U", "E"]).space) == names_of(H.block(["E", "U", "E"]).space) == ["E", "U"]


@pytest.mark.parametrize("bench", one_in(oracles.NAMES, 6, shift=4), indirect=True)
def test_jacobian_of_a_block(bench: Bench):
    J, chosen = cs.Jacobian(bench.problem), list(bench.model.blocks)[1:3]
    part = J.block(chosen)
    truth = bench.dense.jacobian[:, bench.dense.entries(bench.model, *chosen)]
    assert part.shape == truth.shape
    assert relative_error(part.to_dense(), truth) < 1e-10
    assert J.shape[1] == len(bench.order)


def test_monte_carlo_blocks_share_the_drawn_targets(tiny: Bench):
    F = cs.MonteCarloFisher(tiny.problem, seed=4)
    block = F.block("U", "E")
    at = {block.name: F.space.positions(block) for block in F.space}
    truth = F.to_dense()[at["U"]][:, at["E"]]
    assert block.drawn is F.drawn
    assert relative_error(block.to_dense(), truth) < 1e-12


def test_zero_columns(tiny: Bench):
    nothing = torch.zeros(len(tiny.order), 0, dtype=torch.float64)
    assert (cs.Hessian(tiny.problem) @ nothing).shape == nothing.shape


def test_zero_columns_of_a_jacobian(tiny: Bench):
    J = cs.Jacobian(tiny.problem)
    assert (J @ torch.zeros(J.shape[1], 0, dtype=torch.float64)).shape == (J.shape[0], 0)
    assert (J.T @ torch.zeros(J.shape[0], 0, dtype=torch.float64)).shape == (J.shape[1], 0)


def test_operator_algebra_of_curvature(tiny: Bench):
    H, v = cs.Hessian(tiny.problem), tiny.probe()
    rest = H - cs.GGN(tiny.problem) - cs.FunctionalHessian(tiny.problem)
    assert float((rest @ v).norm()) < 1e-12 * float((H @ v).norm())
    J = cs.Jacobian(tiny.problem)
    torch.testing.assert_close((J.T @ J) @ v, tiny.dense.jacobian[:, tiny.order].T @ (J @ v))


def test_a_block_is_named_in_the_error_when_it_is_unknown(tiny: Bench):
    with pytest.raises(cs.UsageError, match=r"no block matches 'L0\.W_q'.*L0\.W_Q"):
        cs.Hessian(tiny.problem).block("L0.W_q")


def test_repr_says_what_and_how_big(tiny: Bench):
    n = len(tiny.order)
    assert repr(cs.Hessian(tiny.problem)) == f"Hessian({n} × {n}, float64, cpu)"
    assert "20 terms" in repr(tiny.problem.batches)
