"""RoBERTa: BERT's body, another head, and positions counted from the row after the padding's."""

from dataclasses import replace

from curvescope.models.adapters.bert import FAMILY as BERT
from curvescope.models.adapters.table import affine, linear, norm, vector

FAMILY = replace(
    BERT,
    base="roberta",
    head={
        **affine("mlm", "lm_head.dense"),
        **norm("ln_mlm", "lm_head.layer_norm"),
        "U": linear("lm_head.decoder.weight"),
        "b_U": vector("lm_head.bias"),
        **affine("class_hidden", "classifier.dense"),
        **affine("class", "classifier.out_proj"),
    },
    notes=("tokens equal to the padding's id have no position of their own",),
)
