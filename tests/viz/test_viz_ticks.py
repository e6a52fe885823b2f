"""Ticks of short logarithmic axes are plain numbers; long ones keep their powers of ten; around zero."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from curvescope.viz.style import around_zero, plain_numbers


def test_a_short_axis_has_plain_numbers_and_a_long_one_powers():
    figure, (short, long) = plt.subplots(1, 2)
    short.semilogy([0, 1], [0.3, 40.0])
    long.semilogy([0, 1], [1e-4, 40.0])
    ends, before = short.get_ylim(), list(long.get_yticks())
    for ax in (short, long):
        plain_numbers(ax)
    shown = [label.get_text() for label in short.get_yticklabels()]
    assert shown == ["0.5", "1", "2", "5", "10", "20", "50"]
    assert short.get_ylim() == ends
    assert list(long.get_yticks()) == before
    plt.close(figure)


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((-0.0052, 0.0031), ["-0.004", "-0.002", "0", "0.002"]),  # all of it is linear
        ((-0.012, 0.31), ["-0.01", "-0.005", "0", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2"]),
        ((-2.0, 30.0), ["-1", "-0.1", "-0.01", "0", "0.01", "0.1", "1", "10"]),
    ],
)
def test_an_axis_around_zero_has_plain_numbers(ends, labels):
    figure, ax = plt.subplots()
    ax.set_ylim(*ends)
    around_zero(ax, 0.01)
    assert [text.get_text() for text in ax.get_yticklabels()] == labels
    assert ax.get_ylim() == pytest.approx(ends)
    plt.close(figure)
