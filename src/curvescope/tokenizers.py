"""Tokenizers: bytes, characters, byte-level BPE, and any tokenizer of Hugging Face.

Every tokenizer can save itself; `load_tokenizer` detects the kind from the file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from curvescope.core.errors import MissingExtra, UsageError

FORMAT = "curvescope-tokenizer"


class Tokenizer(ABC):
    """Conversion of text to ids in [0, vocab_size) and back."""

    name: str

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write a file for `load_tokenizer`; missing folders are created."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes: 256 ids for any text; invalid UTF-8 decodes to U+FFFD."""

    name = "bytes"

    @property
    def vocab_size(self) -> int:
        """256."""
        return 256

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(_checked_ids(ids, self)).decode("utf-8", errors="replace")

    def save(self, path: str | Path) -> None:
        _write_json(path, {"format": FORMAT, "type": self.name})


class CharTokenizer(Tokenizer):
    """One id per character: character i of `alphabet` has id i."""

    name = "chars"

    def __init__(self, alphabet: str):
        repeated = sorted(c for c, count in Counter(alphabet).items() if count > 1)
        if not alphabet or repeated:
            problem = f"{repeated[:5]} more than once" if repeated else "none"
            raise UsageError(
                f"expected an alphabet of different characters, got {problem}",
                hint="CharTokenizer.from_text(text) collects the characters of a text",
            )
        self.alphabet = alphabet
        self._ids = {c: i for i, c in enumerate(alphabet)}

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        """Return a tokenizer whose alphabet is the sorted characters of `text`."""
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        """Length of the alphabet."""
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[c] for c in text]
        except KeyError as missing:
            c = missing.args[0]
            raise UsageError(
                f"expected characters of the alphabet {_shortened(self.alphabet)}, "
                f"got {c!r} at position {text.index(c)}",
                hint="CharTokenizer.from_text on all the text, or ByteTokenizer() for any text",
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[i] for i in _checked_ids(ids, self))

    def save(self, path: str | Path) -> None:
        _write_json(path, {"format": FORMAT, "type": self.name, "alphabet": self.alphabet})


class BPETokenizer(Tokenizer):
    """Byte-pair encoding by the `tokenizers` package.

    `train` makes a byte-level encoding of the 256 bytes, so every text can be encoded and
    `decode(encode(text)) == text`. A tokenizer.json from elsewhere may normalize its text, so that this
    equality need not hold. Special tokens are neither added nor dropped; text is never truncated or padded.
    """

    name = "bpe"

    def __init__(self, core: Any):
        kind = type(core.model).__name__
        if kind != "BPE":
            raise UsageError(
                f"expected a byte-pair encoding, got the model {kind}",
                hint="HFTokenizer(PreTrainedTokenizerFast(tokenizer_file=…)) takes any kind",
            )
        self._core = type(core).from_str(core.to_str())  # a copy, with truncation and padding switched off
        self._core.no_truncation()
        self._core.no_padding()
        self._vocab_size = max(self._core.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def train(cls, texts: str | Iterable[str], vocab_size: int) -> BPETokenizer:
        """Merge the most frequent pairs of `texts` (one text, or several) until there are `vocab_size` ids.

        The same texts give the same merges. The vocabulary is smaller if there is nothing left to merge.
        """
        if vocab_size < 256:
            raise UsageError(f"expected a vocab_size of at least 256 (one id per byte), got {vocab_size}")
        package = _tokenizers()
        core = package.Tokenizer(package.models.BPE())
        core.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[],
            show_progress=False,
        )
        parts = [texts] if isinstance(texts, str) else list(texts)
        for part in parts:
            _utf8(part)
        core.train_from_iterator(parts, trainer)
        return cls(core)

    @classmethod
    def from_file(cls, path: str | Path) -> BPETokenizer:
        """Read the BPE in a tokenizer.json of Hugging Face."""
        content = _read(path)
        try:
            core = _tokenizers().Tokenizer.from_str(content)
        except MissingExtra:
            raise
        except Exception as problem:  # the package raises plain Exception
            raise UsageError(
                f"expected a tokenizer.json, but {str(path)!r} is not one: {_first_line(problem)}",
                hint="BPETokenizer.train(texts, vocab_size=1000).save(path) writes one",
            ) from None
        return cls(core)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._core.decode(_checked_ids(ids, self), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json."""
        _write(path, self._core.to_str(pretty=True))


class HFTokenizer(Tokenizer):
    """A transformers tokenizer, or any object with its `encode`, `decode` and `get_vocab` (or length)."""

    name = "hf"

    def __init__(self, tokenizer: Any):
        missing = [
            method for method in ("encode", "decode") if not callable(getattr(tokenizer, method, None))
        ]
        if missing:
            raise UsageError(
                f"expected a transformers tokenizer, got {type(tokenizer).__name__}, "
                f"which has no {' and no '.join(missing)}",
                hint="transformers.AutoTokenizer.from_pretrained(folder)",
            )
        self.tokenizer = tokenizer
        ids = tokenizer.get_vocab().values() if hasattr(tokenizer, "get_vocab") else range(len(tokenizer))
        self._vocab_size = max(ids, default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included; a model may have more rows than that."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            _checked_ids(ids, self), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def save(self, path: str | Path) -> None:
        """Write a folder, as `save_pretrained` does."""
        self.tokenizer.save_pretrained(str(path))


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return a Tokenizer, wrapping a tokenizer of transformers or of the package `tokenizers`."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "to_str"):
        return BPETokenizer(tokenizer)
    return HFTokenizer(tokenizer)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer written by `save`, or the BPE in a tokenizer.json or in a folder that has one."""
    content = _read(path)
    try:
        parsed = json.loads(content)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or parsed.get("format") != FORMAT:
        return BPETokenizer.from_file(path)
    if parsed.get("type") == ByteTokenizer.name:
        return ByteTokenizer()
    if parsed.get("type") == CharTokenizer.name and isinstance(parsed.get("alphabet"), str):
        return CharTokenizer(parsed["alphabet"])
    raise UsageError(
        f"expected a tokenizer of type 'bytes' or 'chars' in {str(path)!r}, got {parsed.get('type')!r}"
    )


def _checked_ids(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return ids (a sequence, tensor or array) as a list of ints, checked against the vocabulary."""
    plain = [int(i) for i in ids]
    for i in plain:
        if not 0 <= i < tokenizer.vocab_size:
            raise UsageError(f"expected ids from 0 to {tokenizer.vocab_size - 1}, got {i}")
    return plain


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise UsageError(f"expected text, got {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise UsageError(
            f"expected text that UTF-8 can hold, got a lone surrogate at position {problem.start}"
        ) from None


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("a BPE needs the package tokenizers", hint="pip install tokenizers") from None
    return tokenizers


def _read(path: str | Path) -> str:
    file = Path(path)
    if (file / "tokenizer.json").is_file():
        file = file / "tokenizer.json"
    if not file.is_file():
        actual = "a folder" if file.is_dir() else "nothing"
        raise UsageError(f"expected a tokenizer file at {str(path)!r}, found {actual} there")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"expected a tokenizer file of UTF-8 text, but {str(path)!r} is not UTF-8") from None


def _write(path: str | Path, content: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content, encoding="utf-8")


def _write_json(path: str | Path, content: dict[str, str]) -> None:
    _write(path, json.dumps(content) + "\n")


def _first_line(problem: Exception) -> str:
    return str(problem).split("\n", 1)[0][:200]


def _shortened(alphabet: str, limit: int = 40) -> str:
    return repr(alphabet[:limit]) + (f" and {len(alphabet) - limit} more" if len(alphabet) > limit else "")
