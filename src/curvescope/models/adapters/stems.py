"""What stands before and behind the layers that are found by their structure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from curvescope.models.adapters.layers import Layer
from curvescope.models.adapters.table import Cut, linear, matrix, norm, patches, vector

TIMM = {
    "E": patches("patch_embed.proj.weight"),
    "b_E": vector("patch_embed.proj.bias"),
    "E_class": Cut("cls_token", "1 1 o"),
    "P": Cut("pos_embed", "1 i o"),
    **norm("ln_e", "norm_pre"),
    **norm("ln_f", "norm"),
    "U": linear("head.weight"),
    "b_U": vector("head.bias"),
}
"""A Vision Transformer of timm."""
OPEN_CLIP = {
    "E": patches("conv1.weight"),
    "E_class": vector("class_embedding"),
    "P": matrix("positional_embedding"),
    **norm("ln_e", "ln_pre"),
    **norm("ln_f", "ln_post"),
    "U": matrix("proj"),
}
"""The image half of a model of open_clip."""


def find_stem(module: nn.Module) -> Iterator[tuple[str, Cut]]:
    """Roles outside of the layers, each with its cut; those whose parameters are there count."""
    names = {name for name, _ in module.named_parameters()}
    kinds = nn.TransformerEncoder, nn.TransformerDecoder
    stacks = [(path, m) for path, m in module.named_modules() if isinstance(m, kinds)]
    decodes = any(isinstance(m, nn.TransformerDecoder) for _, m in stacks)
    for path, stack in stacks:
        role = "ln_enc" if decodes and isinstance(stack, nn.TransformerEncoder) else "ln_f"
        yield from norm(role, f"{path}.norm".lstrip(".")).items()
    if "patch_embed.proj.weight" in names:
        yield from TIMM.items()
    for prefix in ("", "visual."):
        if {f"{prefix}conv1.weight", f"{prefix}class_embedding"} <= names:
            for role, cut in OPEN_CLIP.items():
                yield role, Cut(prefix + cut.parameter, cut.axes)


FINAL_NORMS = (
    "ln_f",
    "norm",
    "ln",
    "norm_f",
    "final_norm",
    "ln_final",
    "final_layer_norm",
    "ln_post",
    "out_norm",
)


def own_stem(module: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[str, Cut]]:
    """E, P, U and ln_f of a model whose layers are known by the names of their linear layers.

    E is the only table of embeddings outside the layers that is not one of positions, U the only linear layer
    there with an output for each row of E. A role with two candidates is not given.
    """
    if not all(layer.by_names and layer.path for layer in layers):
        return
    outside = {
        path: part
        for path, part in module.named_modules()
        if not any(f"{path}.".startswith(f"{layer.path}.") for layer in layers)
    }
    tables = {path: part for path, part in outside.items() if type(part) is nn.Embedding}
    positions = {path for path in tables if _is_position(path)}
    tokens = [path for path in tables if path not in positions]
    if len(positions) == 1:
        yield "P", matrix(f"{next(iter(positions))}.weight")
    if len(tokens) == 1:
        yield "E", matrix(f"{tokens[0]}.weight")
        shape = tables[tokens[0]].weight.shape
        heads = [
            path for path, part in outside.items() if type(part) is nn.Linear and part.weight.shape == shape
        ]
        linears = [part for part in outside.values() if isinstance(part, nn.Linear)]
        if len(heads) == 1 and len(linears) == 1:
            yield "U", linear(f"{heads[0]}.weight")
            yield "b_U", vector(f"{heads[0]}.bias")
    norms = [path for path, part in outside.items() if path and "Norm" in type(part).__name__]
    if len(norms) == 1 and norms[0].rpartition(".")[2].lower() in FINAL_NORMS:
        yield from norm("ln_f", norms[0]).items()


def _is_position(path: str) -> bool:
    words = re.split(r"[^a-z]+", path.rpartition(".")[2].lower())
    return any(re.fullmatch(r"(abs|tok)?pos(i.*|e.*|s)?|wpe|pe", word) for word in words)
