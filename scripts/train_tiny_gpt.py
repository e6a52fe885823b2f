"""Train the bundled model `tiny-gpt` on the source of Python's standard library.

    python scripts/train_tiny_gpt.py --device cuda --out src/curvescope/assets/tiny-gpt

Every twentieth file is held out. Writes config.toml, tokenizer.json, model.safetensors (float32), three
checkpoints (float16) and training.csv. The text differs between Python versions, so a second run gives
another model; use the files in the package. `scripts/evaluate_tiny_gpt.py` prints losses.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import curvescope as cs
from curvescope.core.seeds import generator
from curvescope.data.corpora import stdlib_files
from curvescope.models.zoo.folder import zoo_model
from curvescope.tokenizers import BPETokenizer
from curvescope.train import TrainConfig, train

VOCABULARY, CONTEXT, BATCH, SEED = 512, 128, 256, 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--out", type=Path, default=Path("src/curvescope/assets/tiny-gpt"))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True

    texts = [path.read_text(encoding="utf-8") for path in stdlib_files()]
    held, seen = texts[::20], [text for i, text in enumerate(texts) if i % 20]
    tokenizer = BPETokenizer.train(seen, vocab_size=VOCABULARY)
    ids = {
        name: encoded(tokenizer, part).to(options.device)
        for name, part in {"seen": seen, "held": held}.items()
    }
    print(
        f"{len(seen)} files, {len(ids['seen'])} tokens; held out {len(held)} files, {len(ids['held'])} tokens"
    )

    config = cs.TransformerConfig(
        n_layers=4, d_model=96, n_heads=4, d_ff=384, n_ctx=CONTEXT, vocab_size=VOCABULARY, seed=SEED
    )
    model = zoo_model(cs.Transformer(config).to(options.device), name="tiny-gpt", tokenizer=tokenizer)
    early, middle = max(options.steps // 60, 1), options.steps // 8
    cfg = TrainConfig(steps=options.steps, lr=3e-3, warmup=options.steps // 60, snapshots=(0, early, middle))
    trained, history, checkpoints = train(model, lambda step: windows(ids["seen"], BATCH, SEED, step), cfg)

    cs.save(trained, options.out)
    for name, step in {"initial": 0, "early": early, "middle": middle}.items():
        half = {key: value.half() for key, value in checkpoints[step].items()}
        save_file(half, options.out / f"checkpoint-{name}.safetensors")
    every = max(options.steps // 600, 1)
    with (options.out / "training.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["step", "loss", "lr", "grad_norm"])
        for i in range(0, options.steps, every):
            table.writerow(
                [i, *(f"{column[i]:.5g}" for column in (history.loss, history.lr, history.grad_norm))]
            )
    facts = {
        "corpus": f"python-stdlib of Python {platform.python_version()}, every 20th file held out",
        "tokens_seen": options.steps * BATCH * CONTEXT,
        "distinct_tokens": len(ids["seen"]),
        "steps": {"initial": 0, "early": early, "middle": middle, "final": options.steps},
        "held_out_loss_nats": round(held_out_loss(trained.module, ids["held"]), 4),
        "torch": torch.__version__.split("+")[0],
    }
    (options.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=1))


def encoded(tokenizer: BPETokenizer, texts: list[str]) -> Tensor:
    return torch.tensor([token for text in texts for token in tokenizer.encode(text)])


def windows(ids: Tensor, count: int, seed: int, step: int) -> cs.Batch:
    starts = torch.randint(len(ids) - CONTEXT - 1, (count, 1), generator=generator(seed, step)).to(ids.device)
    tokens = ids[starts + torch.arange(CONTEXT + 1, device=ids.device)]
    return cs.Batch(tokens[:, :-1], tokens[:, 1:])


@torch.no_grad()
def held_out_loss(module: torch.nn.Module, ids: Tensor) -> float:
    cut = ids[: (len(ids) - 1) // CONTEXT * CONTEXT + 1]
    inputs, targets = cut[:-1].view(-1, CONTEXT), cut[1:].view(-1, CONTEXT)
    total = sum(
        float(torch.nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten(), reduction="sum"))
        for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    )
    return total / targets.numel()


if __name__ == "__main__":
    main()
