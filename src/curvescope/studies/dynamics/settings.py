"""What the study is told: which experiments, on which model and data, for how long."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.studies.setting import ModelOnData

EXPERIMENTS = {
    "edge": "gradient descent: λ_max rises to 2/η and stays there (Cohen et al. 2021)",
    "adam": "Adam: the preconditioned sharpness and its threshold (Cohen et al. 2022)",
    "warmup": "Adam with a warm-up and without it",
    "spikes": "a learning rate that rises above the ceiling, and what warned before the loss rose",
    "grokking": "modular addition: curvature before and after the model generalizes",
}
SMALL, AUTO = "small", "auto"
DIGITS, SAMPLE = "task:digits", "sample"


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to train, and how long. The defaults take about four minutes of one core."""

    model: str = setting(SMALL, "small: a Transformer made for the task; else a name, a folder, a hub id, …")
    data: str = setting(
        AUTO, "a corpus, a file, a folder, task:NAME; auto: task:digits, of a text model sample"
    )
    experiments: tuple[str, ...] = setting(tuple(EXPERIMENTS), f"of {', '.join(EXPERIMENTS)}")
    checkpoints: tuple[str, ...] = setting(
        (), "measured in the place of training: a folder of checkpoints, folders, or revisions of the model"
    )
    num_sequences: int = setting(100, "sequences or pictures of a task that the small model is trained on")
    steps: int = setting(300, "of the runs edge and adam")
    every: int = setting(15, "steps from one measurement to the next, in edge and adam")
    edges: tuple[float, ...] = setting((0.6, 0.9), "2/η of each run of edge, in units of λ_max at the start")
    adam_lr: float = setting(0.002, "η of the run adam")
    beta2: float = setting(0.99, "β₂ of Adam, in adam and warmup")
    warmup_lr: float = setting(0.01, "η of the runs warmup, with and without")
    warmup_steps: int = setting(100, "over which η rises to it; as many follow")
    above: float = setting(4.0, "η at the end of a run of spikes that goes above, of 2/λ_max at the start")
    below: float = setting(0.4, "likewise, of one that stays below")
    spike_steps: int = setting(100, "of a run of spikes, over all of which η rises")
    num_seeds: int = setting(2, "networks of spikes, of warmup twice as many, of grokking at most two")
    modulus: int = setting(29, "p of the additions modulo p")
    fraction: float = setting(0.6, "of the p² pairs that are trained on")
    grok_lr: float = setting(0.005, "η of AdamW in grokking")
    weight_decay: float = setting(2.0, "of AdamW in grokking")
    grok_steps: int = setting(700, "of a run of grokking")
    blocks: tuple[str, ...] = setting(("*",), "of checkpoints: globs of blocks that are measured one by one")
    num_probes: int = setting(4, "of traces")

    def __post_init__(self) -> None:
        as_tuples(self, "experiments", "checkpoints", "edges", "blocks")
        super().__post_init__()
        at_least(self, 2, "steps", "warmup_steps", "spike_steps", "grok_steps", "num_probes")
        at_least(self, 1, "every", "num_seeds", "num_sequences")
        for name in self.experiments:
            if name not in EXPERIMENTS:
                raise UsageError(
                    f"experiments: expected some of {', '.join(EXPERIMENTS)}, got {name!r}",
                    hint=near_misses(name, list(EXPERIMENTS)),
                )
        rates = {"edges": min(self.edges, default=1.0), "above": self.above, "below": self.below}
        rates |= {name: getattr(self, name) for name in ("adam_lr", "warmup_lr", "grok_lr")}
        for name, value in rates.items():
            if not value > 0:
                raise UsageError(f"{name}: expected a number above 0, got {value}")
