"""Count the tensors that a Hessian product of GPT-2 keeps alive, in units of tokens × width per layer.

    python benchmarks/waiting.py

The first half of a product goes through the gradient's graph, and each operation stores tensors for the
second half. The script counts all tensors that a product creates on a CPU, at their peak: once with PyTorch's
linear maps, and once with ours, which a GPU uses (`kernels/linear.py`). Attention and norms are those of a
CPU, whose tensors for second derivatives have the same sizes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any
from unittest import mock

import torch
from _timing import table
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import curvescope as cs
from curvescope.engines import batch_products
from curvescope.engines.replay import cpu
from curvescope.kernels import function_mode
from curvescope.studies.hvp.analysis import GPT2


class AliveTensors(TorchDispatchMode):
    """Mode that counts the tensors that operations create, without views, at their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.most, self.at = 0, Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(t.untyped_storage()).cdata for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor):
                ref = StorageWeakRef(t.untyped_storage())
                if ref.cdata not in given and ref.cdata not in self._alive:
                    self._alive[ref.cdata] = ref, t.untyped_storage().nbytes(), func.overloadpacket.__name__
        total = sum(size for _, size, _ in self._alive.values())
        if total > self.most:
            self.most = total
            self.at = Counter((name, size) for _, size, name in self._alive.values())
        return result


def made(on: tuple[str, ...], layers: int, d: int, T: int) -> tuple[float, list[list[Any]]]:
    """Return the live tensors of T × d per layer at the peak, and the operations that created them."""
    torch.manual_seed(0)
    vocabulary = 64
    module, (x, y) = GPT2(layers, d, 4, vocabulary, T).eval(), torch.randint(vocabulary, (2, 1, T))
    H = cs.Hessian(cs.Problem(cs.load(module), [(x, y)]), engine="fast")
    v = torch.randn(H.shape[0])
    with (
        mock.patch.object(function_mode, "LINEAR_ON", on),
        mock.patch.object(batch_products, "TWINS_ON", on),
        mock.patch.object(cpu, "Replay", lambda work, *_: work),  # as it is
        H.frozen(),
    ):
        _ = H @ v
        with AliveTensors() as seen:
            _ = H @ v
    unit = 4 * T * d * layers
    rows = [[name, size / 4 / T / d, n, n * size / unit] for (name, size), n in seen.at.items()]
    rows = sorted(
        (row for row in rows if row[1] < 4.5), key=lambda row: -row[3]
    )  # the vector H v does not count
    return sum(row[3] for row in rows), rows[:8]


def main() -> None:
    """Count with both linear maps, and print the live tensors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, on in {"PyTorch's linear maps": (), "ours": ("cpu",)}.items():
        total, rows = made(on, given.layers, given.width, given.tokens)
        print(f"\n{name}: {total:.1f} tensors of tokens × width for each layer\n")
        shown = [[op, f"{size:.2f}", n, f"{share:.2f}"] for op, size, n, share in rows]
        print(table(["made by", "size", "alive", "for each layer"], shown))


if __name__ == "__main__":
    sys.exit(main())
