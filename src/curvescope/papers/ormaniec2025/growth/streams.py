"""The random numbers of the paper's sweeps, on any CPU.

Weights come from torch's CPU generator, which every machine has. Embeddings, and all of the MLPs, were drawn
on a GPU: Philox-4x32-10, keyed by the seed, where call number c of the generator gives element j of a tensor
the four words at counter (c, 0, j, 0), of which only the first pair is used. That holds for tensors that fit
into one pass of the GPU's grid, as all of these do. Probes come from NumPy's legacy generator.

Uniform numbers are u = (x + 1/2) / 2³² in (0, 1], normal ones sin(2π u₂) √(−2 log u₁), both in float32.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

SEED = 1234  # of repeat 0, and of all MLPs together
PROBES = 20  # of each norm
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_BUMP = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(seed: int, call: int, num: int) -> np.ndarray:
    """The four 32-bit words of elements 0 … num − 1 in one call: (4, num), as uint64 below 2³².

    Ten rounds of (c₀, c₁, c₂, c₃) ← (hi(M₁ c₂) ⊕ c₁ ⊕ k₀, lo(M₁ c₂), hi(M₀ c₀) ⊕ c₃ ⊕ k₁, lo(M₀ c₀)).
    """
    c0 = np.full(num, call & 0xFFFFFFFF, dtype=np.uint64)
    c1 = np.full(num, call >> 32, dtype=np.uint64)
    c2 = np.arange(num, dtype=np.uint64)
    c3 = np.zeros(num, dtype=np.uint64)
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        one, two = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        k0, k1 = np.uint64(key[0]), np.uint64(key[1])
        c0, c1, c2, c3 = (two >> _HALF) ^ c1 ^ k0, two & _LOW, (one >> _HALF) ^ c3 ^ k1, one & _LOW
        key = [(k + b) & 0xFFFFFFFF for k, b in zip(key, _BUMP, strict=True)]
    return np.stack([c0, c1, c2, c3])


def cuda_normal(shape: tuple[int, ...], std: float, *, seed: int, call: int) -> Tensor:
    """What `normal_(0, std)` drew on the GPU, in float64 with the digits of float32."""
    words = philox(seed, call, math.prod(shape)).astype(np.float32)
    u1, u2 = words[0] * np.float32(2**-32) + np.float32(2**-33), words[1]
    turn = u2 * np.float32(2**-32 * 2 * math.pi) + np.float32(2**-33 * 2 * math.pi)
    drawn = np.sin(turn) * np.sqrt(np.float32(-2) * np.log(u1))
    return torch.from_numpy((drawn * np.float32(std)).astype(np.float64)).reshape(shape)


def cuda_uniform(shape: tuple[int, ...], bound: float, *, seed: int, call: int) -> Tensor:
    """What `uniform_(−bound, bound)` drew on the GPU, in float64 with the digits of float32."""
    u = philox(seed, call, math.prod(shape))[0].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    u = np.where(u == 1, np.float32(0), u)
    low, high = np.float32(-bound), np.float32(bound)
    return torch.from_numpy((u * (high - low) + low).astype(np.float64)).reshape(shape)


def rademacher(repeat: int, first: int, num: int, size: int, *, total: int) -> Tensor:
    """Probes `first, …, first + num − 1` of a repeat's stream, ±1 in float64: (num, size).

    The paper draws them one after the other, `size` numbers each, `total` in all.
    """
    bits = _bits(SEED + repeat, total, size)[first : first + num]
    signs = np.unpackbits(bits, axis=1, count=size).astype(np.float64) * 2 - 1
    return torch.from_numpy(signs)


@lru_cache(maxsize=1)
def _bits(seed: int, total: int, size: int) -> np.ndarray:
    """All probes of a repeat as packed bits, (total, size / 8): some MB."""
    source = np.random.RandomState(seed)  # binomial(1, 1/2) is one uniform number above one half
    return np.stack([np.packbits(source.random_sample(size) > 0.5) for _ in range(total)])
