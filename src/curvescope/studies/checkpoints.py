"""Models at several points of their training: the checkpoints of a bundled one, or folders of one shape."""

from __future__ import annotations

from dataclasses import replace

from curvescope.models.model import Model
from curvescope.models.zoo.names import BUNDLED, REVISIONS
from curvescope.studies.setting import ModelOnData, load_model

HERE = "now"  # the checkpoint of a model that has no others
MEANING = "revisions of a bundled model, or folders of the same shape; by default all that are bundled"


def checkpoint_names(cfg: ModelOnData, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those asked for, or all that are bundled; one name for a model that has none."""
    if asked:
        return tuple(dict.fromkeys(asked))
    bundled = cfg.model in BUNDLED and cfg.revision is None
    return REVISIONS if bundled else (cfg.revision or HERE,)


def load_checkpoints(cfg: ModelOnData, asked: tuple[str, ...]) -> dict[str, Model]:
    """The models by name, in their order; the model itself where there are no others."""
    found = {}
    for name in checkpoint_names(cfg, asked):
        if cfg.model in BUNDLED and name in REVISIONS:
            found[name] = load_model(replace(cfg, revision=name))
        else:
            found[name] = load_model(replace(cfg, model=name, revision=None) if asked else cfg)
    return found
