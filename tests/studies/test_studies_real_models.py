"""Studies on saved Hugging Face models: each gets the data its head was made for."""

import pytest
import torch

import mixtures
from commands import call
from curvescope.core.errors import UsageError
from curvescope.models.load import load
from curvescope.operators import Hessian
from curvescope.studies import blocks, spectrum
from curvescope.studies.problem_config import (
    ModelOnData,
    TokenModel,
    load_token_model,
    make_batches,
    make_problem,
)
from saved_models import TINY, WORDS, save_bert, save_tokenizer

transformers = pytest.importorskip("transformers")


def test_a_masked_language_model_gets_masked_text(tmp_path):
    source = save_bert(tmp_path, "BertForMaskedLM")
    cfg = ModelOnData(model=source, tokens=64, seq_len=16)
    model = load(source)
    assert model.facts["task"] == "masked-lm"
    batches = make_batches(cfg, model)
    assert any(bool((b.inputs["input_ids"] == WORDS.index("[MASK]")).any()) for b in batches)
    assert make_problem(cfg).loss_value() > 0


def test_the_blocks_of_an_image_classifier(tmp_path):
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **TINY)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    settings = {
        "model": str(tmp_path), "tokens": 128, "num_trace_probes": 2, "num_norm_probes": 2,
        "operators": ["hessian"], "norms": ["L0.W_Q"],
    }  # fmt: skip
    result = blocks.run(blocks.Config.from_dict(settings))
    table = next(iter(result.tables().values()))
    assert "L0.W_Q" in table["block"].tolist()


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A folder with a tiny T5 and a tokenizer."""
    folder = tmp_path_factory.mktemp("t5")
    mixtures.t5(vocab_size=520).save_pretrained(folder)
    return save_tokenizer(folder)


def test_an_encoder_with_a_decoder_reads_halves_of_a_text(t5):
    cfg = ModelOnData(model=t5, dtype="float64", tokens=20, seq_len=16)
    batch, *others = make_batches(cfg, load(t5))
    assert not others
    assert batch.inputs["input_ids"].shape == batch.targets.shape == (3, 8)
    problem = make_problem(cfg)
    assert problem.num_terms == int((batch.targets != -100).sum()) == 20
    read = problem.batches[0].inputs["decoder_input_ids"]
    assert torch.equal(read[:2, 1:], batch.targets[:2, :-1])
    assert not read[:, 0].any()
    with pytest.raises(UsageError, match="expected a text of at least"):
        make_batches(ModelOnData(model=t5, tokens=10**7, seq_len=16), load(t5))
    with pytest.raises(UsageError, match="is an encoder with a decoder"):
        load_token_model(TokenModel(model=t5))


def test_the_spectrum_of_a_bias_by_relative_position(t5, capsys):
    code, out, _ = call("info", t5, capsys=capsys)
    assert code == 0
    assert "L*.cross_W_Q" in out
    assert "note: L1 is the first layer of the decoder" in out
    settings = {
        "model": t5, "dtype": "float64", "tokens": 8, "seq_len": 4, "blocks": ["L1.P_rel"], "map_blocks": [],
        "num_probes": 1, "num_steps": 3, "num_eigenvalues": 1, "num_trace_probes": 2,
    }  # fmt: skip
    result = spectrum.run(spectrum.Config.from_dict(settings))
    exact = torch.linalg.eigvalsh(
        Hessian(make_problem(spectrum.Config.from_dict(settings)), "L1.P_rel").to_dense()
    )
    assert result.parts["hessian"].extremes.values[-1] == pytest.approx(float(exact[-1]))
    assert any("shifted to the right" in note for note in result.notes)


def test_commands_on_a_mixture(tmp_path, capsys):
    mixtures.mixture("qwen2_moe", vocab_size=520).save_pretrained(tmp_path / "model")
    model = save_tokenizer(tmp_path / "model")
    code, out, _ = call("info", model, capsys=capsys)
    assert code == 0
    (row,) = [line.split() for line in out.splitlines() if line.startswith("L*.expert*.W_u")]
    assert row[:5] == ["L*.expert*.W_u", "3", "4", "×", "2"]
    few = ["num_trace_probes=2", "tokens=8", "seq_len=4", "norms=", "num_sharp_steps=0"]
    words = ["--blocks", "L0.expert*.W_2", "--profile", "full", *(x for one in few for x in ("--set", one))]
    code, out, err = call("run", "blocks", model, "--out", tmp_path / "runs", *words, capsys=capsys)
    assert code == 0, err
    assert "of 3 blocks with 24 parameters" in out
    assert "a mixture of 3 experts" in out
