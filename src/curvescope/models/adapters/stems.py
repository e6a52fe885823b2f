"""What stands before and behind the layers that are found by their structure."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

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
