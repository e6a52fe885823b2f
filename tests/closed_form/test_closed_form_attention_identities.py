"""Identities that hold for every attention layer, errors that must be seen, and digits that must be kept."""

import numpy as np
import pytest
import torch
from closed_form_attention_oracle import differentiate, random_instance, turn

from curvescope.closed_form import attention
from curvescope.closed_form.attention.layer import rope_table, rotate
from curvescope.core.seeds import generator
from selection import some

NUMBERS = range(40, 52)
SEEDS = some(NUMBERS, 4)
OFF = ("output", "cross", "rope", "linear", "biases", "biased")
PLAIN = {"d": 4, "n": 1} | dict.fromkeys(OFF, False)


def matrix(found, part, names):
    """Part of the Hessian as one matrix."""
    rows = []
    for one in names:
        rows.append(
            torch.cat([found.to_dense((one, two), part).flatten(0, 1).flatten(1) for two in names], dim=1)
        )
    return torch.cat(rows)


def closed(instance):
    oracle = differentiate(instance)
    return oracle, instance.closed_form(*oracle.derivatives(instance))


def gradients(oracle, instance):
    return {n: oracle.gradient[oracle.slices[n]].view(W.shape) for n, W in instance.weights.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_hessian_is_symmetric_and_its_outer_part_positive(seed):
    loss = ("squared", "cross_entropy")[seed % 2]
    instance = random_instance(seed, loss=loss)
    _, found = closed(instance)
    for part in ("outer", "functional"):
        H = matrix(found, part, found.names)
        assert (H - H.T).abs().max() <= 1e-13 * H.abs().max()
        if part == "outer":
            values = torch.linalg.eigvalsh(H)
            assert values.min() > -1e-12 * values.max()


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_zeros(seed):
    instance = random_instance(seed, biases=True, rope=False, linear=seed % 3 == 0)
    _, found = closed(instance)
    assert not found.to_dense(("V", "V"), "functional").any()
    if instance.kind == "linear":
        assert not found.to_dense(("Q", "Q"), "functional").any()
        assert not found.to_dense(("K", "K"), "functional").any()
    else:
        for other in found.names:
            assert not found.to_dense(("b_K", other)).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_gauge_of_queries_and_keys(seed):
    """(W_Q Z, −W_K Zᵀ) changes no score to first order: H maps it to (−∇_Q Zᵀ, ∇_K Z), H_o to zero."""
    instance = random_instance(seed, heads=1, grouped=False, rope=False, linear=False)
    oracle, found = closed(instance)
    W, g = instance.weights, gradients(oracle, instance)
    Z = torch.randn(W["Q"].shape[1], W["Q"].shape[1], generator=generator(seed, 9), dtype=torch.float64)
    direction, want = {}, {}
    for prefix in ("", "b_"):
        if prefix + "Q" in W:
            direction |= {prefix + "Q": W[prefix + "Q"] @ Z, prefix + "K": -W[prefix + "K"] @ Z.T}
            want |= {prefix + "Q": -g[prefix + "Q"] @ Z.T, prefix + "K": g[prefix + "K"] @ Z}
    product, outer = found.product(direction), found.product(direction, "outer")
    scale = oracle.largest * max(v.abs().max().item() for v in direction.values())
    for name in W:
        assert (product[name] - want.get(name, 0)).abs().max() < 1e-11 * scale
        assert outer[name].abs().max() < 1e-11 * scale


@pytest.mark.parametrize("seed", SEEDS)
def test_gauge_of_values_and_outputs(seed):
    instance = random_instance(seed, heads=1, grouped=False, output=True, biases=True)
    oracle, found = closed(instance)
    W, g = instance.weights, gradients(oracle, instance)
    Z = torch.randn(W["V"].shape[1], W["V"].shape[1], generator=generator(seed, 9), dtype=torch.float64)
    product = found.product({"V": W["V"] @ Z, "b_V": W["b_V"] @ Z, "O": -Z @ W["O"]})
    want = {"V": -g["V"] @ Z.T, "b_V": -g["b_V"] @ Z.T, "O": Z.T @ g["O"]}
    for name in W:
        assert (product[name] - want.get(name, 0)).abs().max() < 1e-10 * oracle.largest


def test_one_token_leaves_no_curvature_in_queries_and_keys():
    for seed in NUMBERS[:6]:
        _, found = closed(random_instance(seed, L=1, linear=False, cross=False, rope=False))
        for pair in (("Q", "Q"), ("Q", "K"), ("K", "K"), ("Q", "V"), ("K", "V")):
            assert not found.to_dense(pair).any()


def test_a_constant_added_to_a_row_of_scores_changes_nothing():
    instance = random_instance(
        44, linear=False, L=6, output=False, n=1, cross=False, rope=False, loss="squared"
    )
    oracle = differentiate(instance)
    G, B = oracle.derivatives(instance)
    W = [instance.weights[name] for name in "QKV"]
    plain = attention.curvature(instance.X[0], *W, G[0], B).blocks()
    shifted = attention.curvature(
        instance.X[0], *W, G[0], B, bias=torch.arange(6.0).double()[:, None].expand(6, 6)
    ).blocks()
    for pair in plain:
        torch.testing.assert_close(plain[pair].total, shifted[pair].total, rtol=1e-11, atol=1e-13)


def test_rows_of_tau_and_of_its_derivative_sum_to_zero():
    for seed in NUMBERS[:6]:
        _, found = closed(random_instance(seed, linear=False, L=6))
        layer, head = found.layer, found.heads[0]
        assert layer.tau.sum(-1).abs().max() < 1e-13 * (1 + layer.tau.abs().max())
        ones = head.token(torch.ones_like(head.v[..., :1]))
        assert not head.third(ones, head.values).any()  # Ψ 1 = 0
        assert not head.covariance(ones, head.values).any()


def test_two_factors_are_the_merged_matrix_and_a_mixed_term():
    """H(W_Q, W_Q) is H(W_QK, W_QK) seen through W_K; only the block of W_Q and W_K has more to it."""
    instance = random_instance(47, **PLAIN, d_K=2, loss="cross_entropy", L=6, masked=True)
    oracle = differentiate(instance)
    G, B = oracle.derivatives(instance)
    X, W_Q, W_K, W_V = instance.X[0], *(instance.weights[name] for name in "QKV")
    mask = instance.mask[0, 0]
    two = attention.curvature(X, W_Q, W_K, W_V, G[0], B[0], mask=mask).blocks()
    one = attention.merged_curvature(X, W_Q @ W_K.T, W_V, G[0], B[0], mask=mask, scale=2**-0.5).blocks()
    H = one["QK", "QK"].total
    seen = torch.einsum("axby,xc,ye->acbe", H, W_K, W_K)
    torch.testing.assert_close(two["Q", "Q"].total, seen, rtol=1e-11, atol=1e-13)
    seen = torch.einsum("axyb,xc,ye->acbe", H, W_K, W_Q)
    layer = attention.curvature(X, W_Q, W_K, W_V, G[0], B[0], mask=mask).layer
    mixed = 2**-0.5 * torch.einsum("ab,ce->acbe", X.T @ layer.tau[0, 0] @ X, torch.eye(2).double())
    torch.testing.assert_close(two["Q", "K"].total, seen + mixed, rtol=1e-11, atol=1e-13)
    third = attention.merged_curvature(X, W_Q @ W_K.T, W_V, G[0], B[0], mask=mask, scale=2**-0.5)
    assert len(third.terms(("QK", "QK"), "functional")) == 1  # nothing but the third moment


class TestErrorsThatMustBeSeen:
    """A wrong formula is off by a part of the block itself, so the comparisons above can fail."""

    def setup_method(self):
        self.instance = random_instance(48, **PLAIN, d_K=3, loss="squared", L=7, masked=False)
        self.oracle, self.found = closed(self.instance)
        self.X, self.layer = self.instance.X[0], self.found.layer

    def error(self, pair, part, block):
        want = self.oracle.block(*pair, part)
        return ((block.reshape(want.shape) - want).abs().max() / want.abs().max()).item()

    def mixed(self, M):
        return self.layer.scale * torch.einsum("ab,ce->acbe", M, torch.eye(3).double())

    def test_dropping_the_mixed_term(self):
        block = self.found.to_dense(("Q", "K"), "functional")
        M = self.X.T @ self.layer.tau[0, 0] @ self.X
        assert self.error(("Q", "K"), "functional", block) < 1e-12
        assert self.error(("Q", "K"), "functional", block - self.mixed(M)) > 0.1

    def test_transposing_the_mixed_term(self):
        block = self.found.to_dense(("Q", "K"), "functional")
        M = self.X.T @ self.layer.tau[0, 0] @ self.X
        assert self.error(("Q", "K"), "functional", block - self.mixed(M) + self.mixed(M.T)) > 0.1

    @pytest.mark.parametrize("centered", [True, False])
    def test_uncentered_second_moment(self, centered):
        A, X, W = self.layer.A[0, 0], self.X, self.instance.weights
        M2 = torch.einsum("ij,ja,jb->iab", A, X, X)
        if centered:
            M2 = M2 - torch.einsum("ia,ib->iab", A @ X, A @ X)
        EK = W["V"].T @ M2 @ W["K"]
        C = self.layer.scale**2 * self.layer.B * EK.mT @ EK
        error = self.error(("Q", "Q"), "outer", torch.einsum("ia,ib,ice->acbe", X, X, C))
        assert error < 1e-12 if centered else error > 0.1


def test_rotation_is_the_rotate_half_of_llama():
    x = torch.randn(3, 5, 8, generator=generator(1), dtype=torch.float64)
    cos, sin = rope_table(5, 8)
    angle = torch.outer(torch.arange(5.0).double(), 10000.0 ** (-torch.arange(0, 8, 2).double() / 8))
    torch.testing.assert_close(cos, angle.cos())
    half = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
    want = x * torch.cat([cos, cos], -1) + half * torch.cat([sin, sin], -1)
    torch.testing.assert_close(rotate(x, cos, sin), want)
    torch.testing.assert_close(turn(x, cos, sin), want)
    torch.testing.assert_close(rotate(rotate(x, cos, sin), cos, -sin), x)


@pytest.mark.parametrize(("stretch", "shift"), [(1.0, 0.0), (3.0, 0.0), (6.0, 0.0), (1.0, 1e3)])
def test_local_matrices_keep_their_digits_query_by_query(stretch, shift):
    """Per-query relative error against 80-bit arithmetic, where uncentered sums lose all digits."""
    source = generator(7)
    X = stretch * torch.randn(9, 4, generator=source, dtype=torch.float64)
    W_Q, W_K, W_V = (torch.randn(4, 3, generator=source, dtype=torch.float64) for _ in range(3))
    G = torch.randn(9, 3, generator=source, dtype=torch.float64)
    found = attention.curvature(X, W_Q, W_K, W_V, G, 1.0, X_K=X, X_V=X + shift, scale=1.0)
    head, layer = found.heads[0], found.layer
    covariance = head.covariance(head.values, head.token(layer.X_V)).numpy()
    third = head.third(head.token(layer.X_V), head.values).numpy()

    long = np.longdouble
    A, x, v = (t.numpy().astype(long) for t in (layer.A[0, 0], layer.X_V[0], layer.v[0, 0]))
    A = A / A.sum(1, keepdims=True)
    rho = G.numpy().astype(long) @ v.T
    dev_x, dev_v = x[None] - (A @ x)[:, None], v[None] - (A @ v)[:, None]
    dev_rho = rho - (A * rho).sum(1, keepdims=True)
    want = np.einsum("ij,ijv,ija->iva", A, dev_v, dev_x)
    want_third = np.einsum("ij,ij,ija,ijv->iav", A, dev_rho, dev_x, dev_v)
    tau, want_tau = layer.tau[0, 0].numpy(), A * dev_rho
    floor = 1e-18 * np.abs(rho).max()  # of the 80 bits
    assert (np.abs(tau - want_tau) < 1e-11 * np.abs(want_tau) + floor).all() or shift
    for got, exact in ((covariance, want), (third, want_third)):
        error = np.abs(got - exact).max((1, 2)) / np.abs(exact).max((1, 2))
        assert error.max() < (1e-12 if shift == 0 else 1e-10)
