"""The paper's own random numbers: known answers, exact norms at its weights, and its published means."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from curvescope.papers.ormaniec2025 import growth
from curvescope.papers.ormaniec2025 import growth_sweeps as streams
from curvescope.papers.ormaniec2025.growth_exponents import published_curves
from curvescope.papers.ormaniec2025.growth_sweeps import EXPERIMENTS, RandomSource, measure, sweep_tokens

REFERENCE = Path(__file__).parent / "data" / "ormaniec_exact_norms.csv"


def reference():
    lines = [line for line in REFERENCE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def test_philox_known_answer():
    """Counter 0, key 0: the known answer of Salmon et al. (2011)."""
    words = streams.philox(0, 0, 1)[:, 0]
    assert [hex(int(w)) for w in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_streams_have_the_distributions_they_should():
    normal = streams.cuda_normal((40_000,), 2.0, seed=7, call=3)
    assert abs(float(normal.mean())) < 4 * 2 / 200
    assert abs(float(normal.std()) - 2) < 4 * 2 / 200 / 2**0.5
    uniform = streams.cuda_uniform((40_000,), 0.5, seed=7, call=3)
    assert float(uniform.abs().max()) <= 0.5
    assert abs(float(uniform.var()) - 1 / 12) < 4e-3
    signs = streams.rademacher(0, 3, 2, 400, total=5)
    legacy = np.random.RandomState(1234)
    drawn = np.stack([legacy.binomial(1, 0.5, 400) * 2 - 1 for _ in range(5)])
    assert torch.equal(signs, torch.from_numpy(drawn[3:]).double())


def test_exact_norms_at_the_papers_weights():
    tokens, measured = sweep_tokens(), {}
    for row in reference():
        experiment, repeat, index = row["experiment"], int(row["repeat"]), int(row["sigma_index"])
        key = experiment, repeat, index
        if key not in measured:
            source = RandomSource(EXPERIMENTS[experiment], repeat, 0, replay=True, redraw=True, device="cpu")
            measured[key] = measure(source, index, source.weights(), tokens, probes=1, exact=True)[0]
        place = EXPERIMENTS[experiment].rows.index((row["block"], "H", int(row["layer"])))
        assert measured[key][place] == pytest.approx(float(row["frobenius"]), rel=1e-8)
    assert len(measured) == 19


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "index"),
    [("softmax_none_ce_log_L1", 0), ("softmax_none_ce_log_L1", 12), ("softmax_pre_ce_log_L1", 7),
     ("linattn_none_mse_log_short_L2", 5)],
)  # fmt: skip
def test_published_means_come_out_with_the_papers_probes(experiment, index):
    """All 20 repeats from 20 probes of each part: the published means, which were computed in float32."""
    rows, tokens, values = EXPERIMENTS[experiment].rows, sweep_tokens(), []
    for repeat in range(20):
        source = RandomSource(EXPERIMENTS[experiment], repeat, 0, replay=True, redraw=True, device="cpu")
        values.append(measure(source, index, source.weights(), tokens, probes=20, exact=False)[0])
    mean = dict(zip(rows, np.mean(values, axis=0), strict=True))
    for curve, published in published_curves(experiment).items():
        assert mean[curve] == pytest.approx(published.mean[index], rel=1e-5)


def test_replay_draws_at_every_scale():
    cfg = growth.Config(replay=True, experiments=("linattn*L1",), repeats=1, every=10)
    values = growth.run(cfg).sweeps["linattn_none_mse_log_short_L1"].curve("W_V", "H", 0)[0]
    scaled = values[0] * 10 ** (6 * 10 / 19)  # what one draw would give
    assert abs(values[1] / scaled - 1) > 0.01
