"""Spectrum of a GPT-2 with growing attention sinks: 12 layers, d 768, 12 heads, in transformers' own code.

    python benchmarks/sinks_gpt2.py --device cuda --out benchmarks/results/sinks-gpt2

GPT-2's weights are not available offline, so the model has its shape and initialization, and is trained for a
few hundred steps on the bundled text (tokens of the bundled tokenizer), enough for heads that look at the
first token. There are two interventions, four strengths each, on three texts. The script writes tables and
figures of the study and its time, under 200 s on an H200.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _timing import machine

import curvescope as cs
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.studies import sinks
from curvescope.train import TrainConfig, train

STRENGTHS = (1.0, 2.0, 4.0, 8.0)


def make(args: argparse.Namespace) -> Model:
    """Return GPT-2 with the bundled tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = cs.load("tiny-gpt").tokenizer
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=args.heads, n_positions=args.context + 8,
        vocab_size=tokenizer.vocab_size, bos_token_id=None, eos_token_id=None, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return replace(load(GPT2LMHeadModel(config), device=args.device), name="GPT-2", tokenizer=tokenizer)


def trained(model: Model, args: argparse.Namespace) -> tuple[Model, list[float]]:
    """Return the model after some steps on the text, and its losses."""
    data = cs.text_data("sample", model, tokens=args.train_tokens, seq_len=args.context, batch_size=8, seed=1)
    model_, log, _ = train(model, data, TrainConfig(steps=args.steps, lr=args.lr, warmup=args.steps // 10))
    return model_, log.loss.tolist()


def settings(args: argparse.Namespace) -> sinks.Config:
    """Return the study's configuration: three texts, two interventions."""
    return sinks.Config(
        tokens=3 * args.tokens, seq_len=args.context, batch_size=2, texts=3, hows=("bias", "inserted"),
        biases=STRENGTHS, strengths=STRENGTHS, num_probes=args.probes, num_steps=args.lanczos,
        ggn_steps=6, block_steps=0, device=args.device,
    )  # fmt: skip


def main() -> None:
    """Train, run the study, and write its results."""
    args = read()
    clock = time.perf_counter()
    model = make(args)
    model, losses = trained(model, args)
    seconds: dict[str, float] = {"training": time.perf_counter() - clock}
    cfg = settings(args)
    data = cs.text_data("sample", model, tokens=cfg.tokens, seq_len=cfg.seq_len, batch_size=2, seed=0)

    def say(what: str, number: int, total: int) -> None:
        print(f"{time.perf_counter() - clock:6.1f} s  {number}/{total} {what}", flush=True)

    result = sinks.measure(cs.Problem(model, data), cfg, [], progress=say)
    seconds["all"] = time.perf_counter() - clock
    facts = machine() | {"device": args.device, "parameters": model.num_parameters, "seconds": seconds}
    facts |= {"training_loss": [losses[0], losses[-1]], "steps": args.steps, "settings": cfg.to_dict()}
    write(result, facts, args.out)


def write(result: sinks.Sinks, facts: dict[str, Any], out: Path) -> None:
    """Write tables, figures and headline numbers."""
    import matplotlib

    matplotlib.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    for name, table in result.tables().items():
        table.to_csv(out / f"{name}.csv", index=False)
    for name, figure in result.figures().items():
        figure.savefig(out / f"{name}.png", dpi=150)
    facts |= {"summary": [list(line) for line in result.summary()], "captions": result.captions()}
    (out / "result.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    for line in result.summary():
        print("  ".join(line))


def read() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    numbers = {"layers": 12, "width": 768, "heads": 12, "context": 256, "steps": 300, "probes": 5}
    numbers |= {"lanczos": 10, "tokens": 512, "train_tokens": 30_000}
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=6e-4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
