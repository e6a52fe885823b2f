"""The monitor inside the trainers of Hugging Face and Lightning, which notice nothing of it."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import curvescope as cs
from curvescope.core.errors import MissingExtra, UsageError
from curvescope.monitor.callbacks.following import Following, innermost

TOKENS = (torch.arange(96).reshape(12, 8) * 7 + torch.arange(12)[:, None]) % 11
PROBE = cs.Batches.from_tensors(TOKENS[:4, :-1], TOKENS[:4, 1:], batch_size=2)
QUICK = {"every": 3, "budget": 1.0, "blocks": False, "num_probes": 2}


@pytest.fixture(autouse=True)
def unpainted(monkeypatch):
    """No figures: most of the time would go to them."""
    monkeypatch.setattr("curvescope.monitor.files.write_figures", lambda result, folder: None)


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# ------------------------------------------------------------------------------- Hugging Face


def hugging_face(folder, *callbacks, steps=6, **arguments):
    """A GPT-2 of one layer with dropout, trained for some steps; the trainer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    settings = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, seed=1,
        report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True,
        **{"save_strategy": "no", **arguments},
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    return transformers.Trainer(model, settings, train_dataset=data, callbacks=list(callbacks))


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    """Weights of the same training without a monitor."""
    trainer = hugging_face(tmp_path_factory.mktemp("plain"))
    trainer.train()
    return weights(trainer.model)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face_notices_nothing(unwatched, tmp_path):
    callback = cs.trainer_callback(PROBE, out=tmp_path / "run", **QUICK)
    assert callback.monitor is None
    watched = hugging_face(tmp_path / "watched", callback)
    watched.train()
    torch.testing.assert_close(weights(watched.model), unwatched, rtol=0, atol=0)
    history = callback.monitor.history
    assert list(history["step"]) == [0, 3, 6]
    assert list(history["lr"]) == pytest.approx([1e-2 * (6 - step) / 6 for step in (0, 3, 6)])
    assert history["sharpness_threshold"].notna().any()  # AdamW was seen inside what accelerate wraps
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.filterwarnings("ignore")
def test_it_goes_on_from_a_checkpoint_of_the_trainer(unwatched, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}

    def kill(step, numbers):
        if step == 3:
            raise KeyboardInterrupt

    killer = SimpleNamespace(write=kill, close=lambda: None)
    first = cs.trainer_callback(PROBE, out=tmp_path / "run", writers=[killer], **QUICK)
    with pytest.raises(KeyboardInterrupt):
        hugging_face(tmp_path / "hf", first, **saving).train()
    assert not (tmp_path / "run" / "result.json").exists()
    again = cs.trainer_callback(PROBE, out=tmp_path / "run", **QUICK)
    trainer = hugging_face(tmp_path / "hf", again, **saving)
    trainer.train(resume_from_checkpoint=True)
    assert list(again.monitor.history["step"]) == [0, 3, 6]
    torch.testing.assert_close(weights(trainer.model), unwatched, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_a_finished_run_of_the_trainer_is_extended(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    first = cs.trainer_callback(PROBE, out=tmp_path / "run", **QUICK)
    hugging_face(tmp_path / "hf", first, **saving).train()
    again = cs.trainer_callback(PROBE, out=tmp_path / "run", raise_errors=True, **QUICK)
    hugging_face(tmp_path / "hf", again, steps=9, **saving).train(resume_from_checkpoint=True)
    assert list(again.monitor.history["step"]) == [0, 3, 6, 9]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("out", [None, "run"])
def test_a_second_training_keeps_the_first_rows(out, tmp_path):
    callback = cs.trainer_callback(PROBE, out=out and tmp_path / out, raise_errors=True, **QUICK)
    trainer = hugging_face(tmp_path / "hf", callback)
    trainer.train()
    before = callback.monitor.history["lambda_max"].tolist()
    trainer.train()
    assert list(callback.monitor.history["step"]) == [0, 3, 6, 9, 12]
    assert callback.monitor.history["lambda_max"].tolist()[:3] == before


# ------------------------------------------------------------------------------- Lightning


def lightning(*callbacks, steps=6, **arguments):
    """A module with dropout, trained for some steps; the module and its trainer."""
    L = pytest.importorskip("lightning.pytorch")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(11, 4), nn.Dropout(0.2), nn.Linear(4, 11))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            (x,) = batch
            return nn.functional.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TOKENS), batch_size=2, shuffle=True)
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks), **arguments,
    )  # fmt: skip
    trainer.fit(module, loader)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", ["", "net"])
def test_the_trainer_of_lightning_notices_nothing(part, tmp_path):
    plain = lightning()
    callback = cs.lightning_callback(PROBE, part=part, out=tmp_path / "run", **QUICK)
    watched = lightning(callback)
    torch.testing.assert_close(weights(watched), weights(plain), rtol=0, atol=0)
    history = callback.monitor.history
    assert list(history["step"]) == [0, 3, 6]
    assert list(history["threshold"]) == pytest.approx([3.8] * 3)  # 2 (1 + 0.9)
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.filterwarnings("ignore")
def test_steps_of_the_optimizer_count_not_batches():
    callback = cs.lightning_callback(PROBE, **QUICK)
    lightning(callback, steps=3, accumulate_grad_batches=2)
    assert list(callback.monitor.history["step"]) == [0, 3]


@pytest.mark.filterwarnings("ignore")
def test_a_part_that_is_not_there_is_one_sentence():
    pytest.importorskip("lightning.pytorch")
    callback = cs.lightning_callback(PROBE, part="model")
    with pytest.raises(UsageError, match=r"expected a submodule of Module, got 'model' \(known: net\)"):
        lightning(callback)


# ------------------------------------------------------------------------------- both


def test_only_the_first_process_measures():
    following = Following(PROBE, QUICK)
    following.begin(nn.Linear(2, 2), first=False)
    following.step(2, None)
    following.end()
    assert following.monitor is None


def test_a_model_that_cannot_be_measured_is_named_and_training_goes_on():
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0  # as ZeRO marks them
    following = Following(PROBE, QUICK)
    with pytest.warns(UserWarning, match="DeepSpeed ZeRO"):
        following.begin(model, first=True)
    following.step(0, None)
    following.end()
    assert following.monitor is None
    with pytest.raises(UsageError, match="weight"):
        Following(PROBE, {**QUICK, "raise_errors": True}).begin(model, first=True)


def test_the_optimizer_inside_is_found():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert innermost(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))) is optimizer


@pytest.mark.parametrize(
    ("make", "package"),
    [(cs.trainer_callback, "transformers"), (cs.lightning_callback, "lightning.pytorch")],
    ids=["trainer", "lightning"],
)
def test_what_both_refuse_and_allow(make, package, monkeypatch):
    pytest.importorskip(package)
    with pytest.raises(UsageError, match=r"unexpected setting 'evry'.*did you mean 'every'"):
        make(PROBE, evry=5)
    assert type(pickle.loads(pickle.dumps(make(PROBE, every=7)))).__name__ == "CurvatureCallback"
    for name in (package, "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"needs the package .*pip install '?(transformers|lightning)"):
        make(PROBE)
