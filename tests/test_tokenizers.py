"""Tokenizers: round trips, files, and what is refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curvescope.core.errors import UsageError
from curvescope.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    as_tokenizer,
    load_tokenizer,
)

TEXTS = ["the cat sat on the mat, the cat sat", "naïve façade — 12 + 30 = 42\n", "ĠĠ \t\r\n\x00 €"]
BPE = BPETokenizer.train(TEXTS, 300)


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ids == list(text.encode("utf-8"))
    assert ByteTokenizer().decode(ids) == text


@settings(deadline=None)
@given(st.text())
def test_bpe_round_trip_on_text_it_has_not_seen(text):
    ids = BPE.encode(text)
    assert all(0 <= i < BPE.vocab_size for i in ids)
    assert len(ids) <= len(text.encode("utf-8"))
    assert BPE.decode(ids) == text


@settings(deadline=None)
@given(st.text(alphabet="abc \n€"))
def test_characters_round_trip(text):
    tokenizer = CharTokenizer("abc \n€")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_alphabet_of_a_text_is_sorted():
    tokenizer = CharTokenizer.from_text("banana")
    assert (tokenizer.alphabet, tokenizer.vocab_size, tokenizer.encode("nab")) == ("abn", 3, [2, 0, 1])


def test_bpe_merges_the_most_frequent_pair_first():
    tokenizer = BPETokenizer.train(["xy xy xy ab"], 257)
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode("xy")) == 1
    assert len(tokenizer.encode("ab")) == 2
    assert BPETokenizer.train("xy xy xy ab", 257).encode("xyab") == tokenizer.encode("xyab")


def test_bpe_does_not_depend_on_the_process():
    code = (
        "from curvescope.tokenizers import BPETokenizer;import sys;"
        "sys.stdout.write(BPETokenizer.train(['a b c d e f g h ab bc cd de ef']*3, 270)._core.to_str())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), CharTokenizer("abc €\n'\""), BPE], ids=lambda t: t.name
)
def test_save_and_load(tokenizer, tmp_path):
    file = tmp_path / "new" / "tokenizer.json"
    tokenizer.save(file)
    for place in (file, file.parent):
        again = load_tokenizer(place)
        assert type(again) is type(tokenizer)
        assert (again.vocab_size, again.encode("abc €\n")) == (
            tokenizer.vocab_size,
            tokenizer.encode("abc €\n"),
        )


def test_a_file_that_cuts_and_pads_does_neither_here(tmp_path):
    content = json.loads(BPE._core.to_str())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    assert BPETokenizer.from_file(file).encode(TEXTS[0]) == BPE.encode(TEXTS[0])
    assert len(BPE.encode(TEXTS[0])) > 2


def test_a_transformers_tokenizer_gives_the_same_ids():
    transformers = pytest.importorskip("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=BPE._core, bos_token="<s>", eos_token="</s>"
    )
    tokenizer = HFTokenizer(wrapped)
    assert tokenizer.encode("the cat") == BPE.encode("the cat")
    assert tokenizer.decode(tokenizer.encode("a , b  .")) == "a , b  ."
    assert tokenizer.vocab_size == BPE.vocab_size + 2


def test_hf_objects_are_taken_by_their_methods(tmp_path):
    class Foreign:
        def encode(self, text, add_special_tokens=True):
            return [9] * add_special_tokens + [ord(c) - 97 for c in text]

        def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=True):
            assert not skip_special_tokens
            assert not clean_up_tokenization_spaces
            return "".join(chr(i + 97) for i in ids)

        def get_vocab(self):
            return {"a": 0, "b": 1, "e": 4}  # with holes: the largest id decides

        def save_pretrained(self, folder):
            tmp_path.joinpath(folder).touch()

    tokenizer = as_tokenizer(Foreign())
    assert isinstance(tokenizer, HFTokenizer)
    assert (tokenizer.encode("abe"), tokenizer.decode([0, 4]), tokenizer.vocab_size) == ([0, 1, 4], "ae", 5)
    tokenizer.save(tmp_path / "saved")
    assert (tmp_path / "saved").exists()


def test_as_tokenizer_wraps_what_it_can():
    assert as_tokenizer(BPE) is BPE
    assert as_tokenizer(BPE._core).encode("cat") == BPE.encode("cat")
    with pytest.raises(UsageError, match="got int, which has no encode and no decode"):
        as_tokenizer(3)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ab"), BPE], ids=lambda t: t.name)
def test_ids_outside_the_vocabulary(tokenizer):
    assert tokenizer.decode(np.array([1])) == tokenizer.decode([1])
    for wrong in (tokenizer.vocab_size, -1):
        with pytest.raises(UsageError, match=rf"ids from 0 to {tokenizer.vocab_size - 1}, got {wrong}"):
            tokenizer.decode([0, wrong])


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=lambda t: t.name)
def test_text_that_is_none(tokenizer):
    with pytest.raises(UsageError, match="lone surrogate at position 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(UsageError, match="expected text, got bytes"):
        tokenizer.encode(b"ab")


def test_errors_about_alphabets():
    with pytest.raises(UsageError, match="different characters, got none"):
        CharTokenizer.from_text("")
    with pytest.raises(UsageError, match=r"got \['a'\] more than once"):
        CharTokenizer("aba")
    with pytest.raises(UsageError, match=r"alphabet 'ab', got 'é' at position 3"):
        CharTokenizer("ab").encode("abaé")
    with pytest.raises(UsageError, match=r"and 5 more, got"):
        CharTokenizer("".join(chr(i) for i in range(100, 145))).encode("a")


def test_errors_about_files(tmp_path):
    with pytest.raises(UsageError, match="found nothing there"):
        BPETokenizer.from_file(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="found a folder there"):
        load_tokenizer(tmp_path)
    for content in ("{", "[1, 2]", '{"version": "1.0"}', "plain words"):
        (tmp_path / "wrong.json").write_text(content)
        with pytest.raises(UsageError, match=r"expected a tokenizer.json, but .*wrong.json"):
            load_tokenizer(tmp_path / "wrong.json")
    (tmp_path / "wrong.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        BPETokenizer.from_file(tmp_path / "wrong.json")
    (tmp_path / "own.json").write_text('{"format": "curvescope-tokenizer", "type": "runes"}')
    with pytest.raises(UsageError, match="got 'runes'"):
        load_tokenizer(tmp_path / "own.json")


def test_errors_about_bpe():
    import tokenizers

    with pytest.raises(UsageError, match="at least 256"):
        BPETokenizer.train("abc", 100)
    with pytest.raises(UsageError, match="got the model WordLevel"):
        BPETokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")))
