"""Inputs with a part hidden: what is changed, what is not, and what counts."""

import types

import pytest
import torch

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.denoising import hidden_patches, masked_text, replaced_text
from curvescope.data.labels import image_data
from curvescope.data.text import text_data
from curvescope.tokenizers import ByteTokenizer
from encoders import FIRST, LAST, MASK, PAD, Encoder

CONTENT = "".join(f"{i * i} is the square of {i}.\n" for i in range(50))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "squares.txt"
    path.write_text(CONTENT, encoding="utf-8")
    return path


def ids(batches):
    return torch.cat([b.inputs["input_ids"] if isinstance(b.inputs, dict) else b.inputs for b in batches])


def test_masked_text_is_the_text_but_for_the_mask(file):
    pair = masked_text(file, Encoder(), tokens=37, seq_len=32, batch_size=1, seed=3)
    whole, hidden = ids(pair.whole), ids(pair.hidden)
    changed = whole != hidden
    assert changed.sum(1).tolist() == [4, 1]  # 0.15 of 30 and of 7
    assert (hidden[changed] == MASK).all()
    assert not (whole == MASK).any()
    assert whole[0, 0] == FIRST
    assert whole[0, -1] == LAST
    text_of = bytes(whole[0, 1:-1].tolist()).decode()
    assert text_of in CONTENT
    assert pair.counted[0] is None
    assert pair.counted[1].sum() == 9
    assert (whole[1, 9:] == PAD).all()
    for a, b in zip(pair.whole, pair.hidden, strict=True):
        torch.testing.assert_close(a.inputs["attention_mask"], b.inputs["attention_mask"])


def test_replaced_text_has_other_tokens_at_the_stated_places(file):
    model = types.SimpleNamespace(tokenizer=ByteTokenizer(), facts={"vocab_size": 256}, n_ctx=None)
    cut = {"tokens": 150, "seq_len": 20, "batch_size": 3, "seed": 7}
    pair = replaced_text(file, model, rate=0.2, **cut)
    whole, hidden = ids(pair.whole), ids(pair.hidden)
    torch.testing.assert_close(whole, ids(text_data(file, model, **cut)))
    for row in range(8):
        length = 20 if row < 7 else 10
        rng = generator(7, row)
        places = torch.randperm(length, generator=rng)[: round(0.2 * length)]
        assert sorted((whole[row] != hidden[row]).nonzero().flatten().tolist()) == sorted(places.tolist())
    assert int(hidden.max()) < 256
    assert [c is None for c in pair.counted] == [True, True, False]
    assert pair.counted[2].sum(1).tolist() == [20, 10]


def test_replaced_tokens_are_all_the_others_equally(file):
    model = types.SimpleNamespace(tokenizer=ByteTokenizer(), facts={"vocab_size": 128})
    found = torch.cat(
        [ids(replaced_text(file, model, rate=1.0, tokens=1200, seq_len=60, seed=s).hidden) for s in range(20)]
    )
    counts = torch.bincount(found.flatten(), minlength=128).double()
    assert len(counts) == 128  # no token beyond the model's rows
    expected = float(counts.mean())
    assert (
        float(((counts - expected) ** 2 / expected).sum()) < 127 + 5 * (2 * 127) ** 0.5
    )  # χ² of 127 degrees


def test_hidden_patches_are_gray_and_the_rest_is_the_image():
    facts = {"image_size": 16, "patch_size": 4, "channels": 3}
    model = types.SimpleNamespace(facts=facts)
    pair = hidden_patches(model, 5, rate=0.25, seed=2, batch_size=2)
    whole, hidden = ids(pair.whole), ids(pair.hidden)
    torch.testing.assert_close(whole, ids(image_data(model, 5, 2)))
    same = (whole == hidden).unflatten(2, (4, 4)).unflatten(4, (4, 4)).all(dim=5).all(dim=3).all(dim=1)
    for row in range(5):
        chosen = torch.randperm(16, generator=generator(2, row))[:4]
        assert set((~same[row]).flatten().nonzero().flatten().tolist()) == set(chosen.tolist())
        patches = hidden[row].unflatten(1, (4, 4)).unflatten(3, (4, 4)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        assert (patches[chosen] == 0).all()
    assert pair.counted == (None, None, None)


@pytest.mark.parametrize("rate", [0.0, 1.5, -1])
def test_a_rate_is_a_share(rate, file):
    with pytest.raises(UsageError, match="rate above 0"):
        replaced_text(file, ByteTokenizer(), rate=rate, tokens=10, seq_len=5)
    with pytest.raises(UsageError, match="rate above 0"):
        hidden_patches(types.SimpleNamespace(facts={"image_size": 8, "patch_size": 4}), 2, rate=rate)


def test_patches_need_a_size():
    with pytest.raises(UsageError, match="patch_size"):
        hidden_patches(types.SimpleNamespace(facts={"image_size": 8}), 2)
