"""One head: folded matrices against a plain attention, planted directions, the trap of small gains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from curvescope.core.errors import CurvescopeError
from curvescope.geometry import Rotary, circuits, normalize

D, H, T = 12, 3, 6


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(d: int = D, h: int = H, *, bias: bool = True) -> dict[str, torch.Tensor]:
    found = {f"W_{x}": draw(d, h, seed=i) for i, x in enumerate("QKV")} | {"W_O": draw(h, d, seed=3)}
    if bias:
        found |= {f"b_{x}": draw(h, seed=4 + i) for i, x in enumerate("QKV")} | {"b_O": draw(d, seed=7)}
    return found


def norm_weights(kind: str, d: int = D) -> dict[str, torch.Tensor]:
    return {"gamma": draw(d, seed=8), **({"beta": draw(d, seed=9)} if kind == "layernorm" else {})}


def plain_attention(
    x: torch.Tensor, w: dict[str, torch.Tensor], g: dict[str, torch.Tensor], kind: str
) -> torch.Tensor:
    """Causal attention of one head written out, with torch's own norms."""
    d = x.shape[-1]
    if kind == "layernorm":
        y = torch.nn.functional.layer_norm(x, (d,), g["gamma"], g["beta"], eps=1e-5)
    else:
        y = torch.nn.functional.rms_norm(x, (d,), g["gamma"], eps=1e-5)
    q, k, v = (y @ w[f"W_{x}"] + w.get(f"b_{x}", 0.0) for x in "QKV")
    s = q @ k.T / math.sqrt(k.shape[1])
    s = s.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf)
    return s.softmax(-1) @ v @ w["W_O"]


def causal(length: int = T) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(("d", "h"), [(12, 3), (5, 5), (4, 6), (3, 1)])
def test_a_folded_head_is_plain_attention(kind, bias, d, h):
    w, g, x = weights(d, h, bias=bias), norm_weights(kind, d), draw(T, d, seed=20)
    head = circuits(**w, **g, norm=kind)
    n = normalize(x, kind=kind, eps=1e-5)
    want = plain_attention(x, w, g, kind)
    torch.testing.assert_close(head.output(n, seen=causal()), want, rtol=0, atol=1e-12)
    raw = circuits(**w, **g, norm=kind, folded=False)
    y = n * g["gamma"] + g.get("beta", 0.0)
    torch.testing.assert_close(raw.output(y, seen=causal()), want, rtol=0, atol=1e-12)
    assert head.folded
    assert not raw.folded


def test_scores_from_the_factors():
    """s_ij = n_i W_QK n_j + k0 · n_j + what softmax cancels; the augmented form has both in one."""
    w, g = weights(), norm_weights("layernorm")
    head = circuits(**w, **g)
    n = normalize(draw(T, D, seed=20))
    part = n @ head.qk.to_dense() @ n.T + n @ head.key_bias
    rest = head.scores(n) - part
    torch.testing.assert_close(rest, rest[:, :1].expand(T, T), rtol=0, atol=1e-12)
    torch.testing.assert_close(rest[:, 0] - rest[0, 0], (n - n[0]) @ head.query_bias, rtol=0, atol=1e-12)
    ones = torch.cat([n, torch.ones(T, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(ones @ head.augmented_qk.to_dense() @ n.T, part, rtol=0, atol=1e-12)
    torch.testing.assert_close(head.key_direction(n) @ n.T, part, rtol=0, atol=1e-12)
    assert head.scores(n[:2], n[3:]).shape == (2, 3)


def test_b_K_does_not_matter_and_b_Q_does():
    w, g, x = weights(), norm_weights("layernorm"), draw(T, D, seed=20)
    n = normalize(x, eps=1e-5)
    want = plain_attention(x, w, g, "layernorm")
    without_k = circuits(**{**w, "b_K": None}, **g).output(n, seen=causal())
    other_k = circuits(**{**w, "b_K": 10 * draw(H, seed=30)}, **g).output(n, seen=causal())
    torch.testing.assert_close(without_k, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(other_k, want, rtol=0, atol=1e-12)
    without_q = circuits(**{**w, "b_Q": None}, **g).output(n, seen=causal())
    assert float((without_q - want).abs().max()) > 0.1


def test_the_output_side_is_centered_and_nothing_else_is_lost():
    w, g = weights(), norm_weights("layernorm")
    head, n = circuits(**w, **g), normalize(draw(T, D, seed=20))
    written = n @ head.vo.to_dense() + head.value_bias
    values = head.values(n)
    centered = values - values.mean(1, keepdim=True)
    torch.testing.assert_close(written - written.mean(1, keepdim=True), centered, rtol=0, atol=1e-12)
    P = torch.eye(D, dtype=torch.float64) - 1 / D
    dense = P @ torch.diag(g["gamma"]) @ w["W_V"] @ w["W_O"] @ P
    torch.testing.assert_close(head.vo.to_dense(), dense, rtol=0, atol=1e-12)
    rms = circuits(**w, gamma=g["gamma"], norm="rmsnorm")
    torch.testing.assert_close(rms.vo.to_dense(), torch.diag(g["gamma"]) @ w["W_V"] @ w["W_O"])


def test_singular_values_are_those_of_the_dense_folded_matrix():
    w, g = weights(), norm_weights("layernorm")
    P = torch.eye(D, dtype=torch.float64) - 1 / D
    dense = P @ torch.diag(g["gamma"]) @ w["W_Q"] @ w["W_K"].T @ torch.diag(g["gamma"]) @ P / math.sqrt(H)
    head = circuits(**w, **g)
    torch.testing.assert_close(head.qk.singular_values, torch.linalg.svdvals(dense)[:H], rtol=0, atol=1e-12)
    raw = circuits(**w, **g, folded=False, scale=1.0)
    want = torch.linalg.svdvals(w["W_Q"] @ w["W_K"].T)[:H]
    torch.testing.assert_close(raw.qk.singular_values, want, rtol=0, atol=1e-12)


def test_the_gamma_trap():
    """The largest raw direction lies on a coordinate with a tiny gain: folded it comes last, raw first."""
    d, h = 20, 4
    frames = [torch.linalg.qr(draw(d - 2, h - 1, seed=i))[0] for i in (0, 1)]
    W_Q, W_K = (torch.zeros(d, h, dtype=torch.float64) for _ in range(2))
    strengths = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    W_Q[2:, 1:], W_K[2:, 1:] = frames[0] * strengths, frames[1]
    W_Q[0, 0] = W_K[0, 0] = 10.0  # 100 in the raw product, 1e-4 behind the norm
    gamma = torch.ones(d, dtype=torch.float64)
    gamma[0] = 1e-3
    args = (W_Q, W_K, draw(d, h, seed=5), draw(h, d, seed=6))
    folded, raw = (circuits(*args, gamma=gamma, folded=f, scale=1.0) for f in (True, False))
    trapped = torch.zeros(d, dtype=torch.float64)
    trapped[0] = 1.0
    assert raw.qk.rank == folded.qk.rank == h
    assert int((raw.qk.left.T @ trapped).abs().argmax()) == 0
    assert float((raw.qk.left[:, 0] @ trapped).abs()) > 0.999
    assert int((folded.qk.left.T @ trapped).abs().argmax()) == h - 1
    assert float(folded.qk.singular_values[-1]) < 2e-4
    assert float(folded.qk.singular_values[0]) > 2


def test_a_planted_head_of_rank_three_has_three_directions():
    d, h = 24, 8
    left, right = (torch.linalg.qr(draw(d, 3, seed=i) - draw(d, 3, seed=i).mean(0))[0] for i in (0, 1))
    strength = torch.tensor([5.0, 3.0, 2.0], dtype=torch.float64)
    mix = torch.linalg.qr(draw(h, h, seed=2))[0][:3]
    args = ((left * strength) @ mix, right @ mix, (left * strength) @ mix, (right @ mix).T)
    for dtype in (torch.float64, torch.float32):
        head = circuits(*(W.to(dtype) for W in args), scale=1.0)
        for found in (head.qk, head.vo):
            assert found.rank == 3
            torch.testing.assert_close(found.singular_values, strength, rtol=0, atol=1e-5)
            both = (found.left * left).sum(0) * (found.right * right).sum(0)
            torch.testing.assert_close(both, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_rotary_offsets_are_the_scores(pairs):
    turn = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64), pairs, factor=1.3)
    w, g = weights(h=5), norm_weights("rmsnorm")
    from dataclasses import replace

    head = replace(circuits(**w, **g, norm="rmsnorm"), rotary=turn)
    n = normalize(draw(T, D, seed=20), kind="rmsnorm")
    scores = head.scores(n)
    for i, j in ((0, 0), (3, 1), (5, 0), (1, 4)):
        form = head.qk_at(i - j)
        query = turn.matrix(i - j, 5)
        rest = (n[i] @ head.W_Q + head.b_Q) @ query @ head.b_K * head.scale
        content = n[i] @ form.to_dense() @ n[j] + head.scale * head.b_Q @ query @ head.W_K.T @ n[j]
        torch.testing.assert_close(content + rest, scores[i, j], rtol=0, atol=1e-12)
        torch.testing.assert_close(head.key_direction(n[i], offset=i - j) @ n[j], content, rtol=0, atol=1e-12)
    torch.testing.assert_close(head.qk_at(0).to_dense(), head.qk.to_dense())
    torch.testing.assert_close(head.key_bias, head.scale * head.b_Q @ turn.matrix(0, 5) @ head.W_K.T)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(head.qk_at(2).to_dense(), head.qk.to_dense())


def test_the_share_of_a_constant_query():
    w, g = weights(), norm_weights("layernorm")
    head = circuits(**w, **g)
    n = normalize(draw(20000, D, seed=40))
    content = (n @ head.qk.to_dense()).square().sum(1).mean()  # variance over keys is proportional to |·|²
    constant = head.key_bias.square().sum()
    assert head.bias_share() == pytest.approx(float(constant / (constant + content)), rel=0.03)
    assert head.bias_share(torch.zeros(H, dtype=torch.float64)) == 0


def test_arrays_are_taken_and_wrong_shapes_are_refused():
    w = {name: W.numpy() for name, W in weights().items()}
    torch.testing.assert_close(circuits(**w).qk.to_dense(), circuits(**weights()).qk.to_dense())
    assert isinstance(np.asarray(circuits(**w).qk.singular_values), np.ndarray)
    with pytest.raises(CurvescopeError, match="act from the right"):
        circuits(w["W_Q"].T, w["W_K"].T, w["W_V"].T, w["W_O"])
    with pytest.raises(CurvescopeError, match="b_Q: expected 3"):
        circuits(w["W_Q"], w["W_K"], w["W_V"], w["W_O"], b_Q=np.zeros(2))
    with pytest.raises(CurvescopeError, match="gamma: expected 12"):
        circuits(w["W_Q"], w["W_K"], w["W_V"], w["W_O"], gamma=np.zeros(2))
