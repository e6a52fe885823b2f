"""`load` takes names, folders, configurations and modules; `save` and `load` are inverse."""

from __future__ import annotations

import tomllib

import pytest
import torch
from torch import nn

import curvescope as cs
import oracles
from curvescope.models.zoo.folder import CONFIG, WEIGHTS

SMALL = {"n_layers": 1, "d_model": 4, "n_heads": 2, "n_ctx": 4, "vocab_size": 5}


def equal_parameters(a: cs.Model, b: cs.Model) -> bool:
    return list(dict(a.named_parameters())) == list(dict(b.named_parameters())) and all(
        torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("case", [case for case in oracles.CASES if not case.name.startswith("plain")])
def test_folder_round_trip_of_every_zoo_variant(case: oracles.Case, tmp_path):
    model = cs.load(case.make().float())
    folder = cs.save(model, tmp_path / "deep" / "folder")
    assert sorted(file.name for file in folder.iterdir()) == [CONFIG, WEIGHTS]
    again = cs.load(folder)
    assert again.name == "folder"
    assert again.module.cfg == model.module.cfg
    assert list(again.blocks) == list(model.blocks)
    assert again.facts == model.facts
    assert equal_parameters(again, model)
    x, _, _ = oracles.make_data(case)
    x = x if x.dtype == torch.long else x.float()
    assert torch.equal(again.module(x), model.module(x))


def test_config_file_is_readable_toml(tmp_path):
    model = cs.load(cs.TransformerConfig(**SMALL, score_bias="alibi"))
    text = (cs.save(model, tmp_path) / CONFIG).read_text()
    values = tomllib.loads(text)
    assert values["kind"] == "transformer"
    assert values["score_bias"] == "alibi"
    assert "d_ff" not in values


def test_saving_again_replaces(tmp_path):
    first, second = (cs.load(cs.TransformerConfig(**SMALL, seed=s)) for s in (0, 1))
    cs.save(first, tmp_path)
    cs.save(second, tmp_path)
    assert equal_parameters(cs.load(tmp_path), second)
    assert not list(tmp_path.glob("*.partial"))


def test_double_precision_survives_a_round_trip(tmp_path):
    model = cs.load(oracles.transformer())
    assert model.dtype == torch.float64
    again = cs.load(cs.save(model, tmp_path), dtype="float64")
    assert equal_parameters(again, model)


def test_toml_file_gives_the_same_model_as_its_configuration(tmp_path):
    path = tmp_path / "my-model.toml"
    path.write_text('n_layers = 1\nd_model = 4\nn_heads = 2\nn_ctx = 4\nvocab_size = 5\nnorm = "post"\n')
    model = cs.load(path)
    assert model.name == "my-model"
    assert equal_parameters(model, cs.load(cs.TransformerConfig(**SMALL, norm="post")))
    assert equal_parameters(model, cs.load(str(path)))
    path.write_text('kind = "mlp"\ndepth = 3\n')
    assert isinstance(cs.load(path).module, cs.MLP)


def test_a_module_is_the_same_object_and_a_cast_is_a_copy():
    module = nn.Linear(2, 3)
    assert cs.load(module).module is module
    assert cs.load(module, dtype=torch.float32).module is module
    double = cs.load(module, dtype="float64")
    assert double.module is not module
    assert double.dtype == torch.float64
    assert module.weight.dtype == torch.float32
    torch.testing.assert_close(double.get_parameter("weight").float(), module.weight)


def test_casting_a_model_leaves_the_model_alone():
    model = cs.load(cs.TransformerConfig(**SMALL))
    double = cs.load(model, dtype="float64")
    assert double.dtype == torch.float64
    assert model.dtype == torch.float32
    assert double.blocks == model.blocks


def test_parameters_of_several_dtypes_are_refused_with_a_hint_that_works():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(cs.UsageError, match=r"one dtype.*cs\.load\(module, dtype="):
        cs.load(module)
    model = cs.load(module, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert module[1].weight.dtype == torch.float64


def test_loading_a_model_is_the_model():
    model = cs.load(cs.TransformerConfig(**SMALL))
    assert cs.load(model) is model
    assert cs.load(model, dtype="float32", device="cpu") is model


def test_tied_weights_stay_tied_in_a_copy():
    copied = cs.load(oracles.PlainNet(), dtype="float64").module
    assert copied.head.weight is copied.emb.weight


def test_checkpoints_in_half_precision_load_as_single(tmp_path):
    from safetensors.torch import load_file, save_file

    model = cs.load(cs.TransformerConfig(**SMALL))
    cs.save(model, tmp_path)
    save_file({k: v.half() for k, v in load_file(tmp_path / WEIGHTS).items()}, tmp_path / WEIGHTS)
    again = cs.load(tmp_path)
    assert again.dtype == torch.float32
    torch.testing.assert_close(again.get_parameter("E"), model.get_parameter("E"), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_weights_that_do_not_fit_are_refused(damage: str, tmp_path):
    from safetensors.torch import load_file, save_file

    cs.save(cs.load(cs.TransformerConfig(**SMALL)), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    if damage == "missing":
        del weights["L0.W_Q"]
    if damage == "extra":
        weights["L9.W_Q"] = weights["L0.W_Q"].clone()
    if damage == "shape":
        weights["L0.W_Q"] = weights["L0.W_Q"][:2].contiguous()
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(cs.CurvescopeError, match=r"do not fit the configuration.*W_Q' differs"):
        cs.load(tmp_path)


def test_only_zoo_models_are_saved(tmp_path):
    with pytest.raises(cs.UsageError, match="expected a zoo model, got a Linear"):
        cs.save(cs.load(nn.Linear(2, 2)), tmp_path)


def test_outputs_are_the_only_real_tensor_of_a_tuple():
    module, x = nn.LSTM(2, 2, batch_first=True), torch.randn(2, 3, 2)
    problem = cs.Problem(module, (x, torch.zeros(2, 3, 2)), "mse")
    assert problem.loss_value() == pytest.approx(float(module(x)[0].detach().square().mean()))


class LossFirst(nn.Linear):
    """Returns a loss, the classes, and the logits."""

    def forward(self, x):
        logits = super().forward(x)
        return logits.square().mean(), logits.argmax(-1), logits


def test_logits_behind_a_loss_are_found_by_their_shape_and_said():
    module, x, y = LossFirst(3, 4), torch.randn(5, 3), torch.arange(5) % 4
    with pytest.warns(UserWarning, match="entry 2"):
        value = cs.Problem(module, (x, y)).loss_value()
    assert value == pytest.approx(float(nn.functional.cross_entropy(module(x)[2], y).detach()))
    assert cs.Problem(module, (x, y), output=2).loss_value() == value


def test_parameters_are_iterated_as_those_of_a_module():
    problem = cs.Problem(cs.load(nn.Linear(3, 2)), (torch.ones(4, 3), torch.tensor([0, 1, 0, 1])))
    moved = problem.at({"bias": torch.ones(2)})
    assert [name for name, _ in moved.named_parameters()] == ["weight", "bias"]
    for own, theirs in zip(problem.model.parameters(), problem.model.module.parameters(), strict=True):
        assert own is theirs
    assert torch.equal(list(moved.parameters())[1], torch.ones(2))
    assert torch.equal(moved.get_parameter("bias"), torch.ones(2))
    assert moved.get_parameter("weight") is problem.model.module.weight
    with pytest.raises(cs.UsageError, match="wieght"):
        moved.get_parameter("wieght")
