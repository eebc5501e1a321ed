"""The far side of ``pql.envs.process``: builds a simulator in this interpreter and steps it for another process.

Run by ``process.py``, never by hand. It needs Python 3.8 and NumPy (torch only where the simulator brings it), and
nothing of this library has to be installed: the near side's own files are made importable as ``pql``.

One byte asks for a step and one byte answers it; actions and what follows lie in memory that both sides map. All else
is a message: an operation, JSON, and bytes. Nothing is ever unpickled.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: it has a gymnasium.py, a mujoco ..., which are not the packages of that name

import contextlib
import ctypes
import difflib
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import inspect
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
FLAGS = ("terminated", "truncated", "first", "final_ok", "valid")
OPTIONAL = ("reset_where", "state_dict", "load_state_dict", "render")
ALIGN = 64
PR_SET_PDEATHSIG = 1


class UnknownError(Exception):
    """A setting that cannot work: becomes a ``ConfigError`` on the near side."""

    def __init__(self, setting: str, value: Any, allowed: str):
        super().__init__(f"{setting}={value}: expected {allowed}")
        self.setting, self.value, self.allowed = setting, value, allowed


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


# -- building the simulator -------------------------------------------------------------------------------------------


def mount(folders: Mapping[str, str]) -> None:
    """Make the near side's packages importable here, whatever version is installed, or none."""
    for name, folder in folders.items():
        spec = importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def find(name: str) -> Callable[..., Any]:
    """``module:attribute``, a name of the entry-point group ``pql.envs`` of this interpreter, or a built-in one."""
    here = importlib.import_module("pql.envs")
    builtin, needed = here.BUILTIN, here.NEEDS.get(name, ())
    found: Any = importlib.metadata.entry_points()
    group = found.select(group="pql.envs") if sys.version_info >= (3, 10) else found.get("pql.envs", ())
    points = {point.name: point.value for point in group}
    target = name if ":" in name else points.get(name, builtin.get(name))
    if target is None:
        known = sorted({*builtin, *points})
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UnknownError("task", name, f"module:attribute, or one of {', '.join(known)}{hint}, in {sys.executable}")
    if target == builtin.get(name) and not all(importlib.util.find_spec(package) for package in needed):
        raise UnknownError("task", name, f"the whole package {needed[0]!r}, which {sys.executable} does not have")
    module, _, attribute = target.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or " "):
            raise UnknownError("task", name, f"packages that {sys.executable} has: {error}") from error
        raise UnknownError("task", name, f"what {sys.executable} can import: {error}") from error
    return factory


def build(request: Mapping[str, Any]) -> Any:
    """The environment; keywords that it does not take are refused, those merely offered are left out."""
    return call(find(request["name"]), request)


def foresee(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Its specification, before it is built; None where its factory cannot tell."""
    teller = getattr(find(request["name"]), "describe", None)
    return None if teller is None else describe(call(teller, request))


def call(factory: Any, request: Mapping[str, Any]) -> Any:
    kwargs = dict(request["kwargs"])
    taken = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        known = [k for k in taken if k not in ("num_envs", "device")]
        for key, value in kwargs.items():
            if key not in known:
                raise UnknownError(key, value, f"one of the keywords {', '.join(known)}")
    for key, value in request["offered"].items():
        if key in taken:
            kwargs.setdefault(key, value)
    device: Any = request["device"]
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_grad_enabled(False)
        device = torch.device(device)
    return factory(num_envs=request["num_envs"], device=device, **kwargs)


def describe(spec: Any) -> dict[str, Any]:
    """A specification as JSON."""
    action = spec.action
    bounds = {k: getattr(action, k, None) and list(getattr(action, k)) for k in ("low", "high")}
    info = {k: v for k, v in dict(getattr(spec, "info", {})).items() if isinstance(v, (bool, int, float, str))}
    return {
        "name": spec.name,
        "num_envs": spec.num_envs,
        "obs": {k: [list(s.shape), dtype_name(s.dtype), getattr(s, "stack", 1)] for k, s in spec.obs.items()},
        "action": {"n": action.n} if hasattr(action, "n") else {"size": action.size, **bounds},
        "max_episode_steps": getattr(spec, "max_episode_steps", None),
        "autoreset": getattr(spec, "autoreset", "same_step"),
        "final_obs": getattr(spec, "final_obs", "on_done"),
        "log": list(getattr(spec, "log", ())),
        "deterministic": getattr(spec, "deterministic", True),
        "info": info,
    }


def dtype_name(dtype: Any) -> str:
    """``torch.float32``, ``numpy.float32``, ``"float32"`` -> ``"float32"``."""
    import numpy as np

    text = str(dtype)
    return text[len("torch.") :] if text.startswith("torch.") else np.dtype(dtype).name


def layout(spec: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Where each array lies in the shared memory: name -> (type, shape, offset), and the bytes of all."""
    n, discrete = spec["num_envs"], "n" in spec["action"]
    fields: dict[str, tuple[str, list[int]]] = {
        "action": ("int64", [n]) if discrete else ("float32", [n, spec["action"]["size"]]),
        "mask": ("bool", [n]),
        "flags": ("bool", [len(FLAGS), n]),
        "reward": ("float32", [n]),
        "log": ("float32", [len(spec["log"]), n]),
        "count": ("int64", [1]),  # rows of final observations, which follow: their places, then the rows themselves
        "rows": ("int64", [n]),
    }
    for prefix in ("obs", "final"):
        for name, (shape, dtype, _) in spec["obs"].items():
            fields[f"{prefix}.{name}"] = (dtype, [n, *shape])
    import numpy as np

    places, offset = {}, 0
    for name, (dtype, shape) in fields.items():
        places[name] = [dtype, shape, offset]
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        offset += -(-size // ALIGN) * ALIGN
    return places, offset


# -- serving ----------------------------------------------------------------------------------------------------------


class Server:
    """Answers one process's requests about one environment.

    Args:
        ends: numbers of the open files that the near side has handed over.
    """

    def __init__(self, ends: Mapping[str, int]):
        self.requests, self.answers, self.memory = ends["requests"], ends["answers"], ends["memory"]
        self.env: Any = None
        self.arrays: dict[str, Any] = {}
        self.tensors: dict[str, Any] = {}  # the same memory, where torch is there
        self.groups: dict[str, str] = {}  # observation groups, and where they go
        self.terms: dict[str, str] = {}  # and those of the log
        self.speaks_torch = False
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
            kind = self.read(1)
            try:
                if kind == STEP:
                    self.step()
                    os.write(self.answers, STEP)
                else:
                    request, blob = read_message(self.read)
                    facts, out = getattr(self, "do_" + request["do"])(request, blob)
                    send_message(self.answers, ANSWER, facts, out)
                    if request["do"] == "close":
                        leave()
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        facts: dict[str, Any] = {"traceback": traceback.format_exc()}
        if all(hasattr(error, k) for k in ("setting", "value", "allowed")):
            wrong: Any = error
            facts["config"] = [wrong.setting, str(wrong.value), wrong.allowed]
        send_message(self.answers, ERROR, facts)

    def do_foresee(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        return {"spec": foresee(request)}, b""

    def do_build(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        self.env = build(request)
        spec = describe(self.env.spec)
        places, size = layout(spec)
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
        self.arrays.update(zip(FLAGS, self.arrays["flags"]))
        self.arrays.update(zip(self.terms.values(), self.arrays["log"]))

    def do_share(self, request: Mapping[str, Any], blob: bytes) -> tuple[Any, bytes]:
        """From now on all arrays lie on the device; or the answer says why they cannot."""
        device = self.env.spec.device
        try:
            cuda = importlib.import_module("pql.envs.shared_cuda")
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

    def step(self) -> None:
        """One step, its results copied out. Final observations cross only where they are not ``obs`` itself."""
        step, put = self.env.step(self.given("action")), self.put
        for name, field in self.groups.items():
            put(field, step.obs[name])
        put("reward", step.reward)
        if self.speaks_torch:  # one copy from the device, not five
            put("flags", sys.modules["torch"].stack([getattr(step, name).bool() for name in FLAGS]))
        else:
            for name in FLAGS:
                put(name, getattr(step, name))
        for name, field in self.terms.items():
            put(field, step.log[name])
        if self.settle:
            for name in self.groups:
                put("final." + name, step.final_obs[name])
            self.settle()
            return
        rows = (self.arrays["first"] | ~self.arrays["final_ok"]).nonzero()[0]
        self.arrays["count"][0] = count = len(rows)
        if count:
            self.arrays["rows"][:count] = rows
            for name in self.groups:
                self.put_rows("final." + name, step.final_obs[name], rows)

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
    told = json.loads(sys.argv[1])
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
        importlib.import_module("numpy")
        mount(told["packages"])
    except BaseException as error:
        server.fail(error)
        leave()
    server.run()


if __name__ == "__main__":
    main()
