"""The accuracy script of jvp-flash-attention on a CPU, with our function behind its entry point.

    python tests/peer_suites/jvp_flash.py jvp_flash_attention-0.14.0/tests/test_jvp_attention.py

The script compares outputs, tangents, a loss, and the gradients of a loss in dual numbers with PyTorch's
plain attention. Prints how many of its combinations are within its own tolerance.
"""

from __future__ import annotations

import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from curvescope.nn.functional import scaled_dot_product_attention

LENGTHS = [32, 64, 128, 256]


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=causal)


def main() -> None:
    kernels: Any = ModuleType("jvp_flash_attention.jvp_attention")
    kernels.JVPAttn, kernels.MASK_CONST = SimpleNamespace(fwd_dual=attention), -1e2  # their finite −∞
    sys.modules |= {"jvp_flash_attention": ModuleType("jvp_flash_attention"), kernels.__name__: kernels}
    script = runpy.run_path(sys.argv[1])
    torch.set_num_threads(1)
    for dtype in ("float32", "bfloat16", "float16"):
        options = script["Args"](2, 128, 64, LENGTHS, dtype=dtype, benchmark_performance=False)
        results = [r.accuracy for r in script["run_benchmark_suite"](options) if r.accuracy is not None]
        accurate = sum(result.is_accurate() for result in results)
        largest = max(result.max_error for result in results)
        print(f"{dtype}: {accurate} of {len(results)} within the tolerance, largest error {largest:.1e}")


if __name__ == "__main__":
    main()
