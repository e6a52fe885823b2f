"""A loaded model: a module, its blocks by role, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.blocks import Block, ParamSpace, by_role, whole
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.ranks.spread import Pieces, Spread
from curvescope.models.adapters.table import Place
from curvescope.models.choice import Params, select, words_of
from curvescope.models.running.calling import Call, Output, call_module, read_output
from curvescope.models.running.double import exact
from curvescope.models.running.eager import eager, slow_path
from curvescope.models.running.exchange import (
    Change,
    evaluating,
    exchanged,
    locked,
    parameters_at,
    rewritten,
)
from curvescope.models.running.standins import GENERIC, Standin
from curvescope.models.running.torch_checkpoints import passing_through
from curvescope.models.running.weights.gathering import Sharding
from curvescope.models.running.weights.widening import WIDE, Widening
from curvescope.viz import notebook


def no_settings(module: nn.Module) -> list[Change]:
    """The module is called as it is."""
    return []


EVERYTHING = "*"


@dataclass(frozen=True, eq=False)
class Model:
    """A module seen through named blocks.

    `blocks` covers every parameter exactly once (tied ones too); `heads` holds the blocks of single
    heads, which overlap with them. `facts` are the numbers a reader asks for (layers, heads, …) and
    `notes` what a reader should know (dropout, tied weights, …). `options` are keywords of every call of the
    module, `places` says where an adapter's module shows its activations, and `casts` whether the module
    computes parts in float32 whatever its parameters are; in float64 those casts are left out. `settings` are
    changes of the module that hold whenever it is called here, `attention` those that give it attention with
    second derivatives, and `standins` what our kernels may stand in for. `call` is how the module is called,
    and `output` which part of what it returns its outputs are, where it is not the usual one. `sharding` says
    how parameters are spread over ranks: then they, and the blocks, are the pieces that this rank holds.
    `widening` says that they are kept in half precision, and widened to float32 where they are used.
    """

    module: nn.Module
    name: str
    blocks: Mapping[str, Block]
    heads: Mapping[str, Block] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tokenizer: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    casts: bool = False
    settings: Callable[[nn.Module], list[Change]] = no_settings
    attention: Callable[[nn.Module], list[Change]] = no_settings
    standins: tuple[Standin, ...] = GENERIC
    call: Call = call_module
    output: Output | None = None
    sharding: Sharding | None = None
    widening: Widening | None = None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters with their names, each once; if they are sharded, the pieces of this rank."""
        named: dict[str, Tensor] = dict(self.module.named_parameters())
        return iter((named if self.sharding is None else self.sharding.pieces(named)).items())

    def parameters(self) -> Iterator[Tensor]:
        """The tensors of `named_parameters`."""
        return (p for _, p in self.named_parameters())

    def get_parameter(self, name: str) -> Tensor:
        """One parameter by its name, as in torch."""
        named = dict(self.named_parameters())
        if name not in named:
            raise UsageError(f"{self.name} has no parameter {name!r}", hint=near_misses(name, list(named)))
        return named[name]

    @property
    def num_parameters(self) -> int:
        """Entries of all parameters, each counted once; on all ranks together."""
        return sum(p.numel() for p in self.module.parameters())  # a DTensor counts as a whole

    @property
    def dtype(self) -> torch.dtype:
        """The type that the parameters are used in."""
        return WIDE if self.widening is not None else next(self.module.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    @property
    def n_ctx(self) -> int | None:
        """Most positions the model takes, if it says."""
        return self.facts.get("n_ctx")

    def space(self, *patterns: Params, first: Collection[str] | None = None) -> ParamSpace:
        """Vectors over blocks, one after the other; without patterns, or for "*", over all in torch's order.

        Args:
            patterns: Globs, regular expressions, names, modules, parameters (`models.choice`).
            first: Names of blocks; a pattern looks among these, and only where none matches among all.
        """
        words = list(words_of(patterns or (EVERYTHING,), self.module, self.name))
        chosen = select(words, self.blocks, self.heads, first=first)
        names = {block.parameter for block in chosen}
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters() if name in names}
        covered = self._covered(chosen) if words == [EVERYTHING] else frozenset[str]()
        return ParamSpace(tuple(chosen), shapes, self.dtype, self.device, covered)

    def _covered(self, blocks: Iterable[Block]) -> frozenset[str]:
        """Parameters whose blocks are all among these."""
        chosen = {block.name for block in blocks}
        left = {block.parameter for name, block in self.blocks.items() if name not in chosen}
        return frozenset(block.parameter for block in blocks) - left

    def forward(
        self,
        parameters: Mapping[str, Tensor],
        inputs: Tensor | Mapping[str, Tensor],
        *,
        changes: Iterable[Change] = (),
        as_it_is: bool = False,
    ) -> Tensor:
        """Outputs at `parameters` (those not named keep the module's own values), in the parameters' type.

        Which part of what the module returns they are: see `models.running.calling.read_output`.
        The module is changed for the time of the call alone, under its lock: by `settings`, `attention` and
        `changes`. Called `as_it_is`, it keeps its own attention, options and casts. Torch's checkpoints just
        call their functions, and neither backward hooks nor `torch.compile` take part (`eager`).
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
            exchanged([*all_changes, *parameters_at(self.module, parameters)]),
        ):
            found = self.call(self.module, inputs, {} if as_it_is else self.options)
        outputs = read_output(found, self.output)
        if self.options and outputs.dtype != self.dtype:
            outputs = outputs.to(self.dtype)  # some families end in float32 whatever they began with
        return outputs

    def gathered(self) -> list[Change]:
        """Of a module that is spread over ranks: its pieces in place, and layers that gather them.

        Of one whose weights are kept in half precision, layers that widen them.
        """
        if self.widening is not None:
            return self.widening.changes(self.module)
        if self.sharding is None:
            return []
        pieces = {name: piece.detach() for name, piece in self.named_parameters()}
        return [*self.sharding.changes(self.module), *parameters_at(self.module, pieces)]

    def whole(self, part: nn.Module) -> AbstractContextManager[None]:
        """Inside, a part of the module has whole parameters, on every rank that they are spread over."""
        if self.widening is not None:
            return self.widening.whole(part)
        return nullcontext() if self.sharding is None else self.sharding.whole(self.module, part)

    @property
    def releases(self) -> bool:
        """Whether layers let go of parameters behind every pass, and make them whole, or wide, again."""
        if self.widening is not None:
            return bool(self.widening.layers)
        return self.sharding is not None and self.sharding.releases

    def whole_forward(self, layer: nn.Module) -> Callable[..., Any]:
        """The forward of a layer, with parameters that are whole and wide inside."""
        if self.widening is not None:
            return self.widening.widened_forward(layer)
        return layer.forward if self.sharding is None else self.sharding.gathered_forward(layer)

    def inputs_first(self, block: Block) -> Block:
        """The block laid out inputs × outputs: a weight of `nn.Linear` that has no role is transposed."""
        path, _, kind = block.parameter.rpartition(".")
        if block.name != block.parameter or kind != "weight":
            return block
        linear = isinstance(self.module.get_submodule(path), nn.Linear)
        return whole(block.name, block.parameter, block.split, transposed=True) if linear else block

    def pieces(self, space: ParamSpace) -> Pieces | None:
        """Which entries of vectors over whole blocks a space of this rank has; None where it has all."""
        if self.sharding is None:
            return None
        blocks, shapes = self.sharding.blocks, self.sharding.shapes
        segments = [
            whole(one.name, one.name, shapes[one.name]) if one.name in space.whole else blocks[one.name]
            for one in space.segments
        ]
        return Pieces(self.sharding.spread, tuple(segments), shapes)

    def size_of(self, *blocks: Block) -> int:
        """Entries of blocks; where they are spread over ranks, on all of them together."""
        whole = {} if self.sharding is None else self.sharding.blocks
        return sum(whole.get(block.name, block).size for block in blocks)

    def norm(self, v: Tensor) -> float:
        """‖v‖ of a vector over parameters, or of the pieces that ranks have of it."""
        spread, wide = self.spread, v.double()
        return float(wide.norm() if spread is None else spread.added(wide.square().sum()).sqrt())

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by name, whole; where they are spread over ranks all of them take these together."""
        named = self.module.named_parameters()
        return named if self.sharding is None else self.sharding.wholes(self.module)

    @property
    def spread(self) -> Spread | None:
        """The ranks that its parameters are spread over; None where they are whole."""
        return None if self.sharding is None else self.sharding.spread

    def evaluate(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Outputs at the module's own parameters, in eval mode and without derivatives.

        Inputs may be anywhere: they go to the model's device, real numbers in its type.
        """

        def placed(x: Tensor) -> Tensor:
            return x.to(self.device, self.dtype if x.is_floating_point() else None)

        own = {k: placed(v) for k, v in inputs.items()} if isinstance(inputs, Mapping) else placed(inputs)
        with torch.no_grad(), evaluating(self.module):
            return self.forward({}, own)

    def _repr_html_(self) -> str:
        """For a notebook: what is known of it, and its parameters by role."""
        return notebook.box(
            self,
            f"{self.name}: {self.num_parameters:,} parameters in {len(self.blocks)} blocks",
            lambda: notebook.facts(_told(self)),
            lambda: notebook.blocks(by_role(self.blocks.values())),
            lambda: "".join(map(notebook.paragraph, self.notes)),
        )

    def __repr__(self) -> str:
        return f"Model({self.name!r}: {self.num_parameters} parameters, {len(self.blocks)} blocks)"


def _told(model: Model) -> dict[str, Any]:
    """Type, device, and the facts that are numbers or words."""
    placed = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    return placed | {k: v for k, v in model.facts.items() if isinstance(v, bool | int | float | str)}


def check_cover(blocks: Mapping[str, Block], module: nn.Module) -> None:
    """Raise unless the blocks cover every entry of every parameter exactly once."""
    seen = {name: torch.zeros(p.numel(), dtype=torch.int8) for name, p in module.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    for block in blocks.values():
        seen[block.parameter][block.positions(shapes[block.parameter])] += 1
    for name, count in seen.items():
        if not bool((count == 1).all()):
            raise UsageError(
                f"blocks must cover {name!r} exactly once, but cover some entries "
                f"{count.max() if bool((count > 1).any()) else 0} times"
            )
