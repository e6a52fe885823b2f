"""Energy of singular pairs on states, against sums over all tokens and pairs of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from cases import transformer
from curvescope.core.errors import CurvescopeError
from curvescope.geometry import activation_energy, heads
from curvescope.geometry.attention.energy import sphere_input
from curvescope.models.capture import capture

IDS = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(0))


def states(model, layer, *, folded=True):
    x = capture(model, IDS, f"L{layer}.attn.in")[f"L{layer}.attn.in"].flatten(0, 1)
    return (sphere_input(model, layer, x) if folded else x).numpy()


@pytest.mark.parametrize("cuts", [[6], [1, 3, 2]])
@pytest.mark.parametrize("options", [{}, {"norm_kind": "rmsnorm"}, {"norm": "post"}])
def test_energies_are_sums_over_tokens(options, cuts):
    model = cs.load(transformer(vocab_size=11, n_heads=2, n_layers=2, **options))
    found = activation_energy(model, 1, IDS.split(cuts))
    own = heads(model, 1)
    n = states(model, 1, folded=own[0].folded)
    assert found.num_tokens == len(n) == 30
    for h, circuit in enumerate(own):
        qk, vo = circuit.qk, circuit.vo
        for p in range(qk.rank):
            s, u, v = float(qk.singular_values[p]), qk.left[:, p].numpy(), qk.right[:, p].numpy()
            scores = s * (n @ u)[:, None] * (n @ v)  # of every query with every key
            scores = scores - scores.mean(1, keepdims=True)  # softmax does not see the mean over keys
            np.testing.assert_allclose(found.qk[h, p], (scores**2).mean(), rtol=1e-9, atol=1e-15)
        written = n @ vo.A.numpy() @ vo.B.numpy().T
        np.testing.assert_allclose(np.nansum(found.vo[h]), (written**2).sum(1).mean(), rtol=1e-9)
    np.testing.assert_allclose(np.nansum(found.share("vo"), axis=1), 1)


def test_a_pair_that_no_state_meets_has_no_energy():
    """Token states on one axis: only the pair along it counts, however small its singular value."""
    model = cs.load(
        transformer(vocab_size=11, d_model=4, n_heads=1, d_head=2, positions="none", norm_kind="rmsnorm")
    )
    p = dict(model.module.named_parameters())
    axes = torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        p["E"][:] = axes[0] * torch.linspace(-1, 1, 11, dtype=torch.float64)[:, None]
        for name in ("W_Q", "W_K"):
            p[f"L0.{name}"][:] = torch.stack([0.1 * axes[0], 5 * axes[1]], dim=1)
        p["L0.ln1.g"][:] = 1
    share = activation_energy(model, 0, [IDS]).share("qk")
    assert float(heads(model, 0)[0].qk.energy_share[0]) > 0.99
    np.testing.assert_allclose(share, [[0, 1]], atol=1e-12)


def test_matrices_that_are_not_folded_read_behind_the_norm():
    model = cs.load(transformer(vocab_size=11, n_heads=2))
    plain = activation_energy(model, 0, [IDS], folded=False)
    n = states(model, 0, folded=False)
    raw = heads(model, 0, folded=False)[0].vo
    want = (np.square(n @ raw.A.numpy() @ raw.B.numpy().T)).sum(1).mean()
    np.testing.assert_allclose(np.nansum(plain.vo[0]), want, rtol=1e-9)


def test_no_tokens_are_refused():
    with pytest.raises(CurvescopeError, match="at least one batch"):
        activation_energy(cs.load(transformer(vocab_size=11)), 0, [])
