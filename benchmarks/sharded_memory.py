"""Memory of a Hessian product with a model sharded over 1, 2 and 4 ranks, compared with the prediction.

    python benchmarks/sharded_memory.py > benchmarks/results/sharded/memory.md

A decoder of 16 layers and width 640 (79 million parameters, 315 MB in float32), four sequences of 8 tokens,
gloo on a CPU, two products inside `frozen()`, recomputed layers. Memory is the growth of the process at its
peak (VmHWM) plus the parameters and the vector, on the rank with the most. The prediction is
`distributed.cost.sharded`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import peak_memory

import curvescope as cs
from curvescope.distributed import cost, shard
from curvescope.models.zoo.transformer import TransformerConfig

LAYERS, WIDTH, WORDS, SEQUENCES, TOKENS = 16, 640, 256, 4, 8
RANKS = (1, 2, 4)


def spread_model() -> tuple[Any, cost.Decoder]:
    """Return the sharded decoder, and its sizes."""
    sizes = {"n_layers": LAYERS, "d_model": WIDTH, "n_heads": 10, "n_ctx": TOKENS, "vocab_size": WORDS}
    model = cs.load(TransformerConfig(**sizes))
    decoder = cost.decoder_of(model)
    return shard(model), decoder


def measure(rank: int, ranks: int, file: str) -> None:
    """Run one rank, which prints a line with the largest numbers of all ranks."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    model, decoder = spread_model()
    ids = torch.randint(0, WORDS, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    problem = cs.Problem(model, cs.Batches([cs.Batch(ids[:, :-1], ids[:, 1:])]))
    H = cs.Hessian(problem, checkpoint=True)
    v = torch.ones(H.local_shape[1])

    def twice() -> Any:
        H @ v
        return H @ v  # with what the first one kept

    with H.frozen():
        peak = 1e6 * peak_memory(twice)[1]
    held = sum(p.nbytes for p in model.parameters()) + v.nbytes
    message = torch.tensor([peak + held, float(held)], dtype=torch.float64)
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    predicted = cost.sharded(decoder, tokens=SEQUENCES * TOKENS, ranks=ranks).memory
    if rank == 0:
        numbers = {
            "ranks": ranks,
            "measured": message[0].item(),
            "held": message[1].item(),
            "predicted": predicted,
        }
        print(json.dumps(numbers | {"parameters": decoder.parameters, "layer": decoder.layer}))
    dist.destroy_process_group()


def start(ranks: int) -> dict[str, float]:
    """Start ranks of one thread each, and return the output of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__]
        # return large blocks to the system when any thread of gloo frees them
        env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        options = {"env": env, "stdout": subprocess.PIPE, "text": True}
        running = [
            subprocess.Popen([*words, str(rank), str(ranks), str(Path(folder) / "meet")], **options)
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in running]
    return json.loads(outputs[0])


def main() -> None:
    print("# Memory of a product with a model that is spread over ranks\n")
    print(" ".join((__doc__ or "").split("\n\n")[2].split()) + "\n")
    print(f"torch {torch.__version__}, Python {platform.python_version()}.\n")
    print("| ranks | parameters here, MB | peak, MB | predicted, MB | measured / predicted |")
    print("|---|---|---|---|---|", flush=True)
    for ranks in RANKS:
        found = start(ranks)
        held = found["held"] / 2e6
        measured, predicted = found["measured"] / 1e6, found["predicted"] / 1e6
        numbers = f"{held:.0f} | {measured:.0f} | {predicted:.0f} | {measured / predicted:.2f}"
        print(f"| {ranks} | {numbers} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        main()
