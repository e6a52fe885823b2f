"""A mode that sees every operation that is dispatched, without torch's compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Torch's own, which does not hide its calls from `torch.compile`.

    To hide them, torch imports its compiler at the first call of a mode: two seconds before a first product.
    A compiled module gives the same numbers either way.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
