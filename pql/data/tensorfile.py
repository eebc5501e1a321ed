"""Writer of safetensors files that hashes while it writes and copies tensors from any device piece by piece.

The layout is that of the safetensors library, which can read the file: eight bytes with the length of a header, the
header (JSON: type, shape and position of every tensor), then the bytes of all tensors, widest types first for
alignment. Source: format description, https://github.com/huggingface/safetensors.

The library's own writer needs all tensors in host memory, creates files that only their owner may read, and would need
a second pass for the hash.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pql.engine.watchdog import touch
from pql.types import bytes_of

TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
PIECE = 8 << 20  # bytes copied to the host, hashed and written at a time


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """Write a file and sync it. Its mode follows the umask.

    Args:
        about: metadata for the header, text by name.
    Returns:
        the file's SHA-256, in hexadecimal.
    Raises:
        OSError: it cannot be written; before anything is written, if the disk has not enough space.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    head = header(ordered, about)
    check_space(path.parent, len(head) + sum(t.nbytes for t in ordered.values()))
    parts: Iterator[bytes | memoryview] = chain([head], *map(pieces, ordered.values()))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            touch()  # a large file makes progress
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors (any shape) with their names and types, in hexadecimal."""
    ordered = dict(sorted(tensors.items()))
    digest = hashlib.sha256(header(ordered, None))
    for part in chain.from_iterable(map(pieces, ordered.values())):
        digest.update(part)
    return digest.hexdigest()


def check_space(folder: Path, size: int) -> None:
    """Raise ``OSError`` with both numbers if the disk of ``folder`` has less than ``size`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        text = f"{os.strerror(errno.ENOSPC)}: {size / 1e6:,.1f} MB to write, {free / 1e6:,.1f} MB free"
        raise OSError(errno.ENOSPC, text)


def header(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None) -> bytes:
    """Return the header of a file of ``tensors`` (any shape), whose bytes follow in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of any shape in order, ``PIECE`` at a time, on the host."""
    flat = bytes_of(tensor)
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE].cpu().numpy().data
