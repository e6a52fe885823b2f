"""Tiny models of every family, built from configurations, and truths that use no block and no table."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

os.environ.setdefault("HF_HUB_OFFLINE", "1")

D, H, G, F, V, T = 8, 2, 1, 10, 11, 5  # width, heads, key heads, feed-forward, vocabulary, tokens
Slice = Callable[[Tensor], Tensor]
_FOLDER = tempfile.TemporaryDirectory(prefix="adapters-")  # removed when Python ends


@dataclass(frozen=True)
class Case:
    """A family: its configuration, its head, and where its blocks lie in the raw parameters."""

    model_type: str
    auto: str
    config: dict[str, Any]
    query: tuple[str, Slice]  # the raw parameter and the entries of L0.W_Q in it, inputs × outputs
    value: tuple[str, Slice]
    output: tuple[str, Slice]  # L1.W_O
    gain: str  # L0.ln1.g
    heads: int = H
    kv_heads: int = H
    size: int = D // H

    @property
    def raw(self) -> dict[str, tuple[str, Slice]]:
        """Block to raw parameter and slice."""
        return {
            "L0.W_Q": self.query,
            "L0.W_V": self.value,
            "L1.W_O": self.output,
            "L0.ln1.g": (self.gain, lambda n: n),
        }


def transposed(n: Tensor) -> Tensor:
    return n.T


def same(n: Tensor) -> Tensor:
    return n


def _llama(kind: str, size: int = D // H, **more: Any) -> Case:
    at = "model.layers.{}."
    return Case(
        kind,
        "AutoModelForCausalLM",
        {
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": 2,
            "num_attention_heads": H,
            "num_key_value_heads": G,
            "head_dim": size,
            "vocab_size": V,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            **more,
        },
        (f"{at.format(0)}self_attn.q_proj.weight", transposed),
        (f"{at.format(0)}self_attn.v_proj.weight", transposed),
        (f"{at.format(1)}self_attn.o_proj.weight", transposed),
        f"{at.format(0)}input_layernorm.weight",
        kv_heads=G,
        size=size,
    )


def _encoder(kind: str) -> Case:
    at = f"{kind}.encoder.layer." + "{}.attention."
    return Case(
        kind,
        "AutoModelForMaskedLM",
        {
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": 2,
            "num_attention_heads": H,
            "vocab_size": V,
            "max_position_embeddings": 9,
            "type_vocab_size": 2,
        },
        (f"{at.format(0)}self.query.weight", transposed),
        (f"{at.format(0)}self.value.weight", transposed),
        (f"{at.format(1)}output.dense.weight", transposed),
        f"{at.format(0)}output.LayerNorm.weight",
    )


_PHI = _llama("phi3")
_NEOX = "gpt_neox.layers.{}.attention."
_OPT = "model.decoder.layers.{}."
_NEO = "transformer.h.{}.attn.attention."
_DISTIL = "distilbert.transformer.layer.{}."
_LM = "AutoModelForCausalLM"

CASES = [
    Case(
        "gpt2",
        _LM,
        {"n_embd": D, "n_layer": 2, "n_head": H, "n_positions": 8, "vocab_size": V, "n_inner": F},
        ("transformer.h.0.attn.c_attn.weight", lambda n: n[:, :D]),
        ("transformer.h.0.attn.c_attn.weight", lambda n: n[:, 2 * D :]),
        ("transformer.h.1.attn.c_proj.weight", same),
        "transformer.h.0.ln_1.weight",
    ),
    Case(
        "gpt_neo",
        _LM,
        {
            "hidden_size": D,
            "num_layers": 2,
            "num_heads": H,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": V,
            "max_position_embeddings": 8,
            "intermediate_size": F,
            "window_size": 8,
        },
        (f"{_NEO.format(0)}q_proj.weight", transposed),
        (f"{_NEO.format(0)}v_proj.weight", transposed),
        (f"{_NEO.format(1)}out_proj.weight", transposed),
        "transformer.h.0.ln_1.weight",
    ),
    Case(
        "gpt_neox",
        _LM,
        {
            "hidden_size": D,
            "rotary_pct": 0.5,
            "num_hidden_layers": 2,
            "num_attention_heads": H,
            "intermediate_size": F,
            "vocab_size": V,
            "max_position_embeddings": 8,
        },
        (f"{_NEOX.format(0)}query_key_value.weight", lambda n: torch.cat([n[0:4], n[12:16]]).T),
        (f"{_NEOX.format(0)}query_key_value.weight", lambda n: torch.cat([n[8:12], n[20:24]]).T),
        (f"{_NEOX.format(1)}dense.weight", transposed),
        "gpt_neox.layers.0.input_layernorm.weight",
    ),
    _llama("llama"),
    _llama("mistral"),
    _llama("qwen2"),
    _llama("qwen3", size=6),
    _llama("gemma", size=6),
    _llama("gemma2", size=6),
    _llama("gemma3_text", size=6),
    Case(
        "phi3",
        _LM,
        {k: v for k, v in _PHI.config.items() if k != "head_dim"},
        ("model.layers.0.self_attn.qkv_proj.weight", lambda n: n[:D].T),
        ("model.layers.0.self_attn.qkv_proj.weight", lambda n: n[D + D // H :].T),
        _PHI.output,
        _PHI.gain,
        kv_heads=G,
    ),
    Case(
        "opt",
        _LM,
        {
            "hidden_size": D,
            "ffn_dim": F,
            "num_hidden_layers": 2,
            "num_attention_heads": H,
            "vocab_size": V,
            "max_position_embeddings": 8,
            "word_embed_proj_dim": D,
            "activation_function": "gelu",
        },
        (f"{_OPT.format(0)}self_attn.q_proj.weight", transposed),
        (f"{_OPT.format(0)}self_attn.v_proj.weight", transposed),
        (f"{_OPT.format(1)}self_attn.out_proj.weight", transposed),
        f"{_OPT.format(0)}self_attn_layer_norm.weight",
    ),
    _encoder("bert"),
    _encoder("roberta"),
    Case(
        "distilbert",
        "AutoModelForMaskedLM",
        {
            "dim": D,
            "hidden_dim": F,
            "n_layers": 2,
            "n_heads": H,
            "vocab_size": V,
            "max_position_embeddings": 8,
        },
        (f"{_DISTIL.format(0)}attention.q_lin.weight", transposed),
        (f"{_DISTIL.format(0)}attention.v_lin.weight", transposed),
        (f"{_DISTIL.format(1)}attention.out_lin.weight", transposed),
        f"{_DISTIL.format(0)}sa_layer_norm.weight",
    ),
    Case(
        "vit",
        "AutoModelForImageClassification",
        {
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": 2,
            "num_attention_heads": H,
            "image_size": 4,
            "patch_size": 2,
            "num_labels": 3,
        },
        ("vit.layers.0.attention.q_proj.weight", transposed),
        ("vit.layers.0.attention.v_proj.weight", transposed),
        ("vit.layers.1.attention.o_proj.weight", transposed),
        "vit.layers.0.layernorm_before.weight",
    ),
]
NAMES = [case.model_type for case in CASES]
CASE = {case.model_type: case for case in CASES}
RECURRENT = {
    "mamba": {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": V, "state_size": 3},
    "rwkv": {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": V,
        "context_length": 8,
        "attention_hidden_size": 8,
        "intermediate_size": F,
        "rescale_every": 1,  # so that two layers are deep enough to be rescaled
    },
}


def original(name: str, *, attention: str | None = None, auto: str | None = None) -> Any:
    """A fresh module of the family in float64 with weights that matter everywhere, in eval mode."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    case = CASE.get(name)
    config = transformers.CONFIG_MAPPING[name](**(case.config if case else RECURRENT[name]))
    loader = getattr(transformers, auto or (case.auto if case else _LM))
    more = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = loader.from_config(config, **more)
    return shaken(module.double()).eval()


def shaken(module: nn.Module, seed: int = 0) -> Any:
    """Every parameter moved away from where gradients vanish."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=source, dtype=torch.float64).to(p.dtype)
            p.copy_(0.4 * noise if p.dim() > 1 else p + 0.3 * noise)
    return module


@cache
def saved(name: str) -> Path:
    """A folder with the family's module, written once per session."""
    folder = Path(_FOLDER.name) / name
    original(name).save_pretrained(folder)
    return folder


@cache
def loaded(name: str) -> Any:
    """The model of `saved`, through the public path."""
    import curvescope as cs

    return cs.load(folder_of(name), dtype="float64")


def folder_of(name: str) -> Path:
    return saved(name)


def data(name: str, count: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and targets; some targets do not count."""
    source = torch.Generator().manual_seed(1)
    if name == "vit":
        return torch.randn(count, 3, 4, 4, generator=source, dtype=torch.float64), torch.tensor([0, 2, 1])[
            :count
        ]
    x = torch.randint(2, V, (count, T), generator=source)
    y = torch.randint(0, V, (count, T), generator=source)
    y[0, 3:] = -100
    y[-1, 0] = -100
    return x, y


class KeepDouble(TorchFunctionMode):
    """Casts from float64 to float32 do nothing inside: what the family would compute in exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.matmul and args[0].dtype != args[1].dtype:  # which does not promote
            args = tuple(factor.double() for factor in args)
        double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if double and func is Tensor.float:
            self.casts += 1
            return args[0]
        if double and func is Tensor.to and torch.float32 in (*args, *kwargs.values()):
            self.casts += 1
            return args[0]
        if double and kwargs.get("dtype") is torch.float32:
            self.casts += 1
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def dense_hessian(
    module: nn.Module, parameters: list[str], x: Any, y: Tensor, *, exact: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Hessian of the mean cross-entropy over raw parameters, and the number of each one's entries."""
    own = dict(module.named_parameters())
    shapes = [own[p].shape for p in parameters]
    theta = torch.cat([own[p].detach().flatten() for p in parameters])
    numbers = torch.arange(len(theta)).split([s.numel() for s in shapes])
    places = {p: n.view(s) for p, n, s in zip(parameters, numbers, shapes, strict=True)}

    def loss(theta: Tensor) -> Tensor:
        pieces = theta.split([s.numel() for s in shapes])
        values = {p: t.view(s) for p, t, s in zip(parameters, pieces, shapes, strict=True)}
        options = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
        z = torch.func.functional_call(module, values, (x,), options).logits
        z = z.reshape(-1, z.shape[-1]).double()
        return nn.functional.cross_entropy(z, y.flatten(), ignore_index=-100)

    if exact:
        with KeepDouble():
            return _hessian(loss, theta), places
    return _hessian(loss, theta), places


def _hessian(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(theta), theta, create_graph=True)
    (rows,) = torch.autograd.grad(g, theta, torch.eye(len(theta), dtype=g.dtype), is_grads_batched=True)
    return rows


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, in units of the largest entry of the truth."""
    assert found.shape == truth.shape
    return float((found - truth).detach().abs().max() / truth.detach().abs().max())
