"""Validation of ``.pt2`` and ``.onnx`` files of ``pql export`` before they are loaded.

A ``.pt2`` archive may contain only the members that an export writes, uncompressed: weights as raw bytes and the graph
as JSON (``program.py``). An ``.onnx`` file may not refer to another file, contain loops or use operators outside ONNX's
own set. Every refusal is a ``ValueError`` with a short text.
"""

import io
import json
import math
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pql.config.files import parse_json
from pql.run.export.program import DTYPES, Program

LARGEST = 2 << 30  # bytes of an export
MEMBERS = 10_000
GRAPH, WEIGHTS, CONSTANTS = "models/model.json", "data/weights/", "data/constants/"
SAMPLES, METADATA = "data/sample_inputs/model.pt", "extra/metadata.json"
CONFIGS = {WEIGHTS: f"{WEIGHTS}model_weights_config.json", CONSTANTS: f"{CONSTANTS}model_constants_config.json"}
MARKS = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little"}
KNOWN = {GRAPH, SAMPLES, METADATA, *CONFIGS.values(), *MARKS, ".data/version", ".data/serialization_id"}
TENSOR = re.compile(rf"{WEIGHTS}weight_\d+|{CONSTANTS}tensor_\d+")
SAFE_GLOBALS = {  # names in pickled tensors; torch's list for weights_only is longer
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    *(
        f"torch {kind}Storage"
        for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
    ),
}


def read_pt2(data: bytes, device: torch.device) -> tuple[Program, Any]:
    """Return the program in an archive, and its metadata, parsed but not validated.

    Raises:
        UnknownOperatorError: the program uses an operator that pql's own networks do not use.
        ValueError: the archive differs from what an export writes.
    """
    try:
        members = read_members(data)
        tensors = {k: v for folder in CONFIGS for k, v in _tensors(members, folder, device).items()}
        return Program(parse_json(members[GRAPH]), tensors, device), parse_json(members[METADATA])
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error
    except ValueError:
        raise
    except Exception as error:  # JSON with an unexpected structure fails in many ways
        raise ValueError(f"{type(error).__name__}: {error}") from error


def check_shapes(
    program: Program, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]], rows: int = 2
) -> None:
    """Call ``Program.check`` and turn every error into a ``ValueError``: operators raise errors of many types."""
    try:
        program.check(inputs, outputs, rows)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"operators that do not fit ({type(error).__name__}: {error})") from error


def read_members(data: bytes) -> dict[str, bytes]:
    """Return an archive's members by name, after validating all of them. Raises ``ValueError``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            infos = file.infolist()
            if len(infos) > MEMBERS or sum(info.file_size for info in infos) > len(data):
                raise ValueError("more members, or larger ones, than the archive can hold")
            members = {_inner_name(info): file.read(info) for info in infos}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"an incomplete archive: {error}") from error
    if len(members) < len(infos) or len({info.filename.partition("/")[0] for info in infos}) != 1:
        raise ValueError("two members with one name, or several folders")
    for name in members:
        if name not in KNOWN and not TENSOR.fullmatch(name):
            raise ValueError(f"a member {name[:60]!r}, which no export has")
    if any(members[name] != value for name, value in MARKS.items()):
        raise ValueError("another kind of archive, or another byte order")
    if samples := members.get(SAMPLES, b""):
        check_pickle(samples)
    return members


def _inner_name(info: zipfile.ZipInfo) -> str:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
        raise ValueError(f"a member {info.filename[:60]!r} that is compressed or encrypted")
    return info.filename.partition("/")[2]


def check_pickle(data: bytes) -> None:
    """Check the sample inputs of older exports, without unpickling them: they may name only tensor types.

    Raises:
        ValueError: the pickle names anything else, or is damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            infos = file.infolist()
            if len(infos) > MEMBERS or any(info.compress_type != zipfile.ZIP_STORED for info in infos):
                raise ValueError("sample inputs that are compressed")
            pickles = [file.read(info) for info in infos if info.filename.endswith(".pkl")]
        found = {(code.name, arg) for text in pickles for code, arg, _ in pickletools.genops(text)}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"invalid sample inputs: {error}") from error
    for name, arg in found:
        if name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4") or (
            name == "GLOBAL" and arg not in SAFE_GLOBALS
        ):
            raise ValueError(f"a pickle of {str(arg)[:60]!r} among its sample inputs")


def _tensors(members: Mapping[str, bytes], folder: str, device: torch.device) -> dict[str, Tensor]:
    """Read weights or constants by name from raw bytes. Their total size may not exceed the stored data; tensors with
    the same data and layout count once."""
    out, made, buffers = {}, dict[str, Tensor](), dict[str, bytearray]()
    left = sum(len(data) for name, data in members.items() if name.startswith(folder) and TENSOR.fullmatch(name))
    for name, entry in parse_json(members[CONFIGS[folder]])["config"].items():
        path = folder + str(entry["path_name"])
        if entry["use_pickle"] is not False or not TENSOR.fullmatch(path):
            raise ValueError(f"{name[:60]!r} pickled")
        key = json.dumps([path, entry["tensor_meta"]], sort_keys=True)
        if key not in made:
            if path not in buffers:
                buffers[path] = bytearray(members[path])
            view = _tensor(buffers[path], entry["tensor_meta"])
            left -= view.numel() * view.itemsize
            if left < 0:
                raise ValueError("more tensors than data")
            made[key] = view.to(device, copy=True)
        out[name] = made[key]
    return out


def _tensor(data: bytearray, meta: Mapping[str, Any]) -> Tensor:
    """Return a view of the data."""
    dtype = DTYPES[meta["dtype"]]
    sizes, strides = ([int(part["as_int"]) for part in meta[key]] for key in ("sizes", "strides"))
    if math.prod(sizes) * dtype.itemsize > len(data) or min((*sizes, *strides, 0)) < 0:
        raise ValueError("a tensor larger than its data")
    if not data:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"]))


# -- ONNX -------------------------------------------------------------------------------------------------------------

# Protocol-buffer messages of onnx.proto: field number -> the message in it, or the reason why it is refused.
MODEL: dict[int, Any] = {}
NODE: dict[int, Any] = {}
TENSORS: dict[int, Any] = {13: "numbers in another file", 14: "numbers in another file"}
SPARSE: dict[int, Any] = {1: TENSORS, 2: TENSORS}
ATTRIBUTE: dict[int, Any] = {
    5: TENSORS,
    10: TENSORS,
    6: "a graph within a graph",
    11: "a graph within a graph",
    22: SPARSE,
    23: SPARSE,
}
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
