"""Small modules made of PyTorch's own Transformer layers, as people put them together."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

V, D, H, F, T = 7, 4, 2, 6, 5  # vocabulary, width, heads, feed-forward, tokens
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
ADDED = torch.zeros(T, T, dtype=torch.float64).masked_fill(CAUSAL, -torch.inf)
ODD = torch.linspace(-1, 1, T * T, dtype=torch.float64).view(T, T)  # a bias, no mask
PAD = V - 1
OPTIONS: dict[str, Any] = {"d_model": D, "nhead": H, "dim_feedforward": F, "dropout": 0.1}


class Encoder(nn.Module):
    """nn.TransformerEncoder between an embedding and a linear map."""

    def __init__(
        self, *, mask: Tensor | None = None, padded: Any = None, nested: bool = True, **options: Any
    ):
        super().__init__()
        options = {"batch_first": True, **OPTIONS, **options}
        self.first, self.padded, self.mask = options["batch_first"], padded, mask
        self.e = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(**options)
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=nested)
        self.u = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        h, pad = self.e(x), None
        if self.padded is not None:
            pad = x == PAD
            pad = pad if self.padded == "bool" else torch.zeros_like(h[..., 0]).masked_fill(pad, -torch.inf)
        h = h if self.first else h.transpose(0, 1)
        T = x.shape[1]
        mask = None if self.mask is None else self.mask[:T, :T].to(pad.dtype if pad is not None else None)
        h = self.body(h, mask=mask, src_key_padding_mask=pad)
        return self.u(h if self.first else h.transpose(0, 1))


class Both(nn.Module):
    """nn.Transformer: the decoder reads the sequence, and the encoder its reverse."""

    def __init__(self, **options: Any):
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.body = nn.Transformer(
            num_encoder_layers=1, num_decoder_layers=1, batch_first=True, **{**OPTIONS, **options}
        )
        self.u = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        mask = CAUSAL[: x.shape[1], : x.shape[1]]
        return self.u(self.body(h.flip(1), h, tgt_mask=mask, tgt_is_causal=True))


class Decoder(nn.Module):
    """nn.TransformerDecoder over a memory of another length."""

    def __init__(self, **options: Any):
        super().__init__()
        self.e = nn.Embedding(V, D)
        layer = nn.TransformerDecoderLayer(batch_first=True, **{**OPTIONS, **options})
        self.body, self.u = nn.TransformerDecoder(layer, 2), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        return self.u(self.body(h, h[:, :2], tgt_mask=CAUSAL[: x.shape[1], : x.shape[1]]))


class Own(nn.Module):
    """A block of one's own around nn.MultiheadAttention, which is called with `call`."""

    def __init__(self, *, call: dict[str, Any] | None = None, use_weights: bool = False, **options: Any):
        super().__init__()
        self.call, self.use_weights = call or {}, use_weights
        self.e = nn.Embedding(V, D)
        self.attn = nn.MultiheadAttention(D, H, **{"batch_first": True, **options})
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))
        self.u = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        n = self.norm1(h)
        k, v = n[..., : self.attn.kdim], n[..., : self.attn.vdim]
        if not self.attn.batch_first:
            n, k, v = (t.transpose(0, 1) for t in (n, k, v))
        T = x.shape[1]
        call = {key: m[:T, :T] if isinstance(m, Tensor) else m for key, m in self.call.items()}
        y, weights = self.attn(n, k, v, **call)
        y = y if self.attn.batch_first else y.transpose(0, 1)
        if self.use_weights:
            y = y + (weights @ h)
        h = h + y
        return self.u(h + self.mlp(self.norm2(h)))


class Unbatched(nn.Module):
    """nn.MultiheadAttention on one sequence at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.attn, self.u = nn.Embedding(V, D), nn.MultiheadAttention(D, H), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.u(torch.stack([self.attn(h, h, h)[0] for h in self.e(x)]))


CASES: dict[str, Any] = {
    "encoder": Encoder,
    "encoder, norm first, gelu": lambda: Encoder(norm_first=True, activation="gelu"),
    "encoder, sequence first": lambda: Encoder(batch_first=False),
    "encoder, padded": lambda: Encoder(padded="bool"),
    "encoder, padded, not nested": lambda: Encoder(padded="bool", nested=False),
    "encoder, padded by numbers": lambda: Encoder(padded="float"),
    "encoder, causal": lambda: Encoder(mask=CAUSAL),
    "encoder, causal by numbers, norm first": lambda: Encoder(mask=ADDED, norm_first=True),
    "encoder, causal and padded": lambda: Encoder(mask=CAUSAL, padded="bool"),
    "encoder, a bias": lambda: Encoder(mask=ODD),
    "encoder without biases": lambda: Encoder(bias=False),
    "transformer": Both,
    "transformer, norm first": lambda: Both(norm_first=True),
    "decoder": Decoder,
    "decoder, norm first": lambda: Decoder(norm_first=True),
    "own": Own,
    "own, no weights": lambda: Own(call={"need_weights": False}),
    "own, weights used": lambda: Own(use_weights=True),
    "own, causal weights used": lambda: Own(use_weights=True, call={"attn_mask": CAUSAL}),
    "own, sequence first, hint": lambda: Own(
        batch_first=False, call={"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}
    ),
    "own, an extra key": lambda: Own(add_bias_kv=True),
    "own, a key of zeros": lambda: Own(add_zero_attn=True, call={"attn_mask": CAUSAL}),
    "own, both": lambda: Own(add_zero_attn=True, add_bias_kv=True),
    "own, other widths": lambda: Own(kdim=3, vdim=2),
    "own, no bias": lambda: Own(bias=False),
    "own, a blind query": lambda: Own(call={"attn_mask": ODD < -0.99}),
    "unbatched": Unbatched,
}
FUSED = set(CASES) - {"encoder, a bias", "own, a key of zeros", "own, a blind query"}
"""Those whose attention is one that we have a kernel for."""


def made(name: str, *, train: bool = False) -> nn.Module:
    """The case in float64, with numbers that no layer has in common; in eval mode unless told."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor")
        torch.manual_seed(3)
        module = CASES[name]().double()
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, dtype=p.dtype) * 0.6)
    return module.train(train)


def data(padded: bool = False) -> tuple[Tensor, Tensor]:
    """Two sequences; the second ends in padding."""
    x = torch.tensor([[0, 3, 1, 5, 2], [4, 0, 2, 1, 3]])
    y = torch.tensor([[3, 1, 5, 2, 0], [0, 2, 1, 3, 5]])
    if padded:
        x[1, 3:] = PAD
    return x, y
