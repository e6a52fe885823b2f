"""Vision Transformers with the structure and parameter names of timm and of open_clip, written by hand."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H, CLASSES = 6, 2, 3  # width, heads, classes; images are 1 × 4 × 4 in patches of 2 × 2


class Attention(nn.Module):
    """timm's: rows of `qkv` are Q, K, V, each of all heads; `interleaved` as others have it."""

    def __init__(self, *, normed: bool, fused: bool, interleaved: bool = False, bias: Tensor | None = None):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = H, D // H, (D // H) ** -0.5
        self.fused_attn, self.interleaved, self.bias = fused, interleaved, bias
        self.qkv = nn.Linear(D, 3 * D)
        self.q_norm = nn.LayerNorm(D // H) if normed else nn.Identity()
        self.k_norm = nn.LayerNorm(D // H) if normed else nn.Identity()
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(0.0), nn.Linear(D, D), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        B, N, C = x.shape
        if self.interleaved:
            qkv = self.qkv(x).reshape(B, N, H, 3, C // H).permute(3, 0, 2, 1, 4)
        else:
            qkv = self.qkv(x).reshape(B, N, 3, H, C // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        else:
            attn = q * self.scale @ k.transpose(-2, -1)
            attn = attn if attn_mask is None else attn + attn_mask
            attn = attn if self.bias is None else attn + self.bias
            x = self.attn_drop(attn.softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(D), Attention(**options), LayerScale()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(D), Mlp(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(1, D, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Timm(nn.Module):
    """timm.models.VisionTransformer."""

    def __init__(self, *, normed: bool = False, fused: bool = True, **options) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.zeros(1, 1, D)),
            nn.Parameter(torch.zeros(1, 5, D)),
        )
        self.patch_embed = PatchEmbed()
        self.blocks = nn.Sequential(*(Block(normed=normed, fused=fused, **options) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ResidualAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(D), nn.MultiheadAttention(D, H), nn.LayerNorm(D)
        named = [("c_fc", nn.Linear(D, 8)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(8, D))]
        self.mlp = nn.Sequential(OrderedDict(named))

    def forward(self, x: Tensor) -> Tensor:
        n = self.ln_1(x)
        x = x + self.attn(n, n, n, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Visual(nn.Module):
    """open_clip's image half, sequence first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, D, 2, stride=2, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(D))
        self.positional_embedding = nn.Parameter(torch.zeros(5, D))
        self.ln_pre, self.ln_post = nn.LayerNorm(D), nn.LayerNorm(D)
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList([ResidualAttentionBlock() for _ in range(2)])
        self.proj = nn.Parameter(torch.zeros(D, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        x = self.ln_pre(x).transpose(0, 1)
        for block in self.transformer.resblocks:
            x = block(x)
        return self.ln_post(x.transpose(0, 1)[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """A module that holds it as `visual`."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Visual()

    def forward(self, x: Tensor) -> Tensor:
        return self.visual(x)


CASES = {
    "timm": Timm,
    "timm, not fused": lambda: Timm(fused=False),
    "timm, norms of queries and keys": lambda: Timm(normed=True, fused=False),
    "interleaved": lambda: Timm(fused=False, interleaved=True),
    "open_clip": OpenClip,
}


def made(name: str) -> nn.Module:
    """The case in float64 with random numbers, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = CASES[name]().double()
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, dtype=p.dtype) * 0.5)
    return module.eval()


def data() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, 4, 4, generator=source, dtype=torch.float64), torch.tensor([0, 2, 1])
