"""DistilBERT: BERT without token types and pooler."""

from curvescope.models.adapters.table import Family, affine, linear, matrix, norm, places, vector

FAMILY = Family(
    base="distilbert",
    layer="transformer.layer.{i}.",
    stem={
        "E": matrix("embeddings.word_embeddings.weight"),
        "P": matrix("embeddings.position_embeddings.weight"),
        **norm("ln_e", "embeddings.LayerNorm"),
    },
    roles={
        **affine("Q", "attention.q_lin"),
        **affine("K", "attention.k_lin"),
        **affine("V", "attention.v_lin"),
        **affine("O", "attention.out_lin"),
        **norm("ln1", "sa_layer_norm"),
        **affine("1", "ffn.lin1"),
        **affine("2", "ffn.lin2"),
        **norm("ln2", "output_layer_norm"),
    },
    head={
        **affine("mlm", "vocab_transform"),
        **norm("ln_mlm", "vocab_layer_norm"),
        "U": linear("vocab_projector.weight"),
        "b_U": vector("vocab_projector.bias"),
        **affine("class_hidden", "pre_classifier"),
        **affine("class", "classifier"),
    },
    places=places(
        attention="attention",
        query="attention.q_lin",
        out="attention.out_lin",
        ff_in="ffn.lin1",
        ff_out="ffn.lin2",
    ),
    norm="post",
    causal=False,
    config={"d_ff": "hidden_dim", "activation": "activation"},
)
