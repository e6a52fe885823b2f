"""Names of tokens: their text and bytes, for any tokenizer of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, HFTokenizer, as_tokenizer

Style = Literal["bytes", "sentencepiece", "plain"]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's mark for a space


class TokenNames:
    """Names of a tokenizer's ids; an id without a token (a padded row of a model) has none.

    Without a tokenizer every id is known, and its name is [id].
    """

    def __init__(self, tokenizer: Any = None):
        self.tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        self._raw = None if self.tokenizer is None else _pieces(self.tokenizer)

    def known(self, num_rows: int) -> Tensor:
        """Return the ids below `num_rows` that are tokens, in ascending order."""
        if self._raw is None:
            return torch.arange(num_rows)
        return torch.tensor(sorted(i for i in self._raw if 0 <= i < num_rows), dtype=torch.int64)

    def ids(self) -> list[int]:
        """Return all ids that are tokens, in ascending order; none without a tokenizer."""
        return sorted(self._raw or ())

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token; those of [id] if it has none."""
        content = None if self._raw is None else self._raw.get(int(token))
        return f"[{int(token)}]".encode() if content is None else content

    def text(self, token: int) -> str:
        """Return the bytes decoded as UTF-8, with U+FFFD for invalid bytes."""
        return self.raw(token).decode("utf-8", errors="replace")

    def hex(self, token: int) -> str:
        r"""Return every byte as \xNN, printable or not."""
        return as_hex(self.raw(token))

    def texts(self, ids: Iterable[int]) -> list[str]:
        """Return `text` of each id."""
        return [self.text(i) for i in ids]

    def hexes(self, ids: Iterable[int]) -> list[str]:
        """Return `hex` of each id."""
        return [self.hex(i) for i in ids]

    def nested(self, ids: Tensor) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
        """Return `text` and `hex` of ids (m, n, k) as nested lists."""
        names = {i: (self.text(i), self.hex(i)) for i in ids.unique().tolist()}
        text, raw = ([[[names[i][j] for i in c] for c in row] for row in ids.tolist()] for j in (0, 1))
        return text, raw


def names_of(tokenizer: Any) -> TokenNames:
    """Return the names of a tokenizer's tokens; without a tokenizer, [id]."""
    return tokenizer if isinstance(tokenizer, TokenNames) else TokenNames(tokenizer)


def as_hex(raw: bytes) -> str:
    r"""Format bytes as hexadecimal: `b"a\n"` as `\x61\x0a`."""
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _pieces(tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of every id."""
    if isinstance(tokenizer, ByteTokenizer):
        return {i: bytes([i]) for i in range(256)}
    if isinstance(tokenizer, CharTokenizer):
        return {i: c.encode() for i, c in enumerate(tokenizer.alphabet)}
    inner = tokenizer.tokenizer if isinstance(tokenizer, HFTokenizer) else None
    core = (
        tokenizer._core if isinstance(tokenizer, BPETokenizer) else getattr(inner, "backend_tokenizer", None)
    )
    if core is not None and hasattr(core, "to_str"):
        added = {int(i) for i in core.get_added_tokens_decoder()}
        return _decoded(core.get_vocab(with_added_tokens=True), _style(core), added)
    if inner is not None and hasattr(inner, "get_vocab"):
        vocabulary = inner.get_vocab()
        added = {int(i) for i in getattr(inner, "added_tokens_decoder", {})}
        return _decoded(vocabulary, _guessed_style(vocabulary), added)
    return {i: tokenizer.decode([i]).encode() for i in range(tokenizer.vocab_size)}


def _decoded(vocabulary: dict[str, int], style: Style, added: set[int]) -> dict[int, bytes]:
    return {i: _bytes_of(piece, "plain" if i in added else style) for piece, i in vocabulary.items()}


def _bytes_of(piece: str, style: Style) -> bytes:
    if style == "bytes" and all(c in _LETTERS for c in piece):
        return bytes(_LETTERS[c] for c in piece)
    if style == "sentencepiece":
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
    return piece.encode("utf-8", errors="replace")


def _style(core: Any) -> Style:
    """Return how pieces encode bytes, from the decoder of a `tokenizers` object."""
    decoder = json.loads(core.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return "bytes"
    marked = "Metaspace" in kinds or "ByteFallback" in kinds
    return "sentencepiece" if marked or any(_SPACE in str(part.get("pattern")) for part in parts) else "plain"


def _guessed_style(vocabulary: dict[str, int]) -> Style:
    """Guess how pieces encode bytes, for a tokenizer that does not show its decoder."""
    if any(piece.startswith("Ġ") for piece in vocabulary):
        return "bytes"
    return "sentencepiece" if any(_SPACE in piece for piece in vocabulary) else "plain"


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter: byte-level BPE writes unprintable bytes as U+0100, U+0101, …"""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in sorted(printable)} | {chr(0x100 + j): b for j, b in enumerate(others)}


_LETTERS = _byte_letters()


def single_tokens(tokenizer: Any, words: Sequence[str], *, space: bool) -> dict[str, int]:
    """Return the words that are exactly one token, with its id; `space` puts a space before each."""
    tokenizer = as_tokenizer(tokenizer)
    tokens = {}
    for word in words:
        try:
            ids = tokenizer.encode(f" {word}" if space else word)
        except UsageError:  # a character that the tokenizer does not have
            continue
        if len(ids) == 1:
            tokens[word] = ids[0]
    return tokens
