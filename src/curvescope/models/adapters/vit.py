"""ViT: patches of an image and one class token, pre-norm, read out at the class token."""

from typing import Any

from curvescope.models.adapters.table import Cut, Family, affine, linear, norm, patches, places, vector


def _facts(config: Any) -> dict[str, Any]:
    """One position per patch, and one for the class token."""
    return {
        "n_ctx": (config.image_size // config.patch_size) ** 2 + 1,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "channels": config.num_channels,
        "vocab_size": None,
    }


FAMILY = Family(
    base="vit",
    layer="layers.{i}.",
    stem={
        "E": patches("embeddings.patch_embeddings.projection.weight"),
        "b_E": vector("embeddings.patch_embeddings.projection.bias"),
        "E_class": Cut("embeddings.cls_token", "1 1 o"),
        "P": Cut("embeddings.position_embeddings", "1 i o"),
    },
    roles={
        **affine("Q", "attention.q_proj"),
        **affine("K", "attention.k_proj"),
        **affine("V", "attention.v_proj"),
        **affine("O", "attention.o_proj"),
        **affine("1", "mlp.fc1"),
        **affine("2", "mlp.fc2"),
        **norm("ln1", "layernorm_before"),
        **norm("ln2", "layernorm_after"),
    },
    end={**norm("ln_f", "layernorm"), **affine("pool", "pooler.dense")},
    head={"U": linear("classifier.weight"), "b_U": vector("classifier.bias")},
    places=places(
        attention="attention",
        query="attention.q_proj",
        out="attention.o_proj",
        ff_in="mlp.fc1",
        ff_out="mlp.fc2",
    ),
    causal=False,
    facts=_facts,
    float32=("the softmax",),
)
