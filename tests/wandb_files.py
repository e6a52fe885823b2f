"""What a run of Weights & Biases wrote offline, read without the service: its log is LevelDB's."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, FILE_HEADER = 32768, 7, 7
FULL, FIRST, LAST = 1, 2, 4


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the history of the one run in `folder`/wandb, without the service's own columns."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    found = []
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log behind the service's header; a record may be cut over blocks."""
    place, parts = FILE_HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + HEADER])
        part = data[place + HEADER : place + HEADER + size]
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
        place += HEADER + size
