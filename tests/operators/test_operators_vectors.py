"""Vectors of every kind go in and come out of an operator with named blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packed_net import hessian, normal
from torch import Tensor

import curvescope as cs
from curvescope.core.operator import Diagonal, Identity


def vector(seed: int = 0) -> Tensor:
    return normal(hessian().shape[0], seed=seed)


def assert_same(found: Any, truth: Any) -> None:
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_the_queries_are_a_part_of_one_matrix():
    blocks = hessian().problem.model.blocks
    assert blocks["L0.W_Q"].parameter == blocks["L0.W_K"].parameter == "layer.self_attn.in_proj_weight"


def test_dictionaries_by_parameter_give_dictionaries_by_parameter():
    H, v = hessian(), vector()
    found = H @ H.space.scatter(v)
    assert {name: x.shape for name, x in found.items()} == {
        name: p.shape for name, p in H.problem.model.module.named_parameters()
    }
    assert_same(H.space.gather(found), H @ v)


def test_dictionaries_by_block_give_dictionaries_by_block():
    H, v = hessian(), vector()
    found = H @ H.space.to_dict(v)
    assert list(found) == [block.name for block in H.space]
    assert_same(H.space.from_dict(found), H @ v)
    few = H.block("L0.W_[QK]", "L0.W_V")
    assert list(few @ {"L0.W_V": torch.ones(4, 4)}) == ["L0.W_Q", "L0.W_K"]


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_are_in_the_order_of_the_module(kind):
    H = hessian()
    gradient = H.problem.gradient()
    parameters = list(H.problem.model.module.parameters())
    tree = H.space.scatter(gradient)
    given = kind(tree[name] for name, _ in H.problem.model.module.named_parameters())
    found = H @ given
    assert type(found) is kind
    assert [x.shape for x in found] == [p.shape for p in parameters]
    assert_same(H.space.gather(dict(zip(H.space.shapes, found, strict=True))), H @ gradient)


def test_other_dtypes_layouts_and_the_left_side():
    H, v = hessian(), vector()
    tree = {
        name: x.float().mT.contiguous().mT if x.dim() == 2 else x for name, x in H.space.scatter(v).items()
    }
    torch.testing.assert_close(H.space.gather(H @ tree), H @ v, rtol=1e-5, atol=1e-5)
    assert_same(H.space.gather(H.space.scatter(v) @ H), H @ v)
    found = v.numpy() @ H
    assert isinstance(found, np.ndarray)
    assert_same(torch.from_numpy(found), H @ v)
    assert_same(v @ H, H @ v)
    mixed, u = H.block("L0.W_Q", "L0.W_K"), normal(16, seed=3)
    assert_same(u @ mixed, mixed.to_dense().T @ u)


def test_names_go_through_the_algebra():
    H, v = hessian(), vector()
    n = H.shape[0]
    D = Diagonal(vector(1))
    for A in (2 * H, H / 3, H + Identity(n), D @ H @ D, Identity(n) @ H, H.T, (H + H) @ H):
        assert_same(A.space.gather(A @ H.space.scatter(v)), A @ v)  # pyright: ignore[reportAttributeAccessIssue]
    mixed = H.block("L0.W_Q", "L0.W_K")
    assert list(mixed.T @ {"L0.W_Q": torch.ones(4, 4)}) == ["L0.W_K"]
    # rows in another order are no longer those of the blocks
    assert not hasattr(H.submatrix(torch.arange(n).flip(0)), "space")
    assert not hasattr(H.block("L0.W_Q") + H.block("L0.W_K"), "space")


def test_outputs_have_no_names():
    H, v = hessian(), vector()
    J = cs.Jacobian(H.problem)
    assert_same(J @ H.space.scatter(v), J @ v)
    assert_same(H.space.gather((J.T @ J) @ H.space.scatter(v)), J.T @ (J @ v))
    with pytest.raises(cs.UsageError, match="has no named blocks"):
        J.T @ H.space.scatter(v)


def test_numbers_of_numpy_and_torch_are_numbers():
    H, v = hessian(), vector()
    for two in (np.float64(2), np.int64(2), torch.tensor(2.0), 2):
        assert_same((two * H) @ v, 2 * (H @ v))
        assert_same((H / two) @ v, (H @ v) / 2)


def test_submatrices_by_name_are_blocks():
    H = hessian()
    torch.testing.assert_close(H.submatrix("L0.W_[QK]").to_dense(), H.block("L0.W_[QK]").to_dense())
    assert H.submatrix("L0.W_[QK]").symmetric
    mixed = H.block("L0.W_Q", "L0.*")
    torch.testing.assert_close(
        mixed.submatrix("L0.W_Q", ["L0.W_V", "L0.b_V"]).to_dense(),
        H.block("L0.W_Q", ["L0.W_V", "L0.b_V"]).to_dense(),
    )
    with pytest.raises(cs.UsageError, match=r"no block matches 'L1.W_Q'"):
        H.submatrix("L1.W_Q")


def wrong(change: dict[str, Any], *, drop: str | None = None) -> dict[str, Any]:
    tree = {**hessian().space.scatter(vector()), **change}
    return {name: x for name, x in tree.items() if name != drop}


WRONG: dict[str, tuple[Any, str]] = {
    "unknown": (lambda: wrong({"head.wieght": torch.ones(2, 4)}), "'head.wieght'.*head.weight"),
    "missing": (lambda: wrong({}, drop="head.bias"), "'head.bias' is missing"),
    "shape": (
        lambda: wrong({"head.weight": torch.ones(4, 2)}),
        r"expected a tensor of \(2, 4\), got \(4, 2\)",
    ),
    "no tensor": (lambda: wrong({"head.weight": 0.0}), r"expected a tensor of \(2, 4\), got float"),
    "complex": (
        lambda: wrong({"head.weight": torch.ones(2, 4) * 1j}),
        "head.weight: expected torch.float64 on",
    ),
    "device": (lambda: wrong({"head.bias": torch.ones(2, device="meta")}), "got torch.float32 on meta"),
    "too few": (
        lambda: [torch.ones(2, 4)],
        "expected 14 tensors, for layer.self_attn.in_proj_weight to head.bias",
    ),
    "numbers": (lambda: [1.0, 2.0], "expected a tensor or a NumPy array of .* got list"),
    "mixed": (lambda: wrong({"L0.W_Q": torch.ones(4, 4)}), "got both in one dictionary"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_vectors_are_refused_in_one_sentence(name: str):
    make, message = WRONG[name]
    with pytest.raises(cs.UsageError, match=message) as caught:
        hessian() @ make()
    assert "\n" not in str(caught.value)


def test_entries_outside_of_the_blocks_are_refused():
    A, name = hessian().block("L0.W_Q"), "layer.self_attn.in_proj_weight"
    inside = {name: torch.cat([torch.ones(4, 4), torch.zeros(8, 4)]).double()}
    assert_same(A.space.gather(A @ inside), A @ torch.ones(16).double())
    with pytest.raises(cs.UsageError, match="not zero outside of the operator's blocks"):
        A @ {name: torch.ones(12, 4)}
