"""The layers of a network that it has several times."""

from __future__ import annotations

from torch import nn


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Modules of one class in one place, at least two, that hold the most parameters; empty without any."""
    alike: list[list[nn.Module]] = []
    for parent in module.modules():
        kinds: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            if not isinstance(child, nn.ModuleList | nn.ModuleDict):  # which are not called
                kinds.setdefault(type(child), []).append(child)
        alike += [some for some in kinds.values() if len(some) > 1]
    sizes = [sum(p.numel() for layer in some for p in layer.parameters()) for some in alike]
    return alike[sizes.index(max(sizes))] if any(sizes) else []
