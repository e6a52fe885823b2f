"""Which parameters vary in a problem: those that are named, or all that are not frozen."""

from __future__ import annotations

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.numbers import plural
from curvescope.models.choice.params import Params
from curvescope.models.model import Model
from curvescope.models.running.exchange import locked

SHOWN = 4  # names in a note


class Choice:
    """What varies in a problem: `params`, or all that is not frozen (`requires_grad=False`).

    What is frozen counts as it is when the choice is made; `check` raises where that has changed.
    """

    def __init__(self, model: Model, params: Params | None = None):
        self._model, self.params = model, params
        self._frozen: frozenset[str] | None = None
        if params is not None:
            self._own = frozenset(block.name for block in model.space(params))
            return
        self._frozen = left = frozen(model)
        self._own = frozenset(name for name, block in model.blocks.items() if block.parameter not in left)
        if not self._own:
            raise UsageError(
                f"every parameter of {model.name} is frozen (requires_grad=False), so that nothing varies",
                hint="params='*' takes all of them",
            )

    def space(self, *patterns: Params) -> ParamSpace:
        """Vectors over what varies, or over the blocks that are meant: among these, else among all."""
        return self._model.space(*patterns, first=self._own)

    def check(self) -> None:
        """Raise when parameters were frozen or thawed since."""
        if self._frozen is None or (now := frozen(self._model)) == self._frozen:
            return
        changed = sorted(now ^ self._frozen)
        word = "frozen" if changed[0] in now else "thawed"
        raise CurvescopeError(
            f"since the problem was made, {plural(len(changed), 'parameter')} of {self._model.name} became "
            f"{word}: {_list(changed)}",
            hint="make a new Problem; with params='*', or names, what is frozen does not matter",
        )

    def notes(self) -> list[str]:
        """What was left out, where something was."""
        return notes_of(self._model, self._frozen) if self._frozen else []


def frozen(model: Model) -> frozenset[str]:
    """Parameters that are frozen by their owner; a product in another thread may thaw them for a while."""
    with locked(model.module):
        return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def notes_of(model: Model, frozen: frozenset[str]) -> list[str]:
    """How much is frozen, which blocks, and how to take them."""
    left = [block for block in model.blocks.values() if block.parameter in frozen]
    if not left:
        return []
    count, total = model.size_of(*left), plural(model.num_parameters, "parameter")
    return [
        f"{count:,} of {total} are frozen (requires_grad=False) and left out: "
        f"{_list([block.name for block in left])}; params='*' takes them too, and so does naming them alone"
    ]


def _list(names: list[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
