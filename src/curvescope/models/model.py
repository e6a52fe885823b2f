"""A loaded model: a module, its blocks by role, and facts about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.blocks import Block, ParamSpace, by_role, parameter_block
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.ranks.shard_layout import ShardGroup, VectorShard
from curvescope.models.adapters.table import ActivationPlace
from curvescope.models.parameter_selection import Params, as_patterns, select
from curvescope.models.running.eager import eager, slow_path
from curvescope.models.running.keep_float64 import exact
from curvescope.models.running.module_calls import Call, Output, call_module, read_output
from curvescope.models.running.module_replacements import GENERIC, MethodReplacement
from curvescope.models.running.patching import (
    Change,
    evaluating,
    locked,
    parameters_at,
    patched,
    rewritten,
)
from curvescope.models.running.torch_checkpoints import passing_through
from curvescope.models.running.weights.gathering import Sharding
from curvescope.models.running.weights.widening import WIDE, Widening
from curvescope.viz import notebook


def no_settings(module: nn.Module) -> list[Change]:
    """Return no changes: the module is called as it is."""
    return []


EVERYTHING = "*"


@dataclass(frozen=True, eq=False)
class Model:
    """A module and its named blocks.

    `blocks` covers every parameter exactly once (tied ones, too); `heads` has the blocks of single heads,
    which overlap with them. `facts` are numbers such as layers and heads, and `notes` explain details such as
    dropout or tied weights. `options` are keywords of every call of the module. `places` maps names of
    activations to modules of an adapter. `casts` is True if the module always computes parts in float32; in
    float64 those casts are skipped. `settings` are changes of the module during every call, `attention` those
    that give it attention with second derivatives, and `replacements` the methods that our kernels may
    replace. `call` calls the module, and `output` selects its output from the return value, if that is not
    the usual one. `sharding` describes parameters that are sharded over ranks: then parameters and blocks are
    this rank's pieces. `widening` describes weights that are stored in half precision and converted to
    float32 when used.
    """

    module: nn.Module
    name: str
    blocks: Mapping[str, Block]
    heads: Mapping[str, Block] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tokenizer: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, ActivationPlace] = field(default_factory=dict)
    casts: bool = False
    settings: Callable[[nn.Module], list[Change]] = no_settings
    attention: Callable[[nn.Module], list[Change]] = no_settings
    replacements: tuple[MethodReplacement, ...] = GENERIC
    call: Call = call_module
    output: Output | None = None
    sharding: Sharding | None = None
    widening: Widening | None = None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and parameters, each once; if they are sharded, over the pieces of this rank."""
        named: dict[str, Tensor] = dict(self.module.named_parameters())
        return iter((named if self.sharding is None else self.sharding.pieces(named)).items())

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the tensors of `named_parameters`."""
        return iter(dict(self.named_parameters()).values())

    def get_parameter(self, name: str) -> Tensor:
        """Return one parameter by its name, as in torch."""
        named = dict(self.named_parameters())
        if name not in named:
            raise UsageError(f"{self.name} has no parameter {name!r}", hint=near_misses(name, list(named)))
        return named[name]

    @property
    def num_parameters(self) -> int:
        """Number of entries of all parameters, each counted once, on all ranks together."""
        return sum(p.numel() for p in self.module.parameters())  # numel of a DTensor counts all ranks

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the parameters are used."""
        return WIDE if self.widening is not None else next(self.module.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.module.parameters()).device

    @property
    def n_ctx(self) -> int | None:
        """Largest number of positions, if the model declares one."""
        return self.facts.get("n_ctx")

    def space(self, *patterns: Params, first: Collection[str] | None = None) -> ParamSpace:
        """Return the space of vectors over blocks.

        Without patterns, or for "*", the space has all blocks in torch's order.

        Args:
            patterns: Globs, regular expressions, names, modules, parameters (`models.parameter_selection`).
            first: Names of blocks; a pattern is matched with these first, and with all blocks if none of them
                matches.
        """
        words = list(as_patterns(patterns or (EVERYTHING,), self.module, self.name))
        chosen = select(words, self.blocks, self.heads, first=first)
        names = {block.parameter for block in chosen}
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters() if name in names}
        covered = self._covered(chosen) if words == [EVERYTHING] else frozenset[str]()
        return ParamSpace(tuple(chosen), shapes, self.dtype, self.device, covered)

    def _covered(self, blocks: Iterable[Block]) -> frozenset[str]:
        """Return the parameters all of whose blocks are given."""
        chosen = {block.name for block in blocks}
        missing = {block.parameter for name, block in self.blocks.items() if name not in chosen}
        return frozenset(block.parameter for block in blocks) - missing

    def forward(
        self,
        parameters: Mapping[str, Tensor],
        inputs: Tensor | Mapping[str, Tensor],
        *,
        changes: Iterable[Change] = (),
        as_it_is: bool = False,
    ) -> Tensor:
        """Return the outputs at `parameters` (others keep the module's own values), in the parameters' dtype.

        `read_output` of `models.running.module_calls` selects the outputs from the return value. The module
        is changed only during the call, under its lock: by `settings`, `attention` and `changes`. Called
        `as_it_is`, it keeps its own attention, options and casts. Torch's checkpoints only call their
        functions, and backward hooks and `torch.compile` are switched off (`eager`).
        """
        attention = [] if as_it_is else self.attention(self.module)
        written = rewritten(self.module, copied=not as_it_is)
        all_changes = [*self.settings(self.module), *attention, *written, *self.gathered(), *changes]
        with (
            locked(self.module),
            slow_path(self.module),
            exact(self.dtype, casts=self.casts and not as_it_is),
            passing_through(),
            eager(self.module, tensor_hooks=as_it_is),
            patched([*all_changes, *parameters_at(self.module, parameters)]),
        ):
            returned = self.call(self.module, inputs, {} if as_it_is else self.options)
        outputs = read_output(returned, self.output)
        if self.options and outputs.dtype != self.dtype:
            outputs = outputs.to(self.dtype)  # some families always return float32
        return outputs

    def gathered(self) -> list[Change]:
        """Return the changes that gather the parameters of a sharded module layer by layer.

        For a model stored in half precision, the changes convert the weights of each layer to float32.
        """
        if self.widening is not None:
            return self.widening.changes(self.module)
        if self.sharding is None:
            return []
        pieces = {name: piece.detach() for name, piece in self.named_parameters()}
        return [*self.sharding.changes(self.module), *parameters_at(self.module, pieces)]

    def whole(self, part: nn.Module) -> AbstractContextManager[None]:
        """Gather the full parameters of a part of the module inside the context, on every rank."""
        if self.widening is not None:
            return self.widening.whole(part)
        return nullcontext() if self.sharding is None else self.sharding.whole(self.module, part)

    @property
    def releases(self) -> bool:
        """Return True if layers release their full parameters after every pass and make them again."""
        if self.widening is not None:
            return bool(self.widening.layers)
        return self.sharding is not None and self.sharding.releases

    def whole_forward(self, layer: nn.Module) -> Callable[..., Any]:
        """Return the forward of a layer with full float32 parameters inside."""
        if self.widening is not None:
            return self.widening.widened_forward(layer)
        return layer.forward if self.sharding is None else self.sharding.gathered_forward(layer)

    def inputs_first(self, block: Block) -> Block:
        """Return the block laid out inputs × outputs: transpose `nn.Linear` weights without roles."""
        path, _, kind = block.parameter.rpartition(".")
        if block.name != block.parameter or kind != "weight":
            return block
        linear = isinstance(self.module.get_submodule(path), nn.Linear)
        return parameter_block(block.name, block.parameter, block.split, transposed=True) if linear else block

    def shards(self, space: ParamSpace) -> VectorShard | None:
        """Return the entries of this rank in vectors of a space; None if the rank has all of them."""
        if self.sharding is None:
            return None
        blocks, shapes = self.sharding.blocks, self.sharding.shapes
        segments = [
            parameter_block(segment.name, segment.name, shapes[segment.name])
            if segment.name in space.whole
            else blocks[segment.name]
            for segment in space.segments
        ]
        return VectorShard(self.sharding.spread, tuple(segments), shapes)

    def size_of(self, *blocks: Block) -> int:
        """Return the number of entries of blocks, on all ranks together."""
        whole = {} if self.sharding is None else self.sharding.blocks
        return sum(whole.get(block.name, block).size for block in blocks)

    def norm(self, v: Tensor) -> float:
        """Return ‖v‖ of a vector over parameters, or of a vector whose pieces are on several ranks."""
        spread, wide = self.spread, v.double()
        return float(wide.norm() if spread is None else spread.sum(wide.square().sum()).sqrt())

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and full parameters; if they are sharded, all ranks must iterate together."""
        named = self.module.named_parameters()
        return named if self.sharding is None else self.sharding.whole_parameters(self.module)

    @property
    def spread(self) -> ShardGroup | None:
        """The ranks that the parameters are sharded over; None if they are not sharded."""
        return None if self.sharding is None else self.sharding.spread

    def evaluate(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return outputs at the module's own parameters, in eval mode and without derivatives.

        Inputs are moved to the model's device, and real ones to its dtype.
        """

        def placed(x: Tensor) -> Tensor:
            return x.to(self.device, self.dtype if x.is_floating_point() else None)

        placed_inputs = (
            {k: placed(v) for k, v in inputs.items()} if isinstance(inputs, Mapping) else placed(inputs)
        )
        with torch.no_grad(), evaluating(self.module):
            return self.forward({}, placed_inputs)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: facts about the model, and its parameters by role."""
        return notebook.box(
            self,
            f"{self.name}: {self.num_parameters:,} parameters in {len(self.blocks)} blocks",
            lambda: notebook.facts(_facts_for_notebook(self)),
            lambda: notebook.blocks(by_role(self.blocks.values())),
            lambda: "".join(map(notebook.paragraph, self.notes)),
        )

    def __repr__(self) -> str:
        return f"Model({self.name!r}: {self.num_parameters} parameters, {len(self.blocks)} blocks)"


def _facts_for_notebook(model: Model) -> dict[str, Any]:
    """Return dtype, device, and the facts that are numbers or words."""
    placed = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    return placed | {k: v for k, v in model.facts.items() if isinstance(v, bool | int | float | str)}


def check_cover(blocks: Mapping[str, Block], module: nn.Module) -> None:
    """Raise unless the blocks cover every entry of every parameter exactly once."""
    counts = {name: torch.zeros(p.numel(), dtype=torch.int8) for name, p in module.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    for block in blocks.values():
        counts[block.parameter][block.positions(shapes[block.parameter])] += 1
    for name, count in counts.items():
        if not bool((count == 1).all()):
            raise UsageError(
                f"blocks must cover {name!r} exactly once, but cover some entries "
                f"{count.max() if bool((count > 1).any()) else 0} times"
            )
