"""BERT and RoBERTa: post-norm encoders with learned positions and a masked-language-model head."""

from typing import Any

from curvescope.models.adapters.table import Family, affine, linear, matrix, norm, places, vector


def _facts(config: Any) -> dict[str, Any]:
    """RoBERTa counts positions from the row after its padding's."""
    skipped = config.pad_token_id + 1 if config.model_type == "roberta" else 0
    return {"causal": bool(config.is_decoder), "n_ctx": config.max_position_embeddings - skipped}


FAMILY = Family(
    layer="encoder.layer.{i}.",
    stem={
        "E": matrix("embeddings.word_embeddings.weight"),
        "P": matrix("embeddings.position_embeddings.weight"),
        "E_type": matrix("embeddings.token_type_embeddings.weight"),
        **norm("ln_e", "embeddings.LayerNorm"),
    },
    roles={
        **affine("Q", "attention.self.query"),
        **affine("K", "attention.self.key"),
        **affine("V", "attention.self.value"),
        **affine("O", "attention.output.dense"),
        **norm("ln1", "attention.output.LayerNorm"),
        **affine("1", "intermediate.dense"),
        **affine("2", "output.dense"),
        **norm("ln2", "output.LayerNorm"),
    },
    end=affine("pool", "pooler.dense"),
    head={
        **affine("mlm", "cls.predictions.transform.dense"),
        **norm("ln_mlm", "cls.predictions.transform.LayerNorm"),
        "U": linear("cls.predictions.decoder.weight"),
        "b_U": vector("cls.predictions.bias"),
        **affine("class", "classifier"),
    },
    places=places(
        attention="attention.self",
        query="attention.self.query",
        out="attention.output.dense",
        ff_in="intermediate.dense",
        ff_out="output.dense",
    ),
    base="bert",
    norm="post",
    causal=False,
    facts=_facts,
)
