"""Check of an ``.onnx`` file before ONNX Runtime loads it.

It may not refer to another file, contain loops or use operators outside ONNX's own set. Every refusal is a
``ValueError`` with a short text.
"""

from collections.abc import Iterator
from typing import Any

# Protocol-buffer messages of onnx.proto: field number -> the message in it, or the reason why it is refused.
MODEL: dict[int, Any] = {}
NODE: dict[int, Any] = {}
TENSORS: dict[int, Any] = {13: "numbers in another file", 14: "numbers in another file"}
SPARSE: dict[int, Any] = {1: TENSORS, 2: TENSORS}
INSIDE = "a graph within a graph"
ATTRIBUTE: dict[int, Any] = {5: TENSORS, 10: TENSORS, 6: INSIDE, 11: INSIDE, 22: SPARSE, 23: SPARSE}
MODEL |= {7: {1: NODE, 5: TENSORS, 15: SPARSE}, 20: "a training graph", 25: "model-defined functions"}
NODE |= {5: ATTRIBUTE, 7: "an operator that is not ONNX's own"}
MESSAGES = 1_000_000


def check_onnx(data: bytes) -> None:
    """Raise ``ValueError`` unless a model is one graph of ONNX's own operators with its weights in the same file."""
    left = [(memoryview(data), MODEL)]
    count = 0
    while left:
        message, known = left.pop()
        for number, value in _fields(message):
            count += 1
            if count > MESSAGES:
                raise ValueError(f"more than {MESSAGES:,} entries")
            inside = known.get(number)
            if isinstance(inside, dict) and isinstance(value, memoryview):
                left.append((value, inside))
            elif isinstance(inside, dict) or (isinstance(inside, str) and value not in (0, b"", b"ai.onnx")):
                raise ValueError(inside if isinstance(inside, str) else "a damaged entry")


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (field number, value) of a protocol-buffer message; a value is an integer or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("an incomplete ONNX model")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= len(message):
            break
        value |= (message[at + i] & 127) << 7 * i
        if message[at + i] < 128:
            return value, at + i + 1
    raise ValueError("an incomplete ONNX model")
