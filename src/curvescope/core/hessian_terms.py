"""Names of the Hessian and of its two parts, shared by formulas, operators, studies and figures.

    H = H_o + H_f,   H_o = Jᵀ B J,   H_f = Σ_i G_i ∂²F_i

for a loss ℓ(F(θ)) with J = ∂F/∂θ, G = ∂ℓ/∂F and B = ∂²ℓ/∂F². A `Part` is one of the three with respect to any
F, such as the output of a layer: `outer` is H_o, `functional` is H_f. A `MatrixName` is one of them if F is
the output of the whole network; then H_o is the GGN of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from curvescope.core.errors import UsageError

Part = Literal["outer", "functional", "total"]
Symbol = Literal["H_o", "H_f", "H"]
Half = Literal["outer", "functional"]
MatrixName = Literal["hessian", "ggn", "functional"]
LossPart = Literal["hessian", "functional"]
"""Scalar that a pass differentiates twice: the loss, or ⟨G, F⟩ with G held fixed."""

PARTS: tuple[Part, ...] = get_args(Part)
HALVES: tuple[Half, ...] = get_args(Half)
MATRICES: tuple[MatrixName, ...] = get_args(MatrixName)

SYMBOLS: Mapping[Part, Symbol] = MappingProxyType({"outer": "H_o", "functional": "H_f", "total": "H"})
PART_OF: Mapping[Symbol, Part] = MappingProxyType({symbol: part for part, symbol in SYMBOLS.items()})
MATRIX_SYMBOLS: Mapping[str, Symbol] = MappingProxyType({"hessian": "H", "ggn": "H_o", "functional": "H_f"})
"""Symbol by name of a matrix."""
TITLES: Mapping[str, str] = MappingProxyType(
    {"hessian": "Hessian", "ggn": "GGN", "functional": "functional Hessian"}
)
"""Title by name of a matrix."""


def check_part(part: str) -> None:
    """Raise unless `part` is outer, functional or total."""
    if part not in PARTS:
        raise UsageError(f"expected part of {', '.join(PARTS)}, got {part!r}")


def check_matrix_name(part: str) -> None:
    """Raise unless `part` is hessian, ggn or functional."""
    if part not in MATRICES:
        raise UsageError(f"expected part 'hessian', 'ggn' or 'functional', got {part!r}")
