"""Names of tokens for every kind of tokenizer; words that are single tokens."""

from __future__ import annotations

import pytest

import curvescope as cs
from assets import ASSETS
from curvescope.core.errors import UsageError
from curvescope.geometry import TokenNames, common_nouns, select_words, vocabulary_words
from curvescope.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, HFTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def gpt2():
    if not (ASSETS / "gpt2-tokenizer" / "tokenizer.json").exists():
        pytest.skip("no tokenizer of GPT-2 here; set CURVESCOPE_ASSETS")
    return load_tokenizer(ASSETS / "gpt2-tokenizer")


def test_a_hundred_nouns_ship():
    assert len(common_nouns()) == len(set(common_nouns())) == 100
    assert common_nouns()[0] == "time"


def test_nouns_of_gpt2(gpt2):
    bare, spaced = select_words(gpt2, form="bare"), select_words(gpt2)
    assert len(bare.words) == 96
    assert sorted(bare.dropped) == ["idea", "moment", "others", "teacher"]
    assert bare.form == "bare"
    assert "96 of 100" in bare.note
    assert len(spaced.words) == 100
    assert spaced.form == "space"
    assert "100 of 100" in spaced.note
    assert dict(zip(bare.words, bare.ids.tolist(), strict=True))["time"] == 2435
    assert dict(zip(spaced.words, spaced.ids.tolist(), strict=True))["time"] == 640
    assert gpt2.encode("To kill two birds with one stone") == [2514, 1494, 734, 10087, 351, 530, 7815]


def test_ids_of_the_nouns_are_the_recorded_ones(gpt2):
    import json

    file = ASSETS.parent / "reference" / "gpt2_reference.json"
    if not file.exists():
        pytest.skip("no recorded ids here")
    want = json.loads(file.read_text())["nouns"]
    for key, found in (
        ("single_no_space", select_words(gpt2, form="bare")),
        ("single_space", select_words(gpt2)),
    ):
        assert dict(zip(found.words, found.ids.tolist(), strict=True)) == want[key]


def test_every_token_of_gpt2_has_its_bytes(gpt2):
    """Joined, the bytes of a text's tokens are the text's, also where a token is no UTF-8 by itself."""
    names = TokenNames(gpt2)
    assert len(names.known(50304)) == 50257  # a padded vocabulary has rows without a token
    text = "Ångström 日本 🙂\t\x00\x07 <|endoftext|> naïve\n"
    ids = gpt2.encode(text)
    assert b"".join(names.raw(i) for i in ids) == text.encode()
    assert any("\ufffd" in names.text(i) for i in ids)
    assert names.text(50256) == "<|endoftext|>"
    assert names.hex(gpt2.encode(" a")[0]) == r"\x20\x61"


@pytest.mark.parametrize("kind", ["bpe", "bytes", "chars"])
def test_own_tokenizers(kind):
    text = "tab\tnew\nnull\x00 é 日 the cat the cat"
    tokenizer = {
        "bpe": lambda: BPETokenizer.train(text, 270),
        "bytes": ByteTokenizer,
        "chars": lambda: CharTokenizer.from_text(text),
    }[kind]()
    names = TokenNames(tokenizer)
    assert b"".join(names.raw(i) for i in tokenizer.encode(text)) == text.encode()
    assert len(names.known(10_000)) == tokenizer.vocab_size
    assert names.known(5).tolist() == [0, 1, 2, 3, 4]
    assert all(names.hex(i).count("\\x") == len(names.raw(i)) for i in names.ids())
    if kind != "chars":
        assert {raw for raw in map(names.raw, names.ids()) if len(raw) == 1} == {
            bytes([b]) for b in range(256)
        }


def core(kind: str):
    package = pytest.importorskip("tokenizers")
    if kind == "wordpiece":
        words = {"[UNK]": 0, "the": 1, "##ing": 2, "cat": 3}
        found = package.Tokenizer(package.models.WordPiece(words, unk_token="[UNK]"))
        found.decoder = package.decoders.WordPiece()
        found.pre_tokenizer = package.pre_tokenizers.Whitespace()
        return found
    words = {"<unk>": 0, "<0x0A>": 1, "<0xE6>": 2, "\u2581the": 3, "cat": 4, "\u2581": 5}
    found = package.Tokenizer(
        package.models.BPE(vocab=words, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    found.decoder = package.decoders.Sequence(
        [package.decoders.Replace("\u2581", " "), package.decoders.ByteFallback(), package.decoders.Fuse()]
    )
    return found


def test_sentencepiece_and_wordpiece():
    transformers = pytest.importorskip("transformers")
    for kind, want in (
        ("sentencepiece", {1: b"\n", 2: b"\xe6", 3: b" the", 4: b"cat", 5: b" "}),
        ("wordpiece", {1: b"the", 2: b"##ing", 3: b"cat"}),
    ):
        wrapped = HFTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=core(kind)))
        names = TokenNames(wrapped)
        assert {i: names.raw(i) for i in want} == want
    names = TokenNames(
        HFTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=core("sentencepiece")))
    )
    assert names.text(2) == "\ufffd"


def test_without_a_tokenizer_ids_are_names():
    names = TokenNames(None)
    assert names.text(7) == "[7]"
    assert names.known(3).tolist() == [0, 1, 2]
    assert names.ids() == []


def test_choosing_words():
    tokenizer = CharTokenizer("abc")
    found = select_words(tokenizer, ["a", "b", "ab", "z"])
    assert found.words == ["a", "b"]
    assert found.dropped == ["ab", "z"]
    assert found.form == "bare"  # the tokenizer has no space
    assert select_words(tokenizer, [2, 0]).ids.tolist() == [2, 0]
    assert select_words(None, [2, 0]).words == ["[2]", "[0]"]
    with pytest.raises(UsageError, match="single tokens"):
        select_words(tokenizer, ["zebra"])
    with pytest.raises(UsageError, match="expected a tokenizer"):
        select_words(None, ["zebra"])
    with pytest.raises(UsageError, match="form"):
        select_words(tokenizer, ["a"], form="upper")


def test_a_small_vocabulary_gives_its_own_words():
    tokenizer = cs.load("tiny-gpt").tokenizer
    found = select_words(tokenizer)
    assert found.form == "vocabulary"
    assert "common nouns" in found.note
    names = TokenNames(tokenizer)
    for word, i in zip(found.words, found.ids.tolist(), strict=True):
        assert word.isalpha()
        assert names.text(i) == f" {word}"
    assert len(vocabulary_words(tokenizer, num=4).words) == 4
    with pytest.raises(UsageError, match="none"):
        vocabulary_words(ByteTokenizer())
