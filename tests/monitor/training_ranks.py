"""Two ranks that train with and without a monitor: RANKS FOLDER CASES…, as torchrun would start them.

Each rank writes what it found to FOLDER/CASE-RANK.json.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import curvescope as cs

STEPS, EVERY = 5, 2
SECONDS = 60
IDS = torch.randint(0, 7, (12, 6), generator=torch.Generator().manual_seed(0))
PROBE = [(IDS[:4, :-1], IDS[:4, 1:])]
QUICK: dict[str, Any] = {"every": EVERY, "budget": 1.0, "blocks": False, "num_probes": 2}


def seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def gpt() -> cs.Transformer:
    seeded()
    config = cs.TransformerConfig(n_layers=2, d_model=8, n_heads=2, n_ctx=6, vocab_size=7, d_ff=16)
    return cs.Transformer(config).double()


def weights(module: nn.Module) -> Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def train(
    module: nn.Module, optimizer: Any, monitor: cs.CurvatureMonitor | None, steps: int = STEPS
) -> list[dict[str, float]]:
    """Train, each rank on sequences of its own; the converged numbers where the monitor measured."""
    seeded()
    truths = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        rows = torch.randint(len(IDS), (2, 3))[rank]
        loss = F.cross_entropy(module(IDS[rows, :-1]).flatten(0, 1), IDS[rows, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is not None and monitor.step(step, optimizer=optimizer, loss=loss):
            truths.append(truth(module, optimizer))
    return truths


def told(monitor: cs.CurvatureMonitor, same: bool) -> dict[str, Any]:
    history = monitor.history
    names = ("step", "lambda_max", "sharpness", "trace", "weight_norm", "update_norm", "grad_norm")
    names += ("lambda_max_error", "sharpness_error")
    return {"same": same, "notes": monitor.notes, **{name: history[name].tolist() for name in names}}


def twice(make: Callable[[], nn.Module], folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train without and with a monitor."""
    found, truths = [], []
    monitor: cs.CurvatureMonitor | None = None
    for watched in (False, True):
        module = make()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True)
        if watched:
            settings = {**QUICK, "out": folder, "raise_errors": True, **options}
            monitor = cs.CurvatureMonitor(module, PROBE, **settings)
        truths = train(module, optimizer, monitor)
        found.append(weights(module))
    assert monitor is not None
    monitor.close()
    return {**told(monitor, torch.equal(*found)), "truths": truths}


def truth(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """λ_max and sharpness of a whole copy of a sharded model, converged; nothing of other models."""
    if not any(hasattr(p, "full_tensor") for p in module.parameters()):
        return {}
    drawn = torch.get_rng_state()
    whole = gpt()  # which seeds anew
    torch.set_rng_state(drawn)
    torch.nn.utils.vector_to_parameters(weights(module), whole.parameters())
    own = torch.optim.AdamW(whole.parameters(), **{k: optimizer.defaults[k] for k in ("lr", "betas", "eps")})
    for p, sharded_p in zip(whole.parameters(), module.parameters(), strict=True):
        state = optimizer.state[sharded_p]
        own.state[p] = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    H = cs.Hessian(cs.Problem(whole, PROBE))
    top = float(cs.eigsh(H, 1, which="LA", tol=1e-4).values[0])
    return {"lambda_max": top, "sharpness": cs.preconditioned_sharpness(H, own, tol=1e-4).value}


def whole(folder: Path) -> dict[str, Any]:
    """The weights of the data-parallel run on one process: what two ranks must see."""
    return twice(gpt)


def data_parallel(folder: Path) -> dict[str, Any]:
    return twice(lambda: DistributedDataParallel(gpt()), folder / "ddp")


def compiled(folder: Path) -> dict[str, Any]:
    return twice(lambda: torch.compile(DistributedDataParallel(gpt()), backend="eager"))  # pyright: ignore


def sharded(folder: Path) -> dict[str, Any]:
    """PyTorch's FSDP2; λ_max and sharpness beside those of the whole model at the last weights."""
    from torch.distributed.fsdp import fully_shard

    def make() -> nn.Module:
        module = gpt()
        for layer in (module.L0, module.L1):
            fully_shard(layer)
        return fully_shard(module)

    return twice(make, folder / "fsdp", budget=0.99, every=1)


def sharded_budget(folder: Path) -> dict[str, Any]:
    """At a limited budget all ranks decide the same, and none waits for the other."""
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(gpt())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    monitor = cs.CurvatureMonitor(module, PROBE, every=2, budget=0.9, blocks=False, num_probes=2)
    train(module, optimizer, monitor, 8)
    return told(monitor, True)


def sharded_dies(folder: Path) -> dict[str, Any]:
    """Rank 1 ends in the middle of a measurement."""
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(gpt())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    monitor = cs.CurvatureMonitor(module, PROBE, **QUICK)
    if dist.get_rank() == 1:
        module.register_forward_pre_hook(lambda *_: os._exit(7) if monitor._calls == 1 else None)
    begun = time.monotonic()
    error = ""
    try:
        train(module, optimizer, monitor, 30)
    except RuntimeError as raised:  # of the training's own collective operation
        error = str(raised)
    return {"error": error, "seconds": time.monotonic() - begun}


def refused_fsdp(folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(gpt(), device_id=torch.device("cpu"))
    try:
        cs.CurvatureMonitor(module, PROBE)
    except cs.UsageError as error:
        return {"error": str(error)}
    return {"error": ""}


def hugging_face(folder: Path) -> dict[str, Any]:
    """Transformers' Trainer, which Accelerate makes data-parallel."""
    import transformers

    found, callback = [], cs.trainer_callback(PROBE, out=folder / "hf-run", raise_errors=True, **QUICK)
    for watched in (False, True):
        seeded()
        shape = {"vocab_size": 7, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "hf"), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2,
            report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="no", use_cpu=True, seed=1,
            ddp_backend="gloo", gradient_accumulation_steps=2,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in IDS]
        callbacks = [callback] if watched else []
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        found.append(weights(model))
    return _of_callback(callback, found)


def lightning(folder: Path) -> dict[str, Any]:
    import lightning.pytorch as L
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            (x,) = batch
            return F.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    found, callback = [], cs.lightning_callback(PROBE, out=folder / "pl-run", raise_errors=True, **QUICK)
    for watched in (False, True):
        module = Module()
        seeded()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IDS), batch_size=2, shuffle=True)
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
        trainer = L.Trainer(
            max_steps=STEPS, accelerator="cpu", devices=2, strategy=strategy, logger=False, num_nodes=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[callback] if watched else [],
        )  # fmt: skip
        trainer.fit(module, loader)
        found.append(weights(module))
    return _of_callback(callback, found)


def _of_callback(callback: Any, found: list[Tensor]) -> dict[str, Any]:
    same = torch.equal(*found)
    return {"same": same, "step": []} if callback.monitor is None else told(callback.monitor, same)


CASES = [
    whole, data_parallel, compiled, sharded, sharded_budget, sharded_dies, refused_fsdp, hugging_face,
    lightning,
]  # fmt: skip
OWN_GROUP = {"hugging_face", "lightning"}  # which make the process group themselves


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(60, repeat=True)  # a rank that hangs says where
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    for name in names:
        if name not in OWN_GROUP and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
        try:
            found = next(case for case in CASES if case.__name__ == name)(folder)
        except Exception:
            found = {"failed": traceback.format_exc()}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized() and "sharded_dies" not in names:
        dist.destroy_process_group()


def launch(folder: Path, names: list[str], ranks: int = 2) -> list[int]:
    """Start the ranks, and wait for all of them: their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(filter(None, sys.path))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "GROUP_RANK": "0"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-W", "ignore", __file__, str(folder), *names]
    children = []
    for rank in range(ranks):
        own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"log-{names[0]}-{rank}.txt").open("w") as log:
            children.append(subprocess.Popen(words, env=own, stdout=log, stderr=subprocess.STDOUT))
    try:
        return [child.wait(timeout=900) for child in children]
    finally:
        for child in children:
            child.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
