"""Protocol between remote actors and the learner: frames of a 32-byte header and raw little-endian arrays.

    magic "pqlr" | version u16 | kind u8 | 0 | run id u64 | sequence number u64 | bytes of the body u32 | 0 u32

An actor opens one stream and sends HELLO (JSON: its specification); the learner answers WELCOME (JSON: the actor's
number and time limits). After that the learner sends requests, one at a time: RESET is answered by OBS, ACT by STEP.
The sequence number counts these pairs. Either side may end the stream with BYE (JSON: the reason). ::

    actor    HELLO          OBS         STEP        STEP
    learner        WELCOME RESET     ACT         ACT         BYE

Only the newest frame of a stack is sent, and the learner rebuilds the stack; flat histories are sent whole. Final
observations are sent only for rows where a new episode began. Nothing is unpickled. K is the number of an actor's
environments.

Both sides import this file; it needs only the standard library and NumPy.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pql.contract.robot import robot_fault
from pql.contract.shapes import layout_fault
from pql.remote.process.far_build import action_array

VERSION = 2
MAGIC = b"pqlr"
HEADER = struct.Struct("<4sHBBQQII")
HELLO, WELCOME, RESET, OBS, ACT, STEP, BYE = range(1, 8)
SERVICE, METHOD = "pql.Remote", "Act"
LARGEST = 64 << 20  # bytes of a message; the transport refuses a larger one before it is read
LARGEST_JSON = 64 << 10
FLAGS = ("terminated", "truncated", "first", "valid", "final_ok")  # bits of a row's flags, lowest first
TYPES = ("float32", "uint8", "int8", "int16", "int32", "int64", "bool")  # of observations
SIZES = (("grpc.max_receive_message_length", LARGEST), ("grpc.max_send_message_length", LARGEST))
KEEPALIVE = (  # pings of either side detect a stopped process or a broken connection after 10 s + 5 s
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")  # prefixes of addresses that only this machine can reach

Arrays = dict[str, np.ndarray]


class ProtocolError(Exception):
    """Invalid or unexpected frame; the stream is closed."""


class Frame(NamedTuple):
    """One message with its body still packed."""

    kind: int
    run_id: int
    seq: int
    body: memoryview


class ActorRows(NamedTuple):
    """Answer of K environments, as views of the message. An OBS message has only observations."""

    obs: Arrays  # [K, ...] newest frames
    reward: np.ndarray | None = None  # [K] float32
    flags: np.ndarray | None = None  # [K] uint8
    log: np.ndarray | None = None  # [L, K] float32
    ended: np.ndarray | None = None  # [F] rows whose final observation follows, ascending
    final_obs: Arrays | None = None  # [F, ...]


def pack(kind: int, run_id: int, seq: int, *parts: Any) -> bytes:
    """Return a message whose body is the concatenation of ``parts``: contiguous arrays or bytes."""
    size = sum(memoryview(p).nbytes for p in parts)
    return b"".join((HEADER.pack(MAGIC, VERSION, kind, 0, run_id, seq, size, 0), *parts))


def pack_json(kind: int, run_id: int, seq: int, facts: Mapping[str, Any]) -> bytes:
    """Return a message whose body is ``facts`` as JSON."""
    return pack(kind, run_id, seq, json.dumps(facts).encode())


def unpack(message: bytes) -> Frame:
    """Split a message into header fields and body. Raises ``ProtocolError``: not a frame of this version, or
    truncated."""
    if len(message) < HEADER.size:
        raise ProtocolError(f"{len(message)} bytes are too short for a frame")
    magic, version, kind, zero, run_id, seq, size, more = HEADER.unpack_from(message)
    if magic != MAGIC or zero or more:
        raise ProtocolError("not a frame of pql")
    if version != VERSION:
        raise ProtocolError(f"schema version {version}, expected {VERSION}: both sides need the same version of pql")
    if size != len(message) - HEADER.size:
        raise ProtocolError(f"a body of {len(message) - HEADER.size} bytes, the header says {size}")
    return Frame(kind, run_id, seq, memoryview(message)[HEADER.size :])


def expect(frame: Frame, kind: int, run_id: int, seq: int) -> Frame:
    """Return ``frame`` after checking its kind, run id and sequence number. Raises ``ProtocolError``: one of them
    differs."""
    if (frame.kind, frame.run_id, frame.seq) != (kind, run_id, seq):
        got, wanted = (f"frame {k} of run {r:x}, number {s}" for k, r, s in (frame[:3], (kind, run_id, seq)))
        raise ProtocolError(f"{got}: expected {wanted}")
    return frame


def read_json_frame(body: memoryview) -> dict[str, Any]:
    """Parse the body as a JSON object. Raises ``ProtocolError``: it is too long, or not a JSON object."""
    if len(body) > LARGEST_JSON:
        raise ProtocolError(f"{len(body)} bytes of JSON, at most {LARGEST_JSON}")
    try:
        facts = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ProtocolError("a JSON object is expected")
    return facts


def read_seed(body: memoryview) -> int:
    """Parse the body of a RESET message: a seed below 2^63. Raises ``ProtocolError``: wrong size, or a larger
    number."""
    seed = int.from_bytes(body, "little")
    if len(body) != 8 or seed >= 2**63:
        raise ProtocolError(f"a seed of {len(body)} bytes: expected 8, and a number below 2^63")
    return seed


# -- specifications ---------------------------------------------------------------------------------------------------


def check_facts(facts: Any) -> dict[str, Any]:
    """Validate a received specification (see ``far_build.describe``) and return its known fields. Raises
    ``ProtocolError``: a field is missing or invalid; the message names it."""
    if not isinstance(facts, Mapping):
        raise ProtocolError("specification: a JSON object is expected")
    for name, rule in RULES.items():
        if name not in facts or not rule(facts[name]):
            raise ProtocolError(f"specification: {name} is missing or wrong")
    if not _are_numbers(facts["info"].get("action_reach"), facts["action"].get("size")):
        raise ProtocolError("specification: info is missing or wrong")
    if not isinstance(facts["info"].get("symmetry", {}), Mapping):
        raise ProtocolError("specification: symmetry is no mapping")
    if "robot" in facts["info"]:
        shapes = {k: shape for k, (shape, *_) in facts["obs"].items()}
        if fault := robot_fault(facts["info"]["robot"], facts["action"].get("size"), shapes):
            raise ProtocolError(f"specification: {fault}")
    return {name: facts[name] for name in RULES}


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def _is_text(value: Any) -> bool:  # as checkpoints can store, without control characters
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 2**1023  # larger ones overflow a float
    return type(value) is float and not math.isnan(value)


def _are_numbers(value: Any, count: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == count and all(map(_is_number, value)))


def _is_group(value: Any) -> bool:
    """Return True for [shape, dtype, stack, terms, fill] of an observation group."""
    if not (isinstance(value, list) and len(value) == 5 and isinstance(value[0], list) and isinstance(value[3], list)):
        return False
    shape, dtype, stack, terms, fill = value
    sizes = len(shape) <= 8 and all(map(_is_count, (*shape, stack, *terms)))
    return sizes and dtype in TYPES and isinstance(fill, str) and not layout_fault(shape, stack, terms, fill)


def _is_obs(value: Any) -> bool:
    known = isinstance(value, dict) and "policy" in value and len(value) <= 32
    return known and all(_is_text(k) and _is_group(v) for k, v in value.items())


def _is_action(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "n" in value:
        return _is_count(value["n"]) and _is_count(value.get("start", 0), -(2**31))
    if "nvec" in value:
        many = value["nvec"]
        if not (isinstance(many, list) and 0 < len(many) < 2**16 and all(map(_is_count, many))):
            return False
        starts = value.get("start", many)
        return isinstance(starts, list) and len(starts) == len(many) and all(_is_count(s, -(2**31)) for s in starts)
    size = value.get("size")
    return _is_count(size) and all(_are_numbers(value.get(k), size) for k in ("low", "high", "center"))


def _are_kinds(log: Any) -> bool:
    return isinstance(log, list) or all(kind in ("sum", "step", "episode") for kind in log.values())


RULES: dict[str, Callable[[Any], bool]] = {
    "name": _is_text,
    "num_envs": _is_count,
    "obs": _is_obs,
    "action": _is_action,
    "max_episode_steps": lambda v: v is None or _is_count(v),
    "autoreset": lambda v: v in ("same_step", "next_step"),
    "final_obs": lambda v: v in ("always", "on_done", "never"),
    "log": lambda v: isinstance(v, list | dict) and len(v) <= 256 and all(map(_is_text, v)) and _are_kinds(v),
    "info": lambda v: isinstance(v, dict),
}
"""Fields of a specification, and what their values must be."""


# -- rows -------------------------------------------------------------------------------------------------------------


class Layout:
    """Layout of the rows of K environments in a message, derived from their specification. ``facts``: specification
    from :func:`check_facts`; ``num_envs`` is K. Raises ``ProtocolError``: a step may exceed the largest message."""

    def __init__(self, facts: Mapping[str, Any]):
        self.count: int = facts["num_envs"]
        self.terms = len(facts["log"])
        self.obs = {
            k: (tuple(shape[1:] if frames_sent(shape, stack) > 1 else shape), np.dtype(dtype).newbyteorder("<"))
            for k, (shape, dtype, stack, *_) in facts["obs"].items()
        }
        kind, one = action_array(facts["action"])
        self.action_shape: tuple[int, ...] = (self.count, *one)
        self.action_type = np.dtype(kind).newbyteorder("<")
        self.row_bytes = sum(math.prod(s) * d.itemsize for s, d in self.obs.values())
        largest = HEADER.size + self.count * (2 * self.row_bytes + 9 + 4 * self.terms) + 4
        if largest > LARGEST:
            fit = int(self.count * LARGEST / largest)
            what = f"a step of {self.count} environments may take {largest} bytes, a message at most {LARGEST}"
            raise ProtocolError(f"{what}: at most {fit} environments an actor")

    def pack_obs(self, run_id: int, seq: int, obs: Mapping[str, np.ndarray]) -> bytes:
        """Return an OBS message of first observations [K, ...], newest frames only."""
        return pack(OBS, run_id, seq, *self._obs_parts(obs))

    def pack_step(self, run_id: int, seq: int, step: Any) -> bytes:
        """Return a STEP message. ``step``: fields of ``pql.types.Step`` as arrays [K, ...], newest frames only."""
        flags = sum((np.asarray(getattr(step, k)).astype(np.uint8) << i for i, k in enumerate(FLAGS)), np.uint8(0))
        log = [np.ascontiguousarray(v, "<f4") for v in step.log.values()]
        ended = np.flatnonzero(np.asarray(step.first) & np.asarray(step.valid)).astype("<u4")
        finals = self._obs_parts({k: v[ended] for k, v in step.final_obs.items()}) if len(ended) else []
        rows = [np.ascontiguousarray(step.reward, "<f4"), *log, np.ascontiguousarray(flags)]
        ends = [np.uint32(len(ended)).tobytes(), ended, *finals]
        return pack(STEP, run_id, seq, *rows, *self._obs_parts(step.obs), *ends)

    def _obs_parts(self, obs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [np.ascontiguousarray(obs[k], dtype) for k, (_, dtype) in self.obs.items()]

    def read_obs(self, body: memoryview) -> ActorRows:
        """Parse the body of an OBS message. Raises ``ProtocolError``: wrong size."""
        reader = FrameReader(body)
        obs = self._read_obs(reader, self.count)
        reader.end()
        return ActorRows(obs)

    def read_step(self, body: memoryview) -> ActorRows:
        """Parse the body of a STEP message. Raises ``ProtocolError``: wrong size, unknown flags, or final observations
        of rows where no episode began."""
        reader, n = FrameReader(body), self.count
        reward = reader.array("<f4", (n,))
        log = reader.array("<f4", (self.terms, n))
        flags = reader.array("u1", (n,))
        obs = self._read_obs(reader, n)
        count = int(reader.array("<u4", (1,))[0])
        if count > n or flags.max() >= 1 << len(FLAGS):
            raise ProtocolError(f"{count} final observations of {n} rows, or unknown flags")
        ended = reader.array("<u4", (count,))
        begun = np.flatnonzero((flags & 12) == 12)  # first and valid
        if len(ended) + len(begun) and not np.array_equal(ended, begun):
            raise ProtocolError("final observations do not belong to the rows in which an episode begins")
        finals = self._read_obs(reader, count)
        reader.end()
        return ActorRows(obs, reward, flags, log, begun, finals)

    def _read_obs(self, reader: "FrameReader", rows: int) -> Arrays:
        return {k: reader.array(dtype, (rows, *shape)) for k, (shape, dtype) in self.obs.items()}

    def pack_action(self, run_id: int, seq: int, action: np.ndarray) -> bytes:
        """Return an ACT message with ``action`` [K, A] float32, [K] or [K, A] int64."""
        return pack(ACT, run_id, seq, np.ascontiguousarray(action, self.action_type))

    def read_action(self, body: memoryview) -> np.ndarray:
        """Parse the body of an ACT message: [K, A] float32, [K] or [K, A] int64. Raises ``ProtocolError``: wrong
        size."""
        reader = FrameReader(body)
        action = reader.array(self.action_type, self.action_shape)
        reader.end()
        return action


class FrameReader:
    """Reads consecutive arrays from the body of a message, as views."""

    def __init__(self, body: memoryview):
        self.body, self.at = body, 0

    def array(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return the next array of this type and shape; a boolean is True for any byte but 0."""
        if np.dtype(dtype) == bool:
            return self.array("u1", shape) != 0
        kind, count = np.dtype(dtype), math.prod(shape)
        if self.at + count * kind.itemsize > len(self.body):
            raise ProtocolError(f"a body of {len(self.body)} bytes is cut short")
        out = np.frombuffer(self.body, kind, count, self.at).reshape(shape)
        self.at += count * kind.itemsize
        return out

    def end(self) -> None:
        """Raise ``ProtocolError`` if bytes are left."""
        if self.at != len(self.body):
            raise ProtocolError(f"{len(self.body) - self.at} bytes too many")


def frames_sent(shape: Sequence[int], stack: int) -> int:
    """Return S if only the newest of S frames is sent; 1 for a flat history, which is sent whole."""
    return stack if len(shape) > 1 else 1


def newest_frames(obs: Mapping[str, Any], stacks: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return observation groups [K, ...] as arrays, reduced to the newest frame where they are stacks."""
    arrays = {k: np.asarray(v) for k, v in obs.items()}
    return {k: v[:, -1] if stacks[k] > 1 else v for k, v in arrays.items()}
