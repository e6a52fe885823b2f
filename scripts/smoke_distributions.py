"""Install the built wheel or sdist alone in fresh environments, once per extra, and try it there.

    python -m build python scripts/smoke_distributions.py dist/*.whl                          # core, and
    every extra python scripts/smoke_distributions.py dist/*.tar.gz --extra core python
    scripts/smoke_distributions.py dist/*.whl --before torch==2.13.0   # installed first, in this exact
    version

One line per environment: whether the smoke test passed, and the size of the installed packages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CORE = """
import curvescope as cs
model = cs.load("tiny-gpt")
problem = cs.Problem(model, cs.text_data("sample", model, tokens=64, seq_len=32))
assert cs.trace(cs.Hessian(problem, "L0.W_Q"), num_probes=2).stderr > 0
"""
SMOKE = {
    "core": "",
    "hf": """
import transformers, datasets, torch
config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
model = cs.load(transformers.GPT2LMHeadModel(config))
problem = cs.Problem(model, cs.Batches.from_tensors(torch.arange(8)[None], torch.arange(8)[None]))
assert cs.eigsh(cs.Hessian(problem, "L0.W_Q"), k=1).converged
""",
    "peft": """
import peft, torch
adapted = peft.LoraConfig(r=2, target_modules=["0"])
module = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 2)), adapted)
problem = cs.Problem(module, cs.Batches.from_tensors(torch.randn(4, 3), torch.randn(4, 2)), loss="mse")
assert cs.GGN(problem).shape[0] == problem.num_parameters
""",
    "lens": """
import torch, transformer_lens
config = transformer_lens.HookedTransformerConfig(
    n_layers=1, d_model=8, n_ctx=8, d_head=4, n_heads=2, d_vocab=16, act_fn="gelu"
)
model = cs.load(transformer_lens.HookedTransformer(config))
problem = cs.Problem(model, cs.Batches.from_tensors(torch.arange(8)[None], torch.arange(8)[None]))
assert cs.eigsh(cs.Hessian(problem, "L0.W_Q"), k=1).converged
""",
    "umap": """
import numpy as np
from curvescope.geometry.projection import project
assert project(np.random.default_rng(0).normal(size=(40, 5)), method="umap").coordinates.shape == (40, 3)
""",
    "monitor": """
import tensorboard, wandb, lightning
from curvescope.monitor.callbacks.pytorch_lightning import lightning_callback
assert isinstance(lightning_callback(problem.batches), lightning.pytorch.Callback)
""",
}
"""Code that runs with each extra, after CORE."""
COMMANDS = (["--version"], ["list"], ["doctor"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("distribution", type=Path, help="a wheel or a source distribution")
    parser.add_argument("--extra", nargs="+", choices=list(SMOKE), default=list(SMOKE))
    parser.add_argument("--before", nargs="*", default=[], help="requirements to install first")
    args = parser.parse_args()
    results = [attempt(args.distribution.resolve(), extra, args.before) for extra in args.extra]
    sys.exit(0 if all(results) else 1)


def attempt(distribution: Path, extra: str, before: list[str]) -> bool:
    """Install into a fresh environment, run the smoke test, and print a line."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        target = str(distribution) if extra == "core" else f"{distribution}[{extra}]"
        steps = [
            *([[*install, *before]] if before else []),
            [*install, target],
            [str(python), "-m", "pip", "check"],
            *([str(environment / "bin" / "curvescope"), *command] for command in COMMANDS),
            [str(python), "-c", CORE + SMOKE[extra]],
        ]
        for step in steps:
            done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                output = done.stdout[-1500:] + done.stderr[-3000:]
                print(f"{extra}: failed at {' '.join(step)[:200]}\n{output}", flush=True)
                return False
        print(f"{extra}: passed, {size(environment) / 1e6:.0f} MB installed", flush=True)
        return True


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
