"""Zoo modules as models: blocks named by role, saved folders, the bundled model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvescope.core.blocks import Block, parameter_block
from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.models.model import Model
from curvescope.models.running.module_replacements import ZOO
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.tokenizers import BPETokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.toml", "model.safetensors", "tokenizer.json"


def build(config: Mapping[str, Any]) -> Transformer | MLP:
    """Build a zoo module from a configuration with an optional `kind = "transformer" | "mlp"`."""
    values = dict(config)
    kind = values.pop("kind", "transformer")
    if kind == "transformer":
        return Transformer(TransformerConfig.from_dict(values))
    if kind == "mlp":
        return MLP(MLPConfig.from_dict(values))
    raise UsageError(f"kind: expected 'transformer' or 'mlp', got {kind!r}")


def zoo_model(module: Transformer | MLP, *, name: str, tokenizer: Any = None) -> Model:
    """Return a zoo module as a model.

    Block names are parameter names. Heads are columns of W_Q, W_K and W_V, and rows of W_O.
    """
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    order = sorted(shapes, key=lambda key: key.split(".")[0] in ("ln_f", "U", "b_U"))
    order.sort(key=lambda key: key in ("U", "b_U"))
    blocks = {key: parameter_block(key, key, shapes[key]) for key in order}
    if isinstance(module, MLP):
        return Model(module, name, blocks, facts={"kind": "mlp", **module.cfg.to_dict()}, tokenizer=tokenizer)
    cfg = module.cfg
    facts = {"kind": "transformer", **cfg.to_dict(), "d_head": cfg.head_size, "n_kv_heads": cfg.kv_heads}
    facts["d_ff"] = cfg.ff_size
    notes = ("the unembedding is the embedding, transposed: E holds both",) if cfg.tied else ()
    heads = _head_blocks(cfg, shapes)
    return Model(module, name, blocks, heads, facts, notes, tokenizer, replacements=ZOO)


def _head_blocks(cfg: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Block]:
    """Return the blocks of heads, such as `L0.h3.W_Q`; grouped keys and values have their own numbers."""
    blocks: dict[str, Block] = {}
    for i in range(cfg.n_layers):
        for role in ("W_Q", "b_Q", "W_QK", "W_K", "b_K", "W_V", "b_V", "W_O"):
            key = f"L{i}.{role}"
            if key not in shapes:
                continue
            num_heads = cfg.kv_heads if role[-1] in "KV" and role != "W_QK" else cfg.n_heads
            axis = 0 if role == "W_O" else len(shapes[key]) - 1
            for head in range(num_heads):
                blocks[f"L{i}.h{head}.{role}"] = _head(
                    f"L{i}.h{head}.{role}", key, shapes[key], axis, num_heads, head
                )
    return blocks


def _head(name: str, key: str, shape: tuple[int, ...], axis: int, heads: int, head: int) -> Block:
    size = shape[axis] // heads
    split = (*shape[:axis], heads, size, *shape[axis + 1 :])
    head_shape = (*shape[:axis], size, *shape[axis + 1 :])
    return Block(name, key, split=split, shape=head_shape, narrow=((axis, head, 1),))


def save(model: Model, folder: str | Path) -> Path:
    """Write a zoo model as config.toml + model.safetensors (+ tokenizer.json), all or nothing."""
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
    """Read the zoo model in a folder written by `save`."""
    module = build(read_config(folder / CONFIG))
    read_weights(module, folder / weights)
    tokenizer = BPETokenizer.from_file(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    return zoo_model(module, name=name or folder.name, tokenizer=tokenizer)


def read_config(path: Path) -> dict[str, Any]:
    """Read a TOML file as a dictionary."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"expected a model configuration in TOML, could not read {path}: {error}") from error


def read_weights(module: nn.Module, path: Path) -> None:
    """Copy safetensors into the module; names and shapes must match exactly."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CurvescopeError(f"expected weights in safetensors, could not read {path}: {error}") from error
    expected = dict(module.named_parameters())
    mismatched = sorted(set(expected) ^ set(weights)) or [
        k for k in expected if expected[k].shape != weights[k].shape
    ]
    if mismatched:
        raise CurvescopeError(
            f"the weights in {path} do not fit the configuration beside them: {mismatched[0]!r} differs"
        )
    if any(tensor.dtype == torch.float64 for tensor in weights.values()):
        module.double()
    module.load_state_dict(weights)  # copies, so checkpoints in float16 become float32


def bundled(name: str, revision: str | None) -> Model:
    """Load a model that ships with the package; `revision` is one of its training checkpoints."""
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
    """Return the error for an unknown source; `also` explains why it is not a hub id."""
    hint = near_misses(source, list(BUNDLED)) or ""
    return UsageError(
        f"expected a bundled model, a folder or a TOML file, but {source!r} is none of them",
        hint=hint if also is None else f"{hint}{'; ' if hint else ''}on the hub: {also}",
    )
