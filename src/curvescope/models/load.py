"""`load`: a model from a name, a folder, a configuration or a module."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvescope.core.errors import UsageError
from curvescope.models import zoo
from curvescope.models.mlp import MLP, MLPConfig
from curvescope.models.model import Model
from curvescope.models.names import BUNDLED
from curvescope.models.plain import mode_notes, plain_model
from curvescope.models.transformer import Transformer, TransformerConfig


def load(
    source: Any,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> Model:
    """A model with named blocks.

    Args:
        source: A bundled name ("tiny-gpt"), a folder saved by `curvescope.models.save`, a TOML file or
            `TransformerConfig` (fresh weights from its seed), or any `nn.Module`, which is not changed.
        dtype: Parameters in this type, e.g. "float64"; a module is copied if it has another.
        device: Parameters on this device, likewise.
        revision: A training checkpoint of a bundled model: initial, early, middle or final.
    """
    if revision is not None and not (isinstance(source, str) and source in BUNDLED):
        raise UsageError(f"expected a bundled model with revision={revision!r}, got {_words(source)}")
    if (
        dtype is not None
        and isinstance(source, nn.Module)
        and len({p.dtype for p in source.parameters()}) > 1
    ):
        source = copy.deepcopy(source).to(as_dtype(dtype))
    model = _read(source, revision)
    wanted = as_dtype(dtype if dtype is not None else model.dtype)
    place = as_device(device) if device is not None else model.device
    if wanted != model.dtype or place != model.device:
        module = copy.deepcopy(model.module) if isinstance(source, nn.Module | Model) else model.module
        model = Model(
            module.to(device=place, dtype=wanted),
            model.name,
            model.blocks,
            model.heads,
            model.facts,
            model.notes,
            model.tokenizer,
        )
    return model


def _read(source: Any, revision: str | None) -> Model:
    if isinstance(source, Model):
        return source
    if isinstance(source, TransformerConfig | MLPConfig):
        source = Transformer(source) if isinstance(source, TransformerConfig) else MLP(source)
    if isinstance(source, Transformer | MLP):
        return zoo.zoo_model(source, name=type(source).__name__)
    if isinstance(source, nn.Module):
        for note in mode_notes(source):
            warnings.warn(note, stacklevel=3)
        return plain_model(source)
    if not isinstance(source, str | Path):
        raise UsageError(f"expected a name, a path, a configuration or an nn.Module, got {_words(source)}")
    if str(source) in BUNDLED:
        return zoo.bundled(str(source), revision)
    return _read_path(Path(source))


def _read_path(path: Path) -> Model:
    if len(path.name) > 255:
        raise zoo.unknown(str(path))
    if path.is_file() and path.suffix == ".toml":
        return zoo.zoo_model(zoo.build(zoo.read_config(path)), name=path.stem)
    if path.is_dir():
        if (path / zoo.CONFIG).exists() and (path / zoo.WEIGHTS).exists():
            return zoo.read_folder(path)
        raise UsageError(
            f"expected {zoo.CONFIG} and {zoo.WEIGHTS} in the folder {path}, at least one is missing"
        )
    if path.exists():
        raise UsageError(f"expected a folder or a .toml file, got the file {path}")
    raise zoo.unknown(str(path))


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """float32 or float64, by name or as torch's own."""
    known = {"float32": torch.float32, "float64": torch.float64}
    found = known.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in known.values():
        raise UsageError(
            f"expected float32 or float64, got {dtype!r}", hint="half precision loses second derivatives"
        )
    return found


def as_device(device: torch.device | str) -> torch.device:
    """A device that is here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"expected a device such as cpu or cuda, got {device!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("expected a CUDA device, but torch sees none", hint="use device='cpu'")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _words(source: Any) -> str:
    return repr(source) if isinstance(source, str | Path) else f"a {type(source).__name__}"
