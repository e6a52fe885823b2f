"""A problem: model, data, loss, and the total weight of its terms. It is what has curvature."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace, by_role
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.finite_differences import gradient_error
from curvescope.core.progress import track
from curvescope.core.ranks.reshard import releasing_parameters
from curvescope.core.tensors import custom_functions, receive_gradients
from curvescope.data.batches import Batch, Batches, as_batches
from curvescope.data.compatibility import (
    SUM,
    Terms,
    check_ids,
    fitted,
    opaque_batches,
    padding_notes,
    predicts_next,
    task_notes,
    warn_unshifted,
)
from curvescope.data.dict_batches import hides_start
from curvescope.losses import Loss, ModelLoss, as_loss
from curvescope.models.capture.activation_points import find_point
from curvescope.models.capture.hook_sites import ActivationReader
from curvescope.models.forward_errors import (
    attributed_errors,
    check_left_padding,
    check_weights,
    describe_counts,
    input_errors,
    module_errors,
    not_finite,
)
from curvescope.models.hf.module import is_transformers
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.parameter_selection import ParameterChoice, Params
from curvescope.models.parameter_store import Leaves, ParameterStore
from curvescope.models.running.eager import differentiating, without_tensor_hooks
from curvescope.models.running.module_calls import Closure, Output, own_loss
from curvescope.models.running.patching import Change, evaluating
from curvescope.viz import notebook

T = TypeVar("T")
LOG = logging.getLogger("curvescope")
COPIED = 2**27  # largest number of parameters for which a float64 copy is made
TRUE_BACKWARD = "write it in PyTorch operations, or give it a backward that is its derivative"
_slope_errors: WeakKeyDictionary[Model, dict[tuple[str, ...], float | None]] = WeakKeyDictionary()


class Problem:
    """L(θ) = (1/N) Σ_t w_t ℓ_t(θ) over the terms t of all batches, N = Σ_t w_t.

    The sum is divided once, so batch sizes, order and padding do not change anything. The model is evaluated
    in eval mode and not changed. θ are the model's current parameters, or those given to `at`.

    A flat vector over the whole problem (a gradient, product, eigenvector or solution) is
    `torch.nn.utils.parameters_to_vector` of the parameters that vary. A vector over blocks chosen by name
    concatenates the blocks; `space` splits and converts it.

    Args:
        model: A `Model`, or an argument of `load`.
        batches: `Batches`; (inputs, targets[, weights]), or a list or DataLoader of them; or dictionaries
            with labels in Hugging Face's format, or a `datasets.Dataset`. Labels (B, T) are shifted if the
            model predicts the next token: outputs at t are compared with the label at t + 1.
        loss: A loss, its name, or one of torch's, e.g. `nn.CrossEntropyLoss()`; "own" for a model that is
            called with a batch and returns its own loss.
        loss_fn: Instead of `loss`, a function `loss_fn(model, batch)` that returns one number. It gets the
            batches unchanged.
        terms: Number of terms that `loss_fn`, or the model's own loss, averages over: one number, a list with
            one number per batch, or a function of a batch; "sum" if it is a sum. Not needed for a single
            batch.
        output: The part of the module's return value that is its output; see `load`.
        params: The parameters that vary, by default all that are not frozen (`requires_grad=False`): globs,
            regular expressions (`re.compile(…)` or "re:…"), names of blocks or parameters, modules,
            parameters, or a list of these. A dictionary is the parameters of a model that is a function
            f(params, x).
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
        loaded = load(model, output=output, params=of_function)
        if loss_fn is not None or loss == "own":
            loaded, batches, loss = _of_model(loaded, batches, loss, loss_fn, terms)
        elif terms is not None:
            raise UsageError("expected loss_fn or loss='own' together with terms, got terms only")
        self.model: Model = loaded
        self.store = ParameterStore(loaded)
        self.choice = ParameterChoice(loaded, None if isinstance(params, Mapping) else params)
        check_weights(self.model)
        self.loss: Loss = as_loss(loss)
        self.batches: Batches = as_batches(batches, shift=predicts_next(self.model))
        if self.loss.has_outputs:  # a loss_fn gets its batches unchanged
            self.batches = fitted(self.batches, self.model)
            check_ids(self.batches, self.model)
        from_problem = isinstance(batches, list) and all(isinstance(batch, Batch) for batch in batches)
        if not from_problem:  # batches of another problem were checked already
            warn_unshifted(self.batches, self.model)
        if self.batches.share is None and not self._total_weight() > 0:  # terms of another rank may count
            raise UsageError(
                "expected at least one term that counts, but every target is ignored or has weight zero"
            )

    @property
    def num_terms(self) -> float:
        """Total weight N of the terms, from the current targets and weights; 1 for a plain sum."""
        return self._total_weight() if self.loss.is_mean else 1.0

    def _total_weight(self) -> float:
        return sum(self.loss.total_weight(b.targets, b.weights) for b in self.batches)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how the data were fitted to the model."""
        data_notes = (*task_notes(self.batches, self.model), *padding_notes(self.batches, self.model))
        return (*self.batches.notes, *data_notes, *self.loss.notes, *self.choice.notes())

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.model.device

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and values of θ: the model's own parameters, or those given to `at`."""
        return iter(self.store.values.items())

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the tensors of `named_parameters`."""
        return iter(self.store.values.values())

    def get_parameter(self, name: str) -> Tensor:
        """Return one parameter by its name, as in torch."""
        return self.point[name] if name in self.point else self.model.get_parameter(name)

    @property
    def point(self) -> Mapping[str, Tensor]:
        """The parameters that replace the model's own, by name; see `at`."""
        return self.store.point

    def space(self, *patterns: Params) -> ParamSpace:
        """Return the space of vectors over the parameters that vary, in torch's order, or over selected
        blocks.

        Patterns are matched with the blocks that vary first, then with all blocks.
        """
        return self.choice.space(*patterns)

    def at(self, parameters: Mapping[str, Tensor] | Tensor | np.ndarray) -> Problem:
        """Return the same problem at other parameters: a checkpoint, a training step, a point on a line.

        Nothing is loaded, copied or checked again. The given tensors are read at every product, so they may
        be written to. The model's own parameters are not changed. If the model keeps its weights in half
        precision, the given tensors may be in half precision, too: the model's own tensors are used directly,
        and others are widened, which copies them.

        Args:
            parameters: Values by name (parameters without a name keep the model's values), or a vector over
                `space()`.
        """
        is_vector = isinstance(parameters, Tensor | np.ndarray)
        values = self.space().scatter(parameters) if is_vector else dict(parameters)
        problem = copy.copy(self)
        problem.store = self.store.at(values)
        return problem

    def placed_batches(self, what: str) -> Iterator[Batch]:
        """Iterate over the batches on the model's device, real numbers in its dtype; show progress if
        slow.
        """
        self.store.check_plain(what)
        yield from self.local_batches(what)

    def local_batches(self, what: str) -> Iterator[Batch]:
        """Iterate over this rank's part of each placed batch if the model is sharded, and over all of it
        otherwise.

        Derivatives in the pieces are summed over the ranks. A rank without a sequence takes one with weight
        zero, because all ranks gather parameters together.
        """
        spread = self.model.spread
        if spread is not None and not self.loss.has_outputs:
            raise UsageError(
                "a model that is sharded over ranks cannot be used with a function of model and batch",
                hint="give targets, and a loss of outputs and targets, whose terms can be split "
                "over the ranks",
            )
        for batch in track(self.batches, what):
            local = batch if spread is None else batch.share(spread.rows(batch.num_sequences))
            yield local.map(self.placed)

    def placed(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the model's device, and to its dtype if it holds real numbers."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def outputs(
        self, batch: Batch, parameters: Mapping[str, Tensor] | None = None, *, changes: Iterable[Change] = ()
    ) -> Tensor:
        """Return the model's outputs on a placed batch, in eval mode.

        Args:
            batch: One of `placed_batches`.
            parameters: Tensors that replace θ, by name.
            changes: Changes of the module during this call.
        """
        attributed = attributed_errors(lambda: self.module_outputs(batch))
        with evaluating(self.model.module), attributed, input_errors(batch.inputs):
            return self.model.forward({**self.point, **(parameters or {})}, batch.inputs, changes=changes)

    def activations(self, batch: Batch, *points: str) -> dict[str, Tensor]:
        """Return the activations (B, T, w) at named points such as `L3.mid` on a placed batch."""
        reader = ActivationReader([find_point(self.model, name) for name in points], batch.num_sequences)
        with torch.no_grad():
            self.outputs(batch, changes=reader.changes())
        return reader.values

    def module_outputs(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the outputs of the module, called as its user calls it, on a placed batch in eval mode.

        Args:
            batch: One of `placed_batches`.
            parameters: In place of θ's own, by name.
        """
        errors = module_errors(self.model, batch.inputs, splits=self.loss.has_outputs)
        with errors, evaluating(self.model.module):
            return self.model.forward({**self.point, **(parameters or {})}, batch.inputs, as_it_is=True)

    def loss_value(self) -> float:
        """Return L(θ)."""
        total = 0.0
        with differentiating(), torch.no_grad(), self.store.refusing_aliased():
            for batch in self.local_batches("loss"):
                total += self._loss(batch)
        if self.model.spread is not None:
            total = float(self.store.added(torch.tensor(total, dtype=self.dtype, device=self.device)))
        return total / self.num_terms

    def _loss(self, batch: Batch) -> float:
        """Sum the loss over a batch's terms; with left padding, compare it with the unmodified module.

        Implementations of attention may differ for a token that attends to nothing, and Hugging Face counts
        the first label after such tokens.
        """
        loss_with_kernels = float(self.loss.sum(self.outputs(batch), batch.targets, batch.weights))
        if not self.store.agreed(not hides_start(batch.inputs)):  # all ranks take part, or none does
            module_loss = float(self.loss.sum(self.module_outputs(batch), batch.targets, batch.weights))
            check_left_padding(self.model.name, loss_with_kernels, module_loss)
        return loss_with_kernels

    def gradient(self, *patterns: Params) -> Tensor:
        """Return ∇L(θ) over `space(*patterns)`, (n,)."""
        return self._value_and_gradient(*patterns)[1]

    def value_and_gradient(self, *patterns: Params) -> tuple[float, Tensor]:
        """Return L(θ), and ∇L(θ) over `space(*patterns)`, (n,), from one pass over the data."""
        value, gradient = self._value_and_gradient(*patterns)
        return float(value), gradient

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
            with differentiating(), releasing_parameters():

                def loss(leaves: Leaves, batch: Batch = batch) -> Tensor:
                    return self.loss.sum(self.outputs(batch, leaves), batch.targets, batch.weights)

                leaves, value = self.differentiable(space.parameter_names, loss, lambda value: [value])
                sums.append(value.detach())
                self._refuse_wrong_gradient(value, batch)
                if not value.requires_grad:
                    continue
                into = [leaves[name] for name in space.parameter_names]
                with without_tensor_hooks(into):
                    receive_gradients(
                        [value], into, lambda i, g: total.add(space.parameter_names[i], g[None])
                    )
        value = self.store.added(torch.stack(sums).sum(dtype=summed))
        with differentiating():
            return value / self.num_terms, total.result()[:, 0].div_(self.num_terms)

    def _refuse_wrong_gradient(self, value: Tensor, batch: Batch) -> None:
        """Raise if custom functions in the graph of a loss have a backward that is not their derivative.

        Its slope is compared with a finite difference once for the functions of a model.
        """
        names = tuple(custom_functions(value)) if self.model.spread is None else ()
        if not names:
            return
        errors = _slope_errors.setdefault(self.model, {})
        if names not in errors:
            errors[names] = _slope_error(self, batch, names)
        error = errors[names]
        if error is not None:
            raise CurvescopeError(
                f"{self.model.name} uses {', '.join(names)}: expected a backward that is the derivative of "
                f"its forward, got a gradient that differs from a finite difference by {error:.1%}",
                hint=TRUE_BACKWARD,
            )

    def differentiable(
        self, names: tuple[str, ...], run: Callable[[Leaves], T], ends: Callable[[T], Sequence[Tensor | None]]
    ) -> tuple[Leaves, T]:
        """Return leaves for the named parameters, and the result of `run` on them; see `ParameterStore`."""
        return self.store.differentiable(names, run, ends)

    def check_structure(self) -> None:
        """Raise if the module's parameters have changed names or shapes since blocks and spaces were made."""
        self.store.check_structure()
        self.choice.check()

    def _repr_html_(self) -> str:
        """Return HTML for a notebook with model, data, loss, and the parameters by role, without reading the
        data.
        """
        facts = {"data": self.batches, "loss": self.loss.name, "type": self.dtype, "device": self.device}
        parts = lambda: notebook.facts(facts), lambda: notebook.blocks(by_role(self.space()))
        return notebook.box(self, f"Problem of {self.model.name}", *parts)

    def __repr__(self) -> str:
        return f"Problem({self.model.name!r}, {self.batches!r}, {self.loss.name})"


def _of_model(
    model: Model, data: Any, loss: Any, function: Callable[[Any, Any], Tensor] | None, terms: Terms
) -> tuple[Model, Batches, Loss]:
    """Return model, batches and loss for a function of model and batch: the model's output is the loss
    itself.
    """
    if loss not in ("cross_entropy", "own") or (loss == "own" and function is not None):
        raise UsageError("expected either loss or loss_fn, got both")
    if function is not None and not callable(function):
        raise UsageError(f"expected a function loss_fn(model, batch), got a {type(function).__name__}")
    batches, wholes = opaque_batches(data, terms)
    call = Closure(function or own_loss, wholes.unpack)
    casts = model.casts or is_transformers(model.module)  # Hugging Face computes losses in float32
    return replace(model, call=call, output=None, casts=casts), batches, ModelLoss(terms != SUM)


def check_finite(total: Tensor, problem: Problem, *given: Tensor) -> None:
    """Raise if a product, or the vectors given, have infinite or undefined entries."""
    finite = bool(torch.isfinite(total.sum())) or bool(torch.isfinite(total).all())
    if not problem.store.agreed(finite):
        if not all(bool(torch.isfinite(v).all()) for v in given):
            raise UsageError(
                "expected a vector of finite numbers, got one with infinite or undefined entries"
            )
        bad_entries = not_finite(problem.model, dict(problem.named_parameters()))
        weights_note = (
            f", and there are NaN or infinite weights in {describe_counts(bad_entries)}"
            if bad_entries
            else ""
        )
        raise CurvescopeError(
            f"the product is not finite; the loss at these parameters is {problem.loss_value():.4g}"
            f"{weights_note}",
            hint="look for diverged weights, or use dtype='float64'",
        )


def double_copy(problem: Problem, few: Batch) -> tuple[Problem, Batch]:
    """Copy the module to float64; return its problem for one batch on the device, and that batch."""
    wide = replace(problem.model, module=copy.deepcopy(problem.model.module).double())
    point = {name: p.double() for name, p in problem.point.items()}
    double = Problem(wide, [few], problem.loss, params="*").at(point)
    (batch,) = double.placed_batches("check in float64")
    return double, batch


def _slope_error(problem: Problem, batch: Batch, names: Sequence[str]) -> float | None:
    """Error of the slope of the loss of a placed batch; in float64 if a copy of the module runs in it."""
    size = sum(p.numel() for p in problem.model.parameters())
    if problem.dtype == torch.float32 and problem.model.widening is None and size <= COPIED:
        try:
            return _slope_error(*double_copy(problem, batch), names)
        except Exception as error:  # a module made for one dtype may raise anything
            LOG.debug("%s does not run in float64: %s", problem.model.name, error)

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        return problem.loss.sum(problem.outputs(batch, parameters), batch.targets, batch.weights)

    own = {name: p.detach().to(problem.dtype) for name, p in problem.named_parameters()}
    try:
        with differentiating():
            return gradient_error(loss, own)
    except (CurvescopeError, RuntimeError) as error:
        LOG.warning("%s was not compared with a finite difference: %s", ", ".join(names), error)
        return None
