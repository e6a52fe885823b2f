"""Kronecker factors through real layers: Conv1D, grouped heads, packed and tied weights, layers of others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.errors import CurvescopeError
from curvescope.operators.kronecker.moments import FactorPair, pooled
from oracles import drawn, relative_error, shaken
from selection import most

EXACT = 1e-12
IGNORED = -100


def tokens(num: int = 3, length: int = 3, vocab: int = 5) -> tuple[Tensor, Tensor]:
    """As many sequences as positions, so that no axis can be told by its length; one ends early."""
    ids, y = torch.randint(0, vocab, (2, num, length), generator=torch.Generator().manual_seed(1))
    y[0, 1:] = IGNORED
    return ids, y


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=4, n_layer=1, n_head=2, vocab_size=5, n_positions=4, n_inner=6, bos_token_id=0, eos_token_id=0
    )
    return shaken(drawn(lambda: transformers.GPT2LMHeadModel(config)).eval(), scale=0.3)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=5,
        max_position_embeddings=4,
    )
    return shaken(drawn(lambda: transformers.LlamaForCausalLM(config)).eval(), scale=0.2)


class TimeFirst(nn.Module):
    """PyTorch's attention with positions on axis 0, a layer that is called twice, in-place activations."""

    def __init__(self, *, batch_first: bool):
        super().__init__()
        self.batch_first = batch_first
        self.emb = nn.Embedding(5, 4, padding_idx=0)
        self.att = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = x + self.att(x, x, x, need_weights=False)[0]
        x = self.mix(torch.relu_(self.mix(x)))
        return self.head(x if self.batch_first else x.transpose(0, 1))


class Positions(nn.Module):
    """A lookup that serves all sequences, and a head whose matrix is scaled before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(5, 4), nn.Embedding(4, 4)
        self.mid, self.head = nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(4, 5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))[None]
        return torch.tanh(self.mid(x)) @ (2 * self.head)


class Raw(nn.Module):
    """A matrix of its own, stored outputs × inputs, so that its block is used transposed, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.W, self.b = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.emb(ids)), self.W, self.b)


def exact_diagonals(problem: cs.Problem, E: cs.EKFAC) -> float:
    """Largest relative difference of Λ from the diagonal of the dense GGN in the same basis."""
    worst = 0.0
    for layer, spectrum in zip(E.layers, E.spectra(), strict=True):
        names = [block.name for block in layer.blocks]
        space = problem.space(*names)
        order = torch.cat([space.positions(block) for block in layer.blocks])
        G = cs.GGN(problem, *names).to_dense()[order][:, order]
        Q = torch.kron(*spectrum.vectors)
        difference = spectrum.values.flatten() - (Q.T @ G @ Q).diagonal()
        worst = max(worst, float(difference.norm()) / max(float(G.norm()), 1e-12))
    return worst


MODULES = {
    "gpt2": gpt2,
    "llama": llama,
    "batch-first": lambda: shaken(drawn(lambda: TimeFirst(batch_first=True))),
    "time-first": lambda: shaken(drawn(lambda: TimeFirst(batch_first=False))),
    "positions": lambda: shaken(drawn(Positions)),
    "raw": lambda: shaken(drawn(Raw)),
}
LEFT_OUT = {
    "gpt2": {"L0.ln1.g", "L0.ln1.b", "L0.ln2.g", "L0.ln2.b", "ln_f.g", "ln_f.b"},
    "llama": {"L0.ln1.g", "L0.ln2.g", "ln_f.g"},
    "positions": {"head"},
}


@pytest.mark.parametrize("name", most(list(MODULES), but=["llama"]))
def test_eigenvalues_are_exact_through_the_layers_of_others(name: str):
    problem = cs.Problem(MODULES[name](), tokens())
    E = cs.EKFAC(problem, kind="ggn")
    assert set(E.left_out) == LEFT_OUT.get(name, set())
    assert exact_diagonals(problem, E) < EXACT


class Transposed(nn.Module):
    """Outputs whose numbers do not lie in the order of their axes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down @ self.up(x)).mT  # (B, 4, 2)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_outputs_may_lie_in_any_order(loss: str):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 3, generator=source, dtype=torch.float64)
    y = (
        torch.randint(0, 2, (2, 4), generator=source)
        if loss == "cross_entropy"
        else torch.rand(2, 4, 2).double()
    )
    problem = cs.Problem(shaken(drawn(Transposed)), (x, y), loss)
    E = cs.EKFAC(problem, kind="ggn")
    assert set(E.left_out) == {"down"}
    assert exact_diagonals(problem, E) < EXACT


def test_a_diverged_model_is_said():
    module = shaken(drawn(Positions))
    with torch.no_grad():
        module.mid.weight[0, 0] = torch.nan  # pyright: ignore[reportIndexIssue]
    with pytest.raises(CurvescopeError, match=r"NaN|not finite"):
        cs.KFAC(cs.Problem(module, tokens()))


def test_a_packed_matrix_has_factors_for_each_role():
    """GPT-2's c_attn: W_Q, W_K and W_V share the inputs, and have the gradients of their own outputs."""
    problem = cs.Problem(gpt2(), tokens())
    K = cs.KFAC(problem, "L0.[Wb]_[QKV]", kind="ggn")
    assert [(layer.name, layer.shape) for layer in K.layers] == [(f"L0.W_{x}", (5, 4)) for x in "QKV"]
    A = [K.factors(f"L0.W_{x}")[0] for x in "QKV"]
    assert torch.equal(A[0], A[1])
    inner = K.factors("L0.W_V")[1]
    whole = cs.KFAC(problem, "L0.h*.W_V", kind="ggn")
    for head, at in ((0, slice(0, 2)), (1, slice(2, 4))):
        assert relative_error(whole.factors(f"L0.h{head}.W_V")[1], inner[at, at]) < EXACT


def test_grouped_heads_have_factors_of_their_own_width():
    K = cs.KFAC(cs.Problem(llama(), tokens()), "L0.W_[QK]", "L0.h1.W_O", kind="ggn")
    assert [layer.shape for layer in K.layers] == [(8, 8), (8, 4), (4, 8)]


def test_a_tied_embedding_pools_lookup_and_unembedding():
    """The pair has the trace of both uses, and each side the moments of inputs and of gradients."""
    problem = cs.Problem(gpt2(), tokens())
    K = cs.KFAC(problem, "E", kind="ggn")
    rows, columns = K.factors("E")
    assert (rows.shape, columns.shape) == ((5, 5), (4, 4))
    R, C = torch.rand(2, 3, 3, dtype=torch.float64), torch.rand(2, 2, 2, dtype=torch.float64)
    pairs = [FactorPair(r @ r.T, c @ c.T) for r, c in zip(R, C, strict=True)]
    found = pooled(pairs)
    traces = [float(p.rows.trace() * p.columns.trace()) for p in pairs]
    assert float(found.rows.trace() * found.columns.trace()) == pytest.approx(sum(traces))
    assert pooled(pairs[:1]) is pairs[0]
    same = pooled([FactorPair(pairs[0].rows * 2, pairs[0].columns), pairs[0]])
    whole = torch.kron(*same) / torch.kron(*pairs[0])
    torch.testing.assert_close(whole, torch.full_like(whole, 3.0))


def test_the_row_of_the_padding_id_is_a_constant():
    module = MODULES["batch-first"]()
    K = cs.KFAC(cs.Problem(module, tokens()), "emb.weight", kind="ggn")
    assert float(K.factors("emb.weight")[0][0].abs().max()) == 0


def test_a_module_that_uses_a_matrix_otherwise_later_on_is_an_error():
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).double())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.W if float(x[0, 0]) > 0 else x @ (self.W * self.W)

    x, y = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    for data in ([(x, y), (-x, y)], [(-x, y), (x, y)]):
        with pytest.raises(CurvescopeError, match=r"W (is used in different ways|has no Kronecker factors)"):
            cs.KFAC(cs.Problem(Switch(), data, "mse"), "W", kind="ggn").trace()


class Sometimes(nn.Module):
    """A layer more for inputs above zero, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.more, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.always(x).tanh()
        high = (x[:, :1] > 0).to(x.dtype)
        return h + high * self.more(h) if bool(high.any()) else h


@pytest.mark.parametrize("make", [cs.KFAC, cs.EKFAC, cs.Shampoo])
def test_a_layer_that_some_sequences_use_is_one_in_any_order(make):
    """Its factors are those of the sequences that use it; products do not depend on the order of data."""
    module = drawn(Sometimes).double()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    data = [(row, row.cos()) for row in x.split(1)]
    orders = [data, data[::-1], data[1:] + data[:1]]
    found = [make(cs.Problem(module, some, "mse"), kind="empirical") for some in orders]
    assert all(K.space.blocks == found[0].space.blocks for K in found)
    assert [layer.name for layer in found[0].layers] == ["always.weight", "more.weight"]
    assert found[0].left_out == dict.fromkeys(("never.weight", "never.bias"), "no sequence uses it")
    for K in found[1:]:
        torch.testing.assert_close(K.to_dense(), found[0].to_dense())
    users = make(cs.Problem(module, data[::2], "mse"), kind="empirical")
    at = found[0].space.slices["more.weight"]
    torch.testing.assert_close(2 * found[0].to_dense()[at, at], users.to_dense()[at, at])


def apart(K: Tensor, exact: Tensor) -> float:
    return float((K - exact).norm() / exact.norm())


def test_quality_is_measured_against_the_dense_matrices(tmp_path):
    problem = cs.Problem(gpt2(), tokens())
    found = cs.kfac_quality(problem, "L0.W_O", "L0.b_O", "L0.W_1", "ln_f.*", "E", damping=0.1, max_size=20)
    assert found.layers == ["E", "L0.W_O"]
    assert set(found.left_out) == {"ln_f.g", "ln_f.b", "L0.W_1"}
    E = cs.EKFAC(problem, "L0.W_O", "L0.b_O", kind="ggn")
    G, H = (make(problem, "L0.W_O", "L0.b_O").to_dense() for make in (cs.GGN, cs.Hessian))
    m, g = found.methods.index("ekfac"), problem.gradient("L0.W_O", "L0.b_O")
    assert found.error_ggn[m, 1] == pytest.approx(apart(E.to_dense(), G), rel=1e-8)
    assert found.error_hessian[m, 1] == pytest.approx(apart(E.to_dense(), H), rel=1e-8)
    tops = [float(torch.linalg.eigvalsh(X)[-1]) for X in (E.to_dense(), G)]
    assert found.lambda_max[m, 1] == pytest.approx(tops[0] / tops[1], rel=1e-8)
    delta = 0.1 * tops[1]
    exact = torch.linalg.solve(G + delta * torch.eye(len(G), dtype=torch.float64), g)
    ours = E.inverse(delta) @ g
    assert found.cosine[m, 1] == pytest.approx(float(exact @ ours / exact.norm() / ours.norm()), rel=1e-8)
    assert (found.error_ggn[m] <= found.error_ggn[0] + 1e-12).all()  # the nearest in the eigenbasis of expand
    assert len(found.to_frame()) == found.error_ggn.size
    again = cs.operators.KFACQuality.load(found.save(tmp_path))
    np.testing.assert_array_equal(again.cosine, found.cosine)
    assert len(found.plot().axes) == 3
