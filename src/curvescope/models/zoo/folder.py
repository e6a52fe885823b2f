"""The zoo as models: blocks named by role, folders of our own format, the bundled model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvescope.core.blocks import Block, whole
from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.models.model import Model
from curvescope.models.running.standins import ZOO
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.tokenizers import BPETokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.toml", "model.safetensors", "tokenizer.json"


def build(config: Mapping[str, Any]) -> Transformer | MLP:
    """A fresh zoo module from a configuration with an optional `kind = "transformer" | "mlp"`."""
    values = dict(config)
    kind = values.pop("kind", "transformer")
    if kind == "transformer":
        return Transformer(TransformerConfig.from_dict(values))
    if kind == "mlp":
        return MLP(MLPConfig.from_dict(values))
    raise UsageError(f"kind: expected 'transformer' or 'mlp', got {kind!r}")


def zoo_model(module: Transformer | MLP, *, name: str, tokenizer: Any = None) -> Model:
    """A zoo module as a model: parameter names are block names, heads are columns of Q, K, V, rows of O."""
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    order = sorted(shapes, key=lambda key: key.split(".")[0] in ("ln_f", "U", "b_U"))
    order.sort(key=lambda key: key in ("U", "b_U"))
    blocks = {key: whole(key, key, shapes[key]) for key in order}
    if isinstance(module, MLP):
        return Model(module, name, blocks, facts={"kind": "mlp", **module.cfg.to_dict()}, tokenizer=tokenizer)
    cfg = module.cfg
    facts = {"kind": "transformer", **cfg.to_dict(), "d_head": cfg.head_size, "n_kv_heads": cfg.kv_heads}
    facts["d_ff"] = cfg.ff_size
    notes = ("the unembedding is the embedding, transposed: E holds both",) if cfg.tied else ()
    heads = _head_blocks(cfg, shapes)
    return Model(module, name, blocks, heads, facts, notes, tokenizer, standins=ZOO)


def _head_blocks(cfg: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Block]:
    """`L0.h3.W_Q` and so on; keys and values of grouped heads are counted by their own heads."""
    found: dict[str, Block] = {}
    for i in range(cfg.n_layers):
        for role in ("W_Q", "b_Q", "W_QK", "W_K", "b_K", "W_V", "b_V", "W_O"):
            key = f"L{i}.{role}"
            if key not in shapes:
                continue
            heads = cfg.kv_heads if role[-1] in "KV" and role != "W_QK" else cfg.n_heads
            axis = 0 if role == "W_O" else len(shapes[key]) - 1
            for head in range(heads):
                found[f"L{i}.h{head}.{role}"] = _head(
                    f"L{i}.h{head}.{role}", key, shapes[key], axis, heads, head
                )
    return found


def _head(name: str, key: str, shape: tuple[int, ...], axis: int, heads: int, head: int) -> Block:
    size = shape[axis] // heads
    split = (*shape[:axis], heads, size, *shape[axis + 1 :])
    own = (*shape[:axis], size, *shape[axis + 1 :])
    return Block(name, key, split=split, shape=own, narrow=((axis, head, 1),))


def save(model: Model, folder: str | Path) -> Path:
    """Write a zoo model as config.toml + model.safetensors (+ tokenizer.json); complete or absent."""
    import tomli_w
    from safetensors.torch import save_file

    if isinstance(model, Transformer | MLP):
        model = zoo_model(model, name=type(model).__name__)
    if not isinstance(model, Model) or not isinstance(model.module, Transformer | MLP):
        raise UsageError(
            f"expected a zoo model, got a {type(getattr(model, 'module', model)).__name__}",
            hint="save other modules with their own tools",
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kind = "mlp" if isinstance(model.module, MLP) else "transformer"
    weights = {key: p.detach().cpu().contiguous() for key, p in model.named_parameters()}
    save_file(weights, folder / f"{WEIGHTS}.partial")
    (folder / f"{WEIGHTS}.partial").replace(folder / WEIGHTS)
    if model.tokenizer is not None:
        model.tokenizer.save(folder / TOKENIZER)
    (folder / CONFIG).write_text(
        tomli_w.dumps({"kind": kind, **model.module.cfg.to_dict()}), encoding="utf-8"
    )
    return folder


def read_folder(folder: Path, *, name: str | None = None, weights: str = WEIGHTS) -> Model:
    """The zoo model in a folder written by `save`."""
    module = build(read_config(folder / CONFIG))
    read_weights(module, folder / weights)
    tokenizer = BPETokenizer.from_file(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    return zoo_model(module, name=name or folder.name, tokenizer=tokenizer)


def read_config(path: Path) -> dict[str, Any]:
    """A TOML file as a dict, or one sentence about what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"expected a model configuration in TOML, could not read {path}: {error}") from error


def read_weights(module: nn.Module, path: Path) -> None:
    """Copy safetensors into the module; every parameter must be there with its shape, and nothing else."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CurvescopeError(f"expected weights in safetensors, could not read {path}: {error}") from error
    own = dict(module.named_parameters())
    odd = sorted(set(own) ^ set(weights)) or [k for k in own if own[k].shape != weights[k].shape]
    if odd:
        raise CurvescopeError(
            f"the weights in {path} do not fit the configuration beside them: {odd[0]!r} differs"
        )
    if any(tensor.dtype == torch.float64 for tensor in weights.values()):
        module.double()
    module.load_state_dict(weights)  # copies, so checkpoints in float16 become float32


def bundled(name: str, revision: str | None) -> Model:
    """A model that ships with the package; `revision` is one of its training checkpoints."""
    revision = revision or "final"
    if revision not in REVISIONS:
        raise UsageError(
            f"expected a revision of {name}, got {revision!r}", hint=f"known: {', '.join(REVISIONS)}"
        )
    folder = Path(str(files("curvescope") / "assets" / name))
    weights = WEIGHTS if revision == "final" else f"checkpoint-{revision}.safetensors"
    label = name if revision == "final" else f"{name}@{revision}"
    return read_folder(folder, name=label, weights=weights)


def unknown(source: str, *, also: str | None = None) -> UsageError:
    """The error for a source that is no bundled name, file or folder; `also` says why it is no hub id."""
    hint = near_misses(source, list(BUNDLED)) or ""
    return UsageError(
        f"expected a bundled model, a folder or a TOML file, got {source!r}, which is none of them",
        hint=hint if also is None else f"{hint}{'; ' if hint else ''}on the hub: {also}",
    )
