"""What ranks do that each hold a part of a model, beside the products themselves."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

import curvescope as cs
from cases import transformer
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import gather_objects, in_step, rank_and_size
from curvescope.core.seeds import probes
from curvescope.distributed import shard
from curvescope.distributed.sharding import spread_out
from curvescope.models.running.weights import gathering
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.pieces import Pieces
from curvescope.runs.ranks.shared_folder import ShardedProducts

NAME = "hessian.density"


@final
class Counted(LinearOperator):
    """An operator in pieces that counts its products."""

    def __init__(self, op: LinearOperator):
        self.op, self.count = op, 0
        self.shape, self.dtype, self.device = op.shape, op.dtype, op.device
        self.symmetric, self.psd, self.shards = op.symmetric, op.psd, op.shards

    def _matmat(self, V: Tensor) -> Tensor:
        self.count += 1
        return self.op._matmat(V)


def asked(op: LinearOperator, folder: Path, number: int) -> tuple[list[Tensor], int]:
    """So many products as a run asks for them that was stopped behind them, and how many were computed."""
    assert op.shards is not None
    counted = Counted(op)
    recorder = ShardedProducts(NAME, Pieces(folder) if rank_and_size()[0] == 0 else None)
    V = probes(op.shape[1], number, seed=0, shard=op.shards[1])
    found = [recorder.product(counted, V[:, i : i + 1].contiguous()) for i in range(number)]
    recorder.close()
    return found, counted.count


def products_in_pieces_are_kept() -> str:
    """Known where all ranks know them: a run on as many ranks goes on in the middle of a piece."""
    batches = cs.Batches.from_tensors(*torch.ones(2, 3, 4).long(), batch_size=3)
    H = cs.Hessian(cs.Problem(shard(cs.load(transformer())), batches), "L0.ln1.g", "L0.W_Q")
    with in_step():
        folder = Path(gather_objects(tempfile.mkdtemp())[0])
        rank, ranks = rank_and_size()
        first, computed = asked(H, folder, 3)
        again, then = asked(H, folder, 4)
        assert (computed, then) == (3, 1), (computed, then)
        assert all(map(torch.equal, first, again))
        if rank == ranks - 1:
            (folder / f"{NAME}.{rank}-of-{ranks}.products").unlink()
        dist.barrier()
        assert asked(H, folder, 4)[1] == 4, "one rank does not know them"
        ShardedProducts(NAME, Pieces(folder) if rank == 0 else None).remove()
        dist.barrier()
        assert not list(folder.glob("*.products")), list(folder.iterdir())
    return "same"


def a_gradient_holds_a_layer_at_a_time() -> str:
    """And not the parameters of all of them until its backward pass."""
    batches = cs.Batches.from_tensors(*torch.ones(2, 3, 4).long(), batch_size=3)
    wanted = cs.Problem(cs.load(transformer(n_layers=6)), batches).gradient()
    spread = cs.Problem(shard(cs.load(transformer(n_layers=6))), batches)
    alive, most, own = [], 0, gathering._gathered

    def watched(*given: Any) -> tuple[Tensor, ...]:
        nonlocal most
        found = own(*given)
        alive.extend(map(weakref.ref, found))
        most = max(most, sum(t().numel() for t in alive if t() is not None))
        return found

    gathering._gathered = watched
    try:
        found = spread.gradient()
    finally:
        gathering._gathered = own
    here = spread.model.shards(spread.space()).positions()
    size = spread.model.num_parameters
    assert most < 0.6 * size, (most, size)
    return "same" if torch.allclose(found, wanted[here], rtol=1e-12, atol=1e-14) else "apart"


def contents_of_pieces() -> str:
    """As the whole model has them."""
    with in_step():
        whole = cs.load(transformer())
        found = spread_out(cs.load(transformer()), "cpu")
        return "same" if fingerprint(found) == fingerprint(whole) else "other contents"


def pieces_of_models_that_differ() -> None:
    with in_step():
        spread_out(cs.load(transformer(init_std=0.3 + 0.1 * dist.get_rank())), "cpu")


TASKS = [
    products_in_pieces_are_kept,
    a_gradient_holds_a_layer_at_a_time,
    contents_of_pieces,
    pieces_of_models_that_differ,
]
