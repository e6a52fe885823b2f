"""The task of addition: it adds, and its draws are the published ones."""

from pathlib import Path

import pytest
import torch

from curvescope.data.batches import Batches
from curvescope.data.tasks import task_data
from curvescope.losses import CrossEntropy, SquaredError

ROWS = [
    [5, 1, 6, 5, 6, 10, 7, 3, 8, 9, 1, 11, 1, 2, 5, 5, 4, 7],
    [4, 2, 5, 5, 9, 10, 3, 4, 4, 8, 1, 11, 0, 7, 7, 0, 4, 0],
]


def number(digits):
    return int("".join(str(d) for d in digits))


def published_batch() -> Path | None:
    root = Path(__file__).resolve().parents[2]
    name = "sweep_tokens_64x18.csv"
    places = [
        root / "assets" / name,
        root.parent / "shared" / "assets" / name,
        root.parent / "shared" / "reference" / "ormaniec2025" / name,
    ]
    return next((place for place in places if place.is_file()), None)


def test_default_is_the_batch_of_the_published_sweeps():
    data = task_data("addition")
    assert (data.num_sequences, data.num_terms, len(data)) == (64, 64 * 6, 1)
    assert data[0].inputs[:2].tolist() == ROWS
    file = published_batch()
    if file is not None:
        assert data[0].inputs.tolist() == [
            [int(t) for t in line.split(",")] for line in file.read_text().split()
        ]


@pytest.mark.parametrize("digits", [1, 5, 25])
@pytest.mark.parametrize("sum_to_nine", ["never", "coin"])
def test_it_really_adds(digits, sum_to_nine):
    (batch,) = task_data(
        "addition", num_sequences=100, digits=digits, draw_size=10, sum_to_nine=sum_to_nine, seed=5
    )
    assert batch.inputs.shape == (100, 3 * digits + 3)
    for row in batch.inputs.tolist():
        plus, equals = row.index(10), row.index(11)
        assert (plus, equals) == (digits, 2 * digits + 1)
        x, y, z = row[:plus], row[plus + 1 : equals], row[equals + 1 :]
        assert number(x) + number(y) == number(z)
        assert max(x + y + z) <= 9


def test_targets_are_the_next_token_from_the_equals_sign_on():
    (batch,) = task_data("addition")
    assert bool((batch.targets[:, :11] == -100).all())
    assert bool((batch.targets[:, 17] == -100).all())
    assert torch.equal(batch.targets[:, 11:17], batch.inputs[:, 12:18])


def test_a_fifth_of_the_columns_sums_to_nine_where_the_coin_says_so():
    """Python's coins for seed 1234 fall on draws 2, 3, 4, 7 (x overwritten) and 8 (y overwritten)."""
    plain = task_data("addition", draw_size=8, batch_size=8)
    forced = task_data("addition", draw_size=8, batch_size=8, sum_to_nine="coin")
    assert torch.equal(plain[0].inputs, forced[0].inputs)
    x, y = forced[1].inputs[:, :5], forced[1].inputs[:, 6:11]
    assert torch.equal(y, plain[1].inputs[:, 6:11])  # the first draw consumed no more than the plain one
    changed = x != plain[1].inputs[:, :5]
    assert 0 < int(changed.sum()) <= 8
    assert bool((x + y == 9)[changed].all())
    assert int((x + y == 9).sum()) >= 8
    counts = [int((b.inputs[:, :5] + b.inputs[:, 6:11] == 9).sum()) for b in forced]
    assert [count >= 8 for count in counts] == [False, True, True, True, False, False, True, True]


@pytest.mark.slow
def test_coin_branch_gives_the_published_curvature_of_the_histograms():
    """Frobenius norm of the W_Q Hessian of the histograms' model on their data, 8 batches of 8."""
    data = task_data("addition", draw_size=8, batch_size=8, sum_to_nine="coin")
    batch = task_data("addition", draw_size=8, sum_to_nine="coin")[0]
    assert torch.equal(torch.cat([b.inputs for b in data]), batch.inputs)
    source = torch.Generator().manual_seed(1234)
    shapes = [(12, 16), (18, 16), *[(16, 16)] * 4, (16, 64), (64, 16), (16, 12)]
    E, P, W_Q, W_O, W_K, W_V, W_in, W_out, U = (
        0.2 * torch.randn(s, generator=source).double() for s in shapes
    )
    future = torch.ones(18, 18, dtype=torch.bool).triu(1)

    def mean_loss(W_Q):
        r = E[batch.inputs] + P
        A = ((r @ W_Q) @ (r @ W_K).mT / 4).masked_fill(future, -torch.inf).softmax(-1)
        r = r + A @ r @ W_V @ W_O
        logits = (r + (r @ W_in).relu() @ W_out) @ U
        return CrossEntropy().sum(logits, batch.targets, None) / batch.targets.ne(-100).sum()

    H = torch.autograd.functional.hessian(mean_loss, W_Q, vectorize=True)
    assert float(H.norm()) == pytest.approx(2.59756894e-4, rel=1e-6)


@pytest.mark.parametrize(("kind", "first"), [("onehot_next", 12), ("onehot_current", 11)])
def test_one_hot_targets_make_the_squared_error_of_six_positions(kind, first):
    (batch,) = task_data("addition", num_sequences=8, targets=kind)
    logits = torch.randn(8, 18, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(batch.inputs[:, first : first + 6], 12)
    expected = ((logits[:, 11:17] - one_hot) ** 2).sum()
    loss = SquaredError("mean")
    torch.testing.assert_close(loss.sum(logits, batch.targets, batch.weights), expected)
    assert loss.total_weight(batch.targets, batch.weights) == 8 * 6 * 12


def test_draws_of_another_size_are_other_data():
    assert isinstance(task_data("addition", draw_size=10), Batches)
    assert not torch.equal(task_data("addition", draw_size=10)[0].inputs, task_data("addition")[0].inputs)
    assert task_data("addition", num_sequences=25, draw_size=10).num_sequences == 25
