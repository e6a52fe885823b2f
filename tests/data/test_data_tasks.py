"""Every task: targets, seeds, cuts, and what is refused."""

import math
import subprocess
import sys

import pytest
import torch

from curvescope.core.errors import UsageError
from curvescope.data.tasks import LETTERS, POSITIONS, TASKS, task_data, task_from_text, task_options

SMALL = {"digits": {"num_sequences": 20}, "modular_addition": {"p": 5, "fraction": 0.6}}
REAL = {"gaussian_regression", "digits"}


def whole(name, **options):
    (batch,) = task_data(name, **options)
    return batch.inputs, batch.targets


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_fixes_the_data_and_batch_size_only_cuts_it(name):
    options = SMALL.get(name, {"num_sequences": 20})
    inputs, targets = whole(name, **options, seed=3)
    again = task_data(name, **options, seed=3, batch_size=7)
    assert again.name == name
    assert [b.num_sequences for b in again] == [7] * (len(inputs) // 7) + [len(inputs) % 7] * (
        len(inputs) % 7 > 0
    )
    assert torch.equal(torch.cat([b.inputs for b in again]), inputs)
    assert torch.equal(torch.cat([b.targets for b in again]), targets)
    assert not torch.equal(whole(name, **options, seed=4)[0], inputs)


@pytest.mark.parametrize("name", TASKS)
def test_global_random_numbers_are_left_alone(name):
    before = torch.random.get_rng_state()
    task_data(name, **SMALL.get(name, {"num_sequences": 3}))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", sorted(set(TASKS) - REAL))
def test_integer_tasks_count_some_targets_and_give_ids(name):
    inputs, targets = whole(name, **SMALL.get(name, {"num_sequences": 10}))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape
    assert int(inputs.min()) >= 0
    assert bool((targets != -100).any(dim=1).all())


def test_modular_addition_adds():
    inputs, targets = whole("modular_addition", p=7)
    pairs = [(a, b) for a in range(7) for b in range(7)]
    assert inputs.tolist() == [[a, b, 7] for a, b in pairs]
    assert targets.tolist() == [[-100, -100, (a + b) % 7] for a, b in pairs]


def test_modular_fraction_and_what_is_held_out_share_no_pair():
    chosen = {tuple(row) for row in whole("modular_addition", p=7, fraction=0.3, seed=1)[0].tolist()}
    rest = {
        tuple(row) for row in whole("modular_addition", p=7, fraction=0.3, seed=1, held_out=True)[0].tolist()
    }
    assert (len(chosen), len(rest), len(chosen | rest)) == (15, 34, 49)
    for wrong in ({"fraction": 1.5}, {"fraction": 0.0}, {"fraction": 1.0, "held_out": True}):
        with pytest.raises(UsageError, match="fraction"):
            task_data("modular_addition", p=7, **wrong)


def test_copy_repeats_its_word():
    inputs, targets = whole("copy", num_sequences=50, length=5, vocab=4)
    word = inputs[:, :5]
    assert inputs.shape == (50, 10)
    assert set(word.flatten().tolist()) == {0, 1, 2, 3}
    assert bool((inputs[:, 5] == 4).all())
    assert torch.equal(inputs[:, 6:], word[:, :4])
    assert bool((targets[:, :5] == -100).all())
    assert torch.equal(targets[:, 5:], word)


def test_induction_asks_for_what_followed_the_same_letter():
    inputs, targets = whole("induction", num_sequences=200, length=6, vocab=4)
    assert bool((targets[:, :-1] == -100).all())
    places = set()
    for row, answer in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
        first = row.index(row[-1])
        assert row.count(row[-1]) == 2
        assert answer == row[first + 1] != row[-1]
        places.add(first)
    assert places == {0, 1, 2, 3}
    assert set(inputs.flatten().tolist()) == {0, 1, 2, 3}


def test_sorting_sorts():
    inputs, targets = whole("sorting")
    assert inputs.shape == (64, 11)
    assert set(inputs.flatten().tolist()) == {0, 1, 2}
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        answer = sorted(row[:6])
        assert wanted == [-100] * 5 + answer
        assert row[6:] == answer[:-1]


def test_gaussian_regression_is_a_linear_map_of_its_inputs():
    options = {"num_sequences": 40, "length": 5, "width": 4, "out_width": 3}
    X, Y = whole("gaussian_regression", **options, sigma=0.5)
    assert (X.shape, Y.shape, X.dtype, Y.dtype) == ((40, 5, 4), (40, 5, 3), torch.float64, torch.float64)
    W = torch.linalg.lstsq(X.flatten(0, 1), Y.flatten(0, 1)).solution
    torch.testing.assert_close(X @ W, Y)
    X_big, Y_big = whole("gaussian_regression", **options, sigma=2.0)
    torch.testing.assert_close(X_big, 4 * X)
    torch.testing.assert_close(Y_big, 4 * Y)
    _, noisy = whole("gaussian_regression", **options, sigma=0.5, noise=0.1)
    _, noise = whole("gaussian_regression", **options, sigma=0.5, teacher="noise")
    torch.testing.assert_close(noisy, Y + 0.1 * noise)
    assert whole("gaussian_regression", dtype="float32")[0].dtype == torch.float32


def test_gaussian_regression_has_the_spread_it_says():
    X, Y = whole("gaussian_regression", num_sequences=200, length=10, width=10, sigma=3.0, teacher="noise")
    spread = 4 / math.sqrt(2 * X.numel())  # four standard errors of a standard deviation, relative
    assert abs(X.std() / 3 - 1) < spread
    assert abs(Y.std() - 1) < spread
    assert abs((X * Y).mean()) < 4 * 3 / math.sqrt(X.numel())


def test_digits_are_images():
    from sklearn.datasets import load_digits

    images, classes = whole("digits")
    assert images.shape == (1797, 1, 8, 8)
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert torch.equal(classes.bincount(), torch.as_tensor(load_digits().target).bincount())
    known = {
        img.tobytes(): label
        for img, label in zip(load_digits().images / 16, load_digits().target, strict=True)
    }
    assert all(known[x.numpy().tobytes()] == int(y) for x, y in zip(images, classes, strict=True))
    few, _ = whole("digits", num_sequences=5)
    assert torch.equal(few, images[:5])
    with pytest.raises(UsageError, match="at most 1797, got 2000"):
        task_data("digits", num_sequences=2000)


def test_unknown_names_and_options_are_named():
    with pytest.raises(UsageError, match=r"did you mean 'addition'"):
        task_data("adition")
    with pytest.raises(UsageError, match=r"no option 'digit'.*num_sequences, digits, seed, batch_size"):
        task_data("addition", digit=3)
    assert task_options("sorting") == {
        "num_sequences": 64, "length": 6, "vocab": 3, "seed": 0, "batch_size": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sorting", {"num_sequences": 0}, "num_sequences to be an integer of at least 1, got 0"),
        ("copy", {"length": 2.5}, "length to be an integer of at least 1, got 2.5"),
        ("copy", {"batch_size": "8"}, "batch_size to be an integer"),
        ("induction", {"length": 2}, "length to be an integer of at least 3, got 2"),
        ("induction", {"vocab": 1}, "vocab to be an integer of at least 2"),
        ("modular_addition", {"p": 1}, "p to be an integer of at least 2"),
        ("gaussian_regression", {"sigma": -1.0}, "sigma to be a number that is not negative, got -1.0"),
        ("gaussian_regression", {"teacher": "nois"}, "did you mean 'noise'"),
        ("addition", {"sum_to_nine": "always"}, "one of 'never', 'coin', got 'always'"),
        ("addition", {"seed": "one"}, "seed to be an integer, got 'one'"),
        ("markov", {"seed": None}, None),
        ("markov", {"concentration": 0.0}, "at least 0.01"),
    ],
)
def test_wrong_values_are_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        task_data(name, **options)


def test_every_name_has_one_line_and_names_import_no_torch():
    assert all(0 < len(name.description) < 90 and "\n" not in name.description for name in TASKS.values())
    code = (
        "import sys, curvescope.data.task_names, curvescope.data.corpora;"
        "import curvescope.data.tasks, curvescope.tokenizers;"
        "assert not {'torch', 'numpy', 'sklearn', 'tokenizers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", sorted(POSITIONS))
@pytest.mark.parametrize("limit", [6, 7, 9])
def test_a_task_fits_the_positions_and_the_vocabulary_of_a_model(name, limit):
    inputs = task_from_text(name, n_ctx=limit)[0].inputs
    assert limit - 3 < inputs.shape[1] <= limit
    assert limit - 3 < task_from_text(f"{name}?seq_len={limit}")[0].inputs.shape[1] <= limit
    if name in LETTERS:
        assert task_from_text(name, vocab_size=3)[0].inputs.max() < 3
    assert torch.equal(task_from_text(name, n_ctx=512, vocab_size=512)[0].inputs, task_data(name)[0].inputs)


def test_options_of_a_task_are_given_as_text():
    found = task_from_text("markov?length=5&seed=3,vocab=4", n_ctx=9)
    assert torch.equal(found[0].inputs, task_data("markov", length=5, seed=3, vocab=4)[0].inputs)
    for text in ("markov?lenth=6", "markov?6", "modular_addition?seq_len=3"):
        with pytest.raises(UsageError, match="its options are"):
            task_from_text(text)
