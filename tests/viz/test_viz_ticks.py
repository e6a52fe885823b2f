"""Ticks of short logarithmic axes are plain numbers; long ones keep their powers of ten."""

from __future__ import annotations

from matplotlib import pyplot as plt

from curvescope.viz.ticks import plain_numbers


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
