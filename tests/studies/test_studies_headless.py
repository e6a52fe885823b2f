"""Models without a head: denoising against a loss written by hand, and studies through the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import curvescope as cs
from commands import call
from curvescope.core.errors import UsageError
from curvescope.data.denoising import NOTE
from curvescope.studies import blocks, spectrum
from curvescope.studies.problem_config import ModelOnData, make_problem, notes_of
from saved_models import TINY, WORDS, save_bert
from selection import some

transformers = pytest.importorskip("transformers")
TEXT = "the block of a matrix is a block and the matrix is a matrix of blocks of the " * 12
QUICK = [
    *("--set", "num_steps=6", "--set", "num_probes=2", "--set", "num_eigenvalues=1", "--quiet"),
    *("--set", "num_trace_probes=2", "--set", "num_map_probes=1", "--set", "seq_len=16", "--tokens", "40"),
    *("--set", "max_products=8"),
]


def save_gpt2(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": len(WORDS)}
    transformers.GPT2Model(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


def save_vit(folder):
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **TINY)
    transformers.ViTModel(config).save_pretrained(folder)
    return str(folder)


SAVE = {"bert": lambda folder: save_bert(folder, "BertModel"), "gpt2": save_gpt2, "vit": save_vit}
every = pytest.mark.parametrize("kind", SAVE)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def made(kind, tmp_path, file, **settings):
    """The folder, and settings that fit it."""
    folder = SAVE[kind](tmp_path / kind)
    data = "digits" if kind == "vit" else file
    return {"model": folder, "data": data, "tokens": 40, "seq_len": 16, "batch_size": 2, **settings}


def by_hand(kind, folder, problem):
    """1/N Σ ‖f(x̃; θ) − f(x; θ₀)‖² as a function of named parameters, by transformers and nothing of ours."""
    module = getattr(transformers, {"bert": "BertModel", "gpt2": "GPT2Model", "vit": "ViTModel"}[kind])
    module = module.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()

    def mean(parameters):
        total, count = 0.0, 0
        for batch in problem.batches:
            inputs = (
                batch.inputs if isinstance(batch.inputs, dict) else {module.main_input_name: batch.inputs}
            )
            z = torch.func.functional_call(module, parameters, (), inputs).last_hidden_state
            real = torch.ones(z.shape[:2]) if batch.weights is None else batch.weights
            total = total + ((z - batch.targets) ** 2 * real[..., None]).sum()
            count += int(real.sum()) * z.shape[-1]
        return total / count

    return module, mean


@every
def test_targets_are_the_states_on_the_whole_input_and_products_those_of_the_loss(kind, tmp_path, file):
    settings = made(kind, tmp_path, file, dtype="float64")
    problem = make_problem(ModelOnData(**settings))
    assert problem.loss.name == "mse_mean"
    module, mean = by_hand(kind, settings["model"], problem)
    torch.testing.assert_close(problem.loss_value(), float(mean({}).detach()), rtol=1e-6, atol=0)
    _check_targets(kind, module, problem)
    name = {"bert": "L0.ln2.g", "gpt2": "ln_f.g", "vit": "ln_f.g"}[kind]
    parameter = problem.model.blocks[name].parameter
    theta = dict(module.named_parameters())[parameter].detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(mean({parameter: theta}), theta, create_graph=True)
    truth = torch.stack([torch.autograd.grad(g[i], theta, retain_graph=True)[0] for i in range(len(g))])
    eye = torch.eye(len(g), dtype=torch.float64)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if kind == "vit" else {}  # a softmax in float32
    torch.testing.assert_close(cs.Hessian(problem, name) @ eye, truth, **tolerance)
    H, G, F = (make(problem, "L0.W_Q", name) for make in (cs.Hessian, cs.GGN, cs.FunctionalHessian))
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(H @ v, G @ v + F @ v)
    assert float(v @ (G @ v)) > 0
    assert float((F @ v).norm()) > 0


def _check_targets(kind, module, problem):
    """Each row of targets is the module's output on a window of the text, or on an image, itself."""
    if kind == "vit":
        whole = torch.cat([b.inputs for b in cs.image_data(problem.model, 3)])
        torch.testing.assert_close(
            torch.cat([b.targets for b in problem.batches]), module(whole).last_hidden_state
        )
        return
    words = [WORDS.index(w) if w in WORDS else 1 for w in TEXT.split()]
    for batch in problem.batches:
        rows = batch.inputs if kind == "gpt2" else batch.inputs["input_ids"]
        for i, row in enumerate(rows):
            length = 16 if batch.weights is None else int(batch.weights[i].sum())
            windows = [words[s : s + length] for s in range(0, len(words) - length, 16)]
            changed = [sum(a != b for a, b in zip(row.tolist(), window, strict=False)) for window in windows]
            assert min(changed) == max(1, round(0.15 * length))
            truth = module(torch.tensor([windows[changed.index(min(changed))]])).last_hidden_state[0]
            torch.testing.assert_close(batch.targets[i, :length], truth)


def test_padding_does_not_count(tmp_path, file):
    """One sequence of 8 words, padded to 16 or not, has the same loss and the same Hessian."""
    folder = save_bert(tmp_path / "bert", "BertModel")
    model = cs.load(folder, dtype="float64")
    long = cs.Problem(model, cs.denoising_data(file, model, tokens=8, seq_len=16), loss="mse_mean")
    (batch,) = long.batches
    assert batch.weights.tolist() == [[1.0] * 8 + [0.0] * 8]
    cut = {key: value[:, :8] for key, value in batch.inputs.items()}
    short = cs.Problem(model, (cut, batch.targets[:, :8]), loss="mse_mean")
    assert long.num_terms == short.num_terms == 8 * 16
    torch.testing.assert_close(long.loss_value(), short.loss_value())
    v = torch.ones(cs.Hessian(long, "L0.W_K").shape[0], dtype=torch.float64)
    torch.testing.assert_close(cs.Hessian(long, "L0.W_K") @ v, cs.Hessian(short, "L0.W_K") @ v)


def test_train_mode_does_not_make_targets_random(tmp_path, file):
    folder = save_bert(tmp_path / "bert", "BertModel")
    module = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").train()
    tokenizer = cs.load(folder).tokenizer
    with pytest.warns(UserWarning, match="dropout"):
        model = cs.load(module)
    model = cs.models.model.Model(**{**vars(model), "tokenizer": tokenizer})
    a, b = (cs.denoising_data(file, model, tokens=32, seq_len=16) for _ in range(2))
    torch.testing.assert_close(a[0].targets, b[0].targets, rtol=0, atol=0)
    assert module.training


@pytest.mark.parametrize("kind", some(["gpt2", "bert", "vit"], 1))
def test_the_studies_run_and_say_what_the_loss_is(kind, tmp_path, file):
    own = ["L0.ln1.g"] if kind == "gpt2" else ["L0.ln1.g", "W_pool"]
    settings = made(kind, tmp_path, file, num_trace_probes=2, norms=own, num_sharp_steps=2)
    found = blocks.run(blocks.Config.from_dict(settings))
    assert found.notes[0] == NOTE  # a padding id may have another
    assert ("note", "", NOTE) in found.summary()
    assert found.loss_name == "mse_mean"
    assert found.loss > 0
    assert np.isfinite(found.parts["ggn"].traces.values).all()
    unused = [i for i, name in enumerate(found.parts["ggn"].traces.names) if name.endswith("_pool")]
    assert (found.parts["ggn"].traces.values[unused] == 0).all()
    assert len(unused) == (0 if kind == "gpt2" else 2)
    found.save(tmp_path / "saved")
    assert blocks.Blocks.load(tmp_path / "saved").notes == found.notes


@pytest.mark.parametrize("kind", some(["vit", "bert", "gpt2"], 1))
def test_the_spectrum(kind, tmp_path, file):
    few = {"num_steps": 4, "num_probes": 1, "num_eigenvalues": 1, "num_trace_probes": 2, "num_map_probes": 1}
    few |= {"max_products": 6, "blocks": ["L0.W_[QV]"]}
    found = spectrum.run(spectrum.Config.from_dict(made(kind, tmp_path, file, **few)))
    assert found.notes[0] == NOTE  # a padding id may have another
    assert found.parts["ggn"].extremes.values[-1] > 0
    assert found.parts["ggn"].trace[0] > 0


@pytest.mark.usefixtures("undrawn")
def test_the_command_line(tmp_path, file, capsys):
    settings = made("bert", tmp_path, file)
    code, out, _ = call("info", settings["model"], capsys=capsys)
    assert code == 0
    assert "note: no head" in out
    words = [
        "run",
        "spectrum",
        settings["model"],
        "--data",
        settings["data"],
        "--out",
        tmp_path / "runs",
        *QUICK,
    ]
    code, out, err = call(*words, "--blocks", "L0.W_[QV]", capsys=capsys)
    assert (code, err) == (0, "")
    result = json.loads((Path(out.strip().splitlines()[-1]) / "result.json").read_text(encoding="utf-8"))
    assert result["fields"]["notes"][0] == NOTE
    assert 'loss = "auto"' in (Path(out.strip().splitlines()[-1]) / "config.toml").read_text(encoding="utf-8")


def test_losses_that_fit_and_one_that_does_not(tmp_path, file, capsys):
    settings = made("bert", tmp_path, file, tokens=32)
    values = [
        make_problem(ModelOnData(**settings, loss=loss)).loss_value() for loss in ("auto", "mse", "mse_mean")
    ]
    torch.testing.assert_close(values, [values[0]] * 3)
    code, out, err = call("run", "spectrum", settings["model"], "--set", "loss=cross_entropy", capsys=capsys)
    assert (code, out) == (2, "")
    assert "expected loss auto, mse or mse_mean for 'bert', which has no head, got 'cross_entropy'" in err
    assert "loss=auto" in err


def test_what_a_model_cannot_read_is_one_sentence(tmp_path, file):
    with pytest.raises(UsageError, match="takes images"):
        make_problem(ModelOnData(**{**made("vit", tmp_path, file), "data": file}))
    folder = Path(save_bert(tmp_path / "bare", "BertModel"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(UsageError, match="has no tokenizer"):
        make_problem(ModelOnData(model=str(folder), data=file))
    with pytest.raises(UsageError, match="for another task"):
        make_problem(ModelOnData(model=save_bert(tmp_path / "qa", "BertForQuestionAnswering"), data=file))


def test_any_outputs_can_be_denoised(file):
    """Of a zoo model the outputs are logits: targets are those on the text itself."""
    model = cs.load("tiny-gpt")
    (batch,) = cs.denoising_data(file, model, tokens=32, seq_len=16)
    whole = torch.cat([b.inputs for b in cs.text_data(file, model, tokens=32, seq_len=16)])
    assert (batch.inputs != whole).sum(1).tolist() == [2, 2]
    torch.testing.assert_close(batch.targets, model.forward({}, whole).detach())


def test_a_model_with_a_head_has_no_such_note(tmp_path):
    result = spectrum.Config(tokens=8)
    problem = make_problem(result)
    assert problem.loss.name == "cross_entropy"
    assert notes_of(result, problem) == []


def test_real_targets_choose_the_squared_error(tmp_path):
    path = tmp_path / "m.toml"
    real = 'inputs = "continuous"\noutputs = "regression"\n'
    x, y = (getattr(cs.task_data("gaussian_regression")[0], name) for name in ("inputs", "targets"))
    sizes = f"d_in = {x.shape[-1]}\nn_out = {y.shape[-1]}\nn_ctx = {x.shape[1]}\n"
    path.write_text(f"n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\n{sizes}{real}", encoding="utf-8")
    problem = make_problem(ModelOnData(model=str(path), data="task:gaussian_regression"))
    assert problem.loss.name == "mse_mean"
    z = torch.cat([problem.outputs(b) for b in problem.placed_batches("test")])
    targets = torch.cat([b.targets for b in problem.placed_batches("test")])
    torch.testing.assert_close(problem.loss_value(), float(((z - targets) ** 2).mean().detach()))
