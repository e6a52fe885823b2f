"""A problem: model + data + loss + the total weight of its terms. Curvature is a property of this."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvescope.core import notebook
from curvescope.core.blocks import ParamSpace, by_role
from curvescope.core.errors import CurvescopeError, ModuleError, ShapeError, UsageError
from curvescope.core.progress import track
from curvescope.core.ranks.releasing import releasing
from curvescope.core.ranks.spread import Spread
from curvescope.core.tensors.adding import take_each
from curvescope.core.tensors.graph import leaves_of
from curvescope.core.tensors.trees import leaves as tree_leaves
from curvescope.data.batches import Batch, Batches, as_batches
from curvescope.data.dicts import hides_start
from curvescope.data.fit import check_ids, fitted, padding_notes, predicts_next, task_notes, warn_unshifted
from curvescope.data.whole import SUM, Terms, whole_batches
from curvescope.losses import Loss, ModelLoss, as_loss
from curvescope.models.capture.points import find_point
from curvescope.models.capture.spots import Seen
from curvescope.models.choice.choosing import Choice
from curvescope.models.choice.params import Params
from curvescope.models.finite import check_weights, not_finite, words
from curvescope.models.hf.module import is_transformers
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.running.calling import Closure, Output, own_loss
from curvescope.models.running.eager import uncompiled, without_tensor_hooks
from curvescope.models.running.exchange import Change, evaluating, locked
from curvescope.models.running.held import RefuseHeld, moved, refuse_half
from curvescope.models.running.interrupts import thawed
from curvescope.models.running.torch_checkpoints import RefuseReentrant
from curvescope.models.running.weights.widening import HALVES, WIDE

T = TypeVar("T")
SAME_LOSS = 1e-4  # relative: what another order of operations may change, in float32
Leaves = dict[str, Tensor]


class Problem:
    """L(θ) = (1/N) Σ_t w_t ℓ_t(θ) over the terms t of all batches, N = Σ_t w_t.

    The sum is divided once, so batch sizes, order and padding do not change anything. The model is
    evaluated in eval mode and left as it was. θ is where the model's parameters are now, or what `at` says.

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
        self.model: Model = load(model, output=output, params=of_function)
        if loss_fn is not None or loss == "own":
            self.model, batches, loss = _of_model(self.model, batches, loss, loss_fn, terms)
        elif terms is not None:
            raise UsageError("expected terms beside loss_fn or loss='own', got them alone")
        self.choice = Choice(self.model, None if isinstance(params, Mapping) else params)
        check_weights(self.model)
        self.loss: Loss = as_loss(loss)
        self.batches: Batches = as_batches(batches, shift=predicts_next(self.model))
        if self.loss.splits:  # batches of a function of one's own are as they are
            self.batches = fitted(self.batches, self.model)
            check_ids(self.batches, self.model)
        parts = isinstance(batches, list) and all(isinstance(batch, Batch) for batch in batches)
        if not parts:  # of another problem, which are taken at their word
            warn_unshifted(self.batches, self.model)
        self.point: Mapping[str, Tensor] = {}
        self._shapes = {name: p.shape for name, p in self.model.parameters.items()}
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

    @property
    def parameters(self) -> Leaves:
        """θ by name: the model's own parameters, or those of the point."""
        return {**self.model.parameters, **self.point}

    def space(self, *patterns: Params) -> ParamSpace:
        """Vectors over what varies, or over the blocks that are meant: among what varies, else among all."""
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
        own = self.model.parameters
        point = {**self.point, **given}
        for name, value in given.items():
            if name not in own or value.shape != own[name].shape:
                wanted = tuple(own[name].shape) if name in own else "no such parameter"
                raise ShapeError(f"{name}: expected {wanted}, got a tensor of {tuple(value.shape)}")
            half = self.model.widening is not None and value.dtype in HALVES
            if (value.dtype != self.dtype and not half) or value.device != self.device:
                raise ShapeError(
                    f"{name}: expected {self.dtype} on {self.device}, got {value.dtype} on {value.device}"
                )
            if half and value is own[name]:
                del point[name]
            elif half:
                point[name] = value.detach().to(WIDE)
        found = copy.copy(self)
        found.point = point
        return found

    def placed_batches(self, what: str) -> Iterator[Batch]:
        """The batches on the model's device, real numbers in its type; shows progress when slow."""
        if self.model.spread is not None:
            raise UsageError(
                f"{what}: not for a model that is spread over ranks",
                hint="curvature operators and gradients are; or load the whole model",
            )
        if self.model.widening is not None:
            raise UsageError(
                f"{what}: not for weights that are kept in half precision",
                hint="cs.load(…, dtype='float32'); products with Hessian, GGN, functional part take them",
            )
        yield from self._placed(what)

    def _placed(self, what: str) -> Iterator[Batch]:
        for batch in track(self.batches, what):
            yield batch.map(self.placed)

    def own_batches(self, what: str) -> Iterator[Batch]:
        """As `placed_batches`; where the model is spread over ranks, this rank's sequences of each.

        Derivatives in its pieces are summed over the ranks. A rank for which there is no sequence left takes
        one that counts for nothing, since all of them gather parameters together.
        """
        spread = self.model.spread
        if spread is None:
            yield from self._placed(what)
            return
        for batch in track(self.batches, what):
            yield self._share(batch, spread).map(self.placed)

    def _share(self, batch: Batch, spread: Spread) -> Batch:
        if not self.loss.splits:
            raise UsageError(
                "a function of model and batch is not for a model that is spread over ranks",
                hint="give targets, and a loss of outputs and targets: its terms can be told apart",
            )
        rows = spread.rows(batch.num_sequences)
        if rows:
            return batch[rows.start : rows.stop]
        return Batch(batch[:1].inputs, batch[:1].targets, torch.zeros(1))

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
        with evaluating(self.model.module), self._told_apart(batch), _looked_up(batch):
            return self.model.forward({**self.point, **(parameters or {})}, batch.inputs, changes=changes)

    def activations(self, batch: Batch, *points: str) -> dict[str, Tensor]:
        """Activations on a placed batch at points, `L3.mid` say (models.capture.points): (B, T, w) each."""
        seen = Seen([find_point(self.model, at) for at in points], batch.num_sequences)
        with torch.no_grad():
            self.outputs(batch, changes=seen.changes())
        return seen.values

    def answer(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The outputs on a placed batch of the module as its user calls it, in eval mode.

        Args:
            batch: One of `placed_batches`.
            parameters: In place of θ's own, by name.
        """
        try:
            with evaluating(self.model.module):
                return self.model.forward({**self.point, **(parameters or {})}, batch.inputs, as_it_is=True)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            first, shapes = str(error).partition("\n")[0], [tuple(t.shape) for t in tree_leaves(batch.inputs)]
            who = f"the forward of {self.model.name} itself"
            if not self.loss.splits:  # a function of model and batch, whose tensors have an axis more here
                who, shapes = f"the loss of {self.model.name} itself", [shape[1:] for shape in shapes[1:]]
            raise ModuleError(
                f"{who} raised an error on inputs of shape {', '.join(map(str, shapes))}: {first}",
                hint="it does so without curvescope too: call it on a batch"
                if self.model.widening is None
                else "cs.load(…, dtype='float32'), if it uses parts of layers outside of them",
            ) from error

    @contextmanager
    def _told_apart(self, batch: Batch) -> Iterator[None]:
        """An error that the module raises by itself too, called as its user does, is said to be its own."""
        try:
            yield
        except RuntimeError as error:
            own = self._own_error(batch) if type(error) is RuntimeError else None
            if own is None or str(own.__cause__) != str(error):
                raise
            raise own from error

    def _own_error(self, batch: Batch) -> ModuleError | None:
        try:
            with torch.no_grad():
                self.answer(batch)
        except ModuleError as error:
            return error
        except Exception:  # whatever it raises, it is another one
            return None
        return None

    def value(self) -> float:
        """L(θ)."""
        total = 0.0
        held = RefuseHeld(self.model.parameters, self.point) if self.point else nullcontext()
        with differentiating(), torch.no_grad(), held:
            for batch in self.own_batches("loss"):
                total += self._loss(batch)
        if self.model.spread is not None:
            total = float(self.model.spread.added(torch.tensor(total, dtype=self.dtype, device=self.device)))
        return total / self.num_terms

    def _loss(self, batch: Batch) -> float:
        """The sum over a batch's terms; where padding is on the left, compared with the module's own.

        Attention of two kinds need not agree where a token sees nothing, and Hugging Face counts the first
        label behind such tokens.
        """
        ours = float(self.loss.sum(self.outputs(batch), batch.targets, batch.weights))
        padded, spread = hides_start(batch.inputs), self.model.spread
        if padded if spread is None else not spread.all(not padded, self.device):  # all ask, or none
            theirs = float(self.loss.sum(self.answer(batch), batch.targets, batch.weights))
            if not math.isclose(ours, theirs, rel_tol=SAME_LOSS):
                raise CurvescopeError(
                    f"the loss of {self.model.name} is {ours:.6g} with attention that can be differentiated "
                    f"twice and {theirs:.6g} as it is called, on sequences padded on the left",
                    hint="pad on the right, or give the first label behind the padding no weight (-100)",
                )
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
        for batch in self.own_batches("gradient"):
            with differentiating(), releasing():

                def loss(leaves: Leaves, batch: Batch = batch) -> Tensor:
                    return self.loss.sum(self.outputs(batch, leaves), batch.targets, batch.weights)

                leaves, value = self.differentiable(space.parameters, loss, lambda value: [value])
                sums.append(value.detach())
                if not value.requires_grad:
                    continue
                into = [leaves[name] for name in space.parameters]
                with without_tensor_hooks(into):
                    take_each([value], into, lambda i, g: total.add(space.parameters[i], g[None]))
        value = torch.stack(sums).sum(dtype=summed)
        value = value if self.model.spread is None else self.model.spread.added(value)
        with differentiating():
            return value / self.num_terms, total.whole()[:, 0].div_(self.num_terms)

    def differentiable(
        self, names: tuple[str, ...], run: Callable[[Leaves], T], ends: Callable[[T], Sequence[Tensor | None]]
    ) -> tuple[Leaves, T]:
        """What `run` makes of leaves for the named parameters, and the leaves: they share memory with θ.

        A module may hold a parameter in a second way (a closure, a list) that leaves do not reach; then the
        module's own parameter is the leaf.

        Args:
            names: Parameters.
            run: A function of their leaves.
            ends: The tensors to be differentiated in what it made.
        """
        parameters = self.parameters
        leaves = {name: self._leaf(name, parameters[name]) for name in names}
        frozen = [p for p in map(self.model.parameters.get, names) if p is not None and not p.requires_grad]
        with locked(self.model.module), RefuseReentrant(), thawed(frozen):
            found = run(leaves)
        held = self._held(leaves, [end for end in ends(found) if end is not None])
        if self.model.widening is not None:
            refuse_half(self.model.name, held, ends(found))
        if not held:
            return leaves, found
        if any(p is q for p in held.values() for q in frozen):
            raise UsageError(
                f"the module holds {min(held)!r} in a second way (a closure or a list), and it is frozen, so "
                "that derivatives in it cannot be followed",
                hint="module.requires_grad_(True)",
            )
        if not held.keys().isdisjoint(self.point):
            raise moved(min(held.keys() & self.point.keys()))
        leaves |= held
        return leaves, run(leaves)

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        """A leaf at a parameter's value, in the type that it is used in."""
        widening = self.model.widening
        if widening is not None and value.dtype != self.dtype:
            return widening.leaf(name, value)
        return value.detach().requires_grad_()

    def _held(self, leaves: Leaves, ends: list[Tensor]) -> Leaves:
        """The module's own parameters among those that have leaves, where the graph has found them."""
        own = {id(p): name for name, p in self.model.parameters.items() if name in leaves}
        found = (leaf for end in ends if end.requires_grad for leaf in leaves_of(end))
        return {own[id(leaf)]: leaf for leaf in found if id(leaf) in own}

    def check_structure(self) -> None:
        """Raise when the module's parameters are others than those that blocks and spaces were made for."""
        if {name: p.shape for name, p in self.model.parameters.items()} != self._shapes:
            raise CurvescopeError(
                f"the parameters of {self.model.name} have other names or shapes than when it was loaded",
                hint="make a new Problem of the module as it is now",
            )
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


@contextmanager
def _looked_up(batch: Batch) -> Iterator[None]:
    """An id that no embedding has, and one that is no whole number, are said in our words."""
    try:
        yield
    except RuntimeError as error:
        if "'indices'" not in str(error):  # PyTorch's word for ids
            raise
        kinds = ", ".join(str(t.dtype) for t in tree_leaves(batch.inputs))
        raise UsageError(
            f"the module looks entries up, for which it needs integer inputs, and got {kinds}",
            hint="ids.long(), if they are whole numbers",
        ) from error
    except IndexError as error:
        ids = [t for t in tree_leaves(batch.inputs) if not t.is_floating_point() and t.numel()]
        if not ids:
            raise
        low, high = min(int(t.min()) for t in ids), max(int(t.max()) for t in ids)
        raise UsageError(
            f"the module found no entry for some of its inputs, which go from {low} to {high}: {error}",
            hint="are there ids outside its vocabulary?",
        ) from error


@contextmanager
def differentiating() -> Iterator[None]:
    """The caller's modes do not count inside: no_grad, inference mode, autocast, `torch.compile`."""
    with uncompiled(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as off:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                off.enter_context(torch.autocast(kind, enabled=False))
        yield


def check_finite(total: Tensor, problem: Problem, *given: Tensor) -> None:
    """Raise when a product, with what was given, has infinite or undefined entries."""
    finite = bool(torch.isfinite(total.sum())) or bool(torch.isfinite(total).all())
    if not (finite if problem.model.spread is None else problem.model.spread.all(finite, total.device)):
        if not all(bool(torch.isfinite(v).all()) for v in given):
            raise UsageError(
                "expected a vector of finite numbers, got one with infinite or undefined entries"
            )
        found = not_finite(problem.model, problem.parameters)
        where = f", and there are NaN or infinite weights in {words(found)}" if found else ""
        raise CurvescopeError(
            f"the product is not finite; the loss at these parameters is {problem.value():.4g}{where}",
            hint="look for diverged weights, or use dtype='float64'",
        )
