"""The ``.pt2`` and ``.onnx`` files of ``pql export``, looked through before anything is made of them.

Of a ``.pt2`` archive nothing but the members that an export writes is accepted, none compressed; weights are raw bytes,
the graph is JSON (``program.py``). Of an ``.onnx`` file nothing that lies in another file, runs in a loop or is of an
operator set that is not ONNX's own. Everything that is refused is a ``ValueError`` with a short text.
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
SAFE_GLOBALS = {  # what pickled tensors name: torch's own list for weights_only is longer
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    *(
        f"torch {kind}Storage"
        for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
    ),
}


def read_pt2(data: bytes, device: torch.device) -> tuple[Program, Any]:
    """The program in an archive, and its metadata, parsed and not looked at further.

    Raises:
        UnknownOperatorError: it uses an operator that pql's own networks do not.
        ValueError: it is not as an export is written.
    """
    try:
        members = read_members(data)
        tensors = {k: v for folder in CONFIGS for k, v in _tensors(members, folder, device).items()}
        return Program(parse_json(members[GRAPH]), tensors, device), parse_json(members[METADATA])
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error
    except ValueError:
        raise
    except Exception as error:  # JSON of another shape than the exporter's fails in many ways
        raise ValueError(f"{type(error).__name__}: {error}") from error


def check_shapes(
    program: Program, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]], rows: int = 2
) -> None:
    """As ``Program.check``, with every error a ``ValueError``: operators refuse what does not fit in many ways."""
    try:
        program.check(inputs, outputs, rows)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"operators that do not fit ({type(error).__name__}: {error})") from error


def read_members(data: bytes) -> dict[str, bytes]:
    """An archive's members by their names within it, all of them looked at. Raises ``ValueError``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            infos = file.infolist()
            if len(infos) > MEMBERS or sum(info.file_size for info in infos) > len(data):
                raise ValueError("more in it than there is")
            members = {_inner_name(info): file.read(info) for info in infos}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"no whole archive: {error}") from error
    if len(members) < len(infos) or len({info.filename.partition("/")[0] for info in infos}) != 1:
        raise ValueError("two members of one name, or several folders")
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
    """The sample inputs of older exports: never unpickled, but if they name anything but tensors, what brought them is
    no export. Raises ``ValueError``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            infos = file.infolist()
            if len(infos) > MEMBERS or any(info.compress_type != zipfile.ZIP_STORED for info in infos):
                raise ValueError("sample inputs that are compressed")
            pickles = [file.read(info) for info in infos if info.filename.endswith(".pkl")]
        found = {(code.name, arg) for text in pickles for code, arg, _ in pickletools.genops(text)}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"sample inputs that are none: {error}") from error
    for name, arg in found:
        if name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4") or (
            name == "GLOBAL" and arg not in SAFE_GLOBALS
        ):
            raise ValueError(f"a pickle of {str(arg)[:60]!r} among its sample inputs")


def _tensors(members: Mapping[str, bytes], folder: str, device: torch.device) -> dict[str, Tensor]:
    """Read weights or constants by name from raw bytes; at most as many as are stored, not counting shared ones."""
    out, made, whole = {}, dict[str, Tensor](), dict[str, bytearray]()
    left = sum(len(data) for name, data in members.items() if name.startswith(folder) and TENSOR.fullmatch(name))
    for name, entry in parse_json(members[CONFIGS[folder]])["config"].items():
        path = folder + str(entry["path_name"])
        if entry["use_pickle"] is not False or not TENSOR.fullmatch(path):
            raise ValueError(f"{name[:60]!r} pickled")
        key = json.dumps([path, entry["tensor_meta"]], sort_keys=True)
        if key not in made:
            if path not in whole:
                whole[path] = bytearray(members[path])
            view = _tensor(whole[path], entry["tensor_meta"])
            left -= view.numel() * view.itemsize
            if left < 0:
                raise ValueError("more tensors than data")
            made[key] = view.to(device, copy=True)
        out[name] = made[key]
    return out


def _tensor(data: bytearray, meta: Mapping[str, Any]) -> Tensor:
    """A view of the data."""
    dtype = DTYPES[meta["dtype"]]
    sizes, strides = ([int(part["as_int"]) for part in meta[key]] for key in ("sizes", "strides"))
    if math.prod(sizes) * dtype.itemsize > len(data) or min((*sizes, *strides, 0)) < 0:
        raise ValueError("a tensor larger than its data")
    if not data:
        return torch.empty(sizes, dtype=dtype)
    whole = torch.frombuffer(data, dtype=dtype)
    return whole.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"]))


# -- ONNX -------------------------------------------------------------------------------------------------------------

# Protocol-buffer messages of onnx.proto: number of a field -> the message it holds, or why it is refused.
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
MODEL |= {7: {1: NODE, 5: TENSORS, 15: SPARSE}, 20: "a training graph", 25: "functions of its own"}
NODE |= {5: ATTRIBUTE, 7: "an operator that is not ONNX's own"}
MESSAGES = 1_000_000


def check_onnx(data: bytes) -> None:
    """Raises ``ValueError`` for a model that is more than one graph of ONNX's operators with its numbers in it."""
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
    """(number, value) of a protocol-buffer message's fields: numbers, or bytes."""
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
            raise ValueError("no whole ONNX model")
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
    raise ValueError("no whole ONNX model")
