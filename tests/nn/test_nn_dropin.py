"""Whole models with our functions inside: the same training, every second derivative, nothing left behind."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import curvescope as cs
from curvescope.core.errors import UsageError

V, T, D = 17, 9, 16


class Layer(nn.Module):
    """A layer of somebody's own that calls functions of torch.nn.functional."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.qkv(self.norm(h)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(heads.transpose(1, 2).flatten(2))


class Own(nn.Module):
    def __init__(self, *, again: bool = False):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(V, D), Layer(), nn.Linear(D, V)
        self.again = again

    def forward(self, tokens: Tensor) -> Tensor:
        h: Any = self.embedding(tokens)
        h = checkpoint(self.layer, h, use_reentrant=False) if self.again else self.layer(h)
        return self.head(F.gelu(h))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 2 * D, 0.0, activation="gelu", batch_first=True)
        self.embedding, self.layers, self.head = (
            nn.Embedding(V, D),
            nn.TransformerEncoder(layer, 2),
            nn.Linear(D, V),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        like = self.head.weight
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=like.dtype)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def gpt2(attention: str = "sdpa", **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": D, "n_layer": 2, "n_head": 2}
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **(still | more), attn_implementation=attention)
    )


def llama(attention: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": T}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, attn_implementation=attention)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "encoder": Encoder,
    "gpt2": gpt2,
    "gpt2-eager": lambda: gpt2("eager"),
    "llama": llama,
    "llama-eager": lambda: llama("eager"),
}
SINGLE_INSIDE = ("llama-eager",)  # its eager attention takes the softmax in float32, whatever the dtype


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().to(dtype)


def draw(seed: int) -> Tensor:
    return torch.randint(V, (3, T), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    z: Any = model(tokens)
    z = getattr(z, "logits", z)
    return F.cross_entropy(z[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def losses(model: nn.Module, steps: int) -> Tensor:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, draw(step % 4))
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return torch.tensor(found, dtype=torch.float64)


QUICK = (("own", torch.float64), ("gpt2", torch.float64))
TRAINED = [
    pytest.param(name, dtype, marks=() if (name, dtype) in QUICK else pytest.mark.slow, id=f"{name}-{dtype}")
    for name in MODELS
    for dtype in (torch.float64, torch.float32)
]


@pytest.mark.parametrize(("name", "dtype"), TRAINED)
def test_200_steps_of_training_give_the_same_losses(name, dtype):
    """In float64 to 1e-10; in float32 to rounding, which 200 steps make larger."""
    alone, inside, made = (make(name, dtype) for _ in range(3))
    before = losses(alone, 200)
    with cs.twice_differentiable(inside) as replaced:
        found = losses(inside, 200)
    assert before[-1] < 0.9 * before[0]
    attends = "multi_head_attention_forward" if name == "encoder" else "scaled_dot_product_attention"
    assert replaced.calls[attends] == (200 if name == "own" else 400)
    assert replaced.kept == {}
    single = dtype == torch.float32 or name in SINGLE_INSIDE
    limit = 2e-3 if single else 1e-10
    assert (found - before).abs().max() < limit
    assert (losses(cs.make_twice_differentiable(made), 200) - before).abs().max() < limit


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_draws_the_same_numbers(attention):
    alone, inside = (gpt2(attention, attn_pdrop=0.2, resid_pdrop=0.2).double() for _ in range(2))
    inside.load_state_dict(alone.state_dict())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        before = losses(alone, 5)
        torch.manual_seed(4)
        with cs.twice_differentiable(inside):
            found = losses(inside, 5)
    torch.testing.assert_close(found, before, rtol=1e-12, atol=0)


def second(model: nn.Module, how: str) -> Tensor:
    """vᵀ(…)v of the loss in the parameters: ∇L·v for jvp, vᵀ∇²L v for all others."""
    named = dict(model.named_parameters())
    source = torch.Generator().manual_seed(1)
    v = {n: torch.randn(p.shape, generator=source, dtype=p.dtype) for n, p in named.items()}
    at = {n: p.detach() for n, p in named.items()}
    jvp, grad, tokens = torch.func.jvp, torch.func.grad, draw(0)

    def loss(p: dict[str, Tensor]) -> Tensor:
        def call(tokens: Tensor) -> Any:
            return torch.func.functional_call(model, p, (tokens,))

        return loss_of(call, tokens)  # pyright: ignore[reportArgumentType]

    def along(found: Any) -> Tensor:
        return torch.stack([(found[n] * v[n]).sum() for n in v]).sum()

    if how == "jvp":
        return jvp(loss, (at,), (v,))[1]
    if how == "jvp of grad":
        return along(jvp(grad(loss), (at,), (v,))[1])
    if how == "grad of jvp":
        return along(grad(lambda p: jvp(loss, (p,), (v,))[1])(at))
    if how == "jvp of jvp":
        return jvp(lambda p: jvp(loss, (p,), (v,))[1], (at,), (v,))[1]
    leaves = {n: p.clone().requires_grad_() for n, p in at.items()}
    first = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    again = torch.autograd.grad(along(dict(zip(v, first, strict=True))), list(leaves.values()))
    return along(dict(zip(v, again, strict=True)))


def fails_or_is(want: Tensor, derivative: Callable[[], Tensor], eps: float) -> None:
    """Assert that PyTorch's own path has no such derivative, or, where it takes plain attention, the same."""
    try:
        found = derivative()
    except (RuntimeError, NotImplementedError) as error:
        if "flash_attention" not in str(error):
            raise
    else:
        torch.testing.assert_close(found, want, rtol=eps, atol=0)


HOW = ("double backward", "jvp", "jvp of grad", "grad of jvp", "jvp of jvp")


@pytest.mark.parametrize("name", MODELS)
def test_every_derivative_is_that_of_the_plain_path(name):
    model = make(name)
    with sdpa_kernel(SDPBackend.MATH):
        exact = {"jvp": second(model, "jvp")}
        exact |= dict.fromkeys(HOW[0:1] + HOW[2:], second(model, "double backward"))
    made = cs.make_twice_differentiable(make(name))
    eps = 1e-4 if name.startswith("llama") else 1e-12  # its norms, and eager softmax, are float32 inside
    for how in HOW:
        if "eager" not in name:
            fails_or_is(exact[how], partial(second, model, how), eps)
        with cs.twice_differentiable(model):
            torch.testing.assert_close(second(model, how), exact[how], rtol=eps, atol=0)
        torch.testing.assert_close(second(made, how), exact[how], rtol=eps, atol=0)


def test_eager_gpt2_is_silently_wrong_in_torch_alone_and_right_inside():
    model = make("gpt2-eager")
    right = second(model, "double backward")
    assert (second(model, "grad of jvp") - right).abs() > 0.05 * right.abs()
    with cs.twice_differentiable(model):
        torch.testing.assert_close(second(model, "grad of jvp"), right, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------- what stays as it was


@pytest.mark.parametrize("name", ["own", "gpt2-eager"])
def test_everything_is_as_it_was_after_an_error(name):
    model = make(name)
    before = [dict(vars(part)) for part in model.modules()]
    own = getattr(getattr(model, "config", None), "_attn_implementation_internal", None)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            _fails_inside(model, error)
        assert [dict(vars(part)) for part in model.modules()] == before
        assert getattr(getattr(model, "config", None), "_attn_implementation_internal", None) == own
        assert not torch.overrides._get_current_function_mode_stack()


def _fails_inside(model: nn.Module, error: type[BaseException]) -> None:
    with cs.twice_differentiable(model):
        second(model, "jvp")
        raise error


def test_an_interrupt_in_forward_leaves_no_mode_behind():
    model = cs.make_twice_differentiable(Own())
    model.head.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(draw(0))
    assert not torch.overrides._get_current_function_mode_stack()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_contexts_nest_and_can_be_entered_again():
    model = make("own")
    context = cs.twice_differentiable(model)
    exact = second(cs.make_twice_differentiable(make("own")), "jvp")
    with context, context, cs.twice_differentiable(model):
        assert second(model, "jvp") == exact
    with context:
        assert second(model, "jvp") == exact
    with pytest.raises(NotImplementedError, match="flash_attention"):
        second(model, "jvp")


def test_other_threads_do_not_see_the_replacement():
    model, met = make("own"), []

    def other() -> None:
        try:
            second(model, "jvp")
        except NotImplementedError as error:
            met.append(error)

    with cs.twice_differentiable(model):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        second(model, "jvp")
    assert len(met) == 1
    thread = threading.Thread(target=lambda: met.append(second(made, "jvp")))
    made = cs.make_twice_differentiable(make("own"))
    thread.start()
    thread.join()
    assert met[1] == second(made, "jvp")


@pytest.mark.parametrize("name", ["own", "gpt2", "gpt2-eager"])
def test_a_made_model_keeps_class_state_hooks_signature_and_is_pickled_and_copied(name):
    model, plain = make(name), make(name)
    model.register_forward_hook(_shift)
    plain.register_forward_hook(_shift)
    made = cs.make_twice_differentiable(model)
    assert made is model is cs.make_twice_differentiable(model)
    assert type(made) is type(plain)
    assert list(made.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in made.named_modules()] == [n for n, _ in plain.named_modules()]
    assert inspect.signature(made.forward) == inspect.signature(plain.forward)
    exact = second(made, "grad of jvp")
    with torch.no_grad():
        torch.testing.assert_close(_logits(made), _logits(plain))
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert cs.nn.replacements(again).replaced == cs.nn.replacements(made).replaced
        torch.nn.init.zeros_(next(again.parameters()))  # another model than the one it comes from
        assert second(made, "grad of jvp") == exact != second(again, "grad of jvp")


ELSEWHERE = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    model, tokens = pickle.load(file)
print(float(model(tokens).logits.detach().sum()))
"""


def test_a_made_model_is_unpickled_in_another_process(tmp_path):
    made = cs.make_twice_differentiable(make("gpt2-eager"))
    (tmp_path / "model.pkl").write_bytes(pickle.dumps((made, draw(0))))
    told = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model.pkl")]
    done = subprocess.run(told, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(float(_logits(made).detach().sum()), rel=1e-10)


def _shift(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output + 1
    output.logits = output.logits + 1
    return output


def _logits(model: nn.Module) -> Tensor:
    z: Any = model(draw(0))
    return getattr(z, "logits", z)


def test_a_saved_transformer_is_loaded_without_us(tmp_path):
    made = cs.make_twice_differentiable(make("gpt2-eager"))
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path)
    assert again.config._attn_implementation != made.config._attn_implementation
    torch.testing.assert_close(_logits(again.double()), _logits(made))


def test_layers_that_are_computed_again_have_the_same_derivatives():
    plain, again = make("own"), Own(again=True).double()
    again.load_state_dict(plain.state_dict())
    with cs.twice_differentiable(plain):
        want, first = (
            second(plain, "double backward"),
            torch.autograd.grad(loss_of(plain, draw(0)), [*plain.parameters()]),
        )
    with cs.twice_differentiable(again):
        torch.testing.assert_close(second(again, "double backward"), want, rtol=1e-12, atol=0)
    made = cs.make_twice_differentiable(again)
    torch.testing.assert_close(torch.autograd.grad(loss_of(made, draw(0)), [*made.parameters()]), first)


# ----------------------------------------------------------------------------------- what is replaced, or not


class Odd(nn.Module):
    """Calls that we replace in part or not at all."""

    def __init__(self):
        super().__init__()
        self.bag, self.two = nn.EmbeddingBag(V, 4), nn.LayerNorm((3, 4))
        self.act, self.silu, self.batch = nn.Hardsigmoid(), nn.SiLU(inplace=True), nn.BatchNorm1d(3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.two(self.bag(tokens).view(-1, 3, 4))
        return self.act(self.silu(self.batch(h))) + torch.cdist(h, h).mean()


def test_what_is_kept_is_listed_by_name_with_the_reason():
    model = Odd()
    with cs.twice_differentiable(model) as replaced:
        assert set(replaced.replaced) == {"two", "batch", "silu"}
        assert "second derivative" in replaced.kept["act"]
        assert "second derivative" in replaced.kept["bag"]
        model(torch.randint(V, (6, 2)))
    assert "in place" in replaced.kept["silu"]
    assert "cdist" in replaced.kept["Odd"]
    text = str(replaced)
    assert all(name in text for name in ("act", "bag", "silu", "two", "cdist"))


def test_many_layers_of_one_kind_are_one_line():
    with cs.twice_differentiable(make("encoder")) as replaced:
        text = str(replaced)
    assert "layers.layers.*.norm* (4)" in text
    assert len(text.splitlines()) == 4


def test_a_family_without_a_choice_keeps_its_attention_and_an_encoder_with_a_decoder_does_not():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "hidden_size": D, "n_layer": 2, "n_head": 2}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with cs.twice_differentiable(bloom) as replaced:
        assert "no choice" in replaced.kept["transformer.h.1.self_attention"]
    sizes = {"vocab_size": V, "d_model": D, "d_ff": D, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, attn_implementation="eager")
    t5 = transformers.T5ForConditionalGeneration(config).double().eval()
    given = {"input_ids": draw(0), "decoder_input_ids": draw(1)[:, :5]}
    with torch.no_grad():
        want = t5(**given).logits
        with cs.twice_differentiable(t5) as replaced:
            torch.testing.assert_close(t5(**given).logits, want)
    assert replaced.kept == {}
    assert replaced.calls["scaled_dot_product_attention"] == 6


def test_a_family_with_a_soft_cap_keeps_its_eager_attention():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": T}
    config = transformers.Gemma2Config(**sizes, **heads, attn_implementation="eager")
    model = transformers.Gemma2ForCausalLM(config)
    with cs.twice_differentiable(model) as replaced:
        assert "softcap" in replaced.kept["model.layers.0.self_attn"]
        assert model.config._attn_implementation == "eager"


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


NORMS = {
    "batch": (partial(nn.BatchNorm1d, 4), _batch_norm),
    "instance": (partial(nn.InstanceNorm1d, 4, affine=True, track_running_stats=True), F.instance_norm),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_over_the_batch_are_pytorchs_and_right_in_reverse_over_forward(name):
    kind, norm = NORMS[name]
    theirs, ours = (kind(dtype=torch.float64) for _ in range(2))
    source = torch.Generator().manual_seed(2)
    x, v, w = (torch.randn(5, 4, 7, dtype=torch.float64, generator=source) for _ in range(3))
    y = theirs(x)
    with cs.twice_differentiable(ours):
        torch.testing.assert_close(ours(x), y)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))

    def loss(x: Tensor) -> Tensor:
        return (norm(x).sin() * w).sum()

    def reverse_over_forward() -> Tensor:
        return torch.func.grad(lambda z: torch.func.jvp(loss, (z,), (v,))[1])(x)

    z = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(z), z, create_graph=True)
    (exact,) = torch.autograd.grad((first * v).sum(), z)
    assert (reverse_over_forward() - exact).abs().max() > 0.01 * exact.abs().max()
    with cs.twice_differentiable(ours):
        torch.testing.assert_close(reverse_over_forward(), exact)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "padding"])
def test_multihead_attention_with_masks(mask, weights):
    model = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(2)
    given: dict[str, Any] = {
        "none": {},
        "boolean": {"attn_mask": hidden},
        "additive": {"attn_mask": torch.zeros(T, T, dtype=torch.float64).masked_fill(hidden, -3.0)},
        "padding": {"key_padding_mask": torch.arange(T) >= torch.tensor([[T], [4], [6]])},
    }[mask]
    v = torch.ones_like(x)

    def call(x: Tensor) -> Tensor:
        return model(x, x, x, need_weights=weights, **given)[0]

    with sdpa_kernel(SDPBackend.MATH):
        want = torch.func.jvp(call, (x,), (v,))
    with cs.twice_differentiable(model) as replaced:
        torch.testing.assert_close(torch.func.jvp(call, (x,), (v,)), want)
    assert replaced.calls["multi_head_attention_forward"] == 1


@pytest.mark.parametrize("name", ["encoder", "gpt2", "llama-eager"])
def test_a_model_is_compiled_as_one_graph(name):
    model = make(name, torch.float32)
    want = loss_of(model, draw(0))

    def compiled_loss(model: nn.Module) -> Tensor:
        torch.compiler.reset()
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        return loss_of(compiled, draw(0))

    try:
        found = compiled_loss(cs.make_twice_differentiable(model))
    except torch._dynamo.exc.Unsupported:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled_loss(make(name, torch.float32))
        pytest.skip("this PyTorch cannot compile the plain model as one graph either")
    torch.testing.assert_close(found, want)


def test_what_is_no_module_is_refused():
    for call in (cs.twice_differentiable, cs.make_twice_differentiable):
        with pytest.raises(UsageError, match="function"):
            call(draw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", [partial(nn.BatchNorm1d, 4), partial(nn.InstanceNorm1d, 4, affine=True)])
def test_norms_of_channels_have_the_dtype_and_statistics_of_pytorch(norm, dtype):
    alone, inside = norm(), norm()
    x = (3 * torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0)) + 100).to(dtype)
    want = alone(x)
    with cs.twice_differentiable(inside):
        found = inside(x)
    torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(inside.state_dict(), alone.state_dict())


def test_one_value_per_channel_is_refused_as_in_pytorch():
    norm = nn.BatchNorm1d(4)
    with cs.twice_differentiable(norm), pytest.raises(ValueError, match="more than 1 value"):
        norm(torch.randn(1, 4))
