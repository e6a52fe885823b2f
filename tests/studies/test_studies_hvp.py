"""The study of what a product costs: right numbers of the right things, and honest gaps."""

import csv
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import curvescope as cs
from curvescope.studies import hvp
from curvescope.studies.hvp import analysis, study
from curvescope.studies.hvp.analysis import (
    CHECKPOINTED,
    CONTENDERS,
    PACKAGES,
    SHAPES,
    build,
    logits,
    plain_attention,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TINY = {"batch_size": 2, "seq_len": 8, "rounds": 2}


@pytest.fixture(scope="module", autouse=True)
def _small():
    """The small models are smaller still: 2 layers of width 16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", (2, 16, 4, 64))
        yield


@pytest.fixture(scope="module")
def cost() -> hvp.Cost:
    contenders = ("hessian", "ggn", "functional", "hessian autograd")
    return hvp.run(hvp.Config(**TINY, contenders=contenders, columns=(1, 3)))


def test_errors_are_distances_to_float64(cost):
    for name in ("hessian", "ggn", "functional", "hessian autograd"):
        assert 1e-9 < cost.of(name).error < 1e-5
    assert math.isnan(cost.of("gradient").error)


def test_times_are_in_gradients_of_the_same_round(cost):
    m = cost.of("hessian")
    assert len(m.seconds) == len(m.unit) == 2
    median, low, high = cost.ratio("hessian")
    pairs = [a / b for a, b in zip(m.seconds, m.unit, strict=True)]
    assert low == min(pairs) <= median <= max(pairs) == high
    assert math.isnan(m.peak)  # a CPU does not say


def test_the_result_is_shown_and_stored(cost, tmp_path):
    table = cost.tables()["costs"]
    assert list(table.contender) == ["gradient", "hessian", "ggn", "functional", "hessian autograd"]
    assert set(cost.figures()) <= set(cost.captions())
    again = hvp.Cost.load(cost.save(tmp_path))
    assert again.tables()["costs"].equals(table)
    assert any("hessian" in line for line, _, _ in again.summary())


def test_products_in_a_row_and_with_columns_are_ours_alone(cost):
    m = cost.of("hessian")
    assert len(m.frozen) == len(m.frozen_unit) == 2
    assert m.frozen_ratio()[0] > 0
    (several,) = m.columns
    assert several.number == 3
    each = [a / b / 3 for a, b in zip(several.seconds, several.unit, strict=True)]
    assert several.ratio()[1:] == pytest.approx((min(each), max(each)))
    assert cost.of("gradient").frozen == []
    assert math.isnan(cost.of("gradient").frozen_ratio()[0])
    tables = cost.tables()
    assert set(tables["columns"]["columns"]) == {3}
    assert tables["costs"].vector_GiB[0] == pytest.approx(4 * cost.num_parameters / 2**30)
    peaks = {"first_peak_GiB", "peak_GiB"}  # which a CPU does not tell
    assert {"frozen", "error_on"} <= set(tables["costs"])
    assert peaks.isdisjoint(tables["costs"])
    card = replace(cost, measured=[replace(m, peak=2.0**30) for m in cost.measured])
    assert peaks <= set(card.tables()["costs"])
    words = str(cost.summary())
    assert "frozen" in words
    assert "3 columns" in words
    assert set(tables) <= set(cost.captions())


def test_large_models_are_compared_with_float64_on_two_layers(monkeypatch):
    monkeypatch.setattr(study, "LARGE", 0)
    monkeypatch.setitem(SHAPES, "small", (3, 16, 4, 64))
    made = []
    monkeypatch.setattr(study, "exact_product", lambda matrix, module, *rest: made.append(module))
    monkeypatch.setattr(study, "distance", lambda *given: 0.5)
    found = hvp.run(hvp.Config(**TINY, contenders=CHECKPOINTED))
    assert [len(module.h) for module in made] == [2, 2]
    m = found.of("ggn checkpoint")
    assert (m.error, m.error_on) == (0.5, "2 layers")
    assert len(set(m.unit + found.of("hessian checkpoint").unit)) == 1  # of gradients before
    assert found.ratio("gradient") == (1, 1, 1)
    assert list(found.tables()["costs"].error_on) == ["", "2 layers", "2 layers"]


def test_layers_computed_again_give_the_same_products():
    found = hvp.run(hvp.Config(**TINY, contenders=CHECKPOINTED))
    for name in CHECKPOINTED:
        assert 1e-9 < found.of(name).error < 1e-5
        assert found.of(name).error_on == "the model"


def test_one_that_fails_does_not_stop_the_others(monkeypatch):
    def fail(*given):
        raise KeyError("no such thing")

    monkeypatch.setitem(CONTENDERS, "hessian", fail)
    found = hvp.run(hvp.Config(**TINY, contenders=("hessian", "ggn")))
    assert "no such thing" in found.of("hessian").note
    assert found.of("ggn").seconds


def test_what_was_committed_stands_beside_and_what_got_worse_is_told(cost, tmp_path, monkeypatch, caplog):
    path = tmp_path / "figures.json"
    card = replace(cost, device="A card", measured=[replace(m, peak=2.0**30) for m in cost.measured])
    assert study.known(card, path) == []
    assert study.record(card, "2.0", path) == 5
    study.record(card, "2.1", path)  # in their places
    known = study.known(card, path)
    assert [k.contender for k in known] == [m.name for m in card.measured]
    assert known[1].torch == "2.1"
    assert known[1].gradients == pytest.approx(card.ratio("hessian")[0], rel=1e-3)
    same = replace(card, committed=known)
    assert study.compared(same) == []
    assert "committed: " in str(same.summary())
    assert "committed_gradients" in same.tables()["costs"]
    m = card.of("hessian")
    slow = replace(m, seconds=[1.2 * s for s in m.seconds], peak=1.2 * m.peak)
    worse = replace(same, measured=[slow if x is m else x for x in card.measured])
    time, memory = study.compared(worse)
    assert time.startswith("hessian takes")
    assert "20 % more than the committed" in time
    assert "1.20 GiB" in memory
    assert study.compared(replace(worse, device="cpu")) == []  # a CPU's margin is 25 %, its memory is unknown

    monkeypatch.setattr(study, "known", lambda cost: known)
    with caplog.at_level(logging.WARNING, logger="curvescope"):
        assert hvp.study._beside_committed(worse, None).notes == [time, memory]
    assert time in caplog.text


def test_the_figures_of_the_package_are_those_of_the_stored_run():
    with (RESULTS / "hvp-h200" / "costs.csv").open(encoding="utf-8") as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    found = [e for e in study.read() if (e["device"], e["torch"]) == ("NVIDIA H200", "2.11")]
    for entry in found:
        if (entry["model"], entry["size"], entry["tokens"]) == ("gpt2", "124M", "8 × 1024"):
            row = rows[entry["contender"]]
            assert entry["gradients"] == pytest.approx(float(row["gradients"]), rel=1e-3)
            assert entry["peak_GiB"] == pytest.approx(float(row["peak_GiB"]), rel=1e-3)
    keys = [tuple(entry[name] for name in study.KEYS) for entry in study.read()]
    assert len(set(keys)) == len(keys) > 0


def test_the_largest_model_is_a_llama_in_bfloat16_made_where_it_is_used(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(SHAPES, "8B", (3, 32, 4, 64))
    monkeypatch.setitem(analysis.LLAMA_8B, "num_key_value_heads", 2)
    monkeypatch.setitem(analysis.LLAMA_8B, "intermediate_size", 48)
    module = build("llama", "8B", 16, layers=2, device="meta")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert torch.get_default_dtype() == torch.float32
    config = module.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.intermediate_size) == (2, 2, 48)
    assert not config.tie_word_embeddings
    again, seeded = (build("llama", "8B", 16, seed=1) for _ in range(2))
    for a, b in zip(again.parameters(), seeded.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(t.dtype == torch.float32 for t in study.draw(again, 0))


def test_products_of_a_model_in_bfloat16_are_compared_with_float64_of_its_weights(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(SHAPES, "8B", (3, 32, 4, 64))
    monkeypatch.setitem(analysis.LLAMA_8B, "num_key_value_heads", 2)
    monkeypatch.setattr(study, "LARGE", 0)
    found = hvp.run(hvp.Config(**TINY, model="llama", size="8B"))
    assert [m.name for m in found.measured] == ["gradient", *CHECKPOINTED]
    for name in CHECKPOINTED:
        m = found.of(name)
        assert m.note == ""
        assert 1e-9 < m.error < 1e-5
        assert m.error_on == "2 layers"
        assert m.unit == found.of(CHECKPOINTED[0]).unit
    assert found.vector == 4 * found.num_parameters


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    found = hvp.run(hvp.Config(**TINY, contenders=("eigenthings",)))
    assert found.of("eigenthings").note == "hessian_eigenthings is not installed"
    assert found.of("eigenthings").seconds == []
    assert "not installed" in str(found.summary())


def test_bad_settings_are_one_sentence():
    with pytest.raises(cs.UsageError, match=r"unknown contender 'hesian'.*did you mean"):
        hvp.Config(contenders=("hesian",))
    with pytest.raises(cs.UsageError, match=r"size: expected one of small, 124M, 350M, 1\.5B, 8B"):
        hvp.Config.from_dict({"size": "tiny"})
    with pytest.raises(cs.UsageError, match=r"the size 8B .* got 'gpt2'"):
        hvp.Config(size="8B")
    with pytest.raises(cs.UsageError, match=r"the size 8B supports only .* got 'hessian'"):
        hvp.Config(size="8B", model="llama", contenders=("hessian",))
    assert hvp.Config(size="8B", model="llama").chosen == CHECKPOINTED
    with pytest.raises(cs.UsageError, match="columns: expected numbers of at least 1"):
        hvp.Config(columns=(0, 2))
    assert set(PACKAGES) <= set(CONTENDERS)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "neox", "encoder"])
def test_every_model_takes_tokens_and_its_plain_attention_gives_the_same(kind):
    if kind != "gpt2":
        pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build(kind, "small", 16).eval()
    x = torch.arange(16).view(2, 8)
    with torch.no_grad():
        fused = logits(module, x)
        with plain_attention(module):
            torch.testing.assert_close(logits(module, x), fused, rtol=1e-4, atol=1e-5)
    assert fused.shape == (2, 8, 64)
