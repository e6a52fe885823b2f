"""Studies on saved Hugging Face models: each gets the data its head was made for."""

import pytest
import torch

from curvescope.models.load import load
from curvescope.studies import blocks
from curvescope.studies.setting import ModelOnData, make_batches, make_problem
from saved_models import TINY, WORDS, save_bert

transformers = pytest.importorskip("transformers")


def test_a_masked_language_model_gets_masked_text(tmp_path):
    source = save_bert(tmp_path, "BertForMaskedLM")
    cfg = ModelOnData(model=source, tokens=64, seq_len=16)
    model = load(source)
    assert model.facts["task"] == "masked-lm"
    batches = make_batches(cfg, model)
    assert any(bool((b.inputs["input_ids"] == WORDS.index("[MASK]")).any()) for b in batches)
    assert make_problem(cfg).value() > 0


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
