"""Reads what an offline W&B run recorded, without a network and without a package for it.

The file is a 7-byte header and then LevelDB's log format: blocks of 32 KiB with records of (checksum, length, type,
data), a record that does not fit being split into a first, middle and last part. Each is a protobuf ``Record``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_FILE_HEADER, _RECORD_HEADER = 7, struct.Struct("<IHB")
_BLOCK = 32 * 1024
_FULL, _LAST = 1, 4


def read_history(path: Path) -> list[dict[str, Any]]:
    """What the run logged: one dict a call of ``log``."""
    history = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return history


def _records(content: bytes) -> Iterator[bytes]:
    position, data = _FILE_HEADER, b""
    while position + _RECORD_HEADER.size <= len(content):
        if _BLOCK - position % _BLOCK < _RECORD_HEADER.size:
            position += _BLOCK - position % _BLOCK  # the rest of a block that no header fits into
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(content, position)
        position += _RECORD_HEADER.size
        data += content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield data
            data = b""
