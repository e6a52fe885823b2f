"""The fingerprint of a model sees what its code does, in every process, and not what a pass leaves."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvescope as cs
from curvescope.operators import GGN, Hessian
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.model_structure import structure
from curvescope.runs.resumable_loop import Contents, Piece, work_through

SOURCE = """
import torch
from torch import nn

{constant}

def helper(x):
    return {helper}

class Net(nn.Module):
    def __init__(self, c=1.0, options=()):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.o, self.c, self.options = nn.Embedding(12, 6), nn.Linear(6, 12), c, dict(options)
        self.calls, self.cache, self.mask = 0, {{}}, None
        self.names = {{"b", "a", "c"}}

    def scale(self):
        self.calls += 1
        return self.c

    def set_c(self, c):
        self.c = c

    def forward(self, tokens):
        x = helper({forward})
        self.cache[tokens.shape[1]] = 1
        self.mask = torch.ones(3)
        return self.o(self.scale() * x) * SIZE if "a" in self.names else self.o(x)
"""
PLAIN = {"constant": "SIZE = 2.0", "helper": "x", "forward": "torch.tanh(self.e(tokens))"}


def net(*, c=1.0, options=(), **parts):
    space = {}
    exec(SOURCE.format(**{**PLAIN, **parts}), space)
    return cs.load(space["Net"](c, options).double())


def data():
    x = torch.arange(12).view(2, 6)
    return cs.Batches([cs.Batch(x, (x + 1) % 12)])


@pytest.mark.parametrize(
    "change",
    [
        {"c": 3.0},
        {"options": (("causal", True),)},
        {"forward": "torch.relu(self.e(tokens))"},
        {"helper": "x * x"},
        {"constant": "SIZE = 3.0"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_attributes_and_code_count(change):
    assert fingerprint(net()) == fingerprint(net())
    assert fingerprint(net(**change)) != fingerprint(net())
    assert structure(net(**change)) != structure(net())


def test_a_result_of_another_attribute_is_not_reused():
    state = {}
    for c in (1.0, 3.0):
        model = net(c=c)
        contents = fingerprint(model, data())
        work_through([Piece("c", lambda c=c: Contents(str(c)))], contents=contents, state=state)
        assert state["c"].digest == str(c)


class Held:
    def __init__(self, c):
        self.c = c


@pytest.mark.parametrize("put", [
    lambda module, c: setattr(module, "held", Held(c)),
    lambda module, c: setattr(module, "held", [torch.full((2,), c)]),
    lambda module, c: setattr(module, "held", {"a": torch.full((2,), c)}),
    lambda module, c: setattr(module, "held", np.full(2, c)),
    lambda module, c: module.register_forward_pre_hook(lambda _, given: (c * given[0],)),
    lambda module, c: module.register_forward_hook(lambda _, given, found: c * found),
], ids=["object", "list", "dictionary", "array", "hook before", "hook behind"])  # fmt: skip
def test_what_a_module_holds_counts(put):
    found = []
    for c in (1.0, 1.0, 3.0):
        model = net()
        put(model.module, c)
        found.append(fingerprint(model))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_modes_passes_and_products_do_not_count():
    model = net()
    before = fingerprint(model)
    problem = cs.Problem(model, data())
    for op in (Hessian(problem), GGN(problem)):
        op @ torch.ones(op.shape[0], dtype=torch.float64)
    model.module(torch.zeros(1, 3, dtype=torch.long))
    assert model.module.calls > 0
    assert fingerprint(model) == before
    model.module.train()
    assert fingerprint(model) == before
    model.module.set_c(2.0)  # which is not called in a pass
    assert fingerprint(model) != before


def test_another_process_finds_the_same(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE.format(**PLAIN), encoding="utf-8")
    words = "import own, curvescope as cs; from curvescope.runs.fingerprints import fingerprint; "
    words += "print(fingerprint(cs.load(own.Net(2.5)), cs.load('tiny-gpt')))"
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", words], capture_output=True, text=True, check=True, cwd=tmp_path, env=env
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().strip()) == 32


def test_layers_of_torch_whose_words_do_not_tell():
    def of(**options):
        return fingerprint(
            cs.load(nn.TransformerEncoderLayer(8, **{"nhead": 2, "dropout": 0.0, **options}).double())
        )

    with torch.random.fork_rng():
        found = []
        for options in ({}, {}, {"norm_first": True}, {"nhead": 4}, {"activation": F.gelu}):
            torch.manual_seed(0)
            found.append(of(**options))
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_configurations_and_functions_of_ones_own():
    class Own(nn.Module):
        def __init__(self, act, width):
            super().__init__()
            self.layer, self.act, self.config = nn.Linear(2, 2), act, SimpleNamespace(width=width)

        def forward(self, x):
            return self.act(self.layer(x))

    def of(act, width=1):
        module = Own(act, width)
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        return fingerprint(cs.load(module))

    assert of(torch.tanh) == of(torch.tanh)
    found = [of(torch.tanh), of(F.relu), of(lambda x: x + 1), of(lambda x: x + 2), of(torch.tanh, 2)]
    assert len(set(found)) == len(found)


def test_models_of_hugging_face_are_the_same_behind_a_pass(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    module = transformers.LlamaForCausalLM(config)
    model = cs.load(module)
    before = fingerprint(model)
    H = Hessian(cs.Problem(model, data()), "L0.W_Q")
    H @ torch.ones(H.shape[0])
    module(torch.zeros(1, 4, dtype=torch.long))
    assert fingerprint(model) == before
    module.model.layers[0].self_attn.scaling = 0.1
    assert fingerprint(model) != before
