"""Any simulator in a process of its own, and in the Python it needs: ``task.process.python=/opt/isaac/bin/python``.

Observations and actions cross through memory that both sides map (of the device, where both have their tensors on the
same one), and each side wakes the other through a pipe. The far
side is ``far.py``. It runs on Python 3.8 with NumPy alone, and can build whatever that interpreter can: a task of this
library, an entry point of a package installed there, or ``module:attribute``.

While a simulator steps over there, this process waits in the kernel: one that holds its interpreter's lock, or blocks,
no longer holds up learners. What goes wrong there becomes an error here: an exception with its traceback, a crash with
the Python stack at which it happened, a hang with the stacks of all threads. The process ends with the one that started
it, however that ends.
"""

import json
import mmap
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pql
from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.engine.watchdog import touch
from pql.errors import ConfigError, RunError
from pql.remote.process import far, shared_cuda
from pql.remote.process.far_build import ORDINARY
from pql.types import Obs, Step

GRACE = 5.0  # seconds for a simulator to close, and for a signal to be answered
LOOK = 1.0  # seconds without an answer after which the process is looked after


class Far:
    """The process: starting it, asking it, noticing its end.

    Args:
        python: the interpreter, a path or a name on PATH; a script that starts one will do.
        threads: what its numerical libraries may use (``OMP_NUM_THREADS``, unless that is set); None: all cores.
    Raises:
        ConfigError: ``python`` cannot be run.
    """

    def __init__(self, python: str, threads: int | None = None):
        found = shutil.which(os.path.expanduser(python))
        if found is None:
            raise ConfigError("task.process.python", python, "a Python interpreter: a program that can be run")
        self.python = found
        self.memory, self.crash = _anonymous("pql-memory"), _anonymous("pql-crash")
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        theirs = {"requests": requests, "answers": answers, "memory": self.memory, "crash": self.crash}
        told = {
            **theirs,
            "parent": os.getpid(),
            "package": str(Path(pql.__file__).parent),
            "lives_with_thread": threading.current_thread() is threading.main_thread(),
        }
        environment = {**os.environ} if threads is None else {"OMP_NUM_THREADS": str(threads), **os.environ}
        files = [self.requests, self.answers, self.memory, self.crash]
        try:
            self.process = subprocess.Popen(
                [found, "-u", far.__file__, json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=list(theirs.values()),
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            _close_files(files)
            raise ConfigError("task.process.python", python, f"a Python interpreter ({error.strerror})") from error
        finally:
            _close_files([requests, answers])
        self._end = weakref.finalize(self, _finish, self.process, files)
        self._poll = select.poll()
        self._poll.register(self.answers, select.POLLIN)

    def __str__(self) -> str:
        return f"the simulator's process {self.process.pid} ({self.python})"

    def ask(self, do: str, seconds: float, blob: bytes = b"", **request: Any) -> tuple[Any, bytes]:
        """Send a message and wait for the answer.

        Raises:
            ConfigError: a setting that the simulator refused; the process goes on.
            RunError: an exception there, or as :meth:`wait`; the process is then gone.
        """
        self._check_open()
        with suppress(BrokenPipeError):  # it has ended; what it said before that is still to be read
            far.send_message(self.requests, far.CALL, {"do": do, **request}, blob)
        kind = self.wait(seconds, "start_seconds")
        while kind in (far.STEP, far.PLAIN):  # of a step that nobody has waited for
            kind = self.wait(seconds, "start_seconds")
        return self._answer(kind)

    def wake(self) -> None:
        """Ask for a step."""
        self._check_open()
        try:
            os.write(self.requests, far.STEP)
        except BrokenPipeError:
            return  # as above

    def wait(self, seconds: float, setting: str = "step_seconds") -> bytes:
        """Until it answers: what kind of answer it is.

        Args:
            seconds: a longer silence is a hang.
            setting: that says how long that is.
        Raises:
            RunError: a crash, or no answer within ``seconds``; the process is then gone.
        """
        if not self._poll.poll(1000 * min(seconds, LOOK)):
            touch()
            self._look_after(seconds, setting)
        return os.read(self.answers, 1)

    def stepped(self, seconds: float, setting: str = "step_seconds") -> bool:
        """Wait for the step that was asked for: whether anything ended or began in it. Raises as :meth:`ask`."""
        kind = self.wait(seconds, setting)
        if kind not in (far.STEP, far.PLAIN):
            self._answer(kind)
        return kind != far.PLAIN

    def _look_after(self, seconds: float, setting: str) -> None:
        """It is slow, or hangs, or has ended without a word: that its pipe is open says little, since whatever it has
        forked holds that open, too."""
        deadline = time.monotonic() + seconds - LOOK
        while not self._poll.poll(0):
            if self.process.poll() is not None and not self._poll.poll(0):  # it may have answered, then ended
                raise self._died()
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._hung(seconds, setting)
            self._poll.poll(1000 * min(left, LOOK))
            touch()  # this wait has a deadline of its own

    def _answer(self, kind: bytes) -> tuple[Any, bytes]:
        """The rest of an answer of this kind."""
        if not kind:
            raise self._died()
        facts, blob = far.read_message(self._read)
        if kind == far.ANSWER:
            return facts, blob
        if "config" in facts:
            raise ConfigError(*facts["config"])
        self.kill()
        lines = [f"{self} failed", *facts["traceback"].rstrip().splitlines()]
        if lines[-1] != facts["cause"]:  # the message has several lines: the last one here is to say the cause
            lines.append(facts["cause"])
        raise RunError("\n".join(lines))

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self.answers, min(count, 1 << 20))
            if not part:
                raise self._died()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _died(self) -> RunError:
        """It has closed its pipe: what it left behind, and how it ended."""
        try:
            status = self.process.wait(GRACE)
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            how = "stopped answering"
        left = self._stacks()
        self.kill()
        return RunError(f"{left}\n{self} {how}" if left else f"{self} {how}; it may have said why above")

    def _hung(self, seconds: float, setting: str) -> RunError:
        """No answer: where it hangs. It is killed."""
        os.killpg(self.process.pid, signal.SIGUSR1)  # the group: a script may have started the interpreter
        stacks, before, deadline = "", "", time.monotonic() + GRACE
        while time.monotonic() < deadline and not (stacks and stacks == before):  # until all of it is there
            time.sleep(0.2)
            stacks, before = self._stacks(), stacks
        self.kill()
        how = f"{self} has not answered for {seconds:g} s (task.process.{setting})"
        return RunError(f"{stacks}\n{how}" if stacks else how)

    def _stacks(self) -> str:
        """What its fault handler has written."""
        return os.pread(self.crash, 1 << 16, 0).decode(errors="replace").rstrip()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RunError(f"{self} is closed")

    def kill(self) -> None:
        """End it, and whatever it has started. As often as one likes."""
        self._end()

    def close(self) -> None:
        """Let the simulator close, then end the process."""
        if self._end.alive:
            with suppress(RunError, ConfigError, subprocess.TimeoutExpired):  # it is killed in any case
                self.ask("close", GRACE)
                self.process.wait(GRACE)
        self.kill()


class ProcessVec:
    """``num_envs`` environments of a simulator in a process of its own.

    It is a ``VecEnv`` with the simulator's own specification, but for ``device`` (what is asked for here, whatever the
    simulator computes on), ``groups`` (1) and ``single_instance`` (False: each has its process). ``reset_where``,
    ``render``, ``state_dict`` and ``load_state_dict`` are there where the simulator has them.

    Args:
        name: a task's environment, an entry point of the group ``pql.envs`` over there, or ``module:attribute``.
        num_envs: N.
        device: where the tensors go on this side; the simulator is asked for it, too.
        python: its interpreter; default: this one.
        kwargs: for the simulator's factory.
        offered: keywords that it gets if it takes them.
        step_seconds: a step that takes longer is a hang; the first one, and all else, may take ``start_seconds``.
        threads: of the process's numerical libraries.
        approve: is shown the specification before the simulator is built, where its factory can tell it by then; what
            it raises ends the process.

    Attributes:
        crossing: what observations and actions cross through; where it could have been the device's memory, why not.

    Raises:
        ConfigError: no such interpreter or simulator, or a keyword or value that it refuses.
        RunError: it failed to start.
    """

    def __init__(
        self,
        name: str,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        python: str = sys.executable,
        kwargs: Mapping[str, Any] | None = None,
        offered: Mapping[str, Any] | None = None,
        step_seconds: float = 20.0,
        start_seconds: float = 600.0,
        threads: int | None = None,
        approve: Callable[[EnvSpec], object] | None = None,
    ):
        self._device, self._seconds, self._start_seconds = torch.device(device), step_seconds, start_seconds
        self._far = Far(python, threads)
        wanted: dict[str, Any] = {
            "name": name,
            "num_envs": num_envs,
            "device": str(device),
            "kwargs": dict(kwargs or {}),
            "offered": dict(offered or {}),
        }
        try:
            if approve is not None:
                foreseen = self._far.ask("foresee", start_seconds, **wanted)[0]["spec"]
                if foreseen is not None:
                    approve(read_spec(foreseen, self._device))
            told, _ = self._far.ask("build", start_seconds, **wanted)
        except BaseException:
            self._far.kill()
            raise
        self.spec = read_spec(told["spec"], self._device)
        self.crossing = "host memory"
        self._shared = self._share(told["places"], told["size"]) if shared_cuda.usable(self._device) else False
        if not self._shared:
            self._tensors = map_memory(self._far.memory, told["places"], told["size"])
            self._count = self._tensors["count"].numpy()
        self._readers = {name: reader(shared, self._device) for name, shared in self._tensors.items()}
        self._read_obs = [(name, self._readers[f"obs.{name}"]) for name in self.spec.obs]
        self._read_reward = self._readers["reward"]
        self._ordinary = tuple(torch.full((self.spec.num_envs,), flag, device=self._device) for flag in ORDINARY)
        self._patience = (start_seconds, "start_seconds")  # the first step may compile
        self._has = frozenset(told["has"])

    def __getattr__(self, name: str) -> Any:
        """``reset_where`` and the like, where the simulator has them."""
        if name in vars(self).get("_has", ()):
            return getattr(self, "_" + name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _share(self, places: Mapping[str, Any], size: int) -> bool:
        """Have all arrays on the device, where the simulator's tensors are there, too; or say why that cannot be."""
        try:
            address, handle = shared_cuda.allocate(size, self._device)
        except OSError as error:
            self.crossing = f"host memory: {error}"
            return False
        why = self._far.ask("share", self._start_seconds, handle=handle, places=places)[0]["why"]
        self.crossing = "device memory" if why is None else f"host memory: {why}"
        if why is not None:
            shared_cuda.free(address, self._device)
            return False
        self._tensors = shared_cuda.tensors(address, places, self._device)
        weakref.finalize(self, shared_cuda.free, address, self._device).atexit = False  # then the driver does it
        return True

    def _settle(self) -> None:
        """The other side may read and write: what was asked of the device here has been done."""
        if self._shared:
            shared_cuda.wait(self._device)

    def reset(self, seed: int | None = None) -> Obs:
        self._far.ask("reset", self._start_seconds, seed=seed)
        obs = self._obs()
        self._settle()  # the first step may be another stream's
        return obs

    def step(self, action: Tensor) -> Step:
        self.start(action)
        return self.result()

    def start(self, action: Tensor) -> None:
        """Hand over the actions and return at once; :meth:`result` waits for what follows."""
        self._tensors["action"].copy_(action)
        self._settle()
        self._far.wake()

    def result(self) -> Step:
        """Of the step that was started. Fields are new tensors, but for the flags of a step of ordinary rows alone:
        those are the same ones every time, and not to be written to."""
        eventful = self._far.stepped(*self._patience)
        self._patience = (self._seconds, "step_seconds")
        flags = self._readers["flags"]().unbind(0) if eventful else self._ordinary
        terminated, truncated, first, final_ok, valid = flags
        obs, terms = self._obs(), self.spec.log
        final = self._final(obs) if eventful else dict(obs)
        log = dict(zip(terms, self._readers["log"]().unbind(0), strict=True)) if terms else {}
        return Step(obs, self._read_reward(), terminated, truncated, first, final, final_ok, valid, log)

    def close(self) -> None:
        self._far.close()

    def _obs(self) -> Obs:
        return {name: read() for name, read in self._read_obs}

    def _final(self, obs: Obs) -> Obs:
        """``obs`` itself, or a copy of it with the rows that have another successor."""
        if self._shared:  # all rows cross: to count them would be to wait
            return {name: self._readers[f"final.{name}"]() for name in obs}
        count = int(self._count[0])
        if not count:
            return dict(obs)
        rows = self._tensors["rows"][:count].to(self._device)
        final = {name: self._tensors[f"final.{name}"][:count].to(self._device) for name in obs}
        return {name: value.index_copy(0, rows, final[name]) for name, value in obs.items()}

    def _reset_where(self, mask: Tensor) -> Obs:
        self._tensors["mask"].copy_(mask)
        self._settle()
        self._far.ask("reset_where", self._start_seconds)
        obs = self._obs()
        self._settle()
        return obs

    def _state_dict(self) -> Any:
        return far.unpack(*self._far.ask("state_dict", self._start_seconds), as_tensors=True)

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        tree, blob = far.pack(state)
        self._far.ask("load_state_dict", self._start_seconds, blob, state=tree)

    def _render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        picture = self._far.ask("render", self._start_seconds, index=index, width=width, height=height)
        return np.asarray(far.unpack(*picture, as_tensors=False), np.uint8)


def map_memory(file: int, places: Mapping[str, Any], size: int) -> dict[str, Tensor]:
    """The shared arrays (``far_build.layout``) by name."""
    shared = mmap.mmap(file, size)
    return {
        name: torch.from_numpy(
            np.frombuffer(shared, np.dtype(dtype), int(np.prod(shape, dtype=np.int64)), offset).reshape(shape)
        )
        for name, (dtype, shape, offset) in places.items()
    }


def reader(shared: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """What copies a shared array to a new tensor on ``device``; that on a device may be under way when it returns."""
    return shared.clone if shared.device.type == device.type else partial(shared.to, device)


def read_spec(told: Mapping[str, Any], device: torch.device) -> EnvSpec:
    """``far_build.describe``'s JSON as a specification."""
    kind, bounds = told["action"], [told["action"].get(k) for k in ("low", "high")]
    action: Box | Discrete
    if "n" in kind:
        action = Discrete(kind["n"])
    else:
        action = Box(kind["size"], *(None if values is None else tuple(values) for values in bounds))
    fixed = {k: told[k] for k in ("name", "num_envs", "max_episode_steps", "autoreset", "final_obs", "deterministic")}
    obs = {k: ObsSpec(tuple(shape), getattr(torch, dtype), stack) for k, (shape, dtype, stack) in told["obs"].items()}
    return EnvSpec(**fixed, obs=obs, action=action, device=device, log=tuple(told["log"]), info=dict(told["info"]))


def _anonymous(name: str) -> int:
    """An open file without a name, in memory where that can be had: nothing of it is left, whoever is killed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _finish(process: "subprocess.Popen[bytes]", files: list[int]) -> None:
    """Kill the process and all it has started, and close this side's files."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _close_files(files)
