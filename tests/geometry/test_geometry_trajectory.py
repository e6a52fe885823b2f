"""Paths of tokens: every number against brute force, the baseline is fair."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from trajectory_models import SMALL, T, V, data, hf_module, inputs, model_of

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.data.batches import IGNORED, Batches
from curvescope.geometry.stream import stream
from curvescope.geometry.trajectory import paths
from curvescope.geometry.trajectory.paths import average, curve, follow, trajectories
from curvescope.geometry.trajectory.readout import readout
from curvescope.tokenizers import CharTokenizer

# ------------------------------------------------------------------------------------ numbers


def test_turns_are_known_on_a_few_paths():
    e = torch.eye(3, dtype=torch.float64)
    angles = torch.tensor([0.0, 0.3, 1.0, 1.2]).double()
    circle = torch.stack([angles.cos(), angles.sin(), 0 * angles], -1)
    straight = paths.turning(circle)
    torch.testing.assert_close(straight[1:-1], torch.zeros(2).double(), atol=1e-6, rtol=0)
    assert straight[[0, -1]].isnan().all()
    assert float(paths.turning(torch.stack([e[0], e[1], e[2]]))[1]) == pytest.approx(90)
    assert float(paths.turning(torch.stack([e[0], e[1], e[0]]))[1]) == pytest.approx(180)
    assert math.isnan(paths.turning(torch.stack([e[0], e[0], e[1]]))[1])  # no step, no direction


def test_path_numbers_by_brute_force():
    x = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = x / x.norm(dim=-1, keepdim=True)
    found = {name: value.numpy() for name, value in paths.path_numbers(x, u).items()}
    n = u.numpy()
    for i in range(4):
        length = 0.0
        for p in range(7):
            to = lambda a, b: math.degrees(math.acos(np.clip(a @ b, -1, 1)))  # noqa: E731
            step = to(n[i, p], n[i, p - 1]) if p else 0.0
            length += step
            assert found["step"][i, p] == pytest.approx(step, abs=1e-5)
            assert found["length"][i, p] == pytest.approx(length, abs=1e-5)
            assert found["angle_start"][i, p] == pytest.approx(to(n[i, p], n[i, 0]), abs=1e-5)
            assert found["angle_end"][i, p] == pytest.approx(to(n[i, p], n[i, -1]), abs=1e-5)
            assert found["cos_end"][i, p] == pytest.approx(n[i, p] @ n[i, -1], abs=1e-12)
            assert found["norm"][i, p] == pytest.approx(np.linalg.norm(x[i, p]))


def test_lens_numbers_by_brute_force():
    logits = torch.randn(3, 4, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[1, 2, 5] = -torch.inf  # ruled out
    target, current = torch.tensor([4, 0, 7]), torch.tensor([1, 2, 7])
    logp = paths.log_probabilities(logits)
    found = paths.lens_numbers(logp, target, current) | paths.distribution_numbers(logp)
    for i in range(3):
        last = np.exp(logits[i, -1].numpy())
        last /= last.sum()
        for n in range(4):
            p = np.exp(logits[i, n].numpy())
            p /= p.sum()
            t, c = int(target[i]), int(current[i])
            assert float(found["logp_target"][i, n]) == pytest.approx(math.log(p[t]))
            rank = 1 + sum(q > p[t] for q in p)
            assert math.exp(found["log_rank"][i, n]) == pytest.approx(rank)
            assert float(found["top1"][i, n]) == (rank == 1)
            assert float(found["gain"][i, n]) == pytest.approx(math.log(p[t] / p[c]))
            kept = p[p > 0]
            assert float(found["entropy"][i, n]) == pytest.approx(-(kept * np.log(kept)).sum())
            if (p > 0).all():
                assert float(found["kl_end"][i, n]) == pytest.approx(
                    (last * np.log(last / p)).sum(), abs=1e-12
                )
    assert float(found["kl_end"][:, -1].abs().max()) < 1e-12


def test_shares_of_a_step_sum_to_one():
    x = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = paths.shares(x, center=True)
    c = x - x.mean(-1, keepdim=True)
    for block in range(3):
        a, m = c[:, 2 * block + 1] - c[:, 2 * block], c[:, 2 * block + 2] - c[:, 2 * block + 1]
        whole = a + m
        own, other = ((part * whole).sum(-1) / whole.square().sum(-1) for part in (a, m))
        torch.testing.assert_close(found["attention_share"][:, block], own)
        torch.testing.assert_close(own + other, torch.ones(5).double())
        torch.testing.assert_close(found["ff_norm"][:, block], m.norm(dim=-1))


@pytest.mark.parametrize("name", ["pre", "rmsnorm"])
def test_numbers_do_not_change_when_states_are_rescaled(name):
    model = model_of(name)
    seen = stream(model, inputs())
    read = readout(model, seen)
    x = 100 * seen.points[0]  # ε does not matter
    scale = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    y = x * (1 + 5 * scale)[..., None]
    target = torch.arange(T)
    for a, b in ((x, y),):
        one, two = (paths.path_numbers(p, read.unit(p)) for p in (a, b))
        assert not torch.allclose(one.pop("norm"), two.pop("norm"))
        one |= paths.target_numbers(read.unit(a), read.token(target))
        two |= paths.target_numbers(read.unit(b), read.token(target))
        with torch.no_grad():
            one |= paths.lens_numbers(paths.log_probabilities(read.logits(a)), target, None)
            two |= paths.lens_numbers(paths.log_probabilities(read.logits(b)), target, None)
        for key in one:
            torch.testing.assert_close(one[key], two[key], atol=2e-6, rtol=0, equal_nan=True)


# ------------------------------------------------------------------------------------ averages


def test_standard_errors_know_sequences():
    random = np.random.default_rng(0)
    values = random.normal(size=(40, 3))
    mean, stderr = average(values, np.arange(40))
    np.testing.assert_allclose(mean, values.mean(0))
    np.testing.assert_allclose(stderr, values.std(0, ddof=1) / math.sqrt(40))
    copies, sequence = np.repeat(values, 5, axis=0), np.repeat(np.arange(40), 5)
    np.testing.assert_allclose(average(copies, sequence)[1], stderr)  # copies tell nothing new
    alone = average(values, np.zeros(40, dtype=int))[1]
    np.testing.assert_allclose(alone, stderr)  # of one sequence, tokens are the units


def test_entries_that_are_missing_do_not_count():
    values = np.array([[1.0, np.nan], [3.0, np.nan], [np.nan, np.nan]])
    mean, _ = average(values, np.arange(3))
    assert mean[0] == 2
    assert np.isnan(mean[1])


def test_change_is_paired_token_by_token():
    values, shuffled = np.array([[3.0, 1.0], [5.0, 4.0]]), np.array([[3.0, 2.0], [5.0, 5.0]])
    found = curve(values, np.arange(2), shuffled)
    assert found.change == -1  # −2 and −1, less −1 and 0
    assert found.change_stderr == 0
    assert found.falling == 1


def test_results_do_not_depend_on_batching_and_repeat_with_the_seed():
    model = model_of("pre")
    whole, parts = (trajectories(model, data(batch_size=size), seed=3) for size in (5, 2))
    for name, c in whole.curves.items():
        other = parts.curves[name]
        np.testing.assert_allclose(c.mean, other.mean, atol=1e-10)
        np.testing.assert_allclose(c.stderr, other.stderr, atol=1e-10)
        if c.shuffled is not None:
            np.testing.assert_allclose(c.shuffled, other.shuffled, atol=1e-10)
    again = trajectories(model, data(), seed=3)
    np.testing.assert_array_equal(
        whole.curves["angle_target"].shuffled, again.curves["angle_target"].shuffled
    )
    assert whole.num_tokens == 5 * T - 3
    assert whole.num_sequences == 5


def test_targets_that_do_not_count_are_left_out():
    """The numbers are those of counted tokens alone, next token and current token both aligned."""
    model, batches = model_of("pre"), data()
    found = trajectories(model, batches)
    batch = batches[0]
    seen = stream(model, batch.inputs)
    read = readout(model, seen)
    gains = []
    for i in range(5):
        for t in range(T):
            target = int(batch.targets[i, t])
            if target == IGNORED:
                continue
            with torch.no_grad():
                logp = read.logits(seen.points[i, t]).log_softmax(-1)
            gains.append((logp[:, target] - logp[:, int(batch.inputs[i, t])]).numpy())
    np.testing.assert_allclose(found.curves["gain"].mean, np.mean(gains, axis=0), atol=1e-10)


def test_equal_targets_leave_nothing_beyond_the_baseline():
    model, x = model_of("pre"), inputs(4)
    batches = Batches.from_tensors(x, torch.full_like(x, 5))
    found = trajectories(model, batches)
    for name in ("angle_target", "logp_target", "log_rank"):
        assert np.abs(found.curves[name].excess).max() < 1e-12
        assert found.curves[name].change == pytest.approx(0, abs=1e-12)


def test_a_model_that_was_trained_goes_to_the_next_token():
    model = cs.load("tiny-gpt")
    found = trajectories(model, cs.text_data("sample", model, tokens=512, seq_len=64))
    c = found.curves["angle_target"]
    assert c.change < -5 * c.change_stderr
    fresh = cs.load("tiny-gpt", revision="initial")
    c = trajectories(fresh, cs.text_data("sample", fresh, tokens=512, seq_len=64)).curves["angle_target"]
    assert abs(c.change) < 5 * c.change_stderr + 0.2


# ------------------------------------------------------------------------------------ one prompt


def test_follow_keeps_every_token():
    model = model_of("pre")
    found = follow(model, [1, 2, 3, 4])
    assert found.values["angle_target"].shape == (4, 5)
    assert np.isnan(found.values["logp_target"][-1]).all()  # nothing comes after the last
    assert np.isfinite(found.values["logp_target"][:-1]).all()
    with torch.no_grad():
        p = model.forward({}, torch.tensor([[1, 2, 3, 4]]))[0].softmax(-1)
    np.testing.assert_array_equal(found.reads_id[:, -1], p.argmax(-1))
    np.testing.assert_allclose(found.reads_p[:, -1], p.max(-1).values, atol=1e-10)
    np.testing.assert_allclose(found.values["logp_target"][0, -1], math.log(p[0, 2]), atol=1e-10)
    np.testing.assert_allclose(np.linalg.norm(found.states, axis=-1), 1)
    cosine = (found.states[0, -1] * found.words[1]).sum()
    assert found.values["cos_target"][0, -1] == pytest.approx(cosine)


def test_encoders_are_followed_to_their_own_tokens():
    found = follow(model_of("bert"), [3, 4, 5])
    assert np.isfinite(found.values["angle_target"]).all()
    assert "gain" not in found.values  # there is no next token
    assert any("post-norm" in note for note in found.notes)


def test_a_body_without_a_head_has_geometry_and_no_lens():
    body = hf_module("bert").bert
    found = trajectories(cs.load(body), data())
    assert {"angle_start", "step", "angle_target"} <= set(found.curves)
    assert not {"logp_target", "entropy"} & set(found.curves)
    assert any("no head" in note for note in found.notes)


BAD: dict[str, tuple[Any, str]] = {
    "one token": (lambda: follow(model_of("pre"), [3]), "at least 2 tokens, got 1"),
    "too long": (lambda: follow(model_of("pre"), [1] * 9), "at most 8 tokens, got 9"),
    "text without a tokenizer": (lambda: follow(model_of("pre"), "abc"), "has no tokenizer"),
    "no vocabulary": (
        lambda: follow(
            cs.load(cs.TransformerConfig(**{**SMALL, "inputs": "continuous", "outputs": "regression"})),
            [1, 2],
        ),
        "token vocabulary",
    ),
    "no layers": (lambda: stream(cs.load(torch.nn.Linear(3, 3)), torch.zeros(1, 3)), "known layers"),
    "nothing to shuffle": (
        lambda: trajectories(model_of("pre"), Batches.from_tensors(inputs(1)[:, :1], inputs(1)[:, :1])),
        "at least 2 tokens",
    ),
    "no permutation": (lambda: trajectories(model_of("pre"), data(), num_shuffles=0), "num_shuffles"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_calls_say_what_was_expected(case):
    call, words = BAD[case]
    with pytest.raises(UsageError, match=words):
        call()


def test_a_prompt_of_text_is_cut_by_the_tokenizer():
    model = cs.models.zoo.zoo_model(model_of("pre").module, name="m", tokenizer=CharTokenizer("abcdefghijk"))
    assert follow(model, "cab").tokens == ["c", "a", "b"]
