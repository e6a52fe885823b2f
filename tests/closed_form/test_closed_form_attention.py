"""Every block, part, product, diagonal, trace and norm of attention against automatic differentiation."""

import math

import pytest
import torch
from closed_form_attention_oracle import differentiate, random_instance

from curvescope.closed_form import attention
from curvescope.closed_form.attention import head as attention_head
from curvescope.closed_form.attention import terms as attention_terms
from curvescope.closed_form.attention.multihead import multihead_curvature
from curvescope.core.errors import CurvescopeError
from curvescope.core.seeds import generator
from selection import some

PARTS = ("outer", "functional", "total")


def directions(instance, seed):
    source = generator(seed, 5)
    return {
        name: torch.randn(W.shape, generator=source, dtype=torch.float64)
        for name, W in instance.weights.items()
    }


def upper_pairs(names):
    return [(one, two) for i, one in enumerate(names) for two in names[i:]]


def check_everything(instance, seed, tolerance):
    """Compare all that the closed form can say with the oracle, relative to the largest entry of H.

    Of every pair of weights one part is taken on its own, the next with the next seed.
    """
    oracle = differentiate(instance)
    found = instance.closed_form(*oracle.derivatives(instance))
    allowed, V = tolerance * oracle.largest, directions(instance, seed)
    flat = torch.cat([v.flatten() for v in V.values()])

    def close(got, want):
        assert (got - want).abs().max() < allowed

    for part in PARTS:
        product = found.product(V, part)
        close(torch.cat([product[name].flatten() for name in V]), getattr(oracle, part) @ flat)
        close(found.hessian(part).to_dense(list(V)), getattr(oracle, part))
    for number, (one, two) in enumerate(upper_pairs(list(V))):
        part = PARTS[(number + seed) % 3]
        want = oracle.block(one, two, part)
        close(found.to_dense((one, two), part).reshape(want.shape), want)
        close(found.matvec((one, two), V[two], part).flatten(), want @ V[two].flatten())
        close(found.matvec((two, one), V[one], part).flatten(), want.T @ V[one].flatten())
        close(found.frobenius((one, two), part), want.norm())
        if one == two:
            close(found.diagonal((one, two), part).flatten(), want.diagonal())
            close(found.trace((one, two), part), want.trace())


@pytest.mark.parametrize("seed", some(range(220), 8))
def test_everything_agrees_with_automatic_differentiation(seed):
    check_everything(random_instance(seed), seed, 1e-11)


@pytest.mark.parametrize("seed", some(range(300, 324), 2))
def test_everything_agrees_when_attention_saturates(seed):
    check_everything(random_instance(seed, logits=6.0, linear=False), seed, 1e-9)


@pytest.mark.parametrize("seed", some(range(400, 412), 3))
def test_merged_parameterization_agrees(seed):
    instance = random_instance(seed, merged=True, rope=False, cross=False, output=False, biases=False)
    check_everything(instance, seed, 1e-11)


@pytest.mark.parametrize("seed", some(range(500, 512), 1))
def test_rotary_positions_with_shared_heads_and_biases_agree(seed):
    fixed = {"rope": True, "output": True, "heads": 2, "grouped": True, "biases": True, "d_K": 4}
    check_everything(random_instance(seed, max_tokens=5, **fixed), seed, 1e-11)


@pytest.mark.parametrize("seed", some(range(550, 556), 1))
def test_four_heads_on_two_pairs_of_keys_and_values_agree(seed):
    fixed = {"output": True, "heads": 4, "kv": 2, "biases": False, "d": 2, "d_V": 2}
    check_everything(random_instance(seed, max_tokens=5, **fixed), seed, 1e-11)


def test_oracle_agrees_with_double_backward():
    instance = random_instance(3)
    oracle, sizes = differentiate(instance), [W.numel() for W in instance.weights.values()]
    flat = torch.cat([W.flatten() for W in instance.weights.values()])

    def loss(vector):
        parts = [p.view(W.shape) for p, W in zip(vector.split(sizes), instance.weights.values(), strict=True)]
        return instance.loss_of(instance.output(dict(zip(instance.weights, parts, strict=True))))

    want = torch.autograd.functional.hessian(loss, flat)
    torch.testing.assert_close(oracle.total, want, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(oracle.outer + oracle.functional, want, rtol=1e-10, atol=1e-12)


def test_off_diagonal_blocks_have_a_diagonal_when_shapes_agree():
    for seed in range(600, 604):
        instance = random_instance(seed, cross=False, grouped=False)
        oracle = differentiate(instance)
        found = instance.closed_form(*oracle.derivatives(instance))
        for part in PARTS:
            want = oracle.block("Q", "K", part).diagonal()
            allowed = 1e-11 * oracle.largest
            assert (found.diagonal(("Q", "K"), part).flatten() - want).abs().max() < allowed
            assert abs(found.trace(("Q", "K"), part) - want.sum()) < allowed


def test_blocks_is_a_mapping_of_splits_in_both_orders():
    instance = random_instance(9, output=False, n=1, biases=True, loss="squared", rope=False, cross=False)
    oracle = differentiate(instance)
    G, B = oracle.derivatives(instance)
    W = {name: instance.weights[name] for name in "QKV"}
    biases = {name: instance.weights[name][0] for name in ("b_Q", "b_K", "b_V")}
    mask = None if instance.mask is None else instance.mask[0, 0]
    bias = None if instance.bias is None else instance.bias[0, 0]
    found = attention.curvature(
        instance.X[0], W["Q"], W["K"], W["V"], G[0], B, mask=mask, bias=bias, kind=instance.kind, **biases
    ).blocks()
    assert len(found) == 36
    for (one, two), split in found.items():
        want = oracle.block(one, two, "total")
        assert split.total.shape == (*instance.weights[one].shape, *instance.weights[two].shape)
        assert (split.total.reshape(want.shape) - want).abs().max() < 1e-11 * oracle.largest
        assert one == two or torch.equal(split.outer, found[two, one].T.outer)
    with pytest.raises(AttributeError):
        found["Q", "Q"].outer = None  # frozen


def test_multihead_blocks_use_the_layout_of_whole_matrices():
    instance = random_instance(21, output=True, heads=2, grouped=True, cross=False, biases=True, rope=False)
    oracle = differentiate(instance)
    G, B = oracle.derivatives(instance)
    weights = {n if n[:2] == "b_" else "W_" + n: W for n, W in instance.weights.items()}
    found = multihead_curvature(
        instance.X, **weights, G=G, B=B, num_heads=2, num_kv_heads=1,
        mask=instance.mask, bias=instance.bias, kind=instance.kind,
    ).blocks()  # fmt: skip
    names = list(instance.weights)
    matrix = torch.cat(
        [
            torch.cat([found[a, b].total.reshape(instance.weights[a].numel(), -1) for b in names], dim=1)
            for a in names
        ]
    )
    assert (matrix - oracle.total).abs().max() < 1e-11 * oracle.largest
    assert (matrix - matrix.T).abs().max() < 1e-13 * oracle.largest


def test_batch_is_the_sum_of_its_samples():
    instance = random_instance(2, n=2, loss="cross_entropy", output=False, rope=False, cross=False)
    oracle = differentiate(instance)
    G, B = oracle.derivatives(instance)
    W = [instance.weights[name] for name in "QKV"]
    both = attention.curvature(instance.X, *W, G, B).blocks()
    single = [attention.curvature(instance.X[i], *W, G[i], B[i]).blocks() for i in range(2)]
    for pair in both:
        summed = single[0][pair].total + single[1][pair].total
        torch.testing.assert_close(both[pair].total, summed, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rope", some([True, False], 1))
def test_slices_of_queries_and_terms_do_not_matter(rope, monkeypatch):
    instance = random_instance(5, rope=rope, output=True, L=7)
    oracle = differentiate(instance)
    whole = instance.closed_form(*oracle.derivatives(instance))
    want = {pair: (whole.to_dense(pair), whole.frobenius(pair)) for pair in upper_pairs(["Q", "K", "V", "O"])}
    monkeypatch.setattr(attention_head, "MAX_ENTRIES", 50)
    monkeypatch.setattr(attention_terms, "MAX_ENTRIES", 50)
    cut = instance.closed_form(*oracle.derivatives(instance))
    for pair, (dense, norm) in want.items():
        torch.testing.assert_close(cut.to_dense(pair), dense, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(cut.frobenius(pair), norm, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "hide"), [("softmax", "mask"), ("softmax", "bias"), ("linear", "mask")])
def test_fully_masked_rows_have_no_weight_and_nothing_is_nan(kind, hide):
    source = generator(0, 1)
    X, *W = (torch.randn(*s, generator=source, dtype=torch.float64) for s in ((5, 3), (3, 2), (3, 2), (3, 4)))
    G = torch.randn(5, 4, generator=source, dtype=torch.float64)
    seen = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    table = seen if hide == "mask" else torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, -math.inf)
    found = attention.curvature(X, *W, G, 0.1, kind=kind, **{hide: table})
    assert torch.equal(found.layer.A[0, 0, 0], torch.zeros(5, dtype=torch.float64))
    rest = attention.curvature(X[1:], *W, G[1:], 0.1, kind=kind, X_K=X, mask=seen[1:])
    for pair in upper_pairs(["Q", "K", "V"]):
        for part in PARTS:
            assert found.to_dense(pair, part).isfinite().all()
            torch.testing.assert_close(
                found.to_dense(pair, part), rest.to_dense(pair, part), rtol=1e-12, atol=1e-14
            )
            assert found.frobenius(pair, part).isfinite()


def test_single_precision_stays_single():
    instance = random_instance(12, output=False, cross=False, rope=False, n=1, loss="squared")
    W = [instance.weights[name].float() for name in "QKV"]
    G = torch.ones(instance.X.shape[1], W[2].shape[1])
    found = attention.curvature(instance.X[0].float(), *W, G, 0.5).blocks()
    assert {split.total.dtype for split in found.values()} == {torch.float32}


X, W, G = torch.ones(4, 3), torch.ones(3, 2), torch.ones(4, 2)
BAD = {
    "X": lambda: attention.curvature(X[0], W, W, W, G, 1.0),
    "W_Q": lambda: attention.curvature(X, W.T, W, W, G, 1.0),
    "widths": lambda: attention.curvature(X, W, torch.ones(3, 3), W, G, 1.0),
    "G": lambda: attention.curvature(X, W, W, W, G.T, 1.0),
    "B": lambda: attention.curvature(X, W, W, W, G, torch.ones(2, 2)),
    "mask": lambda: attention.curvature(X, W, W, W, G, 1.0, mask=torch.ones(4, 4)),
    "mask shape": lambda: attention.curvature(X, W, W, W, G, 1.0, mask=torch.ones(3, 4, 4, dtype=torch.bool)),
    "bias": lambda: attention.curvature(X, W, W, W, G, 1.0, bias=torch.ones(4, 5)),
    "rope": lambda: attention.curvature(X, W, W, W, G, 1.0, rope=(torch.ones(4, 2), torch.ones(4, 2))),
    "b_Q": lambda: attention.curvature(X, W, W, W, G, 1.0, b_Q=torch.ones(3)),
    "kind": lambda: attention.curvature(X, W, W, W, G, 1.0, kind="sigmoid"),
    "axes": lambda: attention.curvature(X, W, W, W, G, 1.0, X_K=X[None]),
    "tokens": lambda: attention.curvature(X, W, W, W, G, 1.0, X_K=X, X_V=X[:3]),
    "heads": lambda: multihead_curvature(X, W, W, W, W.T, torch.ones(4, 3), 1.0, num_heads=2, num_kv_heads=3),
    "name": lambda: attention.curvature(X, W, W, W, G, 1.0).to_dense(("Q", "O")),
    "matvec": lambda: attention.curvature(X, W, W, W, G, 1.0).matvec(("Q", "K"), W.T),
    "diagonal": lambda: attention.curvature(X, W, W, X.T, X @ X.T, 1.0).diagonal(("Q", "V")),
    "direction": lambda: attention.curvature(X, W, W, W, G, 1.0).product({"Q": W.T}),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_wrong_calls_say_what_was_expected(what):
    with pytest.raises(CurvescopeError, match=r"expected|no weight|no diagonal"):
        BAD[what]()


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="masks"):
        attention.curvature(X, W, W, W, G, 1.0, masks=None).blocks()
