"""Words as probes: planted pairs, the model's own logits, baselines, and what stands for a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from cases import transformer
from curvescope.core.errors import UsageError
from curvescope.geometry import heads, probe_keys, probe_values, represent
from curvescope.models.capture import capture
from curvescope.studies import traveling_words
from curvescope.tokenizers import CharTokenizer

V, D = 12, 16
LETTERS = CharTokenizer("abcdefghijkl")
PARTNER = torch.tensor([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted() -> cs.Model:
    """Every token's query is the key of its partner, and its value writes the partner's embedding."""
    frame = draw(D, V)
    frame = torch.linalg.qr(frame - frame.mean(0))[0].T
    model = cs.load(transformer(d_model=D, n_heads=1, d_head=V, vocab_size=V, positions="none", d_ff=0))
    p = dict(model.module.named_parameters())
    with torch.no_grad():
        p["E"].copy_(frame)
        p["U"].copy_(frame.T)
        for name in ("L0.ln1", "ln_f"):
            p[f"{name}.g"].copy_(1 + 0.3 * torch.rand(D, generator=torch.Generator().manual_seed(1)))
            p[f"{name}.b"].zero_()
        gain = p["L0.ln1.g"][:, None]
        p["L0.W_Q"].copy_(frame.T / gain)
        p["L0.W_K"].copy_(frame[PARTNER].T / gain)
        p["L0.W_V"].copy_(frame.T / gain)
        p["L0.W_O"].copy_(5 * frame[PARTNER])
        for name in ("b_Q", "b_K", "b_V", "b_O"):
            p[f"L0.{name}"].zero_()
    return model


def test_planted_pairs_are_found():
    keys = probe_keys(planted(), 0, list(LETTERS.alphabet), k=2, tokenizer=LETTERS)
    assert keys.ids[:, 0, 0].tolist() == PARTNER.tolist()
    assert [row[0][0] for row in keys.text] == [LETTERS.alphabet[i] for i in PARTNER]
    assert keys.fraction[:, 0, 0] == pytest.approx(np.ones(V), abs=1e-3)  # 1 but for ε
    assert (keys.fraction[:, 0, 1] < 0.01).all()
    values = probe_values(planted(), 0, list(LETTERS.alphabet), k=1, tokenizer=LETTERS)
    assert values.ids[:, 0, 0].tolist() == PARTNER.tolist()
    assert values.ids[:, 1, 0].tolist() == PARTNER.tolist()
    assert (keys.z[:, 0, 0] > 1.5).all()  # one query in twelve prefers that key
    assert (keys.percentile[:, 0, 0] > 80).all()


def test_the_bias_of_queries_decides_and_can_be_left_out():
    model = planted()
    p = dict(model.module.named_parameters())
    with torch.no_grad():
        p["L0.b_Q"][3] = 1000.0  # every query now looks for the key of coordinate 3
    found = probe_keys(model, 0, ["a", "b"], k=1, tokenizer=LETTERS)
    assert found.ids[:, 0, 0].tolist() == [int(PARTNER[3])] * 2
    old = probe_keys(model, 0, ["a", "b"], k=1, tokenizer=LETTERS, how="raw", **traveling_words.KEYS)
    assert old.ids[:, 0, 0].tolist() == PARTNER[:2].tolist()


def test_scores_are_the_models_own_up_to_a_constant():
    """Scores of key t at position 0 for a query at position 1, from the pattern of two-token sequences."""
    model = cs.load(transformer(positions="none", vocab_size=7, n_layers=2, d_model=6))
    found = probe_keys(model, 0, [2, 5], k=7)
    for w, word in enumerate((2, 5)):
        pairs = torch.tensor([[t, word] for t in range(7)])
        A = capture(model, pairs, "L0.attn.pattern")["L0.attn.pattern"][:, :, 1]
        odds = (A[..., 0] / A[..., 1]).log()  # s(word, t) − s(word, word)
        for head in range(2):
            listed = found.ids[w, head]
            want = odds[listed, head].numpy()
            own = found.scores[w, head]
            at = int(np.flatnonzero(listed == word)[0])
            np.testing.assert_allclose(own - own[at], want, atol=1e-12)


def test_the_layers_sum_is_the_models_logits():
    """With one layer, no feed-forward and one token, the sum of heads is the model's output."""
    for settings in (
        {},
        {"norm_kind": "rmsnorm", "positions": "rope", "d_head": 4, "n_kv_heads": 1},
        {"tied": True},
    ):
        more = {"positions": "none", "d_ff": 0, "vocab_size": 9, "d_model": 8, "n_heads": 2, **settings}
        model = cs.load(transformer(**more))
        found = probe_values(model, 0, [1, 4, 8], k=9, num_random=20)
        logits = model.forward({}, torch.tensor([[1], [4], [8]]))[:, 0].detach()
        want = logits.gather(1, torch.from_numpy(found.ids[:, -1]))
        np.testing.assert_allclose(found.scores[:, -1], want, atol=1e-12)
        assert (np.diff(found.scores, axis=-1) <= 0).all()
        out = capture(model, torch.tensor([[1], [4], [8]]), "L0.attn.out")["L0.attn.out"][:, 0]
        np.testing.assert_allclose(found.norms[:, -1], out.norm(dim=1), atol=1e-12)


def test_post_norm_models_are_read_behind_their_norm():
    more = {"norm": "post", "positions": "none", "d_ff": 0, "vocab_size": 9, "d_model": 8, "n_heads": 2}
    model = cs.load(transformer(**more))
    found = probe_values(model, 0, [1, 4], k=9, num_random=20)
    logits = model.forward({}, torch.tensor([[1], [4]]))[:, 0].detach()
    np.testing.assert_allclose(
        found.scores[:, -1], logits.gather(1, torch.from_numpy(found.ids[:, -1])), atol=1e-12
    )
    assert any("not foldable" in note for note in found.notes)
    keys = probe_keys(model, 0, [1, 4], k=3)
    c, E = heads(model, 0)[0], model.module.E.detach()
    want = (E[[1, 4]] @ c.W_Q + c.b_Q) @ (E @ c.W_K).T * c.scale
    np.testing.assert_allclose(keys.scores[:, 0], want.topk(3).values, atol=1e-12)


def test_the_output_bias_in_every_state_and_whole_lengths():
    model = cs.load(transformer(vocab_size=9, d_model=8, n_heads=2, n_layers=2))
    p = {name: tensor.detach() for name, tensor in model.module.named_parameters()}
    found = probe_values(model, 1, [1, 4], k=9, num_random=20, how="raw", **traveling_words.VALUES)
    E = p["E"][[1, 4]]
    q = torch.nn.functional.layer_norm(E, (8,), p["L1.ln1.g"], p["L1.ln1.b"], eps=1e-5)
    update = (q @ p["L1.W_V"][:, :4] + p["L1.b_V"][:4]) @ p["L1.W_O"][:4]
    state = E + update + p["L1.b_O"]
    want = torch.nn.functional.layer_norm(state, (8,), p["ln_f.g"], p["ln_f.b"], eps=1e-5) @ p["U"]
    np.testing.assert_allclose(found.scores[:, 0], want.sort(dim=1, descending=True).values, atol=1e-12)
    whole = traveling_words.whole_lengths(found)
    np.testing.assert_array_equal(whole.norms[:, 0], update.norm(dim=1).trunc().numpy())
    np.testing.assert_allclose(found.norms[:, 0], update.norm(dim=1))
    with pytest.raises(UsageError, match="sum or every"):
        probe_values(model, 1, [1, 4], output_bias="none")
    assert any("its embedding" in note for note in found.notes)
    other = probe_values(model, 1, [1, 4], k=9, num_random=20, how="raw")
    np.testing.assert_allclose(other.norms[:, 0], update.norm(dim=1))


def test_the_baseline_is_the_same_key_with_random_queries():
    model = cs.load(transformer(vocab_size=30, d_model=6))
    found = probe_keys(model, 0, [2, 5], k=3, num_random=50, seed=3)
    c = heads(model, 0)[1]
    n = represent(model, 0).reads(folded=True).rows(slice(None))
    drawn = torch.randint(0, 30, (50,), generator=torch.Generator().manual_seed(3))
    chance = c.key_direction(n[drawn]) @ n.T
    for w, word in enumerate((2, 5)):
        for rank in range(3):
            t = int(found.ids[w, 1, rank])
            score = float(c.key_direction(n[word]) @ n[t])
            assert found.scores[w, 1, rank] == pytest.approx(score)
            own = chance[:, t]
            assert found.z[w, 1, rank] == pytest.approx(float((score - own.mean()) / own.std()))
            share = (own < score - 1e-9).double() + 0.5 * ((own - score).abs() < 1e-9).double()
            assert found.percentile[w, 1, rank] == pytest.approx(float(100 * share.mean()))
    again = probe_keys(model, 0, [2, 5], k=3, num_random=50, seed=3)
    np.testing.assert_array_equal(again.z, found.z)


# ------------------------------------------------------------------------------- what stands for a token


def test_representations():
    model = cs.load(transformer(vocab_size=9, d_model=8, n_layers=2, n_ctx=5))
    ids = torch.arange(9)
    E, P = model.module.E.detach(), model.module.P.detach()
    assert represent(model, 0).how == "raw"
    assert represent(model, 1).how == "run"
    torch.testing.assert_close(represent(model, 1, how="raw").states(ids), E)
    torch.testing.assert_close(represent(model, 1, how="position", position=3).states(ids), E + P[3])
    with torch.no_grad():
        want = model.module.get_submodule("L0")(E[:, None] + P[0], lambda *_: None)[:, 0]
    found = represent(model, 1)
    torch.testing.assert_close(found.states(ids), want)
    inside = capture(model, ids[:, None], "L1.attn.in")["L1.attn.in"][:, 0]
    torch.testing.assert_close(found.reads(folded=False).rows(slice(None)), inside)
    two = represent(model, 1, bos=3).states(ids)
    pairs = torch.stack([torch.full_like(ids, 3), ids], dim=1)
    with torch.no_grad():
        want = model.module.get_submodule("L0")(model.module.embed(pairs), lambda *_: None)[:, 1]
    torch.testing.assert_close(two, want)
    assert "token 3" in represent(model, 1, bos=3).note


def test_corpus_means():
    model = cs.load(transformer(vocab_size=9, d_model=8, n_layers=2, n_ctx=5))
    corpus = torch.tensor([[1, 2, 1, 3], [3, 3, 7, 1]])
    found = represent(model, 1, how="mean", corpus=corpus)
    assert found.ids.tolist() == [1, 2, 3, 7]
    with torch.no_grad():
        x = model.module.get_submodule("L0")(model.module.embed(corpus), lambda *_: None)
    for row, token in enumerate(found.ids.tolist()):
        torch.testing.assert_close(found.states(torch.tensor([row]))[0], x[corpus == token].mean(0))
    probe = probe_keys(model, 1, [1, 5], how="mean", corpus=corpus, k=2, num_random=5)
    assert probe.word_ids.tolist() == [1]
    assert set(probe.ids.flatten().tolist()) <= {1, 2, 3, 7}
    assert any("1 words are left out" in note for note in probe.notes)
    with pytest.raises(UsageError, match="needs a corpus"):
        represent(model, 1, how="mean")
    with pytest.raises(UsageError, match="have a representation"):
        probe_keys(model, 1, [5], how="mean", corpus=corpus, k=2, num_random=5)


def test_a_representation_can_be_shared():
    model = cs.load(transformer(vocab_size=9, d_model=8, n_layers=2))
    tokens = represent(model, 1)
    one, two = probe_keys(model, 1, [1, 5], tokens=tokens), probe_keys(model, 1, [1, 5])
    np.testing.assert_array_equal(one.scores, two.scores)


def test_wrong_arguments_are_refused():
    model = cs.load(transformer(vocab_size=9, d_model=8, positions="none"))
    for options, words in (
        ({"how": "best"}, "how"),
        ({"how": "position"}, "learned positions"),
        ({"k": 0}, "k of at least 1"),
        ({"num_random": 1}, "num_random"),
        ({"words": ["time"]}, "tokenizer"),
    ):
        with pytest.raises(UsageError, match=words):
            probe_keys(model, 0, **{"words": [1], **options})


@pytest.mark.parametrize(
    "name",
    ["gpt2", "gpt_neox", "llama", "qwen3", "gemma", "gemma2", "gemma3_text", "opt", "bert", "distilbert"],
)
def test_families_agree_with_their_own_attention(name):
    """Scores against the pattern of two tokens, and the sum's length against attention on one."""
    pytest.importorskip("transformers")
    import adapters_cases as others

    model = cs.load(others.original(name))
    rotary = model.facts["positions"] == "rope"
    post = model.facts["norm"] == "post"
    with others.KeepDouble():
        values = probe_values(model, 1, [3, 4], k=2, how="run", num_random=5)
        one = capture(model, torch.tensor([[3], [4]]), "L1.attn.out")["L1.attn.out"][:, 0]
        if "L1.ln1_post.g" not in model.blocks:
            np.testing.assert_allclose(values.norms[:, -1], one.norm(dim=1), rtol=1e-10)
        if not rotary or post:
            return
        keys = probe_keys(model, 0, [3, 4], k=11, how="raw", offset=1)
        for w, word in enumerate((3, 4)):
            pairs = torch.tensor([[t, word] for t in range(11)])
            A = capture(model, pairs, "L0.attn.pattern")["L0.attn.pattern"][:, :, 1]
            odds = (A[..., 0] / A[..., 1]).log()
            for head in range(2):
                want = odds[keys.ids[w, head], head].numpy()
                own = keys.scores[w, head]
                cap = heads(model, 0)[head].softcap
                if cap is None:
                    np.testing.assert_allclose(own - own[0], want - want[0], atol=1e-9)
                else:
                    assert (np.diff(want) <= 1e-9).all()


def test_results_are_saved(tmp_path):
    found = probe_values(planted(), 0, ["a", "b"], k=2, tokenizer=LETTERS)
    again = type(found).load(found.save(tmp_path))
    assert again.text == found.text
    assert list(found.to_frame()["head"].unique()) == [0, "sum"]
    assert len(probe_keys(planted(), 0, ["a"], k=2, tokenizer=LETTERS).to_frame()) == 2
