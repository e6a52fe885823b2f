"""R processes that meet through a file: models spread over them against the whole ones.

RANKS FOLDER CASES…; each rank writes {what was compared: relative error} to FOLDER/errors-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from counting import Counting
from data_tasks import Capacity
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

import curvescope as cs
from curvescope.algorithms.blocks.probes import extreme_ends, own_probes
from curvescope.core.blocks import Block, ParamSpace, parameter_block
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.operator.matrices import LowRank
from curvescope.core.ranks.shard_layout import ShardGroup, VectorShard
from curvescope.data.batches import Batch, Batches
from curvescope.distributed import cost, shard
from curvescope.distributed.sharding import local_block
from curvescope.models.model import Model
from curvescope.models.running.weights.gathering import padded
from curvescope.models.zoo.transformer import TransformerConfig

Case = Iterator[tuple[str, Any, Any]]
"""Names, and what the whole model and the spread one gave."""
V, T = 7, 4


def data(num: int = 5, size: int = 3) -> Batches:
    """Batches of 3 and 2 sequences, of which one target does not count: shares are not equal."""
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, V, (num, T), generator=source) for _ in range(2))
    y[0, 2] = -100
    return Batches([Batch(x[i : i + size], y[i : i + size]) for i in range(0, num, size)])


def zoo(**options: Any) -> Model:
    """Matrices of 4, 5 and 7 rows, and a bias of one: not as many on every rank, or none."""
    sizes = {"n_layers": 2, "d_model": 5, "n_heads": 1, "d_ff": 4, "n_ctx": T, "vocab_size": V}
    settings = sizes | options
    return cs.load(TransformerConfig(**settings, init_std=0.3, embed_std=1.0), dtype="float64")


def transformers_model(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": V, "initializer_range": 0.3}
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 6, "n_head": 2, "n_positions": 8}
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **common))
    else:
        sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 10, "num_attention_heads": 2}
        more = {"num_key_value_heads": 1, "max_position_embeddings": 8, "tie_word_embeddings": False}
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more, **common))
    return module.double().eval()


def fsdp(kind: str) -> Any:
    """A module that PyTorch spread."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = zoo().module if kind == "zoo" else transformers_model(kind)
    layers = [module.L0, module.L1] if kind == "zoo" else list(module.transformer.h)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def whole_and_spread(kind: str) -> tuple[Any, Any]:
    if kind.startswith("fsdp-"):
        own = kind.removeprefix("fsdp-")
        return (zoo() if own == "zoo" else cs.load(transformers_model(own))), shard(fsdp(own))
    if kind == "zoo":
        return zoo(tied=True), shard(zoo(tied=True))
    return cs.load(transformers_model(kind)), shard(transformers_model(kind))


def products(kind: str) -> Case:
    """Operators, blocks, gradient and value; after "brief" the Hessian alone."""
    brief, kind = kind.startswith("brief "), kind.removeprefix("brief ")
    whole, spread = whole_and_spread(kind)
    P, S = cs.Problem(whole, data()), cs.Problem(spread, data())
    yield f"{kind} value", P.loss_value(), S.loss_value()
    options = {"damping": 0.1, "weight_decay": {"matrices": 0.2}}
    kinds: list[tuple[str, Callable[[cs.Problem], Any]]] = [
        ("hessian", cs.Hessian),
        ("ggn", lambda p: cs.GGN(p, **options)),
    ]
    if brief:
        kinds = kinds[:1]
    elif kind == "zoo":
        kinds += [
            ("functional", cs.FunctionalHessian),
            ("fisher", cs.EmpiricalFisher),
            ("autograd", lambda p: cs.Hessian(p, engine="autograd")),
            ("block", lambda p: cs.Hessian(p).block("L0.W_Q", "L1.*")),
        ]
    for name, make in kinds:
        A, B = make(P), make(S)
        assert A.shape == B.shape
        left, right = (pieces.positions() for pieces in B.shards)
        X = torch.randn(A.shape[1], 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        yield f"{kind} {name}", (A @ X)[left], B @ X[right]
        if brief:
            continue
        yield f"{kind} {name} vector", (A @ X[:, 0])[left], B @ X[right, 0]
        U = torch.randn(A.shape[0], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        yield f"{kind} {name} transposed", (A.T @ U)[right], B.T @ U[left]
        assert B.engine.name == ("autograd" if name == "autograd" else "fast"), B.engine.name
    yield f"{kind} gradient", P.gradient()[S.model.shards(S.space()).positions()], S.gradient()


@final
class SpreadMatrix(LinearOperator):
    """A matrix on every rank, which takes vectors in pieces."""

    def __init__(self, A: torch.Tensor, blocks: tuple[Block, ...], shapes: dict[str, tuple[int, ...]]):
        spread = ShardGroup(None, dist.get_rank(), dist.get_world_size())
        here = VectorShard(spread, blocks, shapes)
        rows = {name: spread.rows(shape[0]) for name, shape in shapes.items()}
        local = tuple(local_block(b, shapes[b.parameter], rows[b.parameter]) for b in blocks)
        own = {name: (len(rows[name]), *shape[1:]) for name, shape in shapes.items()}
        self.A, self.shards, self.shape = A, (here, here), (len(A), len(A))
        self.space = ParamSpace(local, own, A.dtype, A.device)
        self.dtype, self.device, self.symmetric, self.psd = A.dtype, A.device, True, True

    def _matmat(self, V: torch.Tensor) -> torch.Tensor:
        here = self.shards[0]
        whole = V.new_zeros(self.shape[1], V.shape[1])
        whole[here.positions()] = V
        return (self.A @ here.spread.sum(whole))[here.positions()]


def matrix(_: str) -> Case:
    """Every algorithm on a matrix, with the same seeds."""
    shapes = {"a": (9, 8), "b": (5, 12), "c": (3,), "d": (10, 6)}
    blocks = tuple(
        parameter_block(name, name, shape, transposed=name == "b") for name, shape in shapes.items()
    )
    n = sum(block.size for block in blocks)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    values = 10.0 * 0.9 ** torch.arange(n, dtype=torch.float64) + 0.5
    values[-2:] = torch.tensor([0.2, 0.1])  # both ends stand apart
    A = Q @ torch.diag(values) @ Q.T
    theirs: Any = cs.Matrix((A + A.T) / 2, symmetric=True, psd=True)
    theirs.space = ParamSpace(blocks, shapes, A.dtype, A.device)
    ours = SpreadMatrix(theirs.A, blocks, shapes)
    here = ours.shards[0].positions().numpy()
    for what, run in RUNS.items():
        if what != "spectral norm of a block":
            yield f"matrix {what}", _numbers(run(theirs), ours.shards[0], n), _numbers(run(ours), None, 0)
    yield "matrix smallest", *(cs.eigsh(op, 2, which="SM").values for op in (theirs, ours))
    yield "matrix dense", theirs.A, ours.to_dense()
    v = torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = cs.eigsh(ours, 2, v0=v[here])
    yield "matrix eigenvectors", abs(cs.eigsh(theirs, 2, v0=v).vectors[here]), abs(found.vectors)
    for method in ("cg", "minres", "lsmr", "neumann"):
        options = {"method": method, "tol": 1e-13, "max_products": 400, "damping": 1.0}
        x = cs.solve(ours, v[here], **options).x
        assert x.any()
        yield f"matrix solve {method}", cs.solve(theirs, v, **options).x[here], x


def algorithms(_: str) -> Case:
    """Every algorithm on the Hessian of a network."""
    one = data(1, 1)  # fewer sequences than ranks: some have none
    whole, spread = (cs.Problem(model, one) for model in (zoo(), shard(zoo())))
    A, B = cs.Hessian(whole), cs.Hessian(spread)
    for what, run in RUNS.items():
        some = (A.block("L0.*"), B.block("L0.*")) if "block" in what else (A, B)
        theirs = _numbers(run(some[0]), some[1].shards[0], some[0].shape[0])
        yield what, theirs, _numbers(run(some[1]), None, 0)
    A, B = (cs.GGN(problem, "L*", damping=0.05) for problem in (whole, spread))
    yield "smallest", *(cs.eigsh(op.block("L0.W*"), 1, which="SM").values for op in (A, B))
    b = torch.randn(A.shape[0], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    here = B.shards[0].positions()
    for method in ("cg", "minres", "lsmr", "neumann"):
        options = {"method": method, "tol": 1e-13, "max_products": 60, "damping": 1.0}
        ours, theirs = cs.solve(B, b[here], **options), cs.solve(A, b, **options)
        assert ours.converged == theirs.converged
        assert np.isfinite(ours.x).all()
        assert ours.x.any()
        yield f"solve {method}", theirs.x[here.numpy()], ours.x
    small_whole, small = A.block("L0.ln1.g"), B.block("L0.ln1.g")  # fewer rows than products: written out
    for what in ("eigsh", "density", "trace hutch++", "trace function", "own probes"):
        theirs = _numbers(RUNS[what](small_whole), small.shards[0], small.shape[0])
        yield f"small {what}", theirs, _numbers(RUNS[what](small), None, 0)
    yield "dense", small_whole.to_dense(), small.to_dense()


def _bounded(x: np.ndarray) -> np.ndarray:
    return x**2 / (1 + x**2)


RUNS: dict[str, Callable[[LinearOperator], Any]] = {
    "eigsh": lambda op: cs.eigsh(op, 3, which="BE").values,
    "density": lambda op: cs.spectral_density(op, num_probes=2, num_steps=8),
    "density three terms": lambda op: cs.spectral_density(
        op, num_probes=1, num_steps=5, reorthogonalize=False
    ),
    "block density": lambda op: list(cs.block_density(op, num_probes=1, num_steps=5).values()),
    "trace": lambda op: cs.trace(op, num_probes=4),
    "trace gaussian": lambda op: cs.trace(op, num_probes=4, probe="gaussian"),
    "trace hutch++": lambda op: cs.trace(op, num_probes=12, method="hutch++"),
    "trace xtrace": lambda op: cs.trace(op, num_probes=8, method="xtrace"),
    "block traces": lambda op: cs.block_traces(op, num_probes=3),
    "trace function": lambda op: np.array(cs.trace_function(op, _bounded, num_probes=2, num_steps=8).value),
    "diagonal": lambda op: cs.diagonal(op, num_probes=3),
    "diagonal gaussian": lambda op: cs.diagonal(op, num_probes=3, probe="gaussian"),
    "diagonal xdiag": lambda op: cs.diagonal(op, num_probes=8, method="xdiag"),
    "frobenius": lambda op: cs.frobenius_norm(op, num_probes=3),
    "spectral norm": lambda op: np.array(cs.spectral_norm(op).value),
    "spectral norm of a block": lambda op: np.array(cs.spectral_norm(op.block("L0.W_Q", "L0.W_1")).value),
    "block map": lambda op: cs.block_norms(op, num_probes=1),
    "own probes": lambda op: own_probes(op, num_probes=3, num_steps=4),
    "ends": lambda op: extreme_ends(op, num_steps=6),
    "sum": lambda op: cs.trace(op * 2.0 + op @ op, num_probes=2),
}


def _numbers(result: Any, pieces: VectorShard | None, n: int) -> list[np.ndarray]:
    """The numbers in a result; of arrays over a whole vector those that a rank with these pieces has."""
    if isinstance(result, list):
        return [x for one in result for x in _numbers(one, pieces, n)]
    held = {"": result} if isinstance(result, np.ndarray) or result is None else vars(result)
    found = []
    for name, value in held.items():
        if name == "orthogonality":  # rounding alone
            continue
        if isinstance(value, float | int | np.ndarray | tuple) and not isinstance(value, bool):
            x = np.asarray(value, dtype=float)
            x = x[pieces.positions().numpy()] if pieces is not None and x.ndim and len(x) == n else x
            found.append(x)
    return found


def _with_a_number() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2).double()
    module.register_parameter("c", torch.nn.Parameter(torch.ones((), dtype=torch.float64)))
    return module


def _product_of(model: Model) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, 5, (4, 5), generator=source) for _ in range(2))
    H = cs.Hessian(cs.Problem(model, (x, y)))
    return H @ torch.ones(H.local_shape[1], dtype=torch.float64)


def refused(_: str) -> Case:
    """What cannot be done on pieces says so, on every rank, in place of giving a number."""
    model = shard(zoo())
    problem = cs.Problem(model, data())
    before = [p.to_local().clone() for p in model.module.parameters()]
    H = cs.Hessian(problem)
    n = H.shape[0]
    calls: list[Callable[[], Any]] = [
        lambda: H @ torch.ones(n, dtype=torch.float64),
        lambda: H.submatrix([0, 1]),
        lambda: H + LowRank(torch.ones(n, 1, dtype=torch.float64)),
        lambda: cs.block_traces(H, {"some": slice(0, 3)}),
        lambda: cs.Jacobian(problem),
        lambda: cs.MonteCarloFisher(problem),
        lambda: cs.eigsh(H, 2, v0=torch.zeros(H.local_shape[0], dtype=torch.float64)),
        lambda: shard(_with_a_number()),
        lambda: cs.Problem(fsdp("zoo"), data()),
        lambda: cs.KFAC(problem),
        lambda: _product_of(shard(Capacity().double())),
    ]
    for i, call in enumerate(calls):
        try:
            call()
        except CurvescopeError:
            yield f"refused {i}", 0.0, 0.0
        else:
            yield f"refused {i}", 0.0, 1.0
    untouched = zip(model.module.parameters(), before, strict=True)
    assert all(isinstance(p, DTensor) and torch.equal(p.to_local(), local) for p, local in untouched)
    assert "forward" not in vars(model.module)


def counted(_: str) -> Case:
    """Bytes and operations of a product as the cost model says."""
    model = shard(zoo(n_layers=3))
    problem, R = cs.Problem(model, data(4, 4)), dist.get_world_size()
    shapes = model.sharding.shapes
    inside = {name for name in shapes if name.startswith("L")}
    layers, outside = (
        sum(padded(shape, R) for name, shape in shapes.items() if (name in inside) == wanted)
        for wanted in (True, False)
    )
    # what travels is padded: as if rows were dealt out evenly
    decoder = replace(cost.decoder_of(model), layer=R * layers // 3, outside=R * outside)
    for kind in (cs.Hessian, cs.GGN):
        op = kind(problem)
        for columns in (1, 2):
            V = torch.ones(op.local_shape[1], columns, dtype=torch.float64)
            options = {"tokens": 4 * T, "ranks": R, "columns": columns, "element": 8}
            op.engine._forget()
            with op.frozen():
                for kept in (False, True):
                    with Counting() as seen:
                        op @ V
                    sent = seen.bytes["c10d._allgather_base_"] + seen.bytes["c10d._reduce_scatter_base_"]
                    predicted = cost.sharded(decoder, **options, cached=kept).moved
                    yield f"bytes of {op!r} {columns} {kept}", predicted, float((R - 1) * sent)


def moved(_: str) -> Case:
    """What is kept is forgotten when one entry moves, of one rank's piece, between products."""
    whole, spread = zoo(), shard(zoo())
    A, B = (cs.Hessian(cs.Problem(model, data())) for model in (whole, spread))
    left, right = (pieces.positions() for pieces in B.shards)
    v = torch.randn(A.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for turn in range(3):
        yield f"moved {turn}", (A @ v)[left], B @ v[right]
        with torch.no_grad():
            whole.module.L1.W_Q[0, turn] += 0.5
            piece = spread.module.L1.W_Q.to_local()
            if dist.get_rank() == 0:
                piece[0, turn] += 0.5


def order(_: str) -> Case:
    """Vectors are pieces of torch's own; blocks of them are found in it."""
    module, (A, B) = zoo().module, (cs.Problem(model, data(5, 5)) for model in (zoo(), shard(zoo())))
    (batch,) = A.batches
    loss = torch.nn.functional.cross_entropy(module(batch.inputs).flatten(0, 1), batch.targets.flatten())
    g = parameters_to_vector(torch.autograd.grad(loss, list(module.parameters()), create_graph=True))
    v = torch.randn(len(g), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    product = parameters_to_vector(torch.autograd.grad(g @ v, list(module.parameters())))
    here = B.model.shards(B.space()).positions()
    yield "gradient in torch's order", g.detach()[here], B.gradient()
    H, whole = cs.Hessian(B), cs.Hessian(A)
    yield "product in torch's order", product[here], H @ v[here]
    for what, make in (("H", lambda op: op), ("a sum", lambda op: 0.5 * op + op)):
        theirs, ours = (cs.block_traces(make(op), num_probes=2) for op in (whole, H))
        assert ours.names == [block.name for block in A.space()]
        yield f"traces of blocks of {what}", theirs.values, ours.values


CASES: dict[str, Callable[[str], Case]] = {
    "algorithms": algorithms,
    "order": order,
    "counted": counted,
    "matrix": matrix,
    "moved": moved,
    "refused": refused,
}


def _error(theirs: Any, ours: Any) -> float:
    """max |a − b| / max |a|, also over lists."""
    if isinstance(theirs, list):
        assert len(theirs) == len(ours)
        return max(map(_error, theirs, ours), default=0.0)
    a, b = (np.asarray(x, dtype=float) for x in (theirs, ours))
    assert a.shape == b.shape, (a.shape, b.shape)
    if not a.size:
        return 0.0
    return float(np.nanmax(np.abs(a - b), initial=0.0) / max(np.nanmax(np.abs(a), initial=0.0), 1e-300))


def one_rank(rank: int, ranks: int, folder: Path, cases: list[str]) -> None:
    """Write the largest error of every comparison, over all ranks, to a file of this rank."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=100)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=wait)
    found: dict[str, float] = {}
    for case in cases:
        for name, theirs, ours in CASES.get(case, products)(case):
            found[name] = _error(theirs, ours)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    dist.destroy_process_group()
    assert all(each.keys() == found.keys() for each in everyone)
    most = {name: max(each[name] for each in everyone) for name in found}
    (folder / f"errors-{rank}.json").write_text(json.dumps(most))


def main(ranks: int, folder: Path, cases: list[str]) -> int:
    """Fork the ranks, which have everything imported, and wait for them."""
    warnings.simplefilter("error", UserWarning)
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            code = 1
            try:
                one_rank(rank, ranks, folder, cases)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
