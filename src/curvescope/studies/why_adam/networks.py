"""The networks that are trained: Transformers and MLPs that read the same sums and answer at the same places.

All have cross-entropy on the digits of x + y, no biases but those of norms, and weights of a seed.
Transformers of one seed share every weight that they have in common, and merged queries and keys begin as the
product of the single ones, W_QK = W_Q W_Kᵀ for each head: the same function with other parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from curvescope.core.config import Config
from curvescope.core.seeds import generator
from curvescope.data.tasks.algorithmic import VOCAB_SIZE
from curvescope.models.zoo.transformer import ACTIVATIONS, Norm, Transformer, TransformerConfig

HEADS = 2
EMBEDDED = 4  # entries of a token in an MLP, which has them side by side


class Choice(NamedTuple):
    """What a configuration is, beside the size that all share."""

    family: Literal["transformer", "mlp"]
    norm: bool
    attention: Literal["softmax", "linear"] = "softmax"
    merged: bool = False
    hidden: int = 0  # layers of an MLP


def _choices() -> dict[str, Choice]:
    norms = {"norm": True, "bare": False}
    found = {
        f"{attention}-{'merged' if merged else 'single'}-{norm}": Choice(
            "transformer", norms[norm], attention, merged
        )
        for attention, merged, norm in product(("softmax", "linear"), (False, True), norms)
    }
    return found | {f"mlp{h}-{norm}": Choice("mlp", norms[norm], hidden=h) for h in (1, 3) for norm in norms}


CHOICES = _choices()
"""The configurations by name: eight Transformers, four MLPs."""
FACTORS = {"merged": ("single", "merged"), "linear": ("softmax", "linear"), "bare": ("norm", "bare")}
"""What two configurations of a pair differ in: the words in their names, before and after."""


def pairs(factor: str, names: list[str]) -> list[tuple[str, str]]:
    """Configurations of `names` that differ in one factor alone: before, after."""
    before, after = FACTORS[factor]
    return [(name, name.replace(before, after)) for name in names
            if before in name.split("-") and name.replace(before, after) in names]  # fmt: skip


@dataclass(frozen=True)
class Size(Config):
    """What all networks of a run have in common."""

    width: int = 16  # of the stream, and half of a hidden layer
    layers: int = 1  # of a Transformer
    digits: int = 2

    @property
    def length(self) -> int:
        """Tokens of a sum."""
        return 3 * self.digits + 3


def network(choice: Choice, size: Size, seed: int) -> nn.Module:
    """Tokens (B, T) to logits (B, T, V), at the random weights of a seed."""
    if choice.family == "mlp":
        return PrefixMLP(size, choice.hidden, norm=choice.norm, seed=seed)
    single = _transformer(choice, size, seed, merged=False)
    return _merge(single, _transformer(choice, size, seed, merged=True)) if choice.merged else single


def _transformer(choice: Choice, size: Size, seed: int, *, merged: bool) -> Transformer:
    return Transformer(
        TransformerConfig(
            n_layers=size.layers, d_model=size.width, n_heads=HEADS, d_ff=2 * size.width, n_ctx=size.length,
            vocab_size=VOCAB_SIZE, attention=choice.attention, merged_qk=merged,
            norm="pre" if choice.norm else "none", bias_qkv=False, bias_o=False, bias_ff=False,
            init="scaled", seed=seed,
        )
    )  # fmt: skip


def _merge(single: Transformer, merged: Transformer) -> Transformer:
    """The merged network with the function of the single one: W_QK,h = W_Q,h W_K,hᵀ."""
    own = single.state_dict()
    queries = [name for name in own if name.endswith("W_Q")]
    for name in queries:
        Q, K = (own.pop(key).unflatten(1, (HEADS, -1)) for key in (name, name[:-1] + "K"))
        own[name + "K"] = torch.einsum("ahk,bhk->ahb", Q, K).flatten(1)
    merged.load_state_dict(own)
    return merged


class PrefixMLP(nn.Module):
    """At position t an MLP of the embeddings of tokens 0 … t, side by side, with zeros after t.

    x W_1, then norm and activation, as often as there are hidden layers, then U: tokens (B, T) to (B, T, V).
    Matrices are drawn from N(0, 1/rows), E from N(0, 1).
    """

    def __init__(self, size: Size, hidden: int, *, norm: bool, seed: int):
        super().__init__()
        T, H, source = size.length, 2 * size.width, generator(seed)
        self.hidden, self.norm = hidden, norm
        self.E = nn.Parameter(torch.randn(VOCAB_SIZE, EMBEDDED, generator=source))
        for i in range(1, hidden + 1):
            rows = T * EMBEDDED if i == 1 else H
            self.register_parameter(f"W_{i}", _drawn(rows, H, source))
            if norm:
                self.add_module(f"ln{i}", Norm(TransformerConfig(d_model=H, n_heads=1)))
        self.U = _drawn(H, VOCAB_SIZE, source)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.E)
        T = x.shape[1]
        seen = torch.ones(T, T, dtype=x.dtype, device=x.device).tril()
        x = (x[:, None] * seen[:, :, None]).flatten(2)
        for i in range(1, self.hidden + 1):
            x = x @ getattr(self, f"W_{i}")
            x = ACTIVATIONS["gelu"](self.get_submodule(f"ln{i}")(x) if self.norm else x)
        return x @ self.U


def _drawn(rows: int, columns: int, source: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=source) / math.sqrt(rows))
