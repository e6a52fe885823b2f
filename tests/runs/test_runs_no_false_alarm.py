"""Right operators pass their check, whatever the model, its scale, its precision and the loss are."""

import pytest
import torch
from torch import nn

import curvescope as cs
from curvescope.operators import GGN, EmpiricalFisher, FunctionalHessian, Hessian
from curvescope.runs.verification.verification import verify

PARTS = (Hessian, GGN, FunctionalHessian)
DTYPES = [torch.float64, torch.float32]
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "none": nn.Identity}


def layers(act="tanh", *, seed=0, dtype, scale=1.0, width=7):
    """A perceptron whose numbers are drawn from the seed."""
    made = nn.Sequential(nn.Linear(4, width), ACTIVATIONS[act](), nn.Linear(width, 3)).to(dtype)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=source, dtype=torch.float64))
    return made


def points(dtype, *, classes=True, size=1.0):
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)
    y = torch.arange(12) % 3 if classes else size * torch.sin(torch.arange(36.0, dtype=dtype)).view(12, 3)
    return x, y


def transformer(dtype, **settings):
    small = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12, "vocab_size": 12, "n_ctx": 18} | settings
    model = cs.load(cs.TransformerConfig(**small), dtype=str(dtype).removeprefix("torch."))
    return cs.Problem(model, cs.task_data("addition", num_sequences=4))


def passes(problem, kinds=PARTS, *blocks, **options):
    for kind in kinds:
        found = verify(kind(problem, *blocks, **options))
        assert found is not None
        assert found.passed, (kind.__name__, found.refusal())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_perceptrons_of_all_scales(act, scale, dtype):
    passes(cs.Problem(layers(act, dtype=dtype, scale=scale), points(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_kinks(seed, dtype):
    passes(cs.Problem(layers("relu", seed=seed, dtype=dtype, width=20), points(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_squared_errors_of_all_sizes(size, dtype):
    data = points(dtype, classes=False, size=size)
    passes(cs.Problem(layers(dtype=dtype), data, loss="mse"))


@pytest.mark.parametrize("margin", [5, 8])
def test_models_that_are_sure_of_their_answers(margin):
    module, (x, _) = layers("gelu", dtype=torch.float32), points(torch.float32)
    with torch.no_grad():
        best, second = module(x).topk(2).values.unbind(1)
        for p in module[2].parameters():
            p *= margin / (best - second).min()
        y = module(x).argmax(-1)
    passes(cs.Problem(module, (x, y)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hessians_that_are_zero(dtype):
    """A linear model has no functional Hessian; a head at zero leaves its layers without curvature."""
    passes(cs.Problem(layers("none", dtype=dtype), points(dtype, classes=False), loss="mse"))
    dead = layers("relu", dtype=dtype)
    with torch.no_grad():
        dead[2].weight.zero_()
        dead[0].bias.fill_(-1e3)
    passes(cs.Problem(dead, points(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_parameters_blocks_and_shifts(dtype):
    module = layers(dtype=dtype)
    module[0].requires_grad_(False)
    passes(cs.Problem(module, points(dtype)))
    problem = transformer(dtype)
    passes(problem, PARTS, "L1.W_[QK]", damping=0.3, weight_decay={"matrices": 0.1})
    passes(problem, (*PARTS, EmpiricalFisher), "L0.W_V")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"init_std": 0.5}, {"init_std": 1e-4}, {"init_std": 4.0}],
    ids=["default", "large", "tiny", "saturated"],
)
def test_transformers(settings, dtype):
    passes(transformer(dtype, **settings))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_are_zero_but_for_rounding(seed):
    """The softmax does not see biases of keys."""
    problem = transformer(torch.float32, seed=seed, init_std=0.3)
    for block in ("L0.b_K", "L1.b_K"):
        passes(problem, PARTS, block)


def test_a_block_so_small_that_signs_may_be_alike():
    """A constant is taken away by the norm behind it: signs that were all alike were a false alarm."""
    passes(transformer(torch.float32, n_layers=1, d_model=4, d_ff=4))


def test_engines():
    problem = transformer(torch.float32)
    passes(problem, PARTS, engine="autograd")
    passes(problem, PARTS, checkpoint=True)


def test_the_bundled_model():
    model = cs.load("tiny-gpt")
    passes(cs.Problem(model, cs.text_data("sample", model, tokens=32, seq_len=32)))


class Held(nn.Module):
    """A parameter in a closure, which no other value reaches."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        weight = self.head.weight
        self.times = lambda x: x @ weight.T

    def forward(self, x):
        return self.times(x).tanh() + self.head.bias


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_that_is_held_in_a_second_way(dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Held().to(dtype)
    problem = cs.Problem(module, points(dtype))
    passes(problem)
    assert verify(Hessian(problem)).left_out == ("finite difference", "columns")
