"""``ProcessVec``: any simulator in a child process, with its own Python: ``task.process.python=/opt/isaac/bin/python``.

Observations and actions are exchanged through shared memory (device memory if both processes use the same GPU); pipes
wake the other process. The child runs ``far.py``, which needs only Python 3.8 and NumPy, and builds a task of this
library, an entry point of a package installed there, or ``module:attribute``.

A simulator that blocks, or holds its interpreter's lock, does not block the learners of this process. Failures of the
child are raised here: an exception with its traceback, a crash with its Python stack, a hang with the stacks of all
threads. The child and its own processes end when the parent ends, even if that is killed.
"""

import mmap
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import EnvSpec, ObsSpec
from pql.contract.spec_json import action_of
from pql.remote.process import far, shared_cuda
from pql.remote.process.child import ChildProcess
from pql.remote.process.far_build import ORDINARY
from pql.types import Obs, Step


class ProcessVec:
    """``num_envs`` environments of a simulator in a child process. Fields of a ``Step`` are [N, ...].

    A ``VecEnv`` with the simulator's specification, except for ``device`` (as given here), ``groups`` (1) and
    ``single_instance`` (False: each has its own process). ``reset_where``, ``render``, ``state_dict``,
    ``load_state_dict``, ``progress`` and ``load_progress`` exist if the simulator has them.

    Args:
        name: a built-in name, an entry point of ``pql.envs`` in the child's Python, or ``module:attribute``.
        num_envs: N.
        device: device of the tensors in this process, also passed to the simulator.
        python: the child's interpreter; default: this one.
        kwargs: keywords of the simulator's factory.
        offered: keywords passed only if the factory takes them.
        step_seconds: time limit of a step; the first step and all other requests may take ``start_seconds``.
        threads: threads of the child's numerical libraries.
        approve: called with the specification before the simulator is built, if its factory has ``describe``; an
            exception that it raises ends the process.
    Attributes:
        crossing: kind of shared memory; on CUDA devices with the reason if it is host memory.
    Raises:
        ConfigError: no such interpreter or simulator, or a rejected keyword or value.
        RunError: the simulator failed to start.
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
        self._far = ChildProcess(python, threads)
        wanted: dict[str, Any] = {"name": name, "num_envs": num_envs, "device": str(device)}
        wanted |= {"kwargs": dict(kwargs or {}), "offered": dict(offered or {})}
        try:
            if approve is not None:
                foreseen = self._far.ask("foresee", start_seconds, **wanted)[0]["spec"]
                if foreseen is not None:
                    approve(read_spec(foreseen, self._device))
            built, _ = self._far.ask("build", start_seconds, **wanted)
        except BaseException:
            self._far.kill()
            raise
        self.spec = read_spec(built["spec"], self._device)
        self.crossing = "host memory"
        self._shared = self._share(built["places"], built["size"]) if shared_cuda.usable(self._device) else False
        if not self._shared:
            self._tensors = map_memory(self._far.memory, built["places"], built["size"])
            self._count = self._tensors["count"].numpy()
        self._readers = {name: reader(shared, self._device) for name, shared in self._tensors.items()}
        self._read_obs = [(name, self._readers[f"obs.{name}"]) for name in self.spec.obs]
        self._read_reward = self._readers["reward"]
        self._ordinary = tuple(torch.full((self.spec.num_envs,), flag, device=self._device) for flag in ORDINARY)
        self._patience = (start_seconds, "start_seconds")  # the first step may compile
        self._has = frozenset(built["has"])

    def __getattr__(self, name: str) -> Any:
        """Return an optional member, such as ``reset_where``, if the simulator has it."""
        if name in vars(self).get("_has", ()):
            return getattr(self, "_" + name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _share(self, places: Mapping[str, Any], size: int) -> bool:
        """Move the shared arrays to the device; return False, and set ``crossing`` to the reason, if that fails."""
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
        self._tensors = shared_cuda.shared_tensors(address, places, self._device)
        weakref.finalize(self, shared_cuda.free, address, self._device).atexit = False  # then the driver does it
        return True

    def _settle(self) -> None:
        """Wait for this process's work on the device, before the child may read and write shared memory."""
        if self._shared:
            shared_cuda.wait(self._device)

    def reset(self, seed: int | None = None) -> Obs:
        self._far.ask("reset", self._start_seconds, seed=seed)
        obs = self._obs()
        self._settle()  # the first step may use another stream
        return obs

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A] or [N]."""
        self.start(action)
        return self.result()

    def start(self, action: Tensor) -> None:
        """Start a step with ``action`` [N, A] or [N] and return immediately; :meth:`result` waits for it."""
        self._tensors["action"].copy_(action)
        self._settle()
        self._far.wake()

    def result(self) -> Step:
        """Wait for the step that was started. Fields are new tensors [N, ...]. Exception: if no episode ended or began,
        the flags are constant tensors, which callers must not modify."""
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
        """Return the final observations: the tensors of ``obs``, or copies with the rows where they differ replaced."""
        if self._shared:  # all rows are copied: counting them would synchronise
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
        return far.unpack_tree(*self._far.ask("state_dict", self._start_seconds), as_tensors=True)

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        tree, blob = far.pack_tree(state)
        self._far.ask("load_state_dict", self._start_seconds, blob, state=tree)

    def _progress(self) -> Any:
        return far.unpack_tree(*self._far.ask("progress", self._start_seconds), as_tensors=True)

    def _load_progress(self, progress: Mapping[str, Any]) -> None:
        tree, blob = far.pack_tree(progress)
        self._far.ask("load_progress", self._start_seconds, blob, progress=tree)

    def _render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        image = self._far.ask("render", self._start_seconds, index=index, width=width, height=height)
        return np.asarray(far.unpack_tree(*image, as_tensors=False), np.uint8)


def map_memory(file: int, places: Mapping[str, Any], size: int) -> dict[str, Tensor]:
    """Map the shared arrays (see ``far_build.layout``): name -> CPU tensor."""
    shared = mmap.mmap(file, size)
    found = {}
    for name, (dtype, shape, offset) in places.items():
        flat = np.frombuffer(shared, np.dtype(dtype), int(np.prod(shape, dtype=np.int64)), offset)
        found[name] = torch.from_numpy(flat.reshape(shape))
    return found


def reader(shared: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that copies ``shared`` (any shape) to a new tensor on ``device``, asynchronously on a GPU."""
    return shared.clone if shared.device.type == device.type else partial(shared.to, device)


def read_spec(facts: Mapping[str, Any], device: torch.device) -> EnvSpec:
    """Return the specification from the output of ``far_build.describe_simulator``."""
    fixed = {k: facts[k] for k in ("name", "num_envs", "max_episode_steps", "autoreset", "final_obs", "deterministic")}
    obs = {
        k: ObsSpec(tuple(shape), getattr(torch, dtype), stack, tuple(terms), fill)
        for k, (shape, dtype, stack, terms, fill) in facts["obs"].items()
    }
    log = dict(facts["log"]) if isinstance(facts["log"], Mapping) else tuple(facts["log"])
    more: dict[str, Any] = {"log": log, "info": dict(facts["info"])}
    return EnvSpec(**fixed, obs=obs, action=action_of(facts["action"]), device=device, **more)
