"""Models on which the cost of a product is measured: GPT-2, torch.nn's own layers, two of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvescope.core.errors import MissingExtra
from curvescope.core.requirements import how_to_install

SHAPES = {  # layers, width, heads, vocabulary
    "small": (4, 128, 4, 1024),
    "124M": (12, 768, 12, 50257),
    "350M": (24, 1024, 16, 50257),
    "1.5B": (48, 1600, 25, 50257),
    "8B": (32, 4096, 32, 128256),
}
LLAMA_8B: dict[str, Any] = {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
"""What the shape of Llama 3 8B has beside these four numbers."""


class Block(nn.Module):
    """A layer of GPT-2 as people write it: fused attention, tanh GELU, norms before."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Tied embeddings, learned positions; tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, layers: int, d: int, heads: int, vocabulary: int, positions: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(positions, d)
        self.h = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` as a language model, norms before, GELU; tokens (B, T) to logits."""

    def __init__(self, layers: int, d: int, heads: int, vocabulary: int, positions: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(positions, d)
        options: dict[str, Any] = {
            "dropout": 0.0,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
        }
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, **options)
        self.h = nn.TransformerEncoder(layer, layers, nn.LayerNorm(d), enable_nested_tensor=False)
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T, tokens.device, self.wte.weight.dtype)
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        return self.lm_head(self.h(x, mask, is_causal=True))


OWN = {"gpt2": GPT2, "encoder": Encoder}


def build(
    kind: str,
    size: str,
    positions: int,
    *,
    layers: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A module in eval mode that takes tokens and returns logits, or an object with them.

    Its weights are random and are made on the device itself: in float32, those of 8B in bfloat16.

    Args:
        layers: fewer than the size has, the rest of the shape being the same.
    """
    depth, d, heads, vocabulary = SHAPES[size]
    depth = depth if layers is None else min(layers, depth)
    with _made(torch.bfloat16 if size == "8B" else torch.float32, torch.device(device), seed):
        if kind in OWN:
            return OWN[kind](depth, d, heads, vocabulary, positions).eval()
        shape: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": d,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "max_position_embeddings": positions,
        }
        return _of_transformers(kind, shape, LLAMA_8B if size == "8B" else {}).eval()


def _of_transformers(kind: str, shape: dict[str, Any], more: dict[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra(
            f"the model {kind!r} needs the package transformers", hint=how_to_install("transformers")
        ) from error
    d = shape["hidden_size"]
    if kind == "llama":
        shape |= {"intermediate_size": 8 * d // 3, "tie_word_embeddings": True} | more
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    config = transformers.GPTNeoXConfig(**shape, intermediate_size=4 * d, tie_word_embeddings=True)
    return transformers.GPTNeoXForCausalLM(config)


@contextmanager
def _made(dtype: torch.dtype, device: torch.device, seed: int) -> Iterator[None]:
    """Modules made inside lie on the device, in that precision, with weights of that seed."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(before)


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """The outputs as a tensor."""
    found = module(tokens) if isinstance(module, tuple(OWN.values())) else module(tokens, use_cache=False)
    return getattr(found, "logits", found)


@contextmanager
def plain_attention(module: Any) -> Iterator[None]:
    """Attention that PyTorch itself can differentiate twice, inside."""
    config = getattr(module, "config", None)
    before = getattr(config, "_attn_implementation", None)
    fast = torch.backends.mha.get_fastpath_enabled()  # of torch's own layers: without derivatives
    torch.backends.mha.set_fastpath_enabled(False)
    if config is not None:
        config._attn_implementation = "eager"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        if config is not None:
            config._attn_implementation = before


def _initialize(part: nn.Module) -> None:
    if isinstance(part, nn.Linear | nn.Embedding):
        nn.init.normal_(part.weight, std=0.02)
    if isinstance(part, nn.Linear) and part.bias is not None:
        nn.init.zeros_(part.bias)
