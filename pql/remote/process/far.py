"""Child process of ``pql.remote.process.near``: builds a simulator in this interpreter and steps it for the parent.

``near.py`` starts it. It needs Python 3.8 and NumPy (and torch only if the simulator uses it). This library need not be
installed: the parent's files are made importable as ``pql``.

One byte requests a step and one byte answers it; the answer says whether an episode ended or began. Actions and results
are in shared memory. All other requests are messages of an operation, JSON and bytes. Nothing is unpickled.
``far_build.py`` builds the simulator and describes it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules would shadow others

import faulthandler
import importlib
import importlib.util
import json
import mmap
import os
import select
import signal
import struct
import traceback
from typing import Any, Callable, Mapping, NoReturn

LENGTHS = struct.Struct("<QQ")
STEP, CALL, ANSWER, ERROR = b"s", b"c", b"a", b"e"
PLAIN = b"p"  # answers STEP if no episode ended or began and no row is a filler
OPTIONAL = ("reset_where", "state_dict", "load_state_dict", "render", "progress", "load_progress")


# -- messages: both sides use these -----------------------------------------------------------------------------------


def write_all(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def message(kind: bytes, facts: Any, blob: bytes = b"") -> bytes:
    """Return a message: its kind, ``facts`` as JSON, and ``blob``."""
    text = json.dumps(facts).encode()
    return kind + LENGTHS.pack(len(text), len(blob)) + text + blob


def read_message(read: Callable[[int], bytes]) -> tuple[Any, bytes]:
    """Read a message after its kind; ``read(n)`` returns exactly n bytes."""
    text, blob = LENGTHS.unpack(read(LENGTHS.size))
    return json.loads(read(text)), read(blob)


def pack_tree(tree: Any) -> tuple[Any, bytes]:
    """Serialise nested dicts and lists of arrays, tensors (any shape) and plain values as (JSON, array bytes)."""
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


def unpack_tree(tree: Any, blob: bytes, as_tensors: bool) -> Any:
    """Deserialise the output of :func:`pack_tree` into new arrays or tensors."""
    import numpy as np

    if "dict" in tree:
        return {k: unpack_tree(v, blob, as_tensors) for k, v in tree["dict"].items()}
    if "list" in tree:
        return [unpack_tree(v, blob, as_tensors) for v in tree["list"]]
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
    """Make the parent's library importable as ``pql``, in place of an installed version."""
    spec = importlib.util.spec_from_file_location(
        "pql", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["pql"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


# -- serving ----------------------------------------------------------------------------------------------------------


class Server:
    """Serves one environment to the parent process. ``ends``: descriptors of the pipes and of the shared memory,
    inherited from the parent."""

    def __init__(self, ends: Mapping[str, int]):
        self.requests, self.answers, self.memory = ends["requests"], ends["answers"], ends["memory"]
        self.sims: Any = None  # far_build.py imports NumPy; if that is missing, this class must report it
        self.env: Any = None
        self.arrays: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}  # the same memory, if torch is imported
        self.groups: dict[str, str] = {}  # observation group -> name of its array
        self.terms: dict[str, str] = {}  # key of the log -> name of its array
        self.speaks_torch = False
        self.checked = False  # that steps are as the specification says
        self.flags: Any = None  # all flags, concatenated
        self.ordinary = b""  # their bytes in a step in which no episode ended or began
        self.join: Any = None  # numpy.concatenate
        self.settle: Any = None  # waits for the device, if the arrays are on one

    def read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self.requests, min(count, 1 << 20))
            if not part:
                quit_process()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def run(self) -> NoReturn:
        """Serve until the parent closes the pipe or ends."""
        while True:
            kind = os.read(self.requests, 1)
            if not kind:
                quit_process()
            try:
                if kind == STEP:
                    os.write(self.answers, self.step())
                else:
                    request, blob = read_message(self.read)
                    facts, out = getattr(self, "do_" + request["do"])(request, blob)
                    write_all(self.answers, message(ANSWER, facts, out))
                    if request["do"] == "close":
                        quit_process()
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        facts: dict[str, Any] = {"traceback": traceback.format_exc(), "cause": f"{type(error).__name__}: {first}"}
        if all(hasattr(error, k) for k in ("setting", "value", "allowed")):
            wrong: Any = error
            plain = wrong.value is None or isinstance(wrong.value, (bool, int, float))
            facts["config"] = [wrong.setting, wrong.value if plain else str(wrong.value), wrong.allowed]
        write_all(self.answers, message(ERROR, facts))

    def do_foresee(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return {"spec": self.sims.foresee(request)}, b""

    def do_build(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.env = self.sims.build_simulator(request)
        spec = self.sims.describe_simulator(self.env.spec)
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
        """Move all shared arrays to the device, or answer the reason why that is impossible."""
        device = self.env.spec.device
        try:
            cuda = importlib.import_module("pql.remote.process.shared_cuda")
            if not cuda.usable(device):
                return {"why": f"the simulator's tensors are on {device}"}, b""
            self.tensors = cuda.shared_tensors(cuda.attach(request["handle"], device), request["places"], device)
        except (ImportError, OSError, RuntimeError, TypeError) as error:
            return {"why": str(error)}, b""
        self.tensors.update(zip(self.terms.values(), self.tensors["log"]))
        self.arrays, self.settle = self.tensors, lambda: cuda.wait(device)
        return {"why": None}, b""

    def do_reset(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.show("reset", self.env.reset(request["seed"]))
        return {}, b""

    def do_reset_where(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.show("reset_where", self.env.reset_where(self.given("mask")))
        return {}, b""

    def do_state_dict(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return pack_tree(self.env.state_dict())

    def do_load_state_dict(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.env.load_state_dict(unpack_tree(request["state"], blob, self.speaks_torch))
        return {}, b""

    def do_progress(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return pack_tree(self.env.progress())

    def do_load_progress(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.env.load_progress(unpack_tree(request["progress"], blob, self.speaks_torch or "torch" in sys.modules))
        return {}, b""

    def do_render(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return pack_tree(self.env.render(request["index"], request["width"], request["height"]))

    def do_close(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        if self.env is not None:
            self.env.close()
        return {}, b""

    def check(self, method: str, answer: Any, tensors: bool = False) -> None:
        """Refuse an answer whose fields or shapes are not those of the specification."""
        if fault := self.sims.answer_fault(method, answer, self.env.spec, tensors):
            raise self.sims.ConfigError("task", self.env.spec.name, fault)

    def show(self, method: str, obs: Mapping[str, Any]) -> None:
        """Write an observation to shared memory, and detect whether the simulator uses torch or NumPy."""
        self.check(method, obs)
        self.speaks_torch = any(hasattr(value, "detach") for value in obs.values())
        if self.speaks_torch and not self.tensors:
            torch = sys.modules["torch"]
            self.tensors = {k: torch.from_numpy(v) for k, v in self.arrays.items()}
        for name, field in self.groups.items():
            self.put(field, obs[name])
        if self.settle:
            self.settle()

    def given(self, name: str) -> Any:
        """Return a copy of the parent's input ``name`` as an array or a tensor, whichever the simulator uses."""
        if not self.speaks_torch:
            return self.arrays[name].copy()
        return self.tensors[name].to(self.env.spec.device, copy=True)

    def step(self) -> bytes:
        """Step, write the results to shared memory and return the answer byte. Final observations are written only for
        rows where they may differ from ``obs``."""
        step, put = self.env.step(self.given("action")), self.put
        if not self.checked:
            self.check("step", step, self.speaks_torch)
            self.checked = True
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
        """Write all flags in one copy instead of five."""
        if self.speaks_torch:
            self.put("flags", sys.modules["torch"].stack([value.bool() for value in values]))
            return
        try:
            self.join(values, out=self.flags)
        except (TypeError, ValueError):  # a flag is not [N] bool
            for name, value in zip(self.sims.FLAGS, values):
                self.put(name, value)

    def put(self, name: str, value: Any) -> None:
        """Copy an array or tensor of any device into the shared memory."""
        target = self.arrays[name]
        if value.shape != target.shape:  # it would be broadcast silently
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {target.shape}")
        if self.speaks_torch:
            self.tensors[name].copy_(value)
        else:
            target[...] = value

    def put_rows(self, name: str, value: Any, rows: Any) -> None:
        """Copy the rows ``rows`` of ``value`` to the beginning of an array."""
        if self.speaks_torch:
            at = sys.modules["torch"].from_numpy(rows).to(value.device)
            self.tensors[name][: len(rows)].copy_(value[at])
        else:
            self.arrays[name][: len(rows)] = value[rows]


# -- the process ------------------------------------------------------------------------------------------------------


def quit_process() -> NoReturn:
    """Exit without the interpreter's shutdown, in which simulators may hang."""
    sys.stderr.flush()
    os._exit(0)


def guard_group(setup: Mapping[str, Any]) -> None:
    """Start a process that kills this process group as soon as the parent is gone. It also ends what the simulator has
    forked, and a simulator that never releases the interpreter's lock. It is no child of this process, because a
    simulator may wait for all of its own."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    for file in (0, 1, 2, setup["answers"], setup["memory"], setup["crash"]):
        os.close(file)  # an open pipe would hide the simulator's end from its reader
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks the group for its stacks
    poll = select.poll()
    poll.register(setup["requests"], 0)  # a hang-up is always reported
    while not poll.poll(1000) and not has_ended(setup["parent"]):  # a fork of the parent would keep the pipe open
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def has_ended(process: int) -> bool:
    """Return True if a process has ended, even if nobody has waited for it."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except OSError:  # no such file on this system
        return False


def main() -> NoReturn:
    """Serve the parent that started this process."""
    setup = json.loads(sys.argv.pop())  # removed from argv, which simulators parse
    guard_group(setup)
    faulthandler.enable(setup["crash"], all_threads=True)
    faulthandler.register(signal.SIGUSR1, setup["crash"], all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    server = Server(setup)
    try:
        mount(setup["package"])
        server.sims = importlib.import_module("pql.remote.process.far_build")
    except BaseException as error:
        server.fail(error)
        quit_process()
    server.run()


if __name__ == "__main__":
    main()
