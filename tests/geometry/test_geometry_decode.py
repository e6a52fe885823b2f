"""Top tokens against a dense sort; names of tokens; singular pairs of planted heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from cases import transformer
from curvescope.core.errors import CurvescopeError
from curvescope.geometry import StreamNorm, decode_heads, heads, reference, rows_reference, top_tokens
from curvescope.geometry.attention.directions import Directions
from curvescope.geometry.vocabulary.decode import EXTRA_CANDIDATES, GROUP
from curvescope.geometry.vocabulary.references import TokenReference
from curvescope.studies import traveling_words
from curvescope.tokenizers import ByteTokenizer, CharTokenizer


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_order(scores: torch.Tensor, k: int) -> np.ndarray:
    """Ids by falling score, ties by id, from a full stable sort."""
    return np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunked_is_dense(chunk, precision):
    rows, v = draw(200, 16), draw(9, 16, seed=1)
    found = top_tokens(v, rows, k=5, chunk=chunk, precision=precision)
    exact = (rows[None] * v[:, None]).sum(-1)
    for side, sign in enumerate((1, -1)):
        want = dense_order(sign * exact, 5)
        np.testing.assert_array_equal(found.ids[:, side], want)
        np.testing.assert_allclose(found.scores[:, side], np.take_along_axis(sign * exact.numpy(), want, 1))
    assert found.num_tokens == 200
    one = top_tokens(v, rows, k=5, chunk=chunk, signs=1)
    np.testing.assert_array_equal(one.ids[:, 0], found.ids[:, 0])
    assert one.ids.shape == (9, 1, 5)


@pytest.mark.parametrize("chunk", [5, 33, 1000])
def test_ties_are_broken_by_id(chunk):
    """Copies of a row, many more than the candidates that are kept, at scattered places."""
    rows = draw(120, 8)
    copies = torch.tensor([3, 11, 12, 40, 77, *range(90, 90 + 3 * EXTRA_CANDIDATES)])
    rows[copies] = 5 * draw(1, 8, seed=3)
    v = rows[copies[:1]]
    found = top_tokens(v, rows, k=7, chunk=chunk)
    assert found.ids[0, 0].tolist() == copies[:7].tolist()
    assert len(set(found.scores[0, 0])) == 1
    zero = top_tokens(torch.zeros(1, 8), rows, k=4, chunk=chunk)
    assert zero.ids[0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert not zero.scores.any()


def test_differences_below_float32_are_seen():
    rows = torch.ones(50, 4, dtype=torch.float64) + 1e-12 * draw(50, 1, seed=4)
    v = torch.ones(1, 4, dtype=torch.float64)
    want = dense_order((rows * v).sum(-1)[None], 6)
    np.testing.assert_array_equal(top_tokens(v, rows, k=6, chunk=8).ids[:, 0], want)


def test_many_directions_that_float32_cannot_decide():
    """More than are done again at a time, between ones that it can."""
    rows = torch.cat([torch.ones(50, 4, dtype=torch.float64) + 1e-12 * draw(50, 4, seed=4), -draw(9, 4)])
    v = draw(3 * GROUP, 4, seed=5).abs()
    v[::4] = draw(len(v[::4]), 4, seed=6)
    want = dense_order((rows[None] * v[:, None]).sum(-1), 6)
    np.testing.assert_array_equal(top_tokens(v, rows, k=6, chunk=8, signs=1).ids[:, 0], want)


def test_fewer_rows_than_asked_for():
    rows = draw(3, 4)
    assert top_tokens(draw(2, 4, seed=1), rows, k=10).ids.shape == (2, 2, 3)


def test_a_bias_makes_logits():
    """logit_t = n · P(γ ∘ u_t) + β · u_t + b_t: the model's own logits, from directions that are states."""
    model = cs.load(transformer(vocab_size=11, bias_u=True, n_ctx=5, d_model=6))
    module = model.module
    x = draw(4, 6, seed=5)
    with torch.no_grad():
        logits = module.ln_f(x) @ module.U + module.b_U
    tokens = reference(model, "logit", bias=True)
    norm = StreamNorm("layernorm", module.ln_f.g.detach(), module.ln_f.b.detach(), module.cfg.norm_eps)
    found = top_tokens(norm.sphere(x), tokens, k=11, signs=2)
    np.testing.assert_array_equal(found.ids[:, 0], dense_order(logits, 11))
    np.testing.assert_allclose(found.scores[:, 0], -np.sort(-logits.numpy(), axis=1), atol=1e-12)
    shift = norm.beta @ module.U.detach() + module.b_U.detach()
    negative = 2 * shift - logits  # of the opposite states
    np.testing.assert_array_equal(found.ids[:, 1], dense_order(negative, 11))
    _, high = norm.attainable(module.U.detach().T)
    best = (high + module.b_U.detach()).numpy()
    np.testing.assert_allclose(found.fraction[:, 0], found.scores[:, 0] / best[found.ids[:, 0]], rtol=1e-12)


def test_references_are_what_they_say():
    model = cs.load(transformer(vocab_size=11, d_model=6))
    p = {name: tensor.detach() for name, tensor in model.module.named_parameters()}
    E, U = p["E"], p["U"].T
    every = slice(None)
    ln = torch.nn.functional.layer_norm
    torch.testing.assert_close(reference(model, "raw").rows(every), E)
    torch.testing.assert_close(reference(model, "sphere").rows(every), ln(E, (6,), eps=1e-5))
    want = ln(E, (6,), p["L0.ln1.g"], p["L0.ln1.b"], eps=1e-5)
    torch.testing.assert_close(reference(model, "normed").rows(every), want)
    scaled = U * p["ln_f.g"]
    want = scaled - scaled.mean(1, keepdim=True)
    torch.testing.assert_close(reference(model, "logit").rows(every), want)
    torch.testing.assert_close(reference(model, "logit", centered=True).rows(every), want - want.mean(0))
    inner = reference(model, "normed", norm="ln_f", which="output").rows(every)
    torch.testing.assert_close(inner, ln(U, (6,), p["ln_f.g"], p["ln_f.b"], eps=1e-5))
    with pytest.raises(CurvescopeError, match="role of a norm"):
        reference(model, "sphere", norm="ln9")
    with pytest.raises(CurvescopeError, match="kind"):
        reference(model, "nearest")


def test_cosines_and_fractions():
    rows, v = draw(30, 5), draw(3, 5, seed=1)
    norm = StreamNorm("layernorm", draw(5, seed=2), draw(5, seed=3), 0.0)
    every = torch.arange(30)
    for kind in ("raw", "sphere", "normed", "logit"):
        source = TokenReference(rows, every, None, kind, norm if kind != "raw" else StreamNorm("none"))
        found = top_tokens(v, source, k=4)
        own = source.rows(slice(None))
        for side, sign in enumerate((1, -1)):
            chosen = own[torch.from_numpy(found.ids[:, side])]
            w = sign * v[:, None]
            cosine = torch.cosine_similarity(w.expand_as(chosen), chosen, dim=-1)
            np.testing.assert_allclose(found.cosine[:, side], cosine, atol=1e-12)
            high = {
                "raw": v.norm(dim=1)[:, None] * chosen.norm(dim=-1),
                "sphere": 5**0.5 * (v - v.mean(1, keepdim=True)).norm(dim=1)[:, None],
                "normed": norm.attainable(sign * v)[1][:, None],
                "logit": (v - v.mean(1, keepdim=True)).norm(dim=1)[:, None] * chosen.norm(dim=-1),
            }[kind]
            np.testing.assert_allclose(
                found.fraction[:, side], torch.from_numpy(found.scores[:, side]) / high
            )
        assert (found.fraction <= 1 + 1e-12).all()


def test_padded_rows_are_not_tokens():
    model = cs.load(transformer(vocab_size=9, d_model=6))
    with torch.no_grad():
        model.module.E[5:] *= 100  # rows that no token has
    found = top_tokens(draw(4, 6), reference(model, "raw", tokenizer=CharTokenizer("abcde")), k=9)
    assert found.ids.max() == 4
    assert found.num_tokens == 5


def test_names_of_tokens_in_the_result(tmp_path):
    rows = draw(256, 4)
    found = top_tokens(draw(2, 4, seed=1), rows, k=3, tokenizer=ByteTokenizer())
    for row in range(2):
        for side in range(2):
            for rank in range(3):
                i = int(found.ids[row, side, rank])
                assert found.bytes[row][side][rank] == f"\\x{i:02x}"
                assert found.text[row][side][rank] == bytes([i]).decode("utf-8", errors="replace")
    frame = found.to_frame()
    assert list(frame["id"]) == found.ids.reshape(-1).tolist()
    assert set(frame["sign"]) == {1, -1}
    again = type(found).load(found.save(tmp_path))
    np.testing.assert_array_equal(again.ids, found.ids)
    assert again.text == found.text
    assert top_tokens(draw(1, 4), rows, k=1).text[0][0][0].startswith("[")


def test_wrong_directions_are_refused():
    with pytest.raises(CurvescopeError, match=r"\(m, 4\)"):
        top_tokens(draw(2, 5), draw(3, 4))
    with pytest.raises(CurvescopeError, match="at least 1"):
        top_tokens(draw(2, 4), draw(3, 4), k=0)
    with pytest.raises(CurvescopeError, match="finite"):
        top_tokens(torch.full((1, 4), torch.nan), draw(3, 4))
    with pytest.raises(CurvescopeError, match="at least one token"):
        top_tokens(draw(1, 4), rows_reference(draw(0, 4)))


# ----------------------------------------------------------------------------------------- pairs of heads


def planted() -> tuple[cs.Model, torch.Tensor]:
    """Twelve orthogonal embeddings; head 0 has the pairs 0→6, 1→7, 2→8 in QK and 3→9, 4→10, 5→11 in VO."""
    d, V, h = 16, 12, 8
    frame = draw(d, V)
    frame = torch.linalg.qr(frame - frame.mean(0))[0].T  # (V, d): orthonormal rows with mean 0
    model = cs.load(transformer(d_model=d, n_heads=2, d_head=h, vocab_size=V, positions="none", n_ctx=4))
    p = dict(model.module.named_parameters())
    strength = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    with torch.no_grad():
        p["E"].copy_(frame)
        p["U"].copy_(frame.T)
        for name in ("L0.ln1", "ln_f"):
            p[f"{name}.g"].fill_(1.0)
            p[f"{name}.b"].zero_()
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            p[f"L0.{name}"].zero_()
        p["L0.W_Q"][:, :3] = frame[:3].T * strength
        p["L0.W_K"][:, :3] = frame[6:9].T
        p["L0.W_V"][:, :3] = frame[3:6].T * strength
        p["L0.W_O"][:3] = frame[9:12]
    return model, strength


def test_a_planted_head_is_read_exactly():
    model, strength = planted()
    found = decode_heads(model, 0, k=2, num=None)
    for part, left, right in ((found.qk, (0, 1, 2), (6, 7, 8)), (found.vo, (3, 4, 5), (9, 10, 11))):
        own = part.head == 0
        assert own.sum() == 3  # never beyond the rank
        assert (part.head == 1).sum() == 0  # a head of zeros has no direction
        scale = 1 / 8**0.5 if part.circuit == "qk" else 1.0
        np.testing.assert_allclose(part.singular_value, scale * strength, atol=1e-12)
        for pair in range(3):
            sides = [(int(part.left.ids[pair, s, 0]), int(part.right.ids[pair, s, 0])) for s in (0, 1)]
            assert (left[pair], right[pair]) in sides  # both ends of a pair are on the same side
    assert found.qk_spectra.rank.tolist() == [3, 0]
    assert found.notes == []
    assert isinstance(found.qk, Directions)
    assert len(found.qk.to_frame()) == 6


def test_one_side_of_the_raw_matrices():
    model = cs.load(transformer(vocab_size=11, d_model=6, n_layers=2))
    found = decode_heads(model, 1, k=3, num=2, **traveling_words.DIRECTIONS)
    assert found.qk.left.ids.shape == (4, 1, 3)
    assert not found.folded
    assert found.query_bias is not None
    p = {name: tensor.detach() for name, tensor in model.module.named_parameters()}
    N = torch.nn.functional.layer_norm(p["E"], (6,), p["L1.ln1.g"], p["L1.ln1.b"], eps=1e-5)
    W_QK = p["L1.W_Q"][:, 3:] @ p["L1.W_K"][:, 3:].T / 3**0.5
    U, S, Vh = torch.linalg.svd(W_QK)
    for rank in range(2):
        row = 2 + rank  # head 1
        v, u = Vh[rank], U[:, rank]
        sign = 1 if (N @ v).max() >= (N @ -v).max() else -1
        assert found.qk.singular_value[row] == pytest.approx(float(S[rank]))
        assert found.qk.right.ids[row, 0].tolist() == dense_order((N @ (sign * v))[None], 3)[0].tolist()
        assert found.qk.left.ids[row, 0].tolist() == dense_order((N @ (sign * u))[None], 3)[0].tolist()
    W_VO = p["L1.W_V"][:, :3] @ p["L1.W_O"][:3]
    v = torch.linalg.svd(W_VO)[2][0]
    sign = 1 if (p["E"] @ v).max() >= (p["E"] @ -v).max() else -1
    assert found.vo.right.ids[0, 0].tolist() == dense_order((p["E"] @ (sign * v))[None], 3)[0].tolist()
    k0 = p["L1.b_Q"][:3] @ p["L1.W_K"][:, :3].T
    assert found.key_bias.ids[0, 0].tolist() == dense_order((N @ k0)[None], 3)[0].tolist()
    q0 = p["L1.W_Q"][:, :3] @ p["L1.b_K"][:3]
    assert found.query_bias.ids[0, 1].tolist() == dense_order((N @ -q0)[None], 3)[0].tolist()


def test_sides_are_ordered_by_their_tokens():
    model = cs.load(transformer(vocab_size=40, d_model=6, n_layers=1))
    found = decode_heads(model, 0, k=3)
    right = found.vo.right.scores
    assert (right[:, 0].mean(-1) >= right[:, 1].mean(-1) - 1e-12).all()
    dense = heads(model, 0)[0].vo
    column = dense.right[:, 0] * int(found.vo.sign[0])
    rows = reference(model, "logit", centered=True).rows(slice(None))
    assert found.vo.right.ids[0, 0].tolist() == dense_order((rows @ column)[None], 3)[0].tolist()


def test_offsets_of_rotary_positions_change_the_pairs():
    model = cs.load(transformer(positions="rope", d_model=8, d_head=4, vocab_size=11))
    none, some = (decode_heads(model, 0, k=2, offset=delta) for delta in (0, 3))
    want = [c.qk_at(3).singular_values for c in heads(model, 0)]
    np.testing.assert_allclose(some.qk.singular_value, torch.cat(want), rtol=1e-12)
    assert np.abs(none.qk.singular_value - some.qk.singular_value).max() > 1e-3
    np.testing.assert_allclose(none.vo.singular_value, some.vo.singular_value)


def test_results_are_saved_and_read_back(tmp_path):
    model, _ = planted()
    found = decode_heads(model, 0, k=2)
    again = type(found).load(found.save(tmp_path))
    assert again.qk.right.text == found.qk.right.text
    np.testing.assert_array_equal(again.vo.sign, found.vo.sign)
