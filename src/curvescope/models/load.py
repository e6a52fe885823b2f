"""Load a model from a name, a folder, a configuration or a module."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from curvescope.core.errors import MissingExtra, UsageError, warn
from curvescope.models.adapters import lens
from curvescope.models.curvature_sources import repeated_layers
from curvescope.models.hf import source
from curvescope.models.hf import source as hf
from curvescope.models.hf.module import adapt, is_transformers, with_routing
from curvescope.models.model import Model
from curvescope.models.nanogpt import adapt_nanogpt, is_nanogpt, read_nanogpt
from curvescope.models.plain import check_initialized, mode_notes, plain_model
from curvescope.models.roles import with_roles
from curvescope.models.running.eager import original
from curvescope.models.running.function_module import FunctionModule, function_module, is_function
from curvescope.models.running.module_calls import Output
from curvescope.models.running.weights.widening import HALVES, Widening, is_half, widening_note
from curvescope.models.zoo import BUNDLED
from curvescope.models.zoo import folder as zoo
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig

LOG = logging.getLogger("curvescope")
_widening_logged: set[str] = set()  # names of models whose widening is already logged


def load(
    source: Any,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    roles: Mapping[str, Any] | None = None,
    output: Output | None = None,
    params: Mapping[str, Any] | None = None,
    routing: Literal["differentiable", "frozen"] | None = None,
) -> Model:
    """Load a model with named blocks.

    Args:
        source: A bundled name ("tiny-gpt"), a folder saved by `curvescope.models.save`, a TOML file or
            `TransformerConfig` (fresh weights from its seed); a Hugging Face folder or hub id, a GGUF file,
            nanoGPT's ckpt.pt; any `nn.Module`, which is not changed; or a function f(params, x).
        dtype: Dtype of the parameters, e.g. "float64"; a module with another dtype is copied. With "bfloat16"
            or "float16", weights stay in half precision and are converted to float32 layer by layer: half the
            memory, and the same products as the float32 model with these weights. By default, a module keeps
            its dtype, and a folder or hub id is loaded in float32.
        device: Device of the parameters; a module on another device is copied.
        revision: A training checkpoint of a bundled model (initial, early, middle, final), or a revision of a
            hub id.
        roles: Roles of the parameters of your own module: {"L{layer}.W_Q": "blocks.{layer}.q.weight", …,
            "n_heads": 4}; see `curvescope.models.roles`.
        output: The part of the module's return value that is its output, by name, position or a function; by
            default `logits`, or the only real tensor of a tuple.
        params: The parameters of a function, by name; they share memory with the tensors given.
        routing: For a mixture of experts: whether the weights of the chosen experts are differentiated (the
            default) or held constant ("frozen"). The choice itself is constant.
    """
    if is_function(source) or params is not None:
        source = function_module(_function(source), params)
    if isinstance(source, nn.Module):
        source = original(source)
        check_initialized(source)
    target_device = None if device is None else as_device(device)
    target_dtype = None if dtype is None else as_dtype(dtype)
    if revision is not None and not _has_revisions(source):
        raise UsageError(f"expected a bundled model with revision={revision!r}, got {_described(source)}")
    if (
        target_dtype is not None
        and isinstance(source, nn.Module)
        and len({p.dtype for p in source.parameters()}) > 1
    ):
        source = copy.deepcopy(source).to(target_dtype)
    model = _read(source, revision, target_dtype)
    model = model if roles is None else with_roles(model, roles)
    model = model if output is None else replace(model, output=output)
    model = model if routing is None else with_routing(model, routing)
    given = source.module if isinstance(source, Model) else source
    own = model.module is not given
    stored = next(model.module.parameters()).dtype
    if target_dtype is None and is_half(model.module):
        target_dtype = stored
    model = _converted(model, target_device or model.device, target_dtype or as_dtype(stored), own=own)
    return _widened(model) if target_dtype in HALVES else model


def _widened(model: Model) -> Model:
    """Return the model with weights that stay in half precision and are converted to float32 when used."""
    if model.widening is not None:
        return model
    note = widening_note(dict(model.named_parameters()))
    if model.name not in _widening_logged:
        LOG.warning("%s: %s", model.name, note)
        _widening_logged.add(model.name)
    layers = tuple(repeated_layers(model.module))
    return replace(model, widening=Widening(layers), notes=(*model.notes, note))


def _function(source: Any) -> Any:
    if is_function(source):
        return source
    raise UsageError(f"expected a function f(params, x) together with params, got {_described(source)}")


def _converted(model: Model, device: torch.device, dtype: torch.dtype, *, own: bool) -> Model:
    """Return the model on a device and in a dtype: a copy, unless the module is our own or already there."""
    kinds = {p.dtype for p in model.module.parameters()}
    if (kinds == {dtype} or (dtype in kinds and is_half(model.module))) and device == model.device:
        return model
    model = replace(
        model, widening=None, notes=(*model.notes, *_conversion_notes(model, kinds, dtype, own=own))
    )
    if lens.is_hooked(model.module):
        return replace(model, module=lens.move(model.module, device, dtype))
    module = model.module if own else copy.deepcopy(model.module)
    if dtype not in HALVES:
        return replace(model, module=module.to(device=device, dtype=dtype))
    for p in module.parameters():  # buffers, such as rotary tables, keep their dtype
        p.data = p.data.to(dtype)
    return replace(model, module=module.to(device=device))


def _conversion_notes(
    model: Model, kinds: set[torch.dtype], dtype: torch.dtype, *, own: bool
) -> Iterator[str]:
    """Return the notes on a model that is moved to another type or device."""
    if dtype in HALVES and any(kind.itemsize > dtype.itemsize for kind in kinds):
        wide = {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point()}
        gap = sum(float((p - p.to(dtype).to(p)).double().square().sum()) for p in wide.values())
        size = sum(float(p.double().square().sum()) for p in wide.values())
        name = str(dtype).removeprefix("torch.")
        part = math.sqrt(gap / max(size, 1e-300))
        yield (
            f"weights are rounded to {name} (by {part:.1e} of their norm): this is another model, and its "
            f"curvature may differ by some percent"
        )
    if not own:
        yield "the module was copied, so later changes of the original have no effect"


def _has_revisions(source: Any) -> bool:
    return isinstance(source, str) and (source in BUNDLED or (hf.is_hub_id(source) and not _exists(source)))


def _read(source: Any, revision: str | None, dtype: torch.dtype | None) -> Model:
    if isinstance(source, Model):
        return source
    if isinstance(source, TransformerConfig | MLPConfig):
        source = Transformer(source) if isinstance(source, TransformerConfig) else MLP(source)
    if isinstance(source, Transformer | MLP):
        return zoo.zoo_model(source, name=type(source).__name__)
    if isinstance(source, nn.Module):
        return _read_module(source)
    if not isinstance(source, str | Path):
        raise UsageError(
            f"expected a name, a path, a configuration or an nn.Module, got {_described(source)}"
        )
    if str(source) in BUNDLED:
        return zoo.bundled(str(source), revision)
    kind = dtype or torch.float32
    if isinstance(source, str) and not _exists(source) and hf.is_hub_id(source):
        return _read_hub(source, revision, kind)
    return _read_path(Path(source), kind)


def _read_module(module: nn.Module) -> Model:
    for note in mode_notes(module):
        warn(note)
    if lens.is_hooked(module):
        return lens.adapt_hooked(module)
    if isinstance(module, FunctionModule):
        return plain_model(module, module.name)
    if is_nanogpt(module):
        return adapt_nanogpt(module)
    return adapt(module) if is_transformers(module) else plain_model(module)


def _read_hub(source: str, revision: str | None, dtype: torch.dtype) -> Model:
    """Load a hub id. If the hub does not know a name without an owner, report it as an unknown source."""
    if "/" in source:
        return hf.read_hub(source, revision=revision, dtype=dtype)
    try:
        return hf.read_hub(source, revision=revision, dtype=dtype)
    except MissingExtra:
        raise zoo.unknown(source) from None
    except UsageError as error:
        raise zoo.unknown(source, also=error.message) from error


def _read_path(path: Path, dtype: torch.dtype) -> Model:
    if not _exists(path):
        raise zoo.unknown(str(path))
    if path.is_file():
        return _read_file(path, dtype)
    if (path / zoo.CONFIG).exists() and (path / zoo.WEIGHTS).exists():
        return zoo.read_folder(path)
    if (path / "config.json").exists():
        return hf.read_hf_folder(path, dtype=dtype)
    if (path / source.CONFIG).exists():
        return source.read_lora(path, dtype=dtype)
    if (path / "ckpt.pt").exists():
        return read_nanogpt(path / "ckpt.pt")
    raise UsageError(
        f"expected {zoo.CONFIG} and {zoo.WEIGHTS} in the folder {path}, at least one is missing",
        hint="transformers writes config.json, PEFT adapter_config.json, nanoGPT ckpt.pt",
    )


def _read_file(path: Path, dtype: torch.dtype) -> Model:
    if path.suffix == ".toml":
        return zoo.zoo_model(zoo.build(zoo.read_config(path)), name=path.stem)
    if path.suffix == ".gguf":
        return hf.read_gguf(path, dtype=dtype)
    if path.suffix in (".pt", ".pth"):
        return read_nanogpt(path)
    raise UsageError(f"expected a folder or a .toml file, got the file {path}", hint="or a .gguf or .pt file")


def _exists(path: str | Path) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or not a path at all
        return False


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a supported dtype, given by name or as a torch dtype."""
    kinds = (torch.float32, torch.float64, *HALVES)
    known = {str(kind).removeprefix("torch."): kind for kind in kinds}
    result = known.get(dtype) if isinstance(dtype, str) else dtype
    if result is None or result not in kinds:
        raise UsageError(
            f"expected float32, float64, or bfloat16 or float16 for storage, got {dtype!r}",
        )
    return result


def as_device(device: torch.device | str) -> torch.device:
    """Return a device; raise if it is not available."""
    try:
        result = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"expected a device such as cpu or cuda, got {device!r}") from error
    if result.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("expected a CUDA device, but torch sees none", hint="use device='cpu'")
    if result.type == "cuda" and result.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return result


def _described(source: Any) -> str:
    return repr(source) if isinstance(source, str | Path) else f"a {type(source).__name__}"
