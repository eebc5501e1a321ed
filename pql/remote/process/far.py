"""The far side of ``pql.remote.process.near``: builds a simulator in this interpreter and steps it for another process.

Run by ``process.py``, never by hand. It needs Python 3.8 and NumPy (torch only where the simulator brings it), and
nothing of this library has to be installed: the near side's own files are made importable as ``pql``.

One byte asks for a step and one byte answers it, and says whether anything ended or began in it; actions and what
follows lie in memory that both sides map. All else is a message: an operation, JSON, and bytes. Nothing is ever
unpickled. What simulator that is, and its specification, are ``far_build.py``'s to say.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules have no business among an interpreter's own

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import mmap
import os
import select
import signal
import struct
import threading
import traceback
from typing import Any, Callable, Mapping, NoReturn

LENGTHS = struct.Struct("<QQ")
STEP, CALL, ANSWER, ERROR = b"s", b"c", b"a", b"e"
PLAIN = b"p"  # answers STEP where every row is an ordinary one: nothing ended, began or is a filler
OPTIONAL = ("reset_where", "state_dict", "load_state_dict", "render")
PR_SET_PDEATHSIG = 1


# -- messages: both sides use these -----------------------------------------------------------------------------------


def write_all(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def send_message(pipe: int, kind: bytes, facts: Any, blob: bytes = b"") -> None:
    """``facts`` as JSON, and bytes beside them."""
    text = json.dumps(facts).encode()
    write_all(pipe, kind + LENGTHS.pack(len(text), len(blob)) + text + blob)


def read_message(read: Callable[[int], bytes]) -> tuple[Any, bytes]:
    """What follows the kind; ``read(n)`` gives exactly n bytes."""
    text, blob = LENGTHS.unpack(read(LENGTHS.size))
    return json.loads(read(text)), read(blob)


def pack(tree: Any) -> tuple[Any, bytes]:
    """Nested dicts and lists of arrays, tensors and plain values -> (JSON, the arrays' bytes)."""
    import numpy as np

    parts: list[bytes] = []
    size = 0

    def walk(value: Any) -> Any:
        nonlocal size
        if isinstance(value, Mapping):
            return {"dict": {str(k): walk(v) for k, v in value.items()}}
        if isinstance(value, (list, tuple)):
            return {"list": [walk(v) for v in value]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        array = np.ascontiguousarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
        if array.dtype.hasobject:
            raise TypeError(f"a {type(value).__name__} cannot be saved: arrays, tensors, numbers and text can")
        parts.append(array.tobytes())
        shape, start = list(np.shape(value)), size
        size += array.nbytes
        return {"array": [array.dtype.str, shape, start]}

    return walk(tree), b"".join(parts)


def unpack(tree: Any, blob: bytes, as_tensors: bool) -> Any:
    """The reverse of :func:`pack`, with new arrays or tensors."""
    import numpy as np

    if "dict" in tree:
        return {k: unpack(v, blob, as_tensors) for k, v in tree["dict"].items()}
    if "list" in tree:
        return [unpack(v, blob, as_tensors) for v in tree["list"]]
    if "value" in tree:
        return tree["value"]
    kind, shape, start = tree["array"]
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(blob, np.dtype(kind), count, start).reshape(shape).copy()
    if not as_tensors:
        return array
    import torch

    return torch.from_numpy(array)


def mount(folder: str) -> None:
    """Make the near side's library importable here as ``pql``, whatever version is installed, or none."""
    spec = importlib.util.spec_from_file_location(
        "pql", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["pql"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


# -- serving ----------------------------------------------------------------------------------------------------------


class Server:
    """Answers one process's requests about one environment.

    Args:
        ends: numbers of the open files that the near side has handed over.
    """

    def __init__(self, ends: Mapping[str, int]):
        self.requests, self.answers, self.memory = ends["requests"], ends["answers"], ends["memory"]
        self.sims: Any = None  # far_build.py, which imports NumPy: if that is missing, it is for this class to say
        self.env: Any = None
        self.arrays: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}  # the same memory, where torch is there
        self.groups: dict[str, str] = {}  # observation groups, and where they go
        self.terms: dict[str, str] = {}  # and those of the log
        self.speaks_torch = False
        self.flags: Any = None  # all of them, one after the other
        self.ordinary = b""  # what they are in a step of ordinary rows
        self.join: Any = None  # numpy.concatenate
        self.settle: Any = None  # waits for the device, where the arrays lie there

    def read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self.requests, min(count, 1 << 20))
            if not part:
                leave()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def run(self) -> NoReturn:
        """Until the near side closes, or is gone."""
        while True:
            kind = os.read(self.requests, 1)
            if not kind:
                leave()
            try:
                if kind == STEP:
                    os.write(self.answers, self.step())
                else:
                    request, blob = read_message(self.read)
                    facts, out = getattr(self, "do_" + request["do"])(request, blob)
                    send_message(self.answers, ANSWER, facts, out)
                    if request["do"] == "close":
                        leave()
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        facts: dict[str, Any] = {"traceback": traceback.format_exc(), "cause": f"{type(error).__name__}: {first}"}
        if all(hasattr(error, k) for k in ("setting", "value", "allowed")):
            wrong: Any = error
            plain = wrong.value is None or isinstance(wrong.value, (bool, int, float))
            facts["config"] = [wrong.setting, wrong.value if plain else str(wrong.value), wrong.allowed]
        send_message(self.answers, ERROR, facts)

    def do_foresee(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return {"spec": self.sims.foresee(request)}, b""

    def do_build(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.env = self.sims.build(request)
        spec = self.sims.describe(self.env.spec)
        places, size = self.sims.layout(spec)
        os.ftruncate(self.memory, size)
        self.groups = {name: "obs." + name for name in spec["obs"]}
        self.terms = {name: "log." + name for name in spec["log"]}
        self.map(places, size)
        return {"spec": spec, "places": places, "size": size, "has": [k for k in OPTIONAL if hasattr(self.env, k)]}, b""

    def map(self, places: Mapping[str, Any], size: int) -> None:
        import numpy as np

        shared = mmap.mmap(self.memory, size)
        for name, (dtype, shape, offset) in places.items():
            count = int(np.prod(shape, dtype=np.int64))
            self.arrays[name] = np.frombuffer(shared, np.dtype(dtype), count, offset).reshape(shape)
        self.arrays.update(zip(self.sims.FLAGS, self.arrays["flags"]))
        self.flags, self.join = self.arrays["flags"].reshape(-1), np.concatenate
        self.ordinary = np.repeat(self.sims.ORDINARY, len(self.arrays["first"])).tobytes()
        self.arrays.update(zip(self.terms.values(), self.arrays["log"]))

    def do_share(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        """From now on all arrays lie on the device; or the answer says why they cannot."""
        device = self.env.spec.device
        try:
            cuda = importlib.import_module("pql.remote.process.shared_cuda")
            if not cuda.usable(device):
                return {"why": f"the simulator's tensors are on {device}"}, b""
            self.tensors = cuda.tensors(cuda.attach(request["handle"], device), request["places"], device)
        except (ImportError, OSError, RuntimeError, TypeError) as error:
            return {"why": str(error)}, b""
        self.tensors.update(zip(self.terms.values(), self.tensors["log"]))
        self.arrays, self.settle = self.tensors, lambda: cuda.wait(device)
        return {"why": None}, b""

    def do_reset(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.show(self.env.reset(request["seed"]))
        return {}, b""

    def do_reset_where(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.show(self.env.reset_where(self.given("mask")))
        return {}, b""

    def do_state_dict(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return pack(self.env.state_dict())

    def do_load_state_dict(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.env.load_state_dict(unpack(request["state"], blob, self.speaks_torch))
        return {}, b""

    def do_render(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return pack(self.env.render(request["index"], request["width"], request["height"]))

    def do_close(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        if self.env is not None:
            self.env.close()
        return {}, b""

    def show(self, obs: Mapping[str, Any]) -> None:
        """Put an observation into the shared memory, and learn whether the simulator speaks torch or NumPy."""
        self.speaks_torch = any(hasattr(value, "detach") for value in obs.values())
        if self.speaks_torch and not self.tensors:
            torch = sys.modules["torch"]
            self.tensors = {k: torch.from_numpy(v) for k, v in self.arrays.items()}
        for name, field in self.groups.items():
            self.put(field, obs[name])
        if self.settle:
            self.settle()

    def given(self, name: str) -> Any:
        """A copy of what the near side has written, as the simulator likes it."""
        if not self.speaks_torch:
            return self.arrays[name].copy()
        return self.tensors[name].to(self.env.spec.device, copy=True)

    def step(self) -> bytes:
        """One step, its results copied out. Final observations cross only where they are not ``obs`` itself.

        Returns:
            the answer.
        """
        step, put = self.env.step(self.given("action")), self.put
        for name, field in self.groups.items():
            put(field, step.obs[name])
        put("reward", step.reward)
        for name, field in self.terms.items():
            put(field, step.log[name])
        self.put_flags(self.sims.flags_of(step))
        if self.settle:
            for name in self.groups:
                put("final." + name, step.final_obs[name])
            self.settle()
            return STEP
        if self.flags.tobytes() == self.ordinary:
            return PLAIN
        rows = (self.arrays["first"] | ~self.arrays["final_ok"]).nonzero()[0]
        self.arrays["count"][0] = count = len(rows)
        if count:
            self.arrays["rows"][:count] = rows
            for name in self.groups:
                self.put_rows("final." + name, step.final_obs[name], rows)
        return STEP

    def put_flags(self, values: tuple[Any, ...]) -> None:
        """All at once: one copy from the device, or one call, not five."""
        if self.speaks_torch:
            self.put("flags", sys.modules["torch"].stack([value.bool() for value in values]))
            return
        try:
            self.join(values, out=self.flags)
        except (TypeError, ValueError):  # other than [N] bool each
            for name, value in zip(self.sims.FLAGS, values):
                self.put(name, value)

    def put(self, name: str, value: Any) -> None:
        """Copy an array or tensor of any device into the shared memory."""
        target = self.arrays[name]
        if value.shape != target.shape:  # it would be broadcast without a word
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {target.shape}")
        if self.speaks_torch:
            self.tensors[name].copy_(value)
        else:
            target[...] = value

    def put_rows(self, name: str, value: Any, rows: Any) -> None:
        """Copy some rows, one after the other, to the beginning of an array."""
        if self.speaks_torch:
            at = sys.modules["torch"].from_numpy(rows).to(value.device)
            self.tensors[name][: len(rows)].copy_(value[at])
        else:
            self.arrays[name][: len(rows)] = value[rows]


# -- the process ------------------------------------------------------------------------------------------------------


def leave() -> NoReturn:
    """End at once: what simulators do when an interpreter shuts down may hang."""
    sys.stderr.flush()
    os._exit(0)


def watch(requests: int, parent: int) -> None:
    """End this process, and what it has started, as soon as the near side's is gone, even in the middle of a step."""
    poll = select.poll()
    poll.register(requests, 0)  # a hang-up is told whether asked for or not
    while not poll.poll(1000):
        try:
            os.kill(parent, 0)  # a fork of the near side would keep the pipe open
        except ProcessLookupError:
            break
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> NoReturn:
    told = json.loads(sys.argv.pop())  # simulators read what is left there as theirs
    faulthandler.enable(told["crash"], all_threads=True)
    faulthandler.register(signal.SIGUSR1, told["crash"], all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the near side's to handle
    direct = told["lives_with_thread"] and os.getppid() == told["parent"]  # not by way of a script
    if direct and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # where a simulator holds the interpreter's lock for ever
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=watch, args=(told["requests"], told["parent"]), daemon=True).start()
    server = Server(told)
    try:
        mount(told["package"])
        server.sims = importlib.import_module("pql.remote.process.far_build")
    except BaseException as error:
        server.fail(error)
        leave()
    server.run()


if __name__ == "__main__":
    main()
