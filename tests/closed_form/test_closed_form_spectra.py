"""Exact spectra against dense Hessians by automatic differentiation."""

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian as autodiff_hessian

from curvescope.closed_form.spectra.one_dimensional import (
    attention_1d_outputs,
    attention_1d_spectrum,
    product_bulk,
    reduced_spectrum,
    two_layer_linear_spectrum,
    two_layer_relu_spectrum,
)
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from oracles import normal
from selection import some

SHAPES = (
    "generic",
    "parallel",
    "antiparallel",
    "equal",
    "opposite",
    "no keys",
    "no queries",
    "neither",
    "no values",
    "orthogonal",
)


def attend(xs, w_Q, w_K, w_V):
    """Outputs of each sample, written out with softmax, for automatic differentiation."""
    outputs = []
    for x in xs:
        logits = (w_Q * w_K).sum(-1)[:, None, None] * x[:, None] * x / w_Q.shape[1] ** 0.5
        outputs.append((w_V[:, None] * (torch.softmax(logits, dim=2) @ x)).sum(0))
    return outputs


def squared_error(xs, ys, w_Q, w_K, w_V):
    outputs = attend(xs, w_Q, w_K, w_V)
    return torch.stack([((f - y) ** 2).mean() for f, y in zip(outputs, ys, strict=True)]).mean()


def dense(function, *weights):
    """The whole Hessian of a scalar function of several tensors, each row-major."""
    blocks = autodiff_hessian(function, weights)
    sizes = [w.numel() for w in weights]
    rows = [
        torch.cat([b.reshape(n, m) for b, m in zip(row, sizes, strict=True)], 1)
        for row, n in zip(blocks, sizes, strict=True)
    ]
    return torch.cat(rows).numpy()


def relative_error(found, H):
    truth = np.linalg.eigvalsh((H + H.T) / 2)
    return np.abs(found.eigenvalues - truth).max() / max(np.abs(truth).max(), 1e-300)


def check_vectors(found, H, tolerance=1e-11):
    size, vectors = np.abs(found.eigenvalues).max(), found.eigenvectors
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(len(vectors)), atol=1e-12)
    np.testing.assert_allclose(H @ vectors, vectors * found.eigenvalues, atol=tolerance * max(size, 1e-300))


def attention_case(number):
    """Weights and samples; the shape of the weights and d_K = 1..6 cycle with the number."""
    source = generator(11, number)
    kind, d = SHAPES[number % len(SHAPES)], 1 + (number // len(SHAPES)) % 6
    w_Q, w_K, w_V = normal(source, d), normal(source, d), normal(source, 1)
    if kind == "orthogonal":
        w_K = w_K - w_Q * (w_Q @ w_K) / (w_Q @ w_Q)
    w_K = {
        "parallel": 0.7 * w_Q,
        "antiparallel": -1.3 * w_Q,
        "equal": w_Q.clone(),
        "opposite": -w_Q,
        "no keys": torch.zeros(d),
        "neither": torch.zeros(d),
    }.get(kind, w_K)
    w_Q = torch.zeros(d) if kind in ("no queries", "neither") else w_Q
    w_V = torch.zeros(1) if kind == "no values" else w_V
    count = int(torch.randint(1, 5, (), generator=source))
    lengths = torch.randint(1, 7, (count,), generator=source).tolist()
    xs = [normal(source, length) for length in lengths]
    ys = [normal(source, length) for length in lengths]
    return xs, ys, w_Q.double()[None], w_K.double()[None], w_V.double()


@pytest.mark.parametrize(("first", "last"), some([(0, 20), (20, 500)], 1))
@pytest.mark.parametrize("kind", range(len(SHAPES)), ids=SHAPES)
def test_attention_1d_spectrum_in_500_cases(kind, first, last):
    for number in range(first + (kind - first) % len(SHAPES), last, len(SHAPES)):
        xs, ys, w_Q, w_K, w_V = attention_case(number)
        H = dense(lambda q, k, v, xs=xs, ys=ys: squared_error(xs, ys, q, k, v), w_Q, w_K, w_V)
        found = attention_1d_spectrum(xs, w_Q[0], w_K[0], w_V[0], targets=ys, eigenvectors=number % 7 == 0)
        assert relative_error(found, H) < 1e-12
        d = w_Q.shape[1]
        assert found.multiplicity.tolist() == [d - 1, d - 1]
        assert len(found.outliers) == 3
        assert len(found.eigenvalues) == 2 * d + 1
        if found.eigenvectors is not None:
            check_vectors(found, H)


def test_parts_add_up_and_the_ggn_has_no_bulk():
    xs, ys, w_Q, w_K, w_V = attention_case(20)
    parts = {}
    for part in ("hessian", "ggn", "functional"):
        found = attention_1d_spectrum(xs, w_Q, w_K, w_V, targets=ys, part=part, eigenvectors=True)
        parts[part] = found.eigenvectors * found.eigenvalues @ found.eigenvectors.T
    np.testing.assert_allclose(parts["ggn"] + parts["functional"], parts["hessian"], atol=1e-12)
    J = torch.cat(
        [
            torch.cat([j.reshape(len(x), -1) for j in jacobians], 1)
            for x, jacobians in zip(
                xs,
                torch.autograd.functional.jacobian(lambda *w: tuple(attend(xs, *w)), (w_Q, w_K, w_V)),
                strict=True,
            )
        ]
    )
    weight = torch.cat([torch.full((len(x),), 2 / len(x) / len(xs), dtype=torch.float64) for x in xs])
    np.testing.assert_allclose(parts["ggn"], J.T @ (weight[:, None] * J), atol=1e-12)
    found = attention_1d_spectrum(xs, w_Q, w_K, w_V, targets=ys, part="ggn")
    assert (found.bulk == 0).all()
    assert (np.abs(found.eigenvalues) < 1e-13).sum() >= 2 * w_Q.shape[1] - 1
    assert found.eigenvalues.min() > -1e-13


def test_several_heads_and_a_loss_that_couples_all_tokens():
    source = generator(3)
    xs = [normal(source, 4), normal(source, 6)]
    w_Q, w_K, w_V = normal(source, 3, 4), normal(source, 3, 4), normal(source, 3)
    mixing = normal(source, 10, 10)

    def loss(f):
        return torch.logsumexp(mixing @ f, 0) + (f**4).sum() / 12

    f = attention_1d_outputs(xs, w_Q, w_K, w_V)
    torch.testing.assert_close(f, torch.cat(attend(xs, w_Q, w_K, w_V)))
    G = torch.func.grad(loss)(f)
    B = autodiff_hessian(loss, f)
    H = dense(lambda *w: loss(torch.cat(attend(xs, *w))), w_Q, w_K, w_V)
    found = attention_1d_spectrum(xs, w_Q, w_K, w_V, G=G, B=B, eigenvectors=True)
    assert relative_error(found, H) < 1e-12
    assert found.multiplicity.tolist() == [3] * 6
    assert len(found.outliers) == 9
    check_vectors(found, H)


@pytest.mark.parametrize("kind", ["by key", "by pair", "causal"])
def test_a_bias_of_the_scores_changes_no_formula(kind):
    source = generator(17)
    xs, ys = ([normal(source, n) for n in (4, 6)] for _ in range(2))
    w_Q, w_K, w_V = normal(source, 2, 3), normal(source, 2, 3), normal(source, 2)
    biases = [normal(source, n) if kind == "by key" else normal(source, n, n) for n in (4, 6)]
    if kind == "causal":
        hidden = [torch.ones(n, n).triu(1).bool() for n in (4, 6)]
        biases = [b.masked_fill(h, -torch.inf) for b, h in zip(biases, hidden, strict=True)]

    def loss(w_Q, w_K, w_V):
        total = []
        for x, y, bias in zip(xs, ys, biases, strict=True):
            scores = (w_Q * w_K).sum(-1)[:, None, None] * x[:, None] * x / 3**0.5 + bias
            total.append((((w_V[:, None] * (torch.softmax(scores, 2) @ x)).sum(0) - y) ** 2).mean())
        return torch.stack(total).mean()

    found = attention_1d_spectrum(xs, w_Q, w_K, w_V, targets=ys, score_bias=biases, eigenvectors=True)
    H = dense(loss, w_Q, w_K, w_V)
    assert relative_error(found, H) < 1e-12
    check_vectors(found, H)
    f = attention_1d_outputs(xs, w_Q, w_K, w_V, score_bias=biases)
    each = ((f - torch.cat(ys)) ** 2).split([4, 6])
    torch.testing.assert_close(sum(e.mean() for e in each) / 2, loss(w_Q, w_K, w_V))


def test_nullity_and_outliers_at_a_critical_point():
    """ℓ_a = ℓ_v = 0 at a positive loss: nullity 2 d_K − 1, and a quadratic gives the other two."""
    source = generator(5)
    x, d = normal(source, 6), 4
    w_Q, w_K, w_V = normal(source, d), normal(source, d), normal(source, 1)
    A = torch.softmax(w_Q @ w_K / d**0.5 * torch.outer(x, x), 1)
    m = A @ x
    slope, bend = x * (A * (x - m[:, None]) ** 2).sum(1), x**2 * (A * (x - m[:, None]) ** 3).sum(1)
    plane, _ = torch.linalg.qr(torch.stack([m, slope], 1))
    r = normal(source, 6)
    r = r - plane @ (plane.T @ r)
    y = w_V * m - r
    found = attention_1d_spectrum(x, w_Q, w_K, w_V, targets=y)
    assert (
        relative_error(found, dense(lambda *w: squared_error([x], [y], *w), w_Q[None], w_K[None], w_V))
        < 1e-12
    )
    assert (np.abs(found.eigenvalues) < 1e-13).sum() == 2 * d - 1

    def mean(z):
        return 2 * float(z.mean())

    N, v, e = float(w_Q @ w_Q + w_K @ w_K), mean(m * m), float(w_V) * mean(m * slope) / d**0.5
    c = (float(w_V) ** 2 * mean(slope**2) + float(w_V) * mean(r * bend)) / d
    half = (v + c * N) / 2
    root = np.sqrt(half**2 - N * (v * c - e**2))
    others = np.sort(found.eigenvalues[np.abs(found.eigenvalues) > 1e-13])
    np.testing.assert_allclose(others, [half - root, half + root], rtol=1e-10)


def test_zero_queries_and_keys_are_a_strict_saddle():
    """±b with multiplicity d_K each and ℓ_vv; with w_V optimal it is a critical point."""
    source = generator(6)
    x, y, d = normal(source, 5), normal(source, 5), 3
    mean = x.mean()
    w_V = (y.mean() / mean)[None]  # ∂ℓ/∂w_V = 0 under uniform attention
    zero = torch.zeros(d, dtype=torch.float64)
    found = attention_1d_spectrum(x, zero, zero, w_V, targets=y)
    b = abs(found.bulk[0])
    assert b > 1e-3
    np.testing.assert_allclose(
        found.eigenvalues, np.sort([-b] * d + [b] * d + [2 * float(mean) ** 2]), atol=1e-14
    )
    gradient = torch.autograd.functional.jacobian(
        lambda q, k, v: squared_error([x], [y], q, k, v), (zero[None], zero[None], w_V)
    )
    assert max(float(g.abs().max()) for g in gradient) < 1e-14


@pytest.mark.parametrize("d", [1, 2, 7])
def test_two_layer_linear_network(d):
    source = generator(7, d)
    for number in range(20):
        w, v = normal(source, d), normal(source, d)
        w, v = [(w, v), (w, -w), (w, w), (w, 0 * v), (0 * w, 0 * v)][number % 5]
        x, y = normal(source, 6), normal(source, 6)
        H = dense(lambda w, v, x=x, y=y: (((w @ v) * x - y) ** 2).mean(), w, v)
        found = two_layer_linear_spectrum(w, v, x, targets=y, eigenvectors=True)
        assert relative_error(found, H) < 1e-12
        check_vectors(found, H)
        b, c = 2 * float((x * ((w @ v) * x - y)).mean()), 2 * float((x * x).mean())
        half = c * float(w @ w + v @ v) / 2
        root = np.sqrt(half**2 + b**2 + 2 * c * b * float(w @ v))
        np.testing.assert_allclose(found.outliers, [half - root, half + root], atol=1e-12)


def test_two_layer_relu_network():
    source = generator(8)
    for number in range(40):
        m = 1 + number % 8
        w, v, x, y = normal(source, m), normal(source, m), normal(source, 7), normal(source, 7)
        w = w.abs() if number % 9 == 0 else w  # one group empty
        if number % 10 == 0:
            x[0] = 0.0

        def loss(w, v, x=x, y=y):
            return ((torch.relu(w[:, None] * x) * v[:, None]).sum(0) - y).pow(2).mean()

        H = dense(loss, w, v)
        found = two_layer_relu_spectrum(w, v, x, targets=y, eigenvectors=True)
        assert relative_error(found, H) < 1e-12
        check_vectors(found, H)


def test_relu_network_with_a_loss_that_couples_its_two_halves():
    source = generator(9)
    w, v, x = normal(source, 6), normal(source, 6), normal(source, 5)

    def network(w, v):
        return (torch.relu(w[:, None] * x) * v[:, None]).sum(0)

    f = network(w, v)
    G, B = torch.softmax(f, 0), torch.diag(torch.softmax(f, 0)) - torch.outer(*[torch.softmax(f, 0)] * 2)
    found = two_layer_relu_spectrum(w, v, x, G=G, B=B, eigenvectors=True)
    H = dense(lambda w, v: torch.logsumexp(network(w, v), 0), w, v)
    assert relative_error(found, H) < 1e-12
    check_vectors(found, H)


def test_reduction_lemma_for_pairs_of_different_lengths():
    source = generator(10)
    sizes, scales = (1, 4, 2), (1.0, 0.3, -2.0)
    pairs = [(normal(source, m), normal(source, m)) for m in sizes]
    phi, mixing = normal(source, 2), normal(source, 5, 5)

    def loss(z):
        return torch.sin(mixing @ z).sum() + (z**3).sum()

    def function(*weights):
        a = [s * (weights[2 * r] @ weights[2 * r + 1]) for r, s in enumerate(scales)]
        return loss(torch.cat([torch.stack(a), weights[-1]]))

    z = torch.cat([torch.stack([s * (w @ v) for s, (w, v) in zip(scales, pairs, strict=True)]), phi])
    H = dense(function, *[vector for pair in pairs for vector in pair], phi)
    found = reduced_spectrum(
        pairs, torch.func.grad(loss)(z)[:3], autodiff_hessian(loss, z), scales=scales, eigenvectors=True
    )
    assert relative_error(found, H) < 1e-12
    assert found.multiplicity.tolist() == [0, 0, 3, 3, 1, 1]
    check_vectors(found, H)


@pytest.mark.parametrize("d_K", [4, 7])
def test_matrix_attention_has_the_singular_values_of_gamma_in_its_spectrum(d_K: int):
    source = generator(12)
    L, d = 5, 2
    X, Y = normal(source, L, d), normal(source, L, d)
    W_Q, W_K, W_V = normal(source, d, d_K), normal(source, d, d_K), normal(source, d, d)

    def loss(product, W_V):
        logits = X @ product @ X.T / d_K**0.5
        logits = logits.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
        return ((torch.softmax(logits, 1) @ X @ W_V - Y) ** 2).mean()

    Gamma = torch.func.grad(loss)(W_Q @ W_K.T, W_V)
    found = product_bulk(Gamma, W_Q, W_K, eigenvectors=True)
    assert found.multiplicity == d_K - 2 * d
    H = dense(lambda q, k, v: loss(q @ k.T, v), W_Q, W_K, W_V)
    spectrum = np.linalg.eigvalsh(H)
    for value in found.eigenvalues:
        near = np.abs(spectrum - value) < 1e-13 * np.abs(spectrum).max()
        assert near.sum() == d_K - 2 * d + 1  # one more than the eigenvectors of `product_bulk`
    vectors = found.eigenvectors.reshape(2 * d * d_K, -1)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(vectors.shape[1]), atol=1e-12)
    padded = np.concatenate([vectors, np.zeros((d * d, vectors.shape[1]))])
    np.testing.assert_allclose(
        H @ padded, padded * np.repeat(found.eigenvalues, found.multiplicity), atol=1e-12
    )
    typical = product_bulk(Gamma, W_Q[:, :2], W_K[:, :2])
    assert typical.multiplicity == 0


def test_vector_output_of_a_linear_network_has_the_gradient_norm_in_its_spectrum():
    """f = vᵀWx: ±|∂ℓ/∂(Wᵀv)| with multiplicity m − rank [v, W]."""
    source = generator(13)
    m, d = 6, 3
    W, v, X, y = normal(source, m, d), normal(source, m), normal(source, 8, d), normal(source, 8)

    def loss(a):
        return ((X @ a - y) ** 2).mean()

    Gamma = torch.func.grad(loss)(W.T @ v)[:, None]
    found = product_bulk(Gamma, W.T, v[None])
    assert found.multiplicity == m - d - 1
    np.testing.assert_allclose(found.eigenvalues, [float(Gamma.norm()), -float(Gamma.norm())])
    spectrum = np.linalg.eigvalsh(dense(lambda W, v: loss(W.T @ v), W, v))
    for value in found.eigenvalues:
        assert (np.abs(spectrum - value) < 1e-12).sum() >= found.multiplicity


def test_spectra_can_be_saved(tmp_path):
    xs, ys, w_Q, w_K, w_V = attention_case(0)
    found = attention_1d_spectrum(xs, w_Q, w_K, w_V, targets=ys)
    again = type(found).load(found.save(tmp_path))
    np.testing.assert_array_equal(again.eigenvalues, found.eigenvalues)
    assert again.eigenvectors is None


def test_wrong_calls_say_what_was_expected():
    x = torch.ones(3)
    with pytest.raises(UsageError, match="either targets, or both G and B"):
        attention_1d_spectrum(x, x, x, x[0])
    with pytest.raises(ShapeError, match="3 targets"):
        attention_1d_spectrum(x, x, x, x[0], targets=torch.ones(2))
    with pytest.raises(ShapeError, match=r"\(h, d_K\)"):
        attention_1d_spectrum(x, x, torch.ones(2), x[0], targets=x)
    for bias, words in ((torch.ones(2), r"bias \(3,\) or \(3, 3\)"), ([x, x], "each of 1 sequences, got 2")):
        with pytest.raises(ShapeError, match=words):
            attention_1d_spectrum(x, x, x, x[0], targets=x, score_bias=bias)
    with pytest.raises(UsageError, match="kink"):
        two_layer_relu_spectrum(torch.zeros(2), torch.ones(2), x, targets=x)
    with pytest.raises(ShapeError, match="square Hessian"):
        reduced_spectrum([(x, x)], torch.ones(1), torch.ones(2, 1))
    with pytest.raises(UsageError, match="'ggn'"):
        two_layer_linear_spectrum(x, x, x, targets=x, part="outer")
