"""What the studies of geometry share: a model with a vocabulary, a choice of layers, data for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from curvescope.core.config import Config
from curvescope.core.errors import UsageError
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.masking import masked_lm
from curvescope.data.tasks import task
from curvescope.data.text import text
from curvescope.geometry.roles import check_vocabulary
from curvescope.models.load import load
from curvescope.models.model import Model

TASK = "task:"
FEW_LAYERS = 4


@dataclass(frozen=True)
class TokenModel(Config):
    """A model that reads tokens."""

    model: str = "tiny-gpt"  # a bundled name, a folder, a hub id, a checkpoint or a TOML file
    revision: str | None = None  # a training checkpoint of a bundled model
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class TokenModelOnData(TokenModel):
    """A model that reads tokens, and a text or task to read."""

    data: str = "sample"  # a corpus, a file, a folder, or task:NAME
    tokens: int = 1024
    seq_len: int = 64
    batch_size: int = 8


def load_token_model(cfg: TokenModel) -> Model:
    """The model, refused when it has no vocabulary."""
    model = load(cfg.model, revision=cfg.revision, dtype=cfg.dtype, device=cfg.device)
    check_vocabulary(model)
    return model


def read_data(cfg: TokenModelOnData, model: Model) -> Batches:
    """Tokens with targets: the next one for a causal model, the hidden one for a masked one, else itself."""
    if cfg.data.startswith(TASK):
        return task(cfg.data.removeprefix(TASK), batch_size=cfg.batch_size)
    if model.tokenizer is None:
        raise UsageError(
            f"the model {model.name!r} has no tokenizer, so it cannot read the text {cfg.data!r}",
            hint="choose a task, e.g. --data task:addition",
        )
    length = min(cfg.seq_len, model.n_ctx or cfg.seq_len)
    options = {"tokens": cfg.tokens, "seq_len": length, "batch_size": cfg.batch_size, "seed": cfg.seed}
    if model.facts.get("task") == "masked-lm":
        return masked_lm(cfg.data, model, **options)
    found = text(cfg.data, model, **options)
    if model.facts.get("causal", True):
        return found
    inputs = torch.cat([batch.inputs for batch in found])  # pyright: ignore[reportCallIssue, reportArgumentType]
    targets = torch.cat([batch.targets for batch in found])
    own = torch.where(targets == IGNORED, targets, inputs)
    return Batches.from_tensors(inputs, own, batch_size=cfg.batch_size, name=found.name)


def choose_layers(wanted: Sequence[int], model: Model) -> list[int]:
    """The layers asked for (negative ones count from the end).

    By default all of up to four, else the first, the one before the middle, and the last: 0, 5, 11 of 12.
    """
    L = int(model.facts.get("n_layers", 0))
    if not wanted:
        return list(range(L)) if L <= FEW_LAYERS else [0, (L - 1) // 2, L - 1]
    for layer in wanted:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -L <= layer < L:
            raise UsageError(f"expected layers from 0 to {L - 1} of {model.name!r}, got {layer!r}")
    return list(dict.fromkeys(layer % L for layer in wanted))


def as_tuples(cfg: Config, *names: str) -> None:
    """In a frozen configuration, let fields that hold several values be given a single one."""
    known = {field.name for field in fields(cfg)}
    for name in names:
        value: Any = getattr(cfg, name)
        assert name in known
        if not isinstance(value, tuple):
            object.__setattr__(cfg, name, (value,))


def at_least(cfg: Config, fewest: int, *names: str) -> None:
    """Raise unless the numbers are large enough."""
    for name in names:
        if getattr(cfg, name) < fewest:
            raise UsageError(f"{name}: expected at least {fewest}, got {getattr(cfg, name)}")
