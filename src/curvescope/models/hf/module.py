"""Hugging Face modules as models: roles by the family's table, attention with second derivatives.

In a mixture of experts, the choice of experts is constant almost everywhere; their weights are smooth
functions of the token and of the router. Curvature is that of a fixed choice. The weights are differentiated,
or held constant, too (`routing="frozen"`): then the curvature of the routers is zero.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.models.adapters import FAMILIES, family_of
from curvescope.models.adapters.build import HeadCounts, body_prefix, build_blocks, layers_of, plain_name
from curvescope.models.adapters.table import ActivationPlace, Family
from curvescope.models.curvature_sources import repeated_layers
from curvescope.models.model import Model
from curvescope.models.plain import check_parameters
from curvescope.models.running.equivalence_check import rounding
from curvescope.models.running.patching import Change, evaluating, patched
from curvescope.models.running.weights.widening import WIDE, Widening, is_half

LOG = logging.getLogger("curvescope")
CACHE = "use_cache"
ATTENTION = "_attn_implementation_internal"  # attribute of a configuration with the name of its attention


def is_transformers(module: Any) -> bool:
    """Return True if a module brings a transformers configuration."""
    config = getattr(module, "config", None)
    return isinstance(module, nn.Module) and hasattr(config, "model_type") and hasattr(config, "to_dict")


def adapt(module: Any, *, name: str | None = None, tokenizer: Any = None, own: bool = False) -> Model:
    """Return the model of a transformers module, by `config.model_type`.

    The module is not copied. Attention without a second derivative is replaced while the module is called, or
    permanently if the module is our `own`.
    """
    check_parameters(module)
    model_type = module.config.model_type
    family = family_of(model_type) or Family(norm="none", positions="none")
    notes = check_settings(module, family)
    settings = Settings(family.settings)
    if own:
        for holder, entry, value in [*attention_is(module, "eager"), *settings(module)]:
            holder[entry] = value
    facts = facts_of(module, family)
    heads = None
    if family.roles:
        heads = HeadCounts(facts["n_heads"], facts["n_kv_heads"], facts["d_head"])
    blocks, singles = build_blocks(module, family, facts.get("n_layers") or 0, heads)
    notes += notes_of(module, family, known=model_type in FAMILIES)
    return Model(
        module,
        name or type(module).__name__,
        blocks,
        singles,
        facts,
        tuple(notes),
        tokenizer,
        _options(module),
        places_of(module, family, facts.get("n_layers") or 0),
        casts=bool(family.float32),
        settings=settings,
        attention=differentiable_twice,
        replacements=family.replacements,
    )


# --------------------------------------------------------------------------------------- facts and notes


def facts_of(module: Any, family: Family) -> dict[str, Any]:
    """Return sizes and kinds from the configuration and the family's table, as far as they apply."""
    config = module.config
    d, h = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    facts: dict[str, Any] = {
        "kind": config.model_type,
        "n_layers": getattr(config, "num_hidden_layers", None),
        "d_model": d,
    }
    if family.roles and d is not None and h is not None:
        d_ff = getattr(config, family.config.get("d_ff", "intermediate_size"), None)
        facts |= {
            "n_heads": h,
            "n_kv_heads": getattr(config, "num_key_value_heads", None) or h,
            "d_head": getattr(config, "head_dim", None) or d // h,
            "d_ff": 4 * d if d_ff is None else d_ff,
            "attention": "softmax",
            "activation": getattr(config, family.config.get("activation", "hidden_act"), None),
            "causal": family.causal,
            "norm": family.norm,
            "norm_kind": family.norm_kind,
            "positions": family.positions,
        }
    facts |= {
        "n_ctx": getattr(config, "max_position_embeddings", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "tied": bool(tied_names(module)),
    }
    facts |= {"task": task_of(module)}
    if facts["task"] in ("classification", "image-classification"):
        facts["n_classes"] = config.num_labels
    facts |= family.facts(config)
    return {key: value for key, value in facts.items() if value is not None}


def task_of(module: nn.Module) -> str:
    """Return the task of the head by the name of the class; `features` if there is no head."""
    name = type(inside(module)).__name__
    if name.endswith("ForConditionalGeneration") and is_paired(module):
        return "seq2seq-lm"
    endings = {
        "ForMaskedLM": "masked-lm",
        "ForSequenceClassification": "classification",
        "ForTokenClassification": "token-classification",
        "ForImageClassification": "image-classification",
        "ForCausalLM": "causal-lm",
        "LMHeadModel": "causal-lm",
        "HeadsModel": "another task",
        "Model": "features",
    }
    return next((task for ending, task in endings.items() if name.endswith(ending)), "another task")


def is_paired(module: Any) -> bool:
    """Return True if a module has both an encoder and a decoder."""
    named = "decoder_input_ids" in inspect.signature(inside(module).forward).parameters
    return named and bool(getattr(module.config, "is_encoder_decoder", False))


def inside(module: Any) -> Any:
    """Return the module that PEFT wraps, or the module itself."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map the second name of each tied parameter to its first name."""
    first: dict[int, str] = {}
    first_names = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            first_names[name] = first[id(p)]
    return first_names


def notes_of(module: Any, family: Family, *, known: bool) -> list[str]:
    """Return the notes on a family and on this module."""
    config, notes = module.config, list(family.notes)
    if not known:
        notes.append(
            f"no table of roles for model_type {config.model_type!r}: "
            "blocks are parameters under their own names"
        )
    for second, first in tied_names(module).items():
        notes.append(f"tied: {second} is {first}, one block for both")
    if family.float32:
        notes.append(
            f"the model always computes in float32: {', '.join(family.float32)}; with dtype float64 these "
            f"casts are skipped, so outputs differ from the module's own by rounding"
        )
    facts = family.facts(config)
    if (first := facts.get("n_encoder_layers", 0)) and is_paired(module):
        notes.append(f"L{first} is the first layer of the decoder; the layers before it are the encoder")
    if uses_dropout(module):
        notes.append("dropout is switched off: curvature is that of the module in eval mode")
    if num_experts(config):
        notes.append(routing_note(config))
    if task_of(module) == "features":
        notes.append(
            "no head: the outputs are the last hidden states (B, T, d); studies use the squared error "
            "between those on corrupted and on original inputs (cs.denoising_data)"
        )
    return notes


def uses_dropout(module: Any) -> bool:
    """Return True if the module uses dropout in train mode."""
    rates = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    rates += [getattr(module.config, "attention_dropout", 0.0) or 0.0]
    return any(rate > 0 for rate in rates)


def places_of(module: nn.Module, family: Family, num_layers: int) -> dict[str, ActivationPlace]:
    """Map `L0.attn.in` and so on to the full names of the modules."""
    stored = {plain_name(name): name for name, _ in module.named_modules() if name}
    prefix = body_prefix(family, stored)
    places = {}
    for i, (layer, _) in enumerate(layers_of(family, num_layers, stored)):
        for place, at in family.places.items():
            key = prefix + layer + at.module
            if key in stored:
                places[f"L{i}.{place}"] = ActivationPlace(stored[key], at.kind)
    return places


def _options(module: nn.Module) -> dict[str, Any]:
    """Return the keywords of every call: no cache of keys and values, and a named output."""
    accepted = inspect.signature(inside(module).forward).parameters
    options: dict[str, Any] = {"return_dict": True}
    return options | ({"use_cache": False} if "use_cache" in accepted else {})


# ------------------------------------------------------------------------------------- second derivatives


def attention_is(module: nn.Module, name: str) -> list[Change]:
    """Return changes that set another attention in every configuration of a module."""
    parts: dict[int, Any] = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    configs = [vars(config) for config in parts.values() if hasattr(config, ATTENTION)]
    return [Change(config, ATTENTION, name) for config in configs if config[ATTENTION] != name]


def differentiable_twice(module: nn.Module) -> list[Change]:
    """Return changes for attention with second derivatives and no cache, also inside a loss function.

    A cache would grow with every call of a layer, and layers may be recomputed.
    """
    configs = {id(m.config): vars(m.config) for m in module.modules() if hasattr(m, "config")}
    caching = [config for config in configs.values() if config.get(CACHE)]
    return [*attention_is(module, "eager"), *(Change(config, CACHE, False) for config in caching)]


def check_settings(module: Any, family: Family) -> list[str]:
    """Raise unless the settings keep the outputs on a small input the same; return notes on the settings."""
    own, experts, attending = family.settings(module), plain_experts(module), attention_is(module, "eager")
    changes = attending + own + experts
    if not changes:
        return []
    differences = [f"{change.name} is {change.value}" for change in own]
    if attending:
        differences.append(f"attention is eager, not {getattr(module.config, ATTENTION, 'eager')}")
    if experts:
        differences.append(f"experts are eager, not {getattr(module.config, IMPLEMENTATION)}")
    note = "while curvature is computed, " + " and ".join(differences)
    wide = Widening(tuple(repeated_layers(module))).changes(module) if is_half(module) else []
    before = (
        None if own else _unmodified_outputs(module, wide, experts)
    )  # with its own settings the module may write into weights
    if before is None:
        note += "; the outputs were not compared"
    else:
        _check_same(before, small_outputs(module, wide + changes), differences)
    LOG.info("%s: %s", type(module).__name__, note)
    return [note]


def _unmodified_outputs(module: Any, wide: list[Change], experts: list[Change]) -> Tensor | None:
    """Return the outputs of the unmodified module; None if grouped experts do not support its dtype."""
    try:
        return small_outputs(module, wide)
    except RuntimeError:
        if not experts:
            raise
        return None


def _check_same(before: Tensor, after: Tensor | None, differences: list[str]) -> None:
    """Raise unless outputs agree."""
    assert after is not None
    error = float((before - after).abs().max()) / max(float(before.abs().max()), 1.0)
    if not error <= rounding(before):
        raise CurvescopeError(
            f"expected the same outputs if {' and '.join(differences)}, they differ by {error:.1e}",
            hint="the eager form of the module computes something else, so its curvature cannot be computed",
        )


def small_outputs(module: Any, changes: list[Change]) -> Tensor | None:
    """Return the outputs on a small input made from the configuration; None if none can be made."""
    inputs = small_inputs(module)
    if inputs is None:
        return None
    with torch.no_grad(), evaluating(module), patched(changes):
        outputs = module(**inputs, **_options(module))
    outputs = getattr(outputs, "logits", getattr(outputs, "last_hidden_state", None))
    return outputs if isinstance(outputs, Tensor) else None


def small_inputs(module: Any) -> Mapping[str, Tensor] | None:
    """Return five tokens (and five for a decoder), or one image of a smooth pattern."""
    config, p = module.config, next(module.parameters())
    kind = getattr(module, "main_input_name", "input_ids")
    if kind == "input_ids" and getattr(config, "vocab_size", None):
        length = min(5, getattr(config, "max_position_embeddings", None) or 5)
        ids = ((torch.arange(length, device=p.device) * 7 + 3) % config.vocab_size)[None]
        return {"input_ids": ids, **({"decoder_input_ids": ids} if is_paired(module) else {})}
    if kind == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (1, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        kind = WIDE if is_half(module) else p.dtype
        count = torch.arange(torch.Size(shape).numel(), device=p.device, dtype=kind)
        return {"pixel_values": torch.sin(0.1 * count).view(shape)}
    return None


Routing = Literal["differentiable", "frozen"]
IMPLEMENTATION = "_experts_implementation_internal"  # attribute with the implementation of the experts
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
MIXTURE = "a mixture of"
ROUTING_NOTES = {
    "differentiable": "their weights are differentiated; routing='frozen' holds them constant too",
    "frozen": "their weights are held constant, too (routing='frozen'), so that routers have no curvature",
}


def num_experts(config: Any) -> int:
    """Number of experts in a layer, from the configuration; 0 without experts."""
    return next((n for n in (getattr(config, name, 0) for name in COUNTS) if isinstance(n, int) and n), 0)


def plain_experts(module: Any) -> list[Change]:
    """Return changes that run experts one after the other: grouped products do not support float64."""
    if not num_experts(module.config):
        return []
    parts: dict[int, Any] = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    configs = [vars(config) for config in parts.values() if IMPLEMENTATION in vars(config)]
    return [
        Change(config, IMPLEMENTATION, "eager") for config in configs if config[IMPLEMENTATION] != "eager"
    ]


@dataclass(frozen=True)
class Settings:
    """Changes of a module during every call: its family's `own`, and those of its experts."""

    own: Callable[[Any], list[Change]]
    routing: Routing = "differentiable"

    def __call__(self, module: Any) -> list[Change]:
        constant_routers = routers_held_constant(module) if self.routing == "frozen" else []
        return [*self.own(module), *plain_experts(module), *constant_routers]


def routers(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that choose experts."""
    return [part for part in module.modules() if type(part).__name__.endswith("Router")]


def routers_held_constant(module: nn.Module) -> list[Change]:
    """Return changes that make the routers' outputs constant."""
    return [Change(vars(part), "forward", partial(_constant, part.forward)) for part in routers(module)]


def _constant(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        outputs = forward(*args, **options)
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in outputs)


def routing_note(config: Any, routing: Routing = "differentiable") -> str:
    """Note on the curvature of a mixture of experts."""
    return (
        f"{MIXTURE} {num_experts(config)} experts: the choice of experts is held as it is at these "
        f"parameters; {ROUTING_NOTES[routing]}"
    )


def with_routing(model: Model, routing: str) -> Model:
    """Return the model with the weights of its experts differentiated or held constant."""
    if routing not in get_args(Routing):
        raise UsageError(f"expected routing 'differentiable' or 'frozen', got {routing!r}")
    if not isinstance(model.settings, Settings) or not routers(model.module):
        raise UsageError(
            f"expected a mixture of experts with known routers, but {model.name!r} is not one",
            hint="Mixtral, Qwen2-MoE and Qwen3-MoE of transformers are supported",
        )
    chosen: Routing = "frozen" if routing == "frozen" else "differentiable"
    config: Any = model.module.config
    known_notes = [routing_note(config, choice) for choice in get_args(Routing)]
    notes = (*(note for note in model.notes if note not in known_notes), routing_note(config, chosen))
    return replace(
        model,
        settings=replace(model.settings, routing=chosen),
        facts={**model.facts, "routing": chosen},
        notes=notes,
    )
