"""A person's own text, tokenizer and layers."""

import pytest

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.studies import blocks, heads, trajectory
from curvescope.studies.problem_config import (
    ModelOnData,
    TokenModelOnData,
    choose_layers,
    make_problem,
    notes_of,
    read_data,
)
from curvescope.studies.trajectory.study import PROMPT, beginning
from curvescope.tokenizers import ByteTokenizer

TEXT = (
    "\n\nOnce upon a time there was a short text, and that was all of it.\n"
    + 3 * "And then it was told again.\n"
)


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def test_a_short_text_is_taken_whole_and_that_is_said(notes):
    cfg = ModelOnData(data=notes)
    problem = make_problem(cfg)
    ids = cs.load("tiny-gpt").tokenizer.encode(TEXT)
    assert problem.num_terms == len(ids) - 1
    (note,) = notes_of(cfg, problem)
    assert repr(str(notes)) in note
    assert f"{len(ids) - 1} tokens" in note
    assert "512" in note
    assert notes_of(ModelOnData(), make_problem(ModelOnData())) == []


@pytest.mark.parametrize("read", [make_problem, lambda cfg: read_data(cfg, cs.load("tiny-gpt"))])
def test_less_than_a_sequence_is_refused_as_in_python(tmp_path, read):
    path = tmp_path / "hi.txt"
    path.write_text("hi", encoding="utf-8")
    kind = ModelOnData if read is make_problem else TokenModelOnData
    found = cs.load("tiny-gpt").tokenizer.encode("hi")
    said = f"expected a text of at least 65 tokens, got {len(found)}"
    with pytest.raises(UsageError, match=said):
        read(kind(data=str(path), tokens=64))
    with pytest.raises(UsageError, match=said):
        cs.text_data(path, cs.load("tiny-gpt"), tokens=64, seq_len=64)
    asked = read(kind(data=str(path), tokens=len(found) - 1))
    assert asked.num_terms == len(found) - 1  # what a person asks for


def test_more_than_the_default_is_what_a_person_wants(notes):
    with pytest.raises(UsageError, match="expected a text of at least 514 tokens"):
        make_problem(ModelOnData(data=notes, tokens=513))


def test_the_prompt_is_the_beginning_of_the_text(notes):
    found = trajectory.run(trajectory.Config(data=notes, num_shuffles=1))
    assert found.path.prompt == "Once upon a time there was a short"
    assert any("all are used" in words for _, _, words in found.summary())
    given = trajectory.run(trajectory.Config(data=notes, num_shuffles=1, prompt="a prompt of mine"))
    assert given.path.prompt == "a prompt of mine"
    assert beginning("one\ntwo\n\n") == PROMPT


def test_another_tokenizer(tmp_path, notes):
    path = tmp_path / "tokenizer.json"
    ByteTokenizer().save(path)
    problem = make_problem(blocks.Config(data=notes, tokenizer=str(path)))
    assert problem.num_terms == len(TEXT.encode()) - 1
    assert "tokenizer" not in blocks.Config().to_dict()
    large = cs.load(cs.TransformerConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, vocab_size=20, n_ctx=16))
    cs.save(large, tmp_path / "model")
    with pytest.raises(UsageError, match="expected a tokenizer of at most 20 tokens"):
        make_problem(ModelOnData(model=str(tmp_path / "model"), data=notes, tokenizer=str(path)))


def test_heads_looks_at_all_layers_where_there_are_few_and_says_which(tmp_path):
    model = cs.load(cs.TransformerConfig(n_layers=9, d_model=4, n_heads=1, d_ff=0, vocab_size=9, n_ctx=8))
    assert choose_layers((), model, few=8) == [0, 4, 8]
    assert choose_layers((), model, few=9) == list(range(9))
    found = heads.run(heads.Config(layers=(1, 2), num_samples=2))
    assert found.summary()[0] == ("layers", "2 of 4", "measured: L1, L2; others by layers=0,1,…")
