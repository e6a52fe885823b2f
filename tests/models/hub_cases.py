"""Load models from a hub on loopback with the real client, and print what came of each case as JSON.

It runs in a process of its own, because the client reads HF_ENDPOINT and HF_HUB_OFFLINE when it is imported:
`python hub_cases.py FOLDER online` serves a hub and fills the cache in FOLDER, `… offline` uses that cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PART = 10 * 2**20  # the client keeps a download in parts of this size
WIDE = 64


def write_models(folder: Path) -> dict[str, Path]:
    """Save three revisions of a model, one in several files, and one of more than a part."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

    words = {"[UNK]": 0, "the": 1, "model": 2, "reads": 3, "a": 4, "few": 5, "words": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    written = {}
    for seed, name in enumerate(("main", "step1000", "step2000", "sharded", "large")):
        torch.manual_seed(seed)
        vocab, width = (PART // (4 * WIDE) + 4096, WIDE) if name == "large" else (len(words), 16)
        shape = {"hidden_size": width, "intermediate_size": 32, "max_position_embeddings": 32}
        config = GPTNeoXConfig(vocab_size=vocab, num_hidden_layers=2, num_attention_heads=2, **shape)
        module = GPTNeoXForCausalLM(config)
        module.save_pretrained(folder / name, max_shard_size="10KB" if name == "sharded" else "1GB")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / name)
        written[name] = folder / name
    return written


def outcome(source: str, revision: str | None = None) -> dict[str, Any]:
    """Load a model: the sum of its parameters, or the error, and the seconds it took."""
    import curvescope as cs

    begin = time.monotonic()
    try:
        model = cs.load(source, revision=revision)
        result: dict[str, Any] = {
            "name": model.name,
            "sum": total(model.module),
            "tokenizer": model.tokenizer is not None,
        }
    except cs.CurvescopeError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    return {**result, "seconds": time.monotonic() - begin}


def total(module: Any) -> float:
    """Sum of all parameters: another for each revision."""
    return sum(float(p.detach().double().sum()) for p in module.parameters())


def online(folder: Path) -> dict[str, Any]:
    """Serve the hub and load from it; then stop it and load from the cache."""
    from hub_server import Repository, serve

    results: dict[str, Any] = {}
    with serve({}) as hub:
        os.environ["HF_ENDPOINT"] = hub.url  # before the client is imported
        written = write_models(folder / "models")
        steps = {name: written[name] for name in ("main", "step1000", "step2000")}
        hub.repositories |= {
            "org/steps": Repository(steps),
            "org/sharded": Repository({"main": written["sharded"]}),
            "org/large": Repository({"main": written["large"]}),
            "org/private": Repository(steps, token="hf_secret"),
            "org/gated": Repository(steps, gated=True),
        }
        results["truth"] = {name: total_of(path) for name, path in written.items()}
        results["main"] = outcome("org/steps")
        results["step1000"] = outcome("org/steps", "step1000")
        hub.sent.clear()
        results["again"] = {
            **outcome("org/steps", "step1000"),
            "sent": hub.sent["org/steps/model.safetensors"],
        }
        results["sharded"] = outcome("org/sharded")
        for name in ("private", "gated", "missing"):
            results[name] = outcome(f"org/{name}")
        os.environ["HF_TOKEN"] = "hf_secret"
        results["private, with its token"] = outcome("org/private", "step1000")
        del os.environ["HF_TOKEN"]
        results["no revision"] = outcome("org/steps", "step7")
        hub.break_once["model.safetensors"] = PART + PART // 20
        hub.ranges.clear()
        results["broken off"] = {**outcome("org/large"), "ranges": list(hub.ranges)}
    results["stopped, in the cache"] = outcome("org/steps", "step1000")
    results["stopped, not in the cache"] = outcome("org/steps", "step2000")
    return results


def total_of(folder: Path) -> float:
    """Sum of the parameters in a folder, read without the client."""
    from transformers import AutoModelForCausalLM

    return total(AutoModelForCausalLM.from_pretrained(folder))


def offline() -> dict[str, Any]:
    """Load from the cache that `online` has filled, with HF_HUB_OFFLINE set."""
    cases = {"in the cache": "step1000", "not in the cache": "step2000"}
    return {name: outcome("org/steps", revision) for name, revision in cases.items()}


def commands(folder: Path) -> dict[str, Any]:
    """Run two studies from the command line on revisions of the hub."""
    from hub_server import Repository, serve

    text = folder / "notes.txt"
    text.write_text("the model reads a few words " * 40)
    models = folder / "models"
    with serve({"org/steps": Repository({r: models / r for r in ("main", "step1000", "step2000")})}) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "other home")}
        shared = ["org/steps", "--data", str(text), "--tokens", "32", "--set", "seq_len=8", "--json"]
        calls = {
            "spectrum": ["--revision", "step1000", "--set", "num_probes=2", "--set", "num_steps=4"],
            "gap": ["--checkpoints", "step1000,step2000"],
        }
        done = {}
        for study, options in calls.items():
            words = [sys.executable, "-m", "curvescope", "run", study, *shared, *options]
            out = ["--out", str(folder / "runs")]
            ended = subprocess.run([*words, *out], env=environment, capture_output=True, text=True)
            done[study] = {"code": ended.returncode, "said": ended.stdout[-3000:] + ended.stderr[-3000:]}
            if ended.returncode == 0:
                done[study] |= json.loads(ended.stdout)
    return done


if __name__ == "__main__":
    place, mode = Path(sys.argv[1]), sys.argv[2]
    cases = {"online": lambda: online(place), "offline": offline, "commands": lambda: commands(place)}
    print(json.dumps(cases[mode]()))
