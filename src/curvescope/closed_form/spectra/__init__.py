"""Exact spectra: the reduction lemma and its cases."""

from curvescope.closed_form.spectra.one_dimensional import (
    SpectrumOptions,
    attention_1d_outputs,
    attention_1d_spectrum,
    two_layer_linear_spectrum,
    two_layer_relu_spectrum,
)
from curvescope.closed_form.spectra.reduction import (
    ExactSpectrum,
    ProductBulk,
    product_bulk,
    reduced_spectrum,
)

__all__ = [
    "ExactSpectrum",
    "ProductBulk",
    "SpectrumOptions",
    "attention_1d_outputs",
    "attention_1d_spectrum",
    "product_bulk",
    "reduced_spectrum",
    "two_layer_linear_spectrum",
    "two_layer_relu_spectrum",
]
