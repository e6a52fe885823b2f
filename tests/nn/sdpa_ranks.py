"""Two ranks that train attention under DDP and FSDP2; one prints whether they end where one rank ends.

Called by `test_nn_sdpa.py` as a script: the process imports once and forks the ranks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import curvescope as cs

RANKS = 2


class Layer(nn.Module):
    """Two heads of width four on sequences of eight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(cs.sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).tanh()


def loss(model: nn.Module, x: Tensor, *, penalty: bool) -> Tensor:
    """The mean of squares, and with a penalty that of the gradient in x: a second derivative in training."""
    x = x.clone().requires_grad_()
    y = model(x)
    if not penalty:
        return y.square().mean()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + slope.square().mean()


def trained(wrap: str, x: Tensor, *, penalty: bool) -> list[Tensor]:
    """The parameters after two steps."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Layer(8), Layer(1)).double()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh)
        model.set_reshard_after_backward(
            not penalty
        )  # PyTorch crashes in the second backward if weights are freed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, x, penalty=penalty).backward()
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        optimizer.step()
    parameters = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


def main(rank: int, meet: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    x = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for wrap, penalty in product(("ddp", "fsdp2"), (False, True)):
        found = trained(wrap, x.chunk(RANKS)[rank], penalty=penalty)
        want = trained("none", x, penalty=penalty)
        worst = max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))
        if rank == 0:
            print(wrap, penalty, len(found), worst < 1e-12, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                try:
                    main(rank, str(Path(folder) / "meet"))
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
