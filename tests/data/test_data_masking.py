"""Batches for encoders and classifiers: exact construction, padding, seeds, and how a study chooses."""

import types

import pytest
import torch

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.labels import classification_data, image_data, read_labeled, sample
from curvescope.data.masking import masked_lm_data, special_tokens
from curvescope.studies.problem_config import ModelOnData, kind_of, make_batches
from curvescope.tokenizers import ByteTokenizer
from encoders import FIRST, LAST, MASK, PAD, Encoder

CONTENT = "".join(f"{i * i} is the square of {i}.\n" for i in range(50))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "squares.txt"
    path.write_text(CONTENT, encoding="utf-8")
    return path


def whole(data):
    inputs = {key: torch.cat([b.inputs[key] for b in data]) for key in data[0].inputs}
    return inputs["input_ids"], inputs["attention_mask"], torch.cat([b.targets for b in data])


def test_hidden_tokens_are_the_targets_and_everything_else_is_the_text(file):
    data = masked_lm_data(file, Encoder(), tokens=300, seq_len=32, batch_size=3, seed=5)
    ids, mask, targets = whole(data)
    assert [b.num_sequences for b in data] == [3, 3, 3, 1]
    text = list(CONTENT.encode())
    order = torch.randperm(len(text) // 30, generator=generator(5)).tolist()
    for row, window in enumerate(order[:10]):
        body = text[window * 30 : (window + 1) * 30]
        count = max(1, round(0.15 * 30))
        places = torch.randperm(30, generator=generator(5, window))[:count]
        expected_targets = torch.full((32,), -100)
        expected_targets[places + 1] = torch.tensor(body)[places]
        expected_ids = torch.tensor([FIRST, *body, LAST])
        expected_ids[places + 1] = MASK
        torch.testing.assert_close(ids[row], expected_ids)
        torch.testing.assert_close(targets[row], expected_targets)
    assert (mask == 1).all()
    assert data.num_terms == 10 * 4  # 0.15 · 30 = 4.5, rounded to even


def test_short_windows_are_padded_and_unseen(file):
    ids, mask, targets = whole(masked_lm_data(file, Encoder(), tokens=37, seq_len=32, batch_size=8))
    assert mask.sum(1).tolist() == [32, 9]  # seven tokens of text between the first and the last
    assert (ids[1, 9:] == PAD).all()
    assert ids[1, [0, 8]].tolist() == [FIRST, LAST]
    assert (targets[1, 9:] == -100).all()
    assert (targets[1] != -100).sum() == 1
    assert (targets[mask == 0] == -100).all()
    file.write_text("abcde", encoding="utf-8")
    ids, mask, targets = whole(masked_lm_data(file, Encoder(), tokens=5, seq_len=32))
    assert mask.sum() == 7
    assert (targets != -100).sum() == 1


def test_every_token_of_a_text_can_be_taken(file):
    text = list(CONTENT.encode())
    ids, mask, targets = whole(masked_lm_data(file, Encoder(), tokens=len(text), seq_len=32))
    shown = torch.where(targets == -100, ids, targets)
    seen = [t for row, m in zip(shown, mask, strict=True) for t in row[m == 1].tolist() if t < 256]
    assert sorted(seen) == sorted(text)


def test_a_seed_fixes_the_sample_and_more_tokens_extend_it(file):
    def made(**options):
        return whole(masked_lm_data(file, Encoder(), seq_len=32, **options))

    few, many = made(tokens=60, batch_size=1), made(tokens=300, batch_size=7)
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(a, b[: len(a)])
    for a, b in zip(made(tokens=300), made(tokens=300), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(made(tokens=300)[0], made(tokens=300, seed=1)[0])


def test_the_rate_says_how_many_are_hidden(file):
    for rate, count in [(0.001, 1), (0.5, 15), (1.0, 30)]:
        assert masked_lm_data(file, Encoder(), tokens=30, seq_len=32, mask_rate=rate).num_terms == count


def test_a_tokenizer_without_a_frame_fills_the_sequence(file):
    plain = ByteTokenizer()
    plain.mask_id = 255
    ids, mask, _ = whole(masked_lm_data(file, types.SimpleNamespace(tokenizer=plain), tokens=64, seq_len=32))
    assert ids.shape == (2, 32)
    assert (mask == 1).all()


def test_special_tokens_are_found_where_transformers_has_them():
    inner = types.SimpleNamespace(mask_token_id=4, cls_token_id=0, sep_token_id=2, pad_token_id=1)
    found = special_tokens(types.SimpleNamespace(tokenizer=types.SimpleNamespace(tokenizer=inner)))
    assert (found.mask, found.first, found.last, found.padding) == (4, 0, 2, 1)
    assert found.num_frame == 2
    none = special_tokens(ByteTokenizer())
    assert (none.mask, none.num_frame, none.padding) == (None, 0, 0)


BAD = {
    "no mask token": ({"tokenizer": ByteTokenizer()}, {}, "tokenizer with a mask token"),
    "too many tokens": ({}, {"tokens": 10**6}, "text of at least 1000000 tokens"),
    "rate zero": ({}, {"mask_rate": 0.0}, "mask_rate above 0"),
    "rate above one": ({}, {"mask_rate": 15}, "mask_rate above 0"),
    "room for nothing": ({}, {"seq_len": 2}, "seq_len of at least 3"),
    "beyond the context": ({"n_ctx": 16}, {"seq_len": 17}, "seq_len of at most 16"),
    "no tokens": ({}, {"tokens": 0}, "tokens to be an integer of at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, file):
    model, options, sentence = BAD[case]
    model = types.SimpleNamespace(**{"tokenizer": Encoder(), "n_ctx": None, **model})
    with pytest.raises(UsageError, match=sentence):
        masked_lm_data(file, model, **{"tokens": 10, "seq_len": 16, **options})


def test_labeled_texts_are_framed_cut_and_padded(tmp_path):
    path = tmp_path / "films.tsv"
    path.write_text("1\tgood film\n\n0\tbad\n2\t" + "x" * 100 + "\n", encoding="utf-8")
    texts, labels = read_labeled(path)
    data = classification_data(texts, labels, Encoder(), seq_len=12, batch_size=2)
    ids, mask, targets = whole(data)
    assert targets.tolist() == [1, 0, 2]
    assert ids[1].tolist() == [FIRST, *b"bad", LAST, *[PAD] * 7]
    assert mask.sum(1).tolist() == [11, 5, 12]
    assert ids[2].tolist() == [FIRST, *b"x" * 10, LAST]
    assert classification_data(["a", "bc"], [0, 1], Encoder(), seq_len=12)[0].inputs["input_ids"].shape == (
        2,
        4,
    )
    path.write_text("good film\n", encoding="utf-8")
    with pytest.raises(UsageError, match="a label, a tab and a text"):
        read_labeled(path)
    with pytest.raises(UsageError, match="as many labels as texts"):
        classification_data(["a"], [0, 1], Encoder())


def test_images_have_the_models_size_and_classes():
    model = types.SimpleNamespace(facts={"image_size": 20, "channels": 3, "n_classes": 4})
    data = image_data(model, 30, seed=2, batch_size=16)
    X, y = torch.cat([b.inputs for b in data]), torch.cat([b.targets for b in data])
    assert X.shape == (30, 3, 20, 20)
    torch.testing.assert_close(X[:, 0], X[:, 2])
    assert -1 <= float(X.min()) < float(X.max()) <= 1
    assert set(y.tolist()) == {0, 1, 2, 3}
    again = image_data(model, 10, seed=2)
    torch.testing.assert_close(again[0].inputs, X[:8])
    with pytest.raises(UsageError, match="image_size"):
        image_data(types.SimpleNamespace(facts={}), 3)
    with pytest.raises(UsageError, match="number of images from 1 to"):
        image_data(model, 10**5)


def test_images_of_the_digits_own_size_are_the_digits():
    data = image_data(types.SimpleNamespace(facts={"image_size": 8, "channels": 1}), 5, seed=3, batch_size=5)
    digits = cs.task_data("digits", num_sequences=5, seed=3)
    torch.testing.assert_close(data[0].inputs, digits[0].inputs * 2 - 1)
    torch.testing.assert_close(data[0].targets, digits[0].targets)


def test_a_study_gives_a_model_what_it_was_made_for(file, tmp_path):
    def made(data, **facts):
        model = types.SimpleNamespace(name="m", tokenizer=Encoder(), facts=facts, n_ctx=None)
        return make_batches(ModelOnData(data=str(data), tokens=60, seq_len=32, batch_size=2), model)

    assert torch.is_tensor(made(file)[0].inputs)
    assert torch.is_tensor(made(file, task="causal-lm", causal=True)[0].inputs)
    masked = made(file, task="masked-lm", causal=False)
    torch.testing.assert_close(
        whole(masked)[0], whole(masked_lm_data(file, Encoder(), tokens=60, seq_len=32))[0]
    )
    path = tmp_path / "films.tsv"
    path.write_text("".join(f"{i % 2}\tfilm {i}\n" for i in range(9)), encoding="utf-8")
    labeled = made(path, task="classification")
    assert labeled.num_sequences == 2  # ⌈60 / 32⌉
    assert labeled[0].targets.tolist() == [i % 2 for i in sample(9, 2, seed=0)]
    seen = made("sample", task="image-classification", image_size=16)
    assert seen[0].inputs.shape == (2, 1, 16, 16)
    with pytest.raises(UsageError, match="takes images"):
        made(file, task="image-classification", image_size=16)


def test_a_zoo_model_of_patches_sees_images(tmp_path):
    config = cs.TransformerConfig(
        n_layers=1, d_model=4, n_heads=1, n_ctx=16, inputs="patches", outputs="class", n_out=3, causal=False
    )
    model = cs.load(cs.Transformer(config))
    assert kind_of(model) == "image-classification"
    data = make_batches(ModelOnData(tokens=320, seq_len=64), model)
    problem = cs.Problem(model, data)
    assert problem.num_terms == 5
    assert problem.loss_value() > 0
