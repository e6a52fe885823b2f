"""Norms of the diagonal blocks of one head: against the general closed form, dense blocks and products."""

import pytest
import torch

from curvescope.closed_form.attention.block_norms import ROWS, HeadNorms
from curvescope.closed_form.attention.hessian import AttentionCurvature
from curvescope.closed_form.attention.layer import make_layer, rope_table
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from draws import normal

PARTS = ("outer", "functional", "total")


def head(kind="softmax", *, output=True, curved=True, n=3, L=2, S=5, d=3, c=2, o=4, scale=1.0, seed=0):
    """A layer whose queries are among its keys, what its output meets, and the general closed form."""
    source = generator(seed)
    v = c if output else o
    weights = {name: normal(source, d, c) for name in "QK"} | {"V": normal(source, d, v)}
    weights |= {"O": normal(source, v, o)} if output else {}
    X, G = scale * normal(source, n, S, d), normal(source, n, L, o)
    R, K = normal(source, n, L, o, 2), normal(source, n, L, o, o)
    K = K + K.mT if curved else None
    mask = torch.ones(S, S, dtype=torch.bool).tril()[S - L :]
    options = {"X_K": X, "mask": mask, "kind": kind}
    outer = AttentionCurvature(make_layer(X[:, S - L :], weights, G, R @ R.mT, **options))
    rest = AttentionCurvature(make_layer(X[:, S - L :], weights, G, 0.0 if K is None else K, **options))
    return HeadNorms(outer.layer, R, K), outer, rest


def dense_parts(outer, rest, name):
    """H_o, H_f and H: what is curved behind the head belongs to H_f."""
    size = outer.layer.weights[name].numel()
    found = [outer.to_dense((name, name), "outer"), rest.to_dense((name, name), "total")]
    H_o, H_f = (block.reshape(size, size) for block in found)
    return dict(zip(PARTS, (H_o, H_f, H_o + H_f), strict=True))


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize("curved", [True, False])
@pytest.mark.parametrize("scale", [0.3, 6.0])
def test_norms_and_products_are_those_of_the_dense_block(kind, output, curved, scale):
    found, outer, rest = head(kind, output=output, curved=curved, scale=scale)
    for name in outer.layer.weights:
        block, dense = found.block(name), dense_parts(outer, rest, name)
        V = normal(generator(1), 3, *outer.layer.weights[name].shape)
        largest = dense["total"].abs().max() + dense["outer"].abs().max()
        for part, norm in block.norms()._asdict().items():
            assert abs(norm - dense[part].norm()) < 1e-12 * largest * len(dense[part])
            product = (dense[part] @ V.reshape(3, -1).T).T.reshape(V.shape)
            assert (block.product(V, part) - product).abs().max() < 1e-11 * largest


def test_linear_attention_and_values_have_no_functional_part_at_all():
    found, _, _ = head("linear", curved=False)
    assert [float(norm.functional) for norm in found.norms().values()] == [0.0] * 4
    found, _, _ = head("softmax", curved=False)
    assert {name: float(norm.functional) == 0 for name, norm in found.norms().items()} == {
        "Q": False, "K": False, "V": True, "O": True,
    }  # fmt: skip


def test_norms_over_more_than_one_band_of_queries():
    found, outer, rest = head(n=ROWS, L=2, seed=3)
    for name in "QKVO":
        dense = dense_parts(outer, rest, name)
        for part, norm in found.block(name).norms()._asdict().items():
            torch.testing.assert_close(norm, dense[part].norm(), rtol=1e-11, atol=0)


def test_queries_that_share_a_vector_are_merged():
    found, _, _ = head()
    block = found.block("Q")
    same = type(block)(block.vectors[:1].expand(len(block.vectors), -1), block.outer, block.functional)
    assert len(same._merged[0]) == 1
    total = (block.outer + block.functional).sum(0)
    expected = block.vectors[0].square().sum() * total.norm()
    torch.testing.assert_close(same.norms().total, expected, rtol=1e-13, atol=0)


def test_what_is_refused():
    found, outer, _ = head()
    layer, R = outer.layer, normal(generator(0), 3, 2, 4, 2)
    with pytest.raises(ShapeError, match="factor of shape"):
        HeadNorms(layer, R[:, :1])
    with pytest.raises(ShapeError, match="a matrix per query"):
        HeadNorms(layer, R, R)
    with pytest.raises(UsageError, match="expected one of Q, K, V, O"):
        found.block("E")
    with pytest.raises(UsageError, match="expected one of Q, K, V"):
        head(output=False)[0].block("O")
    X, W = normal(generator(0), 3, 2, 4), {name: normal(generator(1), 4, 4) for name in "QKVO"}
    turned = make_layer(X, W, X, 1.0, rope=rope_table(2, 4))
    two = make_layer(X, W, X, 1.0, num_heads=2)
    for layer in (turned, two):
        with pytest.raises(UsageError, match="one head and without rotary"):
            HeadNorms(layer, normal(generator(2), 3, 2, 4, 2))
