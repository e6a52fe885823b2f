"""Run the stored results of the studies `prune` and `quantize`, over all cores.

    python benchmarks/surgery.py                              # the defaults, on the bundled model
    python benchmarks/surgery.py --profile full --jobs 16     # over samples of text, and over trained models

The first writes benchmarks/results/surgery/{prune,quantize}.json and the tables of their guides, the second
{prune,quantize}-full.json and the tables over models: five samples of text with the bundled model, and five
Transformers that the script trains on addition. Finished parts are stored under --parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from _stored import GUIDES, RESULTS, arguments, claim_rows, put_table, spread, store

from curvescope.core.result import Result
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.zoo.folder import save
from curvescope.models.zoo.transformer import TransformerConfig
from curvescope.runs.study_result import Shown
from curvescope.studies import prune, quantize
from curvescope.studies.common.statistics import over_models
from curvescope.studies.prune.study import Pruned
from curvescope.studies.prune.view import ranked as prune_ranked
from curvescope.studies.quantize.study import Quantized
from curvescope.studies.quantize.view import ranked as quantize_ranked
from curvescope.train import TrainConfig, train

SEEDS = range(5)
BUNDLED, ADDITION = "tiny-gpt", "addition"
DIGITS, STEPS = 5, 1500  # as task:addition
PAGES = {"prune": GUIDES / "pruning.md", "quantize": GUIDES / "quantizing.md"}


class Task(NamedTuple):
    """Name of a study, a family of models, and a seed."""

    study: str
    family: str
    seed: int
    models: Path


def trained(folder: Path, seed: int) -> Path:
    """Return a Transformer of two layers, trained on addition."""
    path = folder / f"addition-{seed}"
    if not (path / "config.toml").exists():
        shape = TransformerConfig(
            n_layers=2, d_model=32, n_heads=4, n_ctx=3 * DIGITS + 3, vocab_size=12, init="scaled", seed=seed
        )
        sums = task_data("addition", num_sequences=64 * 500, digits=DIGITS, batch_size=64, seed=10_000 + seed)
        save(train(load(shape), sums, TrainConfig(steps=STEPS, lr=3e-3))[0], path)
    return path


def work(task: Task) -> Shown:
    """Run a study with the default settings except model, data and seed."""
    settings: dict[str, Any] = {"seed": task.seed}
    if task.family == ADDITION:
        path = trained(task.models / task.study, task.seed)  # one folder per process
        settings |= {"model": str(path), "data": "task:addition"}
    if task.study == "prune":
        return prune.run(prune.Config(**settings))
    return quantize.run(quantize.Config(**settings))


def values(result: Result) -> dict[str, float]:
    """Return the headline values of a run by their labels."""
    if isinstance(result, Pruned):
        return {words: ranking.correlation.value for words, ranking in prune_ranked(result).items()}
    assert isinstance(result, Quantized)
    return {
        f"{words}, {bits} bits": result_of_bits.value
        for words, by_bits in quantize_ranked(result).items()
        for bits, result_of_bits in by_bits.items()
    }


def main() -> None:
    args = arguments(__doc__)
    full = args.profile == "full"
    families = (BUNDLED, ADDITION) if full else (BUNDLED,)
    parts = args.parts / "surgery"
    tasks = {
        f"{study}.{family}.{seed}": Task(study, family, seed, parts / "models")
        for study in PAGES
        for family in families
        for seed in (SEEDS if full else (0,))
    }
    results = spread(work, tasks, jobs=args.jobs, parts=parts)
    for study, page in PAGES.items():
        if not full:
            bundled_result: Any = results[f"{study}.{BUNDLED}.0"]
            losses = {
                "model": bundled_result.model,
                "loss": bundled_result.loss,
                "held_out_loss": bundled_result.held_out_loss,
            }
            claims = bundled_result.claims()
            store(RESULTS / "surgery" / f"{study}.json", study, {}, claims, **losses)
        else:
            each = {f: [values(results[f"{study}.{f}.{seed}"]) for seed in SEEDS] for f in families}
            claims = over_models(each)
            path = RESULTS / "surgery" / f"{study}-full.json"
            store(path, study, {"families": list(families), "seeds": len(SEEDS)}, claims, values=each)
        put_table(page, "over models" if full else "claims", claim_rows(claims))


if __name__ == "__main__":
    main()
