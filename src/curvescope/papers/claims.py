"""What it means for a claim of a paper to agree with what was measured."""

from __future__ import annotations

from curvescope.runs.shown import Claim

AGREES, DIFFERS = "agrees", "differs"
AUTHORS_CODE = "authors' code"  # printed by it when it is run, or stored in its result files


def as_printed(claim: str, published: str, measured: float, *, source: str) -> Claim:
    """A claim whose number is given with a certain number of digits: do all of them come out?"""
    found = like(measured, published)
    return Claim(claim, published, found, AGREES if float(found) == float(published) else DIFFERS, source)


def within(claim: str, published: float, measured: float, *, relative: float, source: str) -> Claim:
    """A claim that agrees if |measured − published| ≤ relative · |published|; it shows the difference."""
    difference = abs(measured - published) / abs(published)
    shown = f"{measured:.9g} (relative difference {difference:.1e})"
    return Claim(claim, f"{published:.9g}", shown, AGREES if difference <= relative else DIFFERS, source)


def like(value: float, text: str) -> str:
    """`value` with the digits and the notation of the number `text`: like(0.00026471, "2.647e-4")."""
    mantissa, exponent, _ = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return f"{value:.{decimals}{'e' if exponent else 'f'}}"
