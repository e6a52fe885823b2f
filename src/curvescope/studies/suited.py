"""Which studies a model cannot have, found before any of them begins."""

from __future__ import annotations

from dataclasses import fields

from curvescope.core.config import Settings
from curvescope.core.errors import CurvescopeError
from curvescope.models.zoo import BUNDLED
from curvescope.studies.setting import ModelOnData, TokenModel, load_model, load_token_model

GEOMETRY = ("heads", "trajectory", "embeddings", "layernorm", "probes")  # studies of one stream of tokens


def unsuited(studies: list[str], given: Settings) -> dict[str, str]:
    """The studies among these that the model is not made for, with the reason; a bad model is an error.

    Args:
        given: settings, with the model.
    """
    known = {field.name for field in fields(TokenModel)}
    cfg = {name: value for name, value in given.items() if name in known and value not in (None, [])}
    found = {}
    try:
        load_token_model(TokenModel.from_dict(cfg))
    except CurvescopeError as error:
        load_model(ModelOnData.from_dict(cfg))  # raises where it is no model at all
        found = {study: error.message for study in studies if study in GEOMETRY}
    if "dynamics" in studies and given.get("model") not in BUNDLED and not given.get("checkpoints"):
        found["dynamics"] = "a model without checkpoints has no course; --checkpoints names them"
    return found
