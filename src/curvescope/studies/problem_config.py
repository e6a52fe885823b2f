"""Settings for the model and data of a study, and functions that load them.

Studies of curvature take a `ModelOnData` and build a `Problem`. Studies of geometry take a `TokenModel`,
which has a vocabulary, and optionally tokens with targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from curvescope.core.config import Config, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.ranks import loads_sharded
from curvescope.data import denoising
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.corpora import CORPORA, read_source
from curvescope.data.image_folders import PREFIX
from curvescope.data.labels import (
    DIGITS,
    classification_data,
    image_data,
    num_sequences,
    read_labeled,
    sample,
)
from curvescope.data.masking import continuation, masked_lm_data
from curvescope.data.tasks import task_from_text
from curvescope.data.text import text_data
from curvescope.engines import EngineName
from curvescope.models.forward_errors import check_vocabulary, check_weights
from curvescope.models.hf.module import MIXTURE
from curvescope.models.hf.source import is_hub_id
from curvescope.models.load import as_device, load
from curvescope.models.model import Model
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.problem import Problem
from curvescope.tokenizers import as_tokenizer, load_tokenizer

NOW = "now"  # name of the only checkpoint of a model
OF_CHECKPOINTS = "revisions of a bundled model or hub id, or folders of the same shape; default: all bundled"


def checkpoint_names(cfg: ModelOnData, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Return the requested checkpoints, or all bundled ones; one name for a model without checkpoints."""
    if asked:
        return tuple(dict.fromkeys(asked))
    bundled = cfg.model in BUNDLED and cfg.revision is None
    return REVISIONS if bundled else (cfg.revision or NOW,)


def load_checkpoints(cfg: ModelOnData, asked: tuple[str, ...], model: Model) -> dict[str, Model]:
    """Load the checkpoints by name, in order; `model`, if it has no other checkpoints."""
    found = {}
    for name in checkpoint_names(cfg, asked):
        if _is_revision(cfg.model, name):
            found[name] = load_model(replace(cfg, revision=name))
        else:
            found[name] = load_model(replace(cfg, model=name, revision=None)) if asked else model
        check_alike(name, found[name], model)
    return found


def _is_revision(model: str, name: str) -> bool:
    """Return True if a checkpoint's name is a revision of a bundled model or of one on the hub."""
    if model in BUNDLED:
        return name in REVISIONS
    local = Path(model).expanduser().exists() or Path(name).expanduser().exists()
    return not local and is_hub_id(model) and "/" not in name


def check_alike(name: str, found: Model, model: Model) -> None:
    """Raise unless a checkpoint has the model's parameters, by name and shape."""
    wanted, there = (
        {name: tuple(p.shape) for name, p in m.module.named_parameters()} for m in (model, found)
    )
    if there == wanted:
        return
    first = next(k for k in wanted | there if wanted.get(k) != there.get(k))
    raise UsageError(
        f"expected checkpoints of {model.name!r}, got {name!r}, a different model: {first} is "
        f"{there.get(first, 'not there')}, not {wanted.get(first, 'there')}"
    )


TASK = "task:"
SHORT_TEXT = 100_000  # characters; a longer text has enough tokens for the defaults of all studies
PAIRED = "seq2seq-lm"
KINDS = ("causal-lm", "masked-lm", PAIRED, "classification", "image-classification", denoising.FEATURES)
IMAGES = ("sample", DIGITS)  # names of the image data sets for vision models
FEW_LAYERS = 4
DTYPES = "float32 or float64; bfloat16 and float16 store weights in 16 bits and compute in float32"
TOKENIZER = "a tokenizer.json, or a folder with one; default: the model's own"


@dataclass(frozen=True)
class ModelOnData(Config):
    """A model, data and a loss."""

    model: str = setting("tiny-gpt", "a bundled name, a folder, a hub id, a checkpoint or a TOML file")
    revision: str | None = setting(None, "a training checkpoint of a bundled model")
    data: str = setting(
        "sample", "a corpus, a file, a folder, images:FOLDER, task:NAME or task:NAME?OPTION=VALUE"
    )
    tokens: int = setting(512, "tokens of a text; of labeled texts and images, ⌈tokens / seq_len⌉ items")
    seq_len: int = setting(64, "tokens of one sequence")
    batch_size: int = setting(8, "sequences of one batch; changes no number beyond rounding")
    loss: str = setting(
        "auto", "cross_entropy, mse, mse_mean; auto: cross_entropy for classes, else mse_mean"
    )
    dtype: str = setting("float32", DTYPES)
    device: str = setting("cpu", "cpu, cuda, …")
    engine: EngineName = setting("auto", "how products are executed: auto, fast or autograd")
    checkpoint: bool = setting(False, "recompute layers in the backward pass: less memory, more time")
    seed: int = setting(0, "seed of the data sample and of all probes")
    tokenizer: str | None = setting(None, TOKENIZER)


@dataclass(frozen=True)
class SampledOnData(ModelOnData):
    """A model, data and a loss, for headline numbers with a sampling error."""

    sampling: bool = setting(
        True, "measure how much other data of this kind and size would change the numbers"
    )
    unit: int = setting(1, "consecutive sequences of a text that are drawn together, for correlated texts")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "unit")


def make_problem(cfg: ModelOnData, model: Model | None = None) -> Problem:
    """Build the problem of model and data, and check everything before work begins.

    Args:
        model: the model of the configuration, if it is already loaded.
    """
    model = load_model(cfg) if model is None else model
    batches = make_batches(cfg, model)
    real = batches[0].targets.is_floating_point()
    return Problem(
        model, batches, loss=cfg.loss if cfg.loss != "auto" else "mse_mean" if real else "cross_entropy"
    )


def load_model(cfg: ModelOnData | TokenModel) -> Model:
    """Load the model, with the tokenizer of the settings if given; sharded over ranks if they use shards."""
    if loads_sharded():
        from curvescope.distributed.sharding import spread_out

        device = as_device(cfg.device)
        model = spread_out(load(cfg.model, revision=cfg.revision, dtype=cfg.dtype, device="cpu"), device)
    else:
        model = load(cfg.model, revision=cfg.revision, dtype=cfg.dtype, device=cfg.device)
    if cfg.tokenizer is None:
        return model
    tokenizer, most = load_tokenizer(cfg.tokenizer), model.facts.get("vocab_size")
    if isinstance(most, int) and tokenizer.vocab_size > most:
        raise UsageError(
            f"expected a tokenizer of at most {most} tokens for {model.name!r}, "
            f"got one of {tokenizer.vocab_size}: {cfg.tokenizer}"
        )
    return replace(model, tokenizer=tokenizer)


def notes_of(cfg: ModelOnData, problem: Problem) -> list[str]:
    """Return notes on how the loss of a result is defined."""
    made = not cfg.data.startswith(TASK) and kind_of(problem.model) == denoising.FEATURES
    routing = [note for note in problem.model.notes if note.startswith(MIXTURE)]
    return [*([denoising.NOTE] if made else []), *problem.notes, *routing, *short_notes(cfg, problem.model)]


def short_notes(cfg: ModelOnData | TokenModelOnData, model: Model) -> list[str]:
    """Return a note if the text has fewer tokens than requested."""
    taken = taken_tokens(cfg, model)
    if taken == cfg.tokens:
        return []
    return [
        f"the text {cfg.data!r} has only {taken} tokens to predict, fewer than tokens={cfg.tokens}; "
        "all are used"
    ]


def taken_tokens(cfg: ModelOnData | TokenModelOnData, model: Model) -> int:
    """Number of tokens to use: the requested number, or all of a short text if the number is at most the
    default.

    A number above the default was requested explicitly, so a shorter text is an error. A text that does not
    fill one sequence is an error, too, unless the settings request fewer tokens explicitly.
    """
    asked, own = cfg.tokens, type(cfg).tokens
    texts = kind_of(model) in ("causal-lm", "masked-lm") and model.tokenizer is not None
    if asked > own or not texts or cfg.data.startswith((TASK, "hf:")) or cfg.data in CORPORA:
        return asked
    content = read_source(cfg.data)
    if len(content) > SHORT_TEXT:
        return asked
    there = len(as_tokenizer(model.tokenizer).encode(content)) - 1
    return min(asked, there) if there >= min(cfg.seq_len, model.n_ctx or cfg.seq_len) else asked


def sequences_there(cfg: ModelOnData, model: Model) -> int | None:
    """Number of sequences in the text that the data are sampled from; None if the data are not plain text."""
    plain = kind_of(model) == "causal-lm" and not cfg.data.startswith((TASK, "hf:"))
    if model.tokenizer is None or not plain:
        return None
    num_pairs = len(as_tokenizer(model.tokenizer).encode(read_source(cfg.data))) - 1
    return -(-num_pairs // cfg.seq_len)


def make_batches(cfg: ModelOnData, model: Model) -> Batches:
    """Return batches of a task, or data for the kind of model: text, masked text, text pairs, labeled texts
    or images.

    A model without a head gets corrupted inputs; its targets are its own hidden states on the uncorrupted
    inputs.
    """
    if cfg.data.startswith(TASK):
        return _task(cfg, model)
    kind = kind_of(model)
    _check(cfg, model, kind)
    if kind == denoising.FEATURES:
        return denoising.denoising_data(
            cfg.data, model, tokens=cfg.tokens, seq_len=cfg.seq_len, batch_size=cfg.batch_size, seed=cfg.seed
        )
    if kind == "image-classification":
        count = num_sequences(cfg.tokens, cfg.seq_len)
        source = cfg.data if cfg.data.startswith(PREFIX) else DIGITS
        return image_data(model, count, cfg.seed, batch_size=cfg.batch_size, source=source)
    if kind == "classification":
        texts, labels = read_labeled(cfg.data)
        chosen = sample(len(texts), num_sequences(cfg.tokens, cfg.seq_len), seed=cfg.seed)
        texts, labels = [texts[i] for i in chosen], [labels[i] for i in chosen]
        return classification_data(texts, labels, model, seq_len=cfg.seq_len, batch_size=cfg.batch_size)
    tokens = taken_tokens(cfg, model)
    if kind not in ("masked-lm", PAIRED):
        return text_data(
            cfg.data, model, tokens=tokens, seq_len=cfg.seq_len, batch_size=cfg.batch_size, seed=cfg.seed,
            unit=cfg.unit if isinstance(cfg, SampledOnData) else 1,
        )  # fmt: skip
    make = masked_lm_data if kind == "masked-lm" else continuation
    return make(cfg.data, model, tokens=tokens, seq_len=cfg.seq_len, batch_size=cfg.batch_size, seed=cfg.seed)


def _task(cfg: ModelOnData | TokenModelOnData, model: Model) -> Batches:
    """Return the task of the configuration, which must fit the model; its length is `seq_len` if set
    explicitly.
    """
    vocabulary = model.facts.get("vocab_size")
    return task_from_text(
        cfg.data.removeprefix(TASK),
        batch_size=cfg.batch_size,
        n_ctx=model.n_ctx,
        vocab_size=vocabulary if isinstance(vocabulary, int) else None,
        seq_len=cfg.seq_len if cfg.seq_len != type(cfg).seq_len else None,
    )


def _check(cfg: ModelOnData, model: Model, kind: str) -> None:
    """Raise unless studies support the model's task and the model can read the data."""
    if kind not in KINDS:
        raise UsageError(
            f"expected a model for one of {', '.join(KINDS)}; {model.name!r} is for {kind}",
            hint="in Python, cs.Problem(model, batches, loss='mse') supports any outputs",
        )
    if kind == denoising.FEATURES and cfg.loss == "cross_entropy":
        raise UsageError(
            f"expected loss auto, mse or mse_mean for {model.name!r}, which has no head, got 'cross_entropy'",
            hint="--set loss=auto compares hidden states of a corrupted input with those of the "
            "original input",
        )
    if kind == "image-classification" or denoising.sees(model):
        if cfg.data not in IMAGES and not cfg.data.startswith(PREFIX):
            raise UsageError(
                f"the model {model.name!r} takes images, so it cannot read {cfg.data!r}",
                hint="--data digits, images:FOLDER for your own, or task:digits for images of 8 × 8",
            )
    elif cfg.data.startswith(PREFIX):
        raise UsageError(f"the model {model.name!r} reads text, so it cannot see {cfg.data!r}")
    elif model.tokenizer is None:
        raise UsageError(
            f"the model {model.name!r} has no tokenizer, so it cannot read the text {cfg.data!r}",
            hint="choose a task, e.g. --data task:addition",
        )


def kind_of(model: Model) -> str:
    """Return one of KINDS, or a task that studies do not support, from the facts."""
    if model.facts.get("inputs") == "patches" and model.facts.get("outputs") == "class":  # of the zoo
        return "image-classification"
    return model.facts.get("task", "causal-lm")


@dataclass(frozen=True)
class TokenModel(Config):
    """A model that reads tokens."""

    model: str = setting("tiny-gpt", "a bundled name, a folder, a hub id, a checkpoint or a TOML file")
    revision: str | None = setting(None, "a training checkpoint of a bundled model")
    dtype: str = setting("float32", DTYPES)
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "seed of the data sample and of all random numbers")
    tokenizer: str | None = setting(None, TOKENIZER)


@dataclass(frozen=True)
class TokenModelOnData(TokenModel):
    """A model that reads tokens, and a text or task to read."""

    data: str = setting("sample", "a corpus, a file, a folder, task:NAME or task:NAME?OPTION=VALUE")
    tokens: int = setting(1024, "of a text")
    seq_len: int = setting(64, "tokens of one sequence, at most the model's context length")
    batch_size: int = setting(8, "sequences of one batch; changes no number beyond rounding")


def load_token_model(cfg: TokenModel) -> Model:
    """Load the model; raise if it has no vocabulary, is an encoder with a decoder, or has nan weights."""
    model = load_model(cfg)
    check_vocabulary(model)
    if kind_of(model) == PAIRED:
        raise UsageError(
            f"expected a model with one token stream; {model.name!r} is an encoder with a decoder",
            hint="studies of curvature support it: spectrum, blocks, propagation, gap",
        )
    check_weights(model)
    return model


def read_data(cfg: TokenModelOnData, model: Model) -> Batches:
    """Read tokens with targets: the next (causal), the masked (masked), else the token itself."""
    if cfg.data.startswith(TASK):
        return _task(cfg, model)
    if model.tokenizer is None:
        raise UsageError(
            f"the model {model.name!r} has no tokenizer, so it cannot read the text {cfg.data!r}",
            hint="choose a task, e.g. --data task:addition",
        )
    length = min(cfg.seq_len, model.n_ctx or cfg.seq_len)
    options = {
        "tokens": taken_tokens(cfg, model),
        "seq_len": length,
        "batch_size": cfg.batch_size,
        "seed": cfg.seed,
    }
    if model.facts.get("task") == "masked-lm":
        return masked_lm_data(cfg.data, model, **options)
    found = text_data(cfg.data, model, **options)
    if model.facts.get("causal", True):
        return found
    inputs = torch.cat([batch.inputs for batch in found])  # pyright: ignore[reportCallIssue, reportArgumentType]
    targets = torch.cat([batch.targets for batch in found])
    own = torch.where(targets == IGNORED, targets, inputs)
    return Batches.from_tensors(inputs, own, batch_size=cfg.batch_size, name=found.name)


def choose_layers(wanted: Sequence[int], model: Model, *, few: int = FEW_LAYERS) -> list[int]:
    """Return the requested layers (negative numbers count from the end).

    The default is all layers of up to `few`, else the first, the one before the middle, and the last: 0, 5,
    11 of 12.
    """
    L = int(model.facts.get("n_layers", 0))
    if not wanted:
        return list(range(L)) if few >= L else [0, (L - 1) // 2, L - 1]
    for layer in wanted:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -L <= layer < L:
            raise UsageError(f"expected layers from 0 to {L - 1} of {model.name!r}, got {layer!r}")
    return list(dict.fromkeys(layer % L for layer in wanted))
