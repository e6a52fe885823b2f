"""Bounds against the dense Hessian, itself checked against automatic differentiation."""

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian as autodiff_hessian

from curvescope.closed_form.bounds.head import attention_bounds
from curvescope.closed_form.bounds.operator_norms import attention_norm_bounds, theorem1_corrected
from curvescope.closed_form.bounds.sums import (
    joint_sum_bound,
    rectangular_sum_bound,
    separable_rayleigh,
    symmetric_sum_bound,
)
from curvescope.closed_form.printed.bounds import theorem1_as_printed
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from oracles import normal, whole_number
from selection import some

PAIRS = (("QQ", 0, 0), ("QK", 0, 1), ("QV", 0, 2), ("KK", 1, 1), ("KV", 1, 2), ("VV", 2, 2))
KINDS = (
    "plain",
    "large weights",
    "small weights",
    "no keys, large queries",
    "no queries",
    "saturated",
    "one-hot",
    "tokens on a line",
    "one token",
    "equal tokens",
    "causal",
    "random mask",
    "far from the origin",
    "zero gradient",
    "no values",
    "token curvature",
    "indefinite curvature",
    "Gauss-Newton",
    "functional",
    "batch",
)


def attention_case(kind, number):
    """Arguments of `attention_bounds` for an instance of a kind."""
    source = generator(21, KINDS.index(kind), number)
    L, d = whole_number(source, 2, 7), whole_number(source, 1, 4)
    d_K, d_V = whole_number(source, 1, 3), whole_number(source, 1, 3)
    L = 1 if kind == "one token" else L
    size = {"large weights": 8.0, "small weights": 1e-3, "saturated": 3.0, "one-hot": 9.0}.get(kind, 1.0)
    shape = (2, L, d) if kind == "batch" else (L, d)
    X, (W_Q, W_K, W_V) = normal(source, *shape), [size * normal(source, d, n) for n in (d_K, d_K, d_V)]
    if kind == "no keys, large queries":
        W_Q, W_K = 100 * W_Q, 0 * W_K
    if kind == "tokens on a line":
        X = normal(source, L, 1) * normal(source, 1, d)
    if kind == "equal tokens":
        X = X[:1].expand(L, d).clone()
    if kind == "far from the origin":
        X = X + 300 * normal(source, 1, d)
        W_Q = W_Q / 300
    W_Q, W_V = (0 if kind == "no queries" else 1) * W_Q, (0 if kind == "no values" else 1) * W_V
    mask = {
        "causal": torch.ones(L, L).tril().bool(),
        "random mask": torch.rand(L, L, generator=source) < 0.6,  # a query may see nothing
    }.get(kind)
    G, B = normal(source, *shape[:-1], d_V), 2 / (L * d_V)
    G = 0 * G if kind == "zero gradient" else G
    if kind in ("token curvature", "indefinite curvature", "batch"):
        root = normal(source, *shape[:-1], d_V, d_V)
        B = root + root.mT if kind == "indefinite curvature" else root @ root.mT
    part = {"Gauss-Newton": "ggn", "functional": "functional"}.get(kind, "hessian")
    return (X, W_Q, W_K, W_V, G, B), {"mask": mask, "part": part}


def attend(X, W_Q, W_K, W_V, mask=None):
    logits = X @ W_Q @ (X @ W_K).mT / W_Q.shape[1] ** 0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -1e300)
    A = torch.softmax(logits, -1)
    return (A if mask is None else A * mask) @ X @ W_V


def dense_blocks(X, W_Q, W_K, W_V, G, B, mask=None, part="hessian"):
    """The blocks QQ, QK, QV, KK, KV, VV from sums over queries, centered query by query."""
    if X.ndim == 3:
        curvature = B if isinstance(B, torch.Tensor) else [B] * len(X)
        each = [
            dense_blocks(x, W_Q, W_K, W_V, g, b, mask, part) for x, g, b in zip(X, G, curvature, strict=True)
        ]
        return {name: sum(blocks[name] for blocks in each) for name in each[0]}
    (L, d), d_K, d_V = X.shape, W_Q.shape[1], W_V.shape[1]
    s, o, f = d_K**-0.5, float(part != "functional"), float(part != "ggn")
    logits = s * X @ W_Q @ (X @ W_K).mT
    A = torch.softmax(logits if mask is None else logits.masked_fill(~mask, -1e300), 1)
    A = A if mask is None else A * mask
    q, m = X @ W_Q, A @ X
    away = X - X[A.argmax(1)][:, None]
    away = away - A[:, None] @ away  # (query, key, feature)
    rho = torch.einsum("ijw,iw->ij", away @ W_V, G)
    M2, T = (torch.einsum("ij,ija,ijb->iab", weight, away, away) for weight in (A, A * rho))
    eye = torch.eye(d_V, dtype=X.dtype)
    B = B if isinstance(B, torch.Tensor) else (B * eye).expand(L, d_V, d_V)
    E = W_V.mT @ M2
    D = s * s * (o * E.mT @ B @ E + f * T)
    C, N = W_K.mT @ D @ W_K, W_K.mT @ D
    g = s * torch.einsum("ia,ij,ijb->ab", X, A * rho, away)
    mixed = f * torch.einsum("ce,ab->acbe", torch.eye(d_K, dtype=X.dtype), g)
    outer, shape = o * s * B @ E, (d * d_K, d * d_V)
    return {
        "QQ": torch.einsum("ia,ib,ice->acbe", X, X, C).reshape(d * d_K, d * d_K),
        "QK": (torch.einsum("ia,ie,icb->acbe", X, q, N) + mixed).reshape(d * d_K, d * d_K),
        "KK": torch.einsum("ic,ie,iab->acbe", q, q, D).reshape(d * d_K, d * d_K),
        "QV": (
            torch.einsum("ia,ib,iwc->acbw", X, m, outer @ W_K)
            + f * s * torch.einsum("ia,iw,icb->acbw", X, G, W_K.mT @ M2)
        ).reshape(shape),
        "KV": (
            torch.einsum("ic,ib,iwa->acbw", q, m, outer) + f * s * torch.einsum("ic,iw,iab->acbw", q, G, M2)
        ).reshape(shape),
        "VV": o * torch.einsum("ia,ib,ivw->avbw", m, m, B).reshape(d * d_V, d * d_V),
    }


def assembled(b):
    rows = (b["QQ"], b["QK"], b["QV"]), (b["QK"].mT, b["KK"], b["KV"]), (b["QV"].mT, b["KV"].mT, b["VV"])
    return torch.cat([torch.cat(row, 1) for row in rows])


def true_norms(blocks):
    """Spectral norms of the blocks (3, 3) and of the whole."""
    table = np.zeros((3, 3))
    for name, i, j in PAIRS:
        table[i, j] = table[j, i] = float(torch.linalg.matrix_norm(blocks[name], ord=2))
    return table, float(torch.linalg.eigvalsh(assembled(blocks)).abs().max())


def check(found, table, whole):
    room = 1e-13 * whole
    assert (table <= found.upper * (1 + 1e-9) + room).all()
    assert whole <= found.whole * (1 + 1e-9)
    if found.lower is not None:
        assert (found.lower <= table * (1 + 1e-9) + room).all()
        assert found.whole_lower <= whole * (1 + 1e-9)


@pytest.mark.parametrize("numbers", some([range(1), range(1, 100)], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_no_bound_fails_on_2000_instances(kind, numbers):
    for number in numbers:
        arguments, options = attention_case(kind, number)
        table, whole = true_norms(dense_blocks(*arguments, **options))
        check(attention_bounds(*arguments, **options, lower=number % 5 == 0), table, whole)
        check(attention_norm_bounds(*arguments, mask=options["mask"]), table, whole)
        if number % 5 == 0:
            check(attention_norm_bounds(*arguments, mask=options["mask"], measured=True), table, whole)


@pytest.mark.parametrize("numbers", some([range(18), range(18, 54)], 1))  # one or two of every kind
def test_the_reference_is_the_hessian_in_54_instances(numbers):
    kinds = [kind for kind in KINDS if kind not in ("Gauss-Newton", "functional")]
    for number in numbers:
        kind = kinds[number % len(kinds)]
        (X, W_Q, W_K, W_V, G, B), options = attention_case(kind, 200 + number)
        at = attend(X, W_Q, W_K, W_V, options["mask"])

        def loss(W_Q, W_K, W_V, X=X, G=G, B=B, at=at, mask=options["mask"]):
            step = attend(X, W_Q, W_K, W_V, mask) - at
            bend = (B @ step[..., None])[..., 0] if isinstance(B, torch.Tensor) else B * step
            return (G * step).sum() + (step * bend).sum() / 2

        H = autodiff_hessian(loss, (W_Q, W_K, W_V))
        sizes = [W.numel() for W in (W_Q, W_K, W_V)]
        H = torch.cat(
            [torch.cat([H[i][j].reshape(sizes[i], sizes[j]) for j in range(3)], 1) for i in range(3)]
        )
        found = assembled(dense_blocks(X, W_Q, W_K, W_V, G, B, **options))
        # tokens with a large common mean cost the machine derivative half of its digits
        tolerance = 1e-5 if kind == "far from the origin" else 1e-8
        assert float((found - H).abs().max()) <= tolerance * float(H.abs().max()), kind


@pytest.fixture(scope="module")
def typical():
    """Ratios to the truth on 18 instances, L 4–24, d 3–8: upper and lower bounds of blocks and wholes."""
    ratios = {"upper": [], "whole": [], "lower": [], "whole lower": [], "VV": []}
    for number in range(18):
        source = generator(31, number)
        L, d, d_K, d_V = whole_number(source, 4, 24), *(whole_number(source, 3, 8) for _ in range(3))
        size = (0.3, 1.0, 3.0)[number % 3] / d**0.5
        X, Y = normal(source, L, d), normal(source, L, d_V)
        W_Q, W_K, W_V = (size * normal(source, d, n) for n in (d_K, d_K, d_V))
        c = 2 / (L * d_V)
        arguments = X, W_Q, W_K, W_V, c * (attend(X, W_Q, W_K, W_V) - Y), c
        table, whole = true_norms(dense_blocks(*arguments))
        found = attention_bounds(*arguments)
        check(found, table, whole)
        ratios["upper"].append(found.upper / table)
        ratios["lower"].append(found.lower / table)
        ratios["whole"].append(found.whole / whole)
        ratios["whole lower"].append(found.whole_lower / whole)
    return {name: np.array(values) for name, values in ratios.items()}


def test_a_posteriori_bounds_are_tight(typical):
    assert np.median(typical["whole"]) < 1.6
    assert typical["whole"].max() < 3
    assert np.median(typical["upper"], axis=0).max() < 1.45
    np.testing.assert_allclose(typical["upper"][:, 2, 2], 1, rtol=1e-11)


def test_lower_bounds_are_tight(typical):
    assert np.median(typical["whole lower"]) > 0.99
    assert typical["whole lower"].min() > 0.6
    assert np.median(typical["lower"], axis=0).min() > 0.99
    assert typical["lower"].min() > 0.5


def test_theorem_1_as_printed_fails_without_keys():
    """W_K = 0 at an exact minimum: KK grows as ‖W_Q‖², the printed bound does not contain W_Q."""
    source = generator(41)
    L, d, d_K = 4, 3, 2
    X, W_K, W_V = normal(source, L, d), torch.zeros(d, d_K, dtype=torch.float64), normal(source, d, d)
    direction = normal(source, d, d_K)
    target = attend(X, direction, W_K, W_V)
    printed = {
        c: theorem1_as_printed(X, direction, W_K, W_V, target, constants=c).value
        for c in ("main", "appendix")
    }
    np.testing.assert_allclose(printed["main"] / printed["appendix"], 2 * d**0.5)
    norms = []
    for size in (1.0, 10.0, 100.0, 1000.0):
        W_Q = size * direction
        table, whole = true_norms(
            dense_blocks(X, W_Q, W_K, W_V, torch.zeros(L, d, dtype=X.dtype), 2 / (L * d))
        )
        norms.append(whole)
        assert theorem1_as_printed(X, W_Q, W_K, W_V, target).value == printed["main"]
        check(theorem1_corrected(X, W_Q, W_K, W_V, target), table, whole)
        check(theorem1_corrected(X, W_Q, W_K, W_V, target, measured=True), table, whole)
    assert norms[0] < printed["main"]  # where W_Q is moderate the printed number is large enough
    assert norms[-1] > 100 * max(printed.values())


def test_estimates_behind_theorem_1_fail_for_two_clusters():
    """Two tokens share the attention: ‖∂A/∂T‖ = 1/2 and ‖Z_1‖ ≤ ‖X‖³/L fails eightfold."""
    L, W = 16, torch.diag(torch.tensor([0.0, 8.0], dtype=torch.float64))
    X = torch.zeros(L, 2, dtype=torch.float64)
    X[0], X[1] = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])
    A = torch.softmax(X @ W @ W @ X.mT / 2**0.5, 1)
    jacobians = torch.diag_embed(A) - A[:, :, None] * A[:, None]
    M2 = X.mT @ jacobians @ X
    Z_1 = torch.einsum("ia,ibc->ibac", X, M2).reshape(2 * L, 4)
    parts = theorem1_as_printed(X, W, W, torch.eye(2), torch.zeros(L, 2)).parts
    norm = float(torch.linalg.matrix_norm(jacobians, ord=2).max())
    assert 7 * parts["dA/dT"] < norm <= 0.5 + 1e-12
    assert 7 * parts["Z_1"] < float(torch.linalg.matrix_norm(Z_1, ord=2))


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_sums_of_kronecker_products(scale):
    source = generator(71)
    for number in range(20):
        n, a, c, b, e = (whole_number(source, 1, 5) for _ in range(5))
        U, W, root, N = (
            normal(source, n, a),
            normal(source, n, e),
            normal(source, n, c, c),
            normal(source, n, c, b),
        )
        C = root + root.mT if number % 2 else root @ root.mT
        if number % 5 == 0:
            U[0], C = 0, C * (10.0 ** normal(source, n))[:, None, None]
        dense = torch.einsum("ia,ib,ice->acbe", U, U, C).reshape(a * c, a * c)
        truth = float(torch.linalg.matrix_norm(dense, ord=2))
        upper = float(symmetric_sum_bound(U, C * scale)) / scale
        assert truth * (1 - 1e-13) <= upper <= truth * (1 + 1e-11 if n == 1 else np.inf)
        assert float(separable_rayleigh(U, C).value) <= truth * (1 + 1e-12)
        dense = torch.einsum("ia,icb,ie->aceb", U, N, W).reshape(a * c, e * b)
        truth = float(torch.linalg.matrix_norm(dense, ord=2))
        assert truth * (1 - 1e-13) <= float(rectangular_sum_bound(U, N * scale, W)) / scale
        wide = torch.einsum("icb,ie->iceb", N, W).flatten(2)
        assert truth * (1 - 1e-13) <= float(joint_sum_bound(U, wide * scale)) / scale


def test_one_token_has_only_its_values_curvature():
    arguments, options = attention_case("one token", 0)
    found = attention_bounds(*arguments, **options)
    assert (found.upper[:2] == 0).all()
    np.testing.assert_allclose(
        [found.whole, found.whole_lower], true_norms(dense_blocks(*arguments))[1], rtol=1e-11
    )


def test_bounds_can_be_saved(tmp_path):
    arguments, options = attention_case("plain", 0)
    found = attention_bounds(*arguments, **options)
    again = type(found).load(found.save(tmp_path))
    np.testing.assert_array_equal(again.upper, found.upper)
    assert (again.whole, again.names) == (found.whole, ["Q", "K", "V"])


def test_wrong_calls_say_what_was_expected():
    (X, W_Q, W_K, W_V, G, B), _ = attention_case("plain", 1)
    with pytest.raises(ShapeError, match="expected G"):
        attention_bounds(X, W_Q, W_K, W_V, G[1:], B)
    with pytest.raises(ShapeError, match="matrix for each"):
        attention_bounds(X, W_Q, W_K, W_V, G, torch.eye(G.numel()))
    with pytest.raises(UsageError, match="finite"):
        attention_bounds(X * torch.inf, W_Q, W_K, W_V, G, B)
    with pytest.raises(UsageError, match="'ggn'"):
        attention_bounds(X, W_Q, W_K, W_V, G, B, part="outer")
    with pytest.raises(ShapeError, match="expected a target"):
        theorem1_corrected(X, W_Q, W_K, W_V, G[1:])
    with pytest.raises(ShapeError, match="d_V = d"):
        theorem1_as_printed(X, W_Q, W_K, torch.ones(X.shape[1], X.shape[1] + 1), X)


@pytest.mark.parametrize("weight", [1.0, 15.0, 20.0, 26.0, 27.0, 40.0])
def test_bounds_are_finite_where_attention_saturates_and_a_token_is_zero(weight):
    X, W = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[weight]]).double()
    one, G = torch.ones(1, 1).double(), torch.ones(2, 1).double()
    found = attention_bounds(X, W, W, one, G, 1.0)
    assert np.isfinite(found.upper).all()
    assert found.lower is not None
    assert (found.lower <= found.upper).all()
