"""A problem: model + data + loss + the total weight of its terms. Curvature is a property of this."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace, by_role
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import track
from curvescope.core.ranks.releasing import releasing
from curvescope.core.tensors import take_each
from curvescope.data.batches import Batch, Batches, as_batches
from curvescope.data.dicts import hides_start
from curvescope.data.fit import (
    SUM,
    Terms,
    check_ids,
    fitted,
    padding_notes,
    predicts_next,
    task_notes,
    warn_unshifted,
    whole_batches,
)
from curvescope.losses import Loss, ModelLoss, as_loss
from curvescope.models.capture.points import find_point
from curvescope.models.capture.spots import Seen
from curvescope.models.choice import Choice, Params
from curvescope.models.forward_errors import (
    check_left_padding,
    check_weights,
    input_errors,
    module_errors,
    not_finite,
    told_apart,
    words,
)
from curvescope.models.hf.module import is_transformers
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.parameter_store import Leaves, ParameterStore
from curvescope.models.running.calling import Closure, Output, own_loss
from curvescope.models.running.eager import differentiating, without_tensor_hooks
from curvescope.models.running.exchange import Change, evaluating
from curvescope.viz import notebook

T = TypeVar("T")


class Problem:
    """L(θ) = (1/N) Σ_t w_t ℓ_t(θ) over the terms t of all batches, N = Σ_t w_t.

    The sum is divided once, so batch sizes, order and padding do not change anything. The model is
    evaluated in eval mode and left as it was. θ is where the model's parameters are now, or what `at` says.

    A flat vector over the whole problem (a gradient, product, eigenvector or solution) is
    `torch.nn.utils.parameters_to_vector` of the parameters that vary. A vector over blocks that were chosen
    by name has one block after the other; `space` tells them apart and converts.

    Args:
        model: A `Model`, or what `load` takes.
        batches: `Batches`; (inputs, targets[, weights]), or a list or DataLoader of them; dictionaries with
            labels, as Hugging Face's tools make them, or a `datasets.Dataset`: labels (B, T) of a model that
            predicts the next token are shifted, so that outputs at t meet the label at t + 1.
        loss: A loss, its name, or one of torch's, e.g. `nn.CrossEntropyLoss()`; "own" for a model that is
            called with a batch and returns its own loss.
        loss_fn: In its place a function `loss_fn(model, batch)`, one number; batches reach it as they are.
        terms: Over how many terms `loss_fn`, or the model's own loss, is a mean: a number, one for each
            batch, or a function of a batch; "sum" where it is a sum. One batch alone needs none.
        output: Which part of what a module returns its outputs are; see `load`.
        params: What varies, by default all that is not frozen (`requires_grad=False`): globs, regular
            expressions (`re.compile(…)` or "re:…"), names of blocks or parameters, modules, parameters, or a
            list of these. A dictionary is the parameters of a model that is a function f(params, x).
    """

    def __init__(
        self,
        model: Any,
        batches: Any,
        loss: Any = "cross_entropy",
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        terms: Terms = None,
        output: Output | None = None,
        params: Params | Mapping[str, Any] | None = None,
    ):
        of_function = params if isinstance(params, Mapping) else None
        found = load(model, output=output, params=of_function)
        if loss_fn is not None or loss == "own":
            found, batches, loss = _of_model(found, batches, loss, loss_fn, terms)
        elif terms is not None:
            raise UsageError("expected terms beside loss_fn or loss='own', got them alone")
        self.model: Model = found
        self.store = ParameterStore(found)
        self.choice = Choice(found, None if isinstance(params, Mapping) else params)
        check_weights(self.model)
        self.loss: Loss = as_loss(loss)
        self.batches: Batches = as_batches(batches, shift=predicts_next(self.model))
        if self.loss.splits:  # batches of a function of one's own are as they are
            self.batches = fitted(self.batches, self.model)
            check_ids(self.batches, self.model)
        parts = isinstance(batches, list) and all(isinstance(batch, Batch) for batch in batches)
        if not parts:  # of another problem, which are taken at their word
            warn_unshifted(self.batches, self.model)
        if self.batches.share is None and not self._total_weight() > 0:  # another rank's may count
            raise UsageError(
                "expected at least one term that counts, but every target is ignored or weighs nothing"
            )

    @property
    def num_terms(self) -> float:
        """N: the total weight of the terms, as targets and weights are now; 1 for a plain sum."""
        return self._total_weight() if self.loss.divided else 1.0

    def _total_weight(self) -> float:
        return sum(self.loss.total_weight(b.targets, b.weights) for b in self.batches)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of how data and model were brought together."""
        own = (*task_notes(self.batches, self.model), *padding_notes(self.batches, self.model))
        return (*self.batches.notes, *own, *self.loss.notes, *self.choice.notes())

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.model.device

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """θ with its names: the model's own parameters, or those that `at` put in their place."""
        return iter(self.store.values.items())

    def parameters(self) -> Iterator[Tensor]:
        """The tensors of `named_parameters`."""
        return iter(self.store.values.values())

    def get_parameter(self, name: str) -> Tensor:
        """One parameter by its name, as in torch."""
        return self.point[name] if name in self.point else self.model.get_parameter(name)

    @property
    def point(self) -> Mapping[str, Tensor]:
        """The parameters that stand in the place of the model's own, by name; see `at`."""
        return self.store.point

    def space(self, *patterns: Params) -> ParamSpace:
        """Vectors over what varies, in torch's order, or over the blocks that are meant, one after the other.

        Blocks are looked for among what varies, else among all.
        """
        return self.choice.space(*patterns)

    def at(self, parameters: Mapping[str, Tensor] | Tensor) -> Problem:
        """The same problem at other parameters: a checkpoint, a training step, a point on a line.

        Nothing is loaded, copied or checked again. What is given is read at every product, so it may be
        written to; the model's own parameters are not touched. Of a model whose weights are kept in half
        precision they are taken in it too: its own as they are, others widened, which is a copy.

        Args:
            parameters: By name, those not named as the model has them; or a vector over `space()`.
        """
        given = self.space().scatter(parameters) if isinstance(parameters, Tensor) else dict(parameters)
        moved = copy.copy(self)
        moved.store = self.store.at(given)
        return moved

    def placed_batches(self, what: str) -> Iterator[Batch]:
        """The batches on the model's device, real numbers in its type; shows progress when slow."""
        self.store.check_plain(what)
        yield from self.local_batches(what)

    def local_batches(self, what: str) -> Iterator[Batch]:
        """As `placed_batches`; if the model is spread over ranks, this rank's sequences of each batch.

        Derivatives in its pieces are summed over the ranks. A rank for which there is no sequence left takes
        one that counts for nothing, since all of them gather parameters together.
        """
        spread = self.model.spread
        if spread is not None and not self.loss.splits:
            raise UsageError(
                "a function of model and batch is not for a model that is spread over ranks",
                hint="give targets, and a loss of outputs and targets: its terms can be told apart",
            )
        for batch in track(self.batches, what):
            own = batch if spread is None else batch.share(spread.rows(batch.num_sequences))
            yield own.map(self.placed)

    def placed(self, tensor: Tensor) -> Tensor:
        """A tensor on the model's device, in its type where it holds real numbers."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def outputs(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None, *, changes: Iterable[Change] = ()
    ) -> Tensor:
        """The model's outputs on a placed batch, in eval mode.

        Args:
            batch: One of `placed_batches`.
            parameters: In place of θ's own, by name.
            changes: Of the module, for the time of the call.
        """
        own = told_apart(lambda: self.module_outputs(batch))
        with evaluating(self.model.module), own, input_errors(batch.inputs):
            return self.model.forward({**self.point, **(parameters or {})}, batch.inputs, changes=changes)

    def activations(self, batch: Batch, *points: str) -> dict[str, Tensor]:
        """Activations on a placed batch at points, `L3.mid` say (models.capture.points): (B, T, w) each."""
        seen = Seen([find_point(self.model, at) for at in points], batch.num_sequences)
        with torch.no_grad():
            self.outputs(batch, changes=seen.changes())
        return seen.values

    def module_outputs(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The outputs on a placed batch of the module as its user calls it, in eval mode.

        Args:
            batch: One of `placed_batches`.
            parameters: In place of θ's own, by name.
        """
        errors = module_errors(self.model, batch.inputs, splits=self.loss.splits)
        with errors, evaluating(self.model.module):
            return self.model.forward({**self.point, **(parameters or {})}, batch.inputs, as_it_is=True)

    def loss_value(self) -> float:
        """L(θ)."""
        total = 0.0
        with differentiating(), torch.no_grad(), self.store.refusing_held():
            for batch in self.local_batches("loss"):
                total += self._loss(batch)
        if self.model.spread is not None:
            total = float(self.store.added(torch.tensor(total, dtype=self.dtype, device=self.device)))
        return total / self.num_terms

    def _loss(self, batch: Batch) -> float:
        """The sum over a batch's terms; where padding is on the left, compared with the module's own.

        Attention of two kinds need not agree where a token sees nothing, and Hugging Face counts the first
        label behind such tokens.
        """
        ours = float(self.loss.sum(self.outputs(batch), batch.targets, batch.weights))
        if not self.store.agreed(not hides_start(batch.inputs)):  # all ranks ask, or none
            theirs = float(self.loss.sum(self.module_outputs(batch), batch.targets, batch.weights))
            check_left_padding(self.model.name, ours, theirs)
        return ours

    def gradient(self, *patterns: Params) -> Tensor:
        """∇L(θ) over `space(*patterns)`: (n,)."""
        return self._value_and_gradient(*patterns)[1]

    def value_and_gradient(self, *patterns: Params) -> tuple[float, Tensor]:
        """L(θ), and ∇L(θ) over `space(*patterns)`, (n,), from one pass over the data."""
        value, found = self._value_and_gradient(*patterns)
        return float(value), found

    def _value_and_gradient(self, *patterns: Params) -> tuple[Tensor, Tensor]:
        self.check_structure()
        space = self.space(*patterns)
        for batch in self.batches:
            if hides_start(batch.inputs):
                with differentiating(), torch.no_grad():
                    self._loss(batch.map(self.placed))
        sums: list[Tensor] = []
        summed = self.dtype if self.device.type == "mps" else torch.float64
        with differentiating():
            total = space.total(1)
        for batch in self.local_batches("gradient"):
            with differentiating(), releasing():

                def loss(leaves: Leaves, batch: Batch = batch) -> Tensor:
                    return self.loss.sum(self.outputs(batch, leaves), batch.targets, batch.weights)

                leaves, value = self.differentiable(space.parameter_names, loss, lambda value: [value])
                sums.append(value.detach())
                if not value.requires_grad:
                    continue
                into = [leaves[name] for name in space.parameter_names]
                with without_tensor_hooks(into):
                    take_each([value], into, lambda i, g: total.add(space.parameter_names[i], g[None]))
        value = self.store.added(torch.stack(sums).sum(dtype=summed))
        with differentiating():
            return value / self.num_terms, total.whole()[:, 0].div_(self.num_terms)

    def differentiable(
        self, names: tuple[str, ...], run: Callable[[Leaves], T], ends: Callable[[T], Sequence[Tensor | None]]
    ) -> tuple[Leaves, T]:
        """Leaves for the named parameters, and what `run` makes of them; see `ParameterStore`."""
        return self.store.differentiable(names, run, ends)

    def check_structure(self) -> None:
        """Raise when the module's parameters are others than those that blocks and spaces were made for."""
        self.store.check_structure()
        self.choice.check()

    def _repr_html_(self) -> str:
        """For a notebook: model, data, loss, and what varies by role; the data are not read."""
        told = {"data": self.batches, "loss": self.loss.name, "type": self.dtype, "device": self.device}
        parts = lambda: notebook.facts(told), lambda: notebook.blocks(by_role(self.space()))
        return notebook.box(self, f"Problem of {self.model.name}", *parts)

    def __repr__(self) -> str:
        return f"Problem({self.model.name!r}, {self.batches!r}, {self.loss.name})"


def _of_model(
    model: Model, data: Any, loss: Any, function: Callable[[Any, Any], Tensor] | None, terms: Terms
) -> tuple[Model, Batches, Loss]:
    """The problem of a function of model and batch: a model whose outputs are its loss."""
    if loss not in ("cross_entropy", "own") or (loss == "own" and function is not None):
        raise UsageError("expected either loss or loss_fn, got both")
    if function is not None and not callable(function):
        raise UsageError(f"expected a function loss_fn(model, batch), got a {type(function).__name__}")
    batches, wholes = whole_batches(data, terms)
    call = Closure(function or own_loss, wholes.unpack)
    casts = model.casts or is_transformers(model.module)  # whose losses are in float32
    return replace(model, call=call, output=None, casts=casts), batches, ModelLoss(terms != SUM)


def check_finite(total: Tensor, problem: Problem, *given: Tensor) -> None:
    """Raise when a product, with what was given, has infinite or undefined entries."""
    finite = bool(torch.isfinite(total.sum())) or bool(torch.isfinite(total).all())
    if not problem.store.agreed(finite):
        if not all(bool(torch.isfinite(v).all()) for v in given):
            raise UsageError(
                "expected a vector of finite numbers, got one with infinite or undefined entries"
            )
        found = not_finite(problem.model, dict(problem.named_parameters()))
        where = f", and there are NaN or infinite weights in {words(found)}" if found else ""
        raise CurvescopeError(
            f"the product is not finite; the loss at these parameters is {problem.loss_value():.4g}{where}",
            hint="look for diverged weights, or use dtype='float64'",
        )
