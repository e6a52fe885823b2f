"""The zoo: one configurable Transformer for all variants in the papers.

Parameters are named by role and laid out inputs × outputs, so that a layer reads x @ W: `E, P, L0.W_Q,
L0.b_Q, …, L0.W_2, L0.ln1.g, ln_f.g, U`. The parameter names are the block names. Everything is plain
PyTorch that can be differentiated any number of times, in any mode: norms are written out, because
`F.layer_norm` gives silently wrong second derivatives under `torch.func.hessian`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from curvescope.core.config import Config
from curvescope.core.errors import ShapeError, UsageError

Record = Callable[[str, Tensor], None]
"""Function called with a place ('L0.attn.pattern', …) and its tensor."""


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Configuration of a zoo Transformer. Unknown keys and impossible combinations are errors.

    Shapes: tokens (B, T), or real inputs (B, T, d_in), or images (B, channels, size, size), to logits
    (B, T, vocab_size), or real outputs (B, T, n_out), or class logits (B, n_out).
    """

    n_layers: int = 2
    d_model: int = 32
    n_heads: int = 4
    n_kv_heads: int | None = None  # grouped-query attention if fewer than n_heads
    d_head: int | None = None  # d_model / n_heads
    d_ff: int | None = None  # 4 d_model by default; 0 for no feed-forward
    n_ctx: int = 32
    vocab_size: int = 64

    attention: Literal["softmax", "linear"] = "softmax"  # linear: the scaled scores are the weights
    merged_qk: bool = False  # one matrix W_QK per head instead of W_Q, W_K
    causal: bool = True
    score_bias: Literal["none", "alibi", "learned"] = "none"  # added to the scores, by offset i − j
    norm: Literal["none", "pre", "post"] = "pre"
    norm_kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_affine: bool = True
    norm_eps: float = 1e-5
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "identity"] = "gelu"
    positions: Literal["learned", "rope", "none"] = "learned"
    rope_base: float = 10000.0
    residual: bool = True  # skip connections around attention and feed-forward
    residual_scale: float = 1.0  # multiplies the skip around attention, as in ormaniec2025's fork

    bias_qkv: bool = True
    bias_o: bool = True
    bias_ff: bool = True
    bias_norm: bool = True  # layernorm only
    bias_u: bool = False
    tied: bool = False  # the unembedding is the transposed embedding

    inputs: Literal["tokens", "continuous", "patches"] = "tokens"
    outputs: Literal["tokens", "regression", "class"] = "tokens"
    d_in: int | None = None  # continuous inputs of another width get an embedding E (d_in, d_model)
    n_out: int | None = None  # for regression; None returns the stream itself
    image_size: int = 8
    patch_size: int = 2
    channels: int = 1

    init: Literal["gpt2", "scaled", "xavier"] = "gpt2"
    init_std: float | None = None  # of every weight matrix; None uses the scheme's value
    embed_std: float | None = None  # of E and P; None uses the value of the other weights
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(self)

    @property
    def head_size(self) -> int:
        """d_head, or d_model / n_heads."""
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Heads of W_K and W_V."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ff_size(self) -> int:
        """Width of the feed-forward layer; 0 if there is none."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def input_size(self) -> int | None:
        """Rows of E, or None if the input is the stream itself."""
        if self.inputs == "tokens":
            return self.vocab_size
        if self.inputs == "patches":
            return self.channels * self.patch_size**2
        return None if self.d_in in (None, self.d_model) else self.d_in

    @property
    def output_size(self) -> int | None:
        """Columns of U, or None if the output is the stream itself."""
        return self.vocab_size if self.outputs == "tokens" else self.n_out


class Norm(nn.Module):
    """y = g ∘ (x − mean) / √(var + ε) + b (layernorm), or y = g ∘ x / √(mean x² + ε) (rmsnorm)."""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.eps, self.center = cfg.norm_eps, cfg.norm_kind == "layernorm"
        self.g = nn.Parameter(torch.ones(cfg.d_model)) if cfg.norm_affine else None
        shifted = cfg.norm_affine and cfg.bias_norm and self.center
        self.b = nn.Parameter(torch.zeros(cfg.d_model)) if shifted else None

    def forward(self, x: Tensor) -> Tensor:
        if self.center:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        y = y if self.g is None else y * self.g
        return y if self.b is None else y + self.b


class Layer(nn.Module):
    """One block: attention, then feed-forward, each with its norm and skip connection."""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        d, h, kv, k = cfg.d_model, cfg.n_heads, cfg.kv_heads, cfg.head_size
        if cfg.norm != "none":
            self.ln1 = Norm(cfg)
        if cfg.merged_qk:
            self.W_QK = _weight(d, h * d)
        else:
            self.W_Q = _weight(d, h * k)
            self.b_Q = _bias(h * k, cfg.bias_qkv)
            self.W_K = _weight(d, kv * k)
            self.b_K = _bias(kv * k, cfg.bias_qkv)
        self.W_V = _weight(d, kv * k)
        self.b_V = _bias(kv * k, cfg.bias_qkv)
        self.W_O = _weight(h * k, d)
        self.b_O = _bias(d, cfg.bias_o)
        if cfg.score_bias == "learned":
            self.b_S = nn.Parameter(torch.zeros(h, 2 * cfg.n_ctx - 1))  # offset i − j + n_ctx − 1
        if cfg.ff_size:
            if cfg.norm != "none":
                self.ln2 = Norm(cfg)
            if cfg.activation == "swiglu":
                self.W_g = _weight(d, cfg.ff_size)
                self.W_u = _weight(d, cfg.ff_size)
            else:
                self.W_1 = _weight(d, cfg.ff_size)
                self.b_1 = _bias(cfg.ff_size, cfg.bias_ff)
            self.W_2 = _weight(cfg.ff_size, d)
            self.b_2 = _bias(d, cfg.bias_ff and cfg.activation != "swiglu")

    def forward(self, x: Tensor, record: Record) -> Tensor:
        cfg = self.cfg
        pre, post = cfg.norm == "pre", cfg.norm == "post"
        y = self.attend(self.ln1(x) if pre else x, record)
        x = cfg.residual_scale * x + y if cfg.residual else y
        x = self.ln1(x) if post else x
        if cfg.ff_size:
            y = self.feed_forward(self.ln2(x) if pre else x, record)
            x = x + y if cfg.residual else y
            x = self.ln2(x) if post else x
        return x

    def attend(self, x: Tensor, record: Record) -> Tensor:
        """Apply multi-head attention to x (B, T, d); the pattern is (B, h, T, T)."""
        record("attn.in", x)
        cfg, (B, T, _) = self.cfg, x.shape
        scores = self.scores(x) / math.sqrt(cfg.head_size)
        if cfg.score_bias != "none":
            scores = scores + self.score_bias(T)
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril() if cfg.causal else None
        if cfg.attention == "softmax":
            A = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
        else:
            A = scores if seen is None else scores.masked_fill(~seen, 0.0)
        record("attn.pattern", A)
        V = self.values(x).repeat_interleave(cfg.n_heads // cfg.kv_heads, dim=1)
        F = (A @ V).transpose(1, 2).reshape(B, T, -1)
        record("attn.heads", F)
        y = self.project(F)
        record("attn.out", y)
        return y

    def project(self, F: Tensor) -> Tensor:
        """Project the heads' outputs F (B, T, h k) to the stream."""
        return _affine(F, self.W_O, self.b_O)

    def scores(self, x: Tensor) -> Tensor:
        """Return the unscaled scores q_i · k_j, or x_i W_QK x_j: (B, h, T, T)."""
        cfg = self.cfg
        if cfg.merged_qk:
            return _split_heads(x @ self.W_QK, cfg.n_heads) @ x[:, None].transpose(-1, -2)
        Q, K = self.queries_and_keys(x)
        return Q @ K.repeat_interleave(cfg.n_heads // cfg.kv_heads, dim=1).transpose(-1, -2)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q (B, h, T, k) and K (B, kv, T, k), rotated if positions are rotary."""
        cfg = self.cfg
        Q = _split_heads(_affine(x, self.W_Q, self.b_Q), cfg.n_heads)
        K = _split_heads(_affine(x, self.W_K, self.b_K), cfg.kv_heads)
        return (rotate(Q, cfg.rope_base), rotate(K, cfg.rope_base)) if cfg.positions == "rope" else (Q, K)

    def values(self, x: Tensor) -> Tensor:
        """Return V (B, kv, T, k)."""
        return _split_heads(_affine(x, self.W_V, self.b_V), self.cfg.kv_heads)

    def score_bias(self, T: int) -> Tensor:
        """Return the score bias by head and offset i − j: (h, T, T)."""
        cfg, device = self.cfg, self.W_V.device
        offset = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
        if cfg.score_bias == "learned":
            return self.b_S[:, offset + cfg.n_ctx - 1]
        heads = torch.arange(1, cfg.n_heads + 1, device=device, dtype=torch.float64)
        slopes = 2.0 ** (-8.0 * heads / cfg.n_heads)
        return (-slopes[:, None, None] * offset.abs()).to(self.W_V.dtype)

    def feed_forward(self, x: Tensor, record: Record) -> Tensor:
        record("ff.in", x)
        if self.cfg.activation == "swiglu":
            z = nn.functional.silu(x @ self.W_g) * (x @ self.W_u)
        else:
            z = ACTIVATIONS[self.cfg.activation](_affine(x, self.W_1, self.b_1))
        y = _affine(z, self.W_2, self.b_2)
        record("ff.out", y)
        return y


class Transformer(nn.Module):
    """A stack of layers between an embedding and an unembedding; `module(x)` returns the outputs."""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        self.E = None if cfg.input_size is None else _weight(cfg.input_size, cfg.d_model)
        self.P = _weight(cfg.n_ctx, cfg.d_model) if cfg.positions == "learned" else None
        for i in range(cfg.n_layers):
            self.add_module(f"L{i}", Layer(cfg))
        if cfg.norm == "pre":
            self.ln_f = Norm(cfg)
        has_U = cfg.output_size is not None and not cfg.tied
        self.U = _weight(cfg.d_model, cfg.output_size or 0) if has_U else None
        self.b_U = _bias(cfg.output_size or 0, cfg.bias_u and cfg.output_size is not None)
        initialize(self, cfg)

    def forward(self, inputs: Tensor, record: Record | None = None) -> Tensor:
        cfg = self.cfg
        x = self.embed(inputs)
        for i in range(cfg.n_layers):
            place = no_record if record is None else _prefixed(record, f"L{i}.")
            x = self.get_submodule(f"L{i}")(x, place)
        if cfg.norm == "pre":
            x = self.ln_f(x)
        if cfg.outputs == "class":
            x = x.mean(1)
        U = self.E.T if cfg.tied and self.E is not None else self.U
        x = x if U is None else x @ U
        return x if self.b_U is None else x + self.b_U

    def embed(self, inputs: Tensor) -> Tensor:
        """Return the stream before the first layer: (B, T, d_model)."""
        cfg = self.cfg
        check_inputs(inputs, cfg)
        if cfg.inputs == "tokens":
            x = nn.functional.embedding(inputs, self.E)  # pyright: ignore[reportArgumentType]
        else:
            x = _patches(inputs, cfg.patch_size) if cfg.inputs == "patches" else inputs
            x = x if self.E is None else x @ self.E
        if x.shape[1] > cfg.n_ctx:
            raise ShapeError(f"expected at most n_ctx={cfg.n_ctx} positions, got {x.shape[1]}")
        return x if self.P is None else x + self.P[: x.shape[1]]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda h: nn.functional.gelu(h, approximate="tanh"),
    "silu": nn.functional.silu,
    "identity": lambda h: h,
}


def rotate(X: Tensor, base: float) -> Tensor:
    """Apply rotary positions to X (B, h, T, k): dimension f pairs with f + k/2, angle t · base^(−2f/k)."""
    T, k = X.shape[-2:]
    frequency = base ** (-torch.arange(0, k, 2, device=X.device, dtype=torch.float64) / k)
    angle = torch.arange(T, device=X.device, dtype=torch.float64)[:, None] * frequency  # (T, k/2)
    cos, sin = angle.cos().to(X.dtype), angle.sin().to(X.dtype)
    a, b = X[..., : k // 2], X[..., k // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def initialize(model: Transformer, cfg: TransformerConfig) -> None:
    """Draw every weight matrix from `cfg.seed`; biases 0, norm gains 1.

    Schemes: `gpt2` N(0, 0.02²) with W_O and W_2 divided by √(2 n_layers); `scaled` N(0, 0.64/d_model);
    `xavier` N(0, 2/(rows + columns)). Order: E, P, then per layer W_Q, W_O, W_K, W_V and the feed-forward,
    then U, which is ormaniec2025's.
    """
    source = torch.Generator().manual_seed(cfg.seed)
    roles = ["W_Q", "W_QK", "W_O", "W_K", "W_V", "W_1", "W_g", "W_u", "W_2"]
    names = ["E", "P", *(f"L{i}.{role}" for i in range(cfg.n_layers) for role in roles), "U"]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            if name in parameters:
                W = parameters[name]
                W.normal_(0.0, _init_std(name, W, cfg), generator=source)


def _init_std(name: str, W: Tensor, cfg: TransformerConfig) -> float:
    if name in ("E", "P") and cfg.embed_std is not None:
        return cfg.embed_std
    std = cfg.init_std
    if cfg.init == "xavier":
        return math.sqrt(2 / sum(W.shape)) if std is None else std
    if cfg.init == "scaled":
        return 0.8 / math.sqrt(cfg.d_model) if std is None else std
    into_stream = name.endswith((".W_O", ".W_2"))
    return (0.02 if std is None else std) / (math.sqrt(2 * cfg.n_layers) if into_stream else 1.0)


def _weight(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))


def _bias(size: int, wanted: bool) -> nn.Parameter | None:
    return nn.Parameter(torch.zeros(size)) if wanted else None


def _affine(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    return x @ W if b is None else x @ W + b


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (B, T, heads · k) to (B, heads, T, k)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _patches(images: Tensor, p: int) -> Tensor:
    """Split (B, C, H, W) into patches (B, H W / p², C p²), row by row."""
    return nn.functional.unfold(images, p, stride=p).transpose(1, 2)


def no_record(place: str, tensor: Tensor) -> None:
    """Ignore a tensor: the record that stores nothing."""


def _prefixed(record: Record, prefix: str) -> Record:
    return lambda place, tensor: record(prefix + place, tensor)


def check_config(cfg: TransformerConfig) -> None:
    """Raise for sizes that are not positive and for settings that contradict each other."""
    sizes = ("d_model", "n_heads", "n_ctx", "vocab_size", "d_head", "d_in", "n_out")
    for name in (*sizes, "image_size", "patch_size", "channels"):
        if getattr(cfg, name) is not None and getattr(cfg, name) < 1:
            raise UsageError(f"{name}: expected a positive number, got {getattr(cfg, name)}")
    for name in ("init_std", "embed_std", "norm_eps"):
        if getattr(cfg, name) is not None and not getattr(cfg, name) >= 0:
            raise UsageError(f"{name}: expected a number of at least 0, got {getattr(cfg, name)}")
    if cfg.n_layers < 0 or cfg.ff_size < 0:
        raise UsageError(f"expected n_layers and d_ff of at least 0, got {cfg.n_layers} and {cfg.d_ff}")
    rules = [
        (
            cfg.d_head is None and cfg.d_model % cfg.n_heads,
            f"d_model={cfg.d_model} is not a multiple of n_heads",
        ),
        (
            cfg.kv_heads < 1 or cfg.n_heads % cfg.kv_heads,
            f"n_heads={cfg.n_heads} is not a multiple of n_kv_heads",
        ),
        (cfg.positions == "rope" and cfg.head_size % 2, f"rope needs an even head size, got {cfg.head_size}"),
        (cfg.positions == "rope" and cfg.merged_qk, "rope rotates queries and keys; merged_qk has neither"),
        (cfg.merged_qk and cfg.kv_heads != cfg.n_heads, "merged_qk has no keys to share between heads"),
        (cfg.tied and (cfg.inputs != "tokens" or cfg.outputs != "tokens"), "tied needs tokens in and out"),
        (cfg.outputs == "class" and cfg.n_out is None, "outputs='class' needs n_out, the number of classes"),
        (
            cfg.inputs == "patches" and cfg.image_size % cfg.patch_size,
            "image_size is not a multiple of patch_size",
        ),
        (
            cfg.inputs == "patches" and (cfg.image_size // cfg.patch_size) ** 2 > cfg.n_ctx,
            f"an image has {(cfg.image_size // cfg.patch_size) ** 2} patches, n_ctx is {cfg.n_ctx}",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise UsageError(message)


def check_inputs(inputs: Tensor, cfg: TransformerConfig) -> None:
    """Raise unless the inputs have the kind, shape and range that the configuration requires."""
    if torch.compiler.is_compiling():
        return
    tokens, actual = (
        cfg.inputs == "tokens",
        {
            "tokens": (),
            "continuous": (cfg.d_in or cfg.d_model,),
            "patches": (cfg.channels, cfg.image_size, cfg.image_size),
        }[cfg.inputs],
    )
    free = ("B",) if cfg.inputs == "patches" else ("B", "T")
    fits = inputs.dim() == len(free + actual) and inputs.shape[len(free) :] == actual
    if not fits or inputs.is_floating_point() == tokens:
        kind = {"tokens": "integer tokens", "continuous": "real inputs", "patches": "images"}[cfg.inputs]
        axes = ", ".join(map(str, free + actual))
        raise ShapeError(f"expected {kind} ({axes}), got {inputs.dtype} {tuple(inputs.shape)}")
    if _inside_vmap(inputs):  # values cannot be read inside vmap
        return
    if tokens and inputs.numel() and not 0 <= int(inputs.min()) <= int(inputs.max()) < cfg.vocab_size:
        raise UsageError(f"expected tokens from 0 to {cfg.vocab_size - 1}, got up to {int(inputs.max())}")


def _inside_vmap(inputs: Tensor) -> bool:
    """Return True if the inputs are inside vmap, possibly below a level of grad."""
    levels = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while levels.is_gradtrackingtensor(inputs):
        inputs = levels.get_unwrapped(inputs)
    return levels.is_batchedtensor(inputs)
