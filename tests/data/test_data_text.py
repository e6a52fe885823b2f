"""Text as batches: every target counts once."""

import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvescope.core.errors import UsageError
from curvescope.data.baselines import uniform_loss, unigram_loss
from curvescope.data.text import text_data, windows
from curvescope.tokenizers import ByteTokenizer, CharTokenizer

CONTENT = "".join(f"{i * i} is the square of {i}.\n" for i in range(200))
TOKENIZER = ByteTokenizer()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "squares.txt"
    path.write_text(CONTENT, encoding="utf-8")
    return path


def test_pairs_are_next_tokens_of_the_text(file):
    data = text_data(file, TOKENIZER, tokens=256, seq_len=32, batch_size=3)
    assert [b.num_sequences for b in data] == [3, 3, 2]
    assert data.num_terms == 256
    starts = set()
    for batch in data:
        for row, following in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert row[1:] == following[:-1]
            start = CONTENT.index(TOKENIZER.decode([*row, following[-1]]))
            assert start % 32 == 0
            starts.add(start)
    assert len(starts) == 8


def test_a_seed_fixes_the_sample_and_more_tokens_extend_it(file):
    def ids(**options):
        return torch.cat([b.inputs for b in text_data(file, TOKENIZER, seq_len=16, **options)])

    assert torch.equal(ids(tokens=160, seed=1), ids(tokens=160, seed=1, batch_size=4))
    assert not torch.equal(ids(tokens=160, seed=1), ids(tokens=160, seed=2))
    assert torch.equal(ids(tokens=320, seed=1)[:10], ids(tokens=160, seed=1))


@settings(deadline=None)
@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_exactly_so_many_targets_count_and_none_twice(length, seq_len, data):
    tokens = data.draw(st.integers(1, length - 1))
    ids = torch.arange(1, length + 1)  # every id once, so a target says where it stood
    inputs, targets = windows(ids, tokens=tokens, seq_len=seq_len, seed=0)
    counted = targets != -100
    assert inputs.shape == targets.shape == (math.ceil(tokens / seq_len), seq_len)
    assert int(counted.sum()) == tokens
    assert len(set(targets[counted].tolist())) == tokens
    assert torch.equal(inputs[counted] + 1, targets[counted])
    assert bool((counted.long().diff(dim=1) <= 0).all())  # what does not count comes last
    assert bool(counted[:-1].all())


def test_text_shorter_than_a_sequence_is_padded(file):
    file.write_text("abcd")
    (batch,) = text_data(file, CharTokenizer("dcba"), tokens=3, seq_len=5)
    assert batch.inputs.tolist() == [[3, 2, 1, 0, 0]]
    assert batch.targets.tolist() == [[2, 1, 0, -100, -100]]


def test_too_short_a_text_says_how_many_tokens_it_has(file):
    file.write_text("abcd")
    with pytest.raises(
        UsageError, match=r"at least 5 tokens, got 4 \(give a longer text, or tokens=3 for all of it\)"
    ):
        text_data(file, TOKENIZER, tokens=4)
    file.write_text("")
    with pytest.raises(UsageError, match=r"got 0 \(give a longer text\)"):
        text_data(file, TOKENIZER, tokens=1)
    file.write_text(CONTENT)
    with pytest.raises(
        UsageError, match=r"got 100 in its first 100 bytes \(max_bytes=None reads all of it\)"
    ):
        text_data(file, TOKENIZER, tokens=200, max_bytes=100)


def test_a_model_brings_its_tokenizer_and_its_context(file):
    model = types.SimpleNamespace(tokenizer=TOKENIZER, n_ctx=32)
    assert text_data(file, model, seq_len=32, tokens=64).num_terms == 64
    with pytest.raises(UsageError, match=r"seq_len of at most 32, the model's context, got 64"):
        text_data(file, model, seq_len=64)
    with pytest.raises(UsageError, match="SimpleNamespace has none"):
        text_data(file, types.SimpleNamespace(tokenizer=None))


@pytest.mark.parametrize("option", ["tokens", "seq_len", "batch_size"])
def test_counts_are_checked(file, option):
    with pytest.raises(UsageError, match=f"{option} to be an integer of at least 1, got 0"):
        text_data(file, TOKENIZER, **{option: 0})


def test_baselines():
    assert uniform_loss(8) == pytest.approx(math.log(8))
    assert unigram_loss([], [0, 1, 2], 3) == pytest.approx(math.log(3))
    expected = -(2 * math.log(3 / 7) + math.log(1 / 7)) / 3  # counts 2, 1, 0, 0 become 3, 2, 1, 1
    assert unigram_loss([0, 0, 1], [0, 0, 3], 4) == pytest.approx(expected)
    ids = TOKENIZER.encode(CONTENT)
    assert unigram_loss(torch.tensor(ids), ids, 256) < uniform_loss(256) - 2


def test_baseline_errors():
    with pytest.raises(UsageError, match="ids_eval from 0 to 3, got from -100 to 2"):
        unigram_loss([1], [2, -100], 4)
    with pytest.raises(UsageError, match="ids_train to be integers"):
        unigram_loss([0.5], [1], 4)
    with pytest.raises(UsageError, match="got none"):
        unigram_loss([1], [], 4)
    with pytest.raises(UsageError, match="vocab_size of at least 1"):
        uniform_loss(0)
