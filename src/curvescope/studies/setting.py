"""What studies of a model on data share: the settings, and the problem made from them."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import Config
from curvescope.core.errors import UsageError
from curvescope.data.batches import Batches
from curvescope.data.tasks import task
from curvescope.data.text import text
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.problem import Problem

TASK = "task:"


@dataclass(frozen=True)
class ModelOnData(Config):
    """A model, data and a loss."""

    model: str = "tiny-gpt"  # a bundled name, a folder or a TOML file
    revision: str | None = None  # a training checkpoint of a bundled model
    data: str = "sample"  # a corpus, a file, a folder, or task:NAME
    tokens: int = 512  # counted targets of a text
    seq_len: int = 64
    batch_size: int = 8
    loss: str = "cross_entropy"
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = "auto"
    seed: int = 0


def make_problem(cfg: ModelOnData) -> Problem:
    """The model on the data, with everything checked before work begins."""
    model = load(cfg.model, revision=cfg.revision, dtype=cfg.dtype, device=cfg.device)
    return Problem(model, make_batches(cfg, model), loss=cfg.loss)


def make_batches(cfg: ModelOnData, model: Model) -> Batches:
    """Text through the model's tokenizer, or a task."""
    if cfg.data.startswith(TASK):
        return task(cfg.data.removeprefix(TASK), batch_size=cfg.batch_size)
    if model.tokenizer is None:
        raise UsageError(
            f"the model {model.name!r} has no tokenizer, so it cannot read the text {cfg.data!r}",
            hint="choose a task, e.g. --data task:addition",
        )
    return text(
        cfg.data, model, tokens=cfg.tokens, seq_len=cfg.seq_len, batch_size=cfg.batch_size, seed=cfg.seed
    )
