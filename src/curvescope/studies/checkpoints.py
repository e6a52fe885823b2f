"""Models at several points of their training: the checkpoints of a bundled one, or folders of one shape."""

from __future__ import annotations

from dataclasses import replace

from curvescope.core.errors import UsageError
from curvescope.models.model import Model
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.studies.setting import ModelOnData, load_model

HERE = "now"  # the checkpoint of a model that has no others
MEANING = "revisions of a bundled model, or folders of the same shape; by default all that are bundled"


def checkpoint_names(cfg: ModelOnData, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those asked for, or all that are bundled; one name for a model that has none."""
    if asked:
        return tuple(dict.fromkeys(asked))
    bundled = cfg.model in BUNDLED and cfg.revision is None
    return REVISIONS if bundled else (cfg.revision or HERE,)


def load_checkpoints(cfg: ModelOnData, asked: tuple[str, ...], model: Model) -> dict[str, Model]:
    """The models by name, in their order; `model`, that of the settings, where there are no others."""
    found = {}
    for name in checkpoint_names(cfg, asked):
        if cfg.model in BUNDLED and name in REVISIONS:
            found[name] = load_model(replace(cfg, revision=name))
        else:
            found[name] = load_model(replace(cfg, model=name, revision=None)) if asked else model
        check_alike(name, found[name], model)
    return found


def check_alike(name: str, found: Model, model: Model) -> None:
    """Raise unless a checkpoint has the model's parameters, by name and shape."""
    wanted, there = (
        {name: tuple(p.shape) for name, p in m.module.named_parameters()} for m in (model, found)
    )
    if there == wanted:
        return
    first = next(k for k in wanted | there if wanted.get(k) != there.get(k))
    raise UsageError(
        f"expected checkpoints of {model.name!r}, got {name!r}, which is another model: {first} is "
        f"{there.get(first, 'not there')}, not {wanted.get(first, 'there')}"
    )
