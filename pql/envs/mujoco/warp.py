"""``WarpEngine``: MuJoCo Warp behind the ``Engine`` protocol, with state on the GPU in tensors shared with torch.

No call synchronises with the device. Stepping and the forward pass are captured once as CUDA graphs and launched on
PyTorch's current stream. :meth:`WarpEngine.prepare` captures them before a run begins: while one thread captures on
Warp's stream, CUDA forbids the legacy default stream to all others. While PyTorch captures, Warp's kernels are launched
into its graph instead, since a graph cannot be launched within a capture. Resets are masked: they run on all
simulations and change only the selected ones.

Warp keeps contacts and constraints in buffers of fixed size (C allocates as needed): 1.5 times the most that C needed
in a measurement. If a buffer is too small, contacts are lost. :meth:`WarpEngine.overflowed` reports the simulations
concerned. The first overflow, and each doubling of their number, gives a warning that names the setting to change.

On the CPU, Warp runs on one thread and is meant for tests only.
"""

import copy
import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mujoco
import torch
import warp as wp
from torch import Tensor

from pql.envs.mujoco.engine import DERIVING, MAX_STATE, Fields, Masked, Rows, check_state
from pql.envs.mujoco.weights import InverseWeights
from pql.errors import ConfigError, PqlWarning

wp.config.log_level = wp.LOG_WARNING  # set before the import, which would log a line for each of 90 kernels
import mujoco_warp as mjw  # noqa: E402

from pql.envs.mujoco.kernels import Kernels  # noqa: E402

STATE = ("time", "qpos", "qvel", "act", "qacc_warmstart")
"""Components of the state that the next step depends on, except the controls."""

WEIGHTS = ("dof_invweight0", "body_invweight0")
"""Fields that :class:`InverseWeights` computes."""

LOST = int(mjw.OverflowType.ALL & ~(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS))
"""Overflow flags under which contacts or constraints are lost; a solver's iteration limit is not one."""

MARGIN = 1.5

LEAST = 128
"""Least size of the contact pool of all simulations, which also holds candidate pairs that do not touch."""

POSITIONS = {
    *("xpos", "xquat", "xmat", "xipos", "ximat", "subtree_com", "cinert"),
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
}
"""Derived fields that need positions alone; all others need the whole forward pass."""

_SENSORS = int(mjw.DisableBit.SENSOR)
_AUTORESET = int(mujoco.mjtDisableBit.mjDSBL_AUTORESET.value)


_engines: "weakref.WeakValueDictionary[int, WarpEngine]" = weakref.WeakValueDictionary()

# An operation of torch, so that recordings of a step contain it; the tensors tell what it reads and writes.
_library = torch.library.Library("pql", "FRAGMENT")
_library.define("warp(int engine, str work, Tensor[] read, Tensor(a!)[] written) -> ()")
_library.impl("warp", lambda engine, work, read, written: _engines[engine].launch(work), "CompositeExplicitAutograd")


class WarpEngine:
    """N simulations in float32 on a CUDA device (or the CPU, in tests).

    Args:
        model: compiled model.
        num_envs: N.
        device: the device of the simulations.
        outputs: derived fields to offer.
        parameters: the model's fields that have one value per simulation. Constants that MuJoCo derives from masses are
            recomputed, except those of tendons and actuators (``tendon_invweight0``, ``actuator_acc0``), which stay
            nominal.
        need: the most contacts and constraint rows that C needed for one simulation; see ``engines.measure``.
    Raises:
        ConfigError: the model has something that Warp cannot simulate.
    """

    dtype = torch.float32
    capturable = True

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        device: torch.device,
        outputs: Sequence[str] = (),
        parameters: Sequence[str] = (),
        need: tuple[int, int] = (0, 0),
    ):
        wp.init()
        model = copy.copy(model)
        model.opt.disableflags &= ~_AUTORESET  # Warp does not know the flag, and never restarts a simulation itself
        if device.type == "cuda" and device.index is None:  # Warp needs its index
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self._count = device, num_envs
        contacts, constraints = (max(8, math.ceil(MARGIN * most)) for most in need)
        deriving = not {*parameters}.isdisjoint(DERIVING)
        derived = (*DERIVING, "body_subtreemass", *WEIGHTS) if deriving else ()
        own = (*parameters, *derived)
        with wp.ScopedDevice(wp.device_from_torch(self.device)):
            try:
                self._model = mjw.put_model(model, batch_sizes=dict.fromkeys(own, num_envs))
            except NotImplementedError as error:
                raise ConfigError("engine", "warp", f"batch: Warp cannot simulate this model ({error})") from error
            self._model.opt.warn_overflow = 0  # Warp would print from the device; overflows are counted here
            self._model.opt.run_rne_postconstraint = "cfrc_ext" in outputs
            self._data = mjw.make_data(
                model, num_envs, nconmax=contacts, njmax=constraints, naconmax=max(LEAST, contacts * num_envs)
            )
        names = dict.fromkeys((*STATE, "ctrl", *outputs, "overflow"))
        self._tensors = {name: wp.to_torch(getattr(self._data, name)) for name in names}  # one per array: none overlap
        self.fields: Fields = {name: self._tensors[name] for name in ("qpos", "qvel", "ctrl", *outputs)}
        self._parameters = {name: wp.to_torch(getattr(self._model, name)) for name in own}
        # Warp can compute them too, but with about a hundred launches, which take longer than a step
        self._weights = InverseWeights(model, self.device) if deriving else None
        state = [self._tensors[name] for name in STATE]
        self._state = [part[:, None] if part.ndim == 1 else part for part in state]
        self._outputs = outputs
        self.read_at_start(outputs)
        self._graphs: dict[str, Any] | None = {}
        self._joined: list[Any] = []  # what was launched into PyTorch's graphs: it must outlive them
        self._kernels = Kernels()
        self._watch = Overflows(self._tensors["overflow"], contacts, constraints)
        _engines[id(self)] = self

    def rows(self, mask: Tensor) -> Masked:
        """Return ``mask`` [N] bool in the form that :meth:`reset` takes."""
        return Masked(mask)

    def read_at_start(self, names: Collection[str]) -> None:
        """Compute only what the fields ``names`` need in :meth:`reset`."""
        read = {*names} & {*self._outputs}
        self._forward = [] if not read else ["positions"] if read <= POSITIONS else ["forward"]

    def prepare(self, substeps: int) -> None:
        """Compile and capture all graphs that are launched later."""
        constants = ["constants"] * (self._weights is not None)
        works = (*constants, *self._forward, f"step {substeps}")
        with self._unchanged() as device:
            self._kernels.load([partial(self._launch, work) for work in works], device)
        for work in works:
            self._graph(work)

    def preparation(self) -> str:
        """Return what :meth:`prepare` is doing, in words. Other threads may call it."""
        return self._kernels.text

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Hold ``ctrl`` [N, nu] for ``substeps`` steps."""
        self.fields["ctrl"].copy_(ctrl)
        self._run(f"step {substeps}")
        self._watch.count()
        if not _capturing():
            self._watch.look()

    def overflowed(self) -> Tensor:
        """Return [N] bool: the simulation lost contacts or constraints in the latest step."""
        return self._watch.lost

    def report_overflows(self) -> None:
        """Warn of overflows in steps of a captured graph, as far as they are known here without waiting."""
        self._watch.look()

    def reset(self, rows: Rows, qpos: Tensor, qvel: Tensor) -> None:
        """Restart ``rows`` at ``qpos`` [N, nq], ``qvel`` [N, nv]; all else that the next step depends on becomes 0."""
        assert isinstance(rows, Masked)
        new = {"qpos": qpos, "qvel": qvel}
        for name in (*STATE, "ctrl"):
            old = self._tensors[name]
            old.copy_(rows.put(old, new.get(name, torch.zeros_like(old))))
        for work in self._forward:
            self._run(work)

    def set_parameters(self, rows: Rows, values: Fields) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(rows.put(self._parameters[name], value))
        if self._weights is not None:
            self._run("constants")
            new = self._weights(*(self._parameters[name] for name in DERIVING))
            for name, values_of_all in zip(WEIGHTS, new, strict=True):
                self._parameters[name].copy_(values_of_all)

    def diverged(self) -> Tensor:
        square = self.fields["qpos"].square().sum(1) + self.fields["qvel"].square().sum(1)
        return ~(square <= MAX_STATE**2)  # NaN compares false, so it counts

    def state(self) -> Tensor:
        return torch.cat(self._state, 1)

    def load_state(self, state: Tensor) -> None:
        """Restore the output of :meth:`state`, [N, S]."""
        check_state(state, torch.empty(self._count, sum(part.shape[1] for part in self._state), device="meta"))
        for part, saved in zip(self._state, state.split([part.shape[1] for part in self._state], 1), strict=True):
            part.copy_(saved)

    def data(self, index: int, data: mujoco.MjData) -> mujoco.MjData:
        for name in ("qpos", "qvel", "ctrl"):
            getattr(data, name)[:] = self.fields[name][index].cpu().numpy()
        return data

    def bytes_per_env(self) -> int:
        """Memory of the simulations' arrays and of per-simulation model fields, in bytes, divided by N."""
        arrays = [*_arrays(self._data), *(getattr(self._model, name) for name in self._parameters)]
        return sum(array.capacity for array in arrays) // self._count

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a graph may still run on the arrays
        self._graphs = None

    def _launch(self, work: str) -> None:
        """Launch the kernels of ``work``: "positions", "forward", "constants", or "step" and a number of substeps."""
        if work == "positions":
            mjw.fwd_kinematics(self._model, self._data)
        elif work == "forward":
            mjw.forward(self._model, self._data)
        elif work == "constants":
            mjw.set_const(self._model, self._data, mjw.SetConstGroup.FIXED, restore=False)
        else:
            for left in reversed(range(int(work.removeprefix("step ")))):
                with self._without_sensors(left > 0):
                    mjw.step(self._model, self._data)

    @contextmanager
    def _without_sensors(self, without: bool) -> Iterator[None]:
        """Context manager: leave out sensors and contact forces, which only the last substep of a step shows."""
        option = self._model.opt
        flags, forces = option.disableflags, option.run_rne_postconstraint
        if without and not self._model.nhistory:  # delayed sensors remember every substep
            option.disableflags, option.run_rne_postconstraint = flags | _SENSORS, False
        try:
            yield
        finally:
            option.disableflags, option.run_rne_postconstraint = flags, forces

    def _run(self, work: str) -> None:
        torch.ops.pql.warp(id(self), work, list(self._parameters.values()), list(self._tensors.values()))

    def launch(self, work: str) -> None:
        """Launch the graph of ``work``, captured first if necessary; while PyTorch captures, its kernels."""
        if _capturing():
            self._join(work)
            return
        graph = self._graph(work)
        if self.device.type == "cuda":
            wp.capture_launch(graph, stream=wp.stream_from_torch(torch.cuda.current_stream(self.device)))
        else:
            wp.capture_launch(graph)

    def _join(self, work: str) -> None:
        """Launch the kernels of ``work`` into the graph that PyTorch is capturing."""
        stream = wp.stream_from_torch(torch.cuda.current_stream(self.device))
        here = wp.ScopedStream(stream, sync_enter=False, sync_exit=False)
        with wp.ScopedDevice(wp.device_from_torch(self.device)), here:
            wp.capture_begin(stream=stream, external=True, force_module_load=False)
            try:
                self._launch(work)
            finally:
                self._joined.append(wp.capture_end(stream=stream))

    def _graph(self, work: str) -> Any:
        if self._graphs is None:
            raise RuntimeError("the environment is closed")
        if work not in self._graphs:
            self._graphs[work] = self._capture(partial(self._launch, work))
        return self._graphs[work]

    def _capture(self, launch: Callable[[], None]) -> Any:
        """Compile, warm up and capture; the simulations' state is unchanged."""
        with self._unchanged() as device:
            self._kernels.load([launch], device)
            launch()
            wp.synchronize_device(device)
            with wp.ScopedCapture(device=device) as capture:
                launch()
            wp.synchronize_device(device)
        return capture.graph

    @contextmanager
    def _unchanged(self) -> Iterator[Any]:
        """Context manager: make Warp's device current, idle, and restore the simulations' state in the end."""
        saved, ctrl = self.state(), self.fields["ctrl"].clone()
        device = wp.device_from_torch(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with wp.ScopedDevice(device):
            yield device
        self.load_state(saved)
        self.fields["ctrl"].copy_(ctrl)
        self._watch.forget()


class Overflows:
    """Monitors the overflow bits that Warp sets in ``flags`` [N], and warns without waiting for the device."""

    EVERY = 64  # steps between two reads of the count

    def __init__(self, flags: Tensor, contacts: int, constraints: int):
        self._flags, self._sizes = flags, (contacts, constraints)
        self.lost = torch.zeros(len(flags), dtype=torch.bool, device=flags.device)
        self._total = torch.zeros((), dtype=torch.int64, device=flags.device)
        self._cuda = flags.device.type == "cuda"
        self._seen = torch.zeros((), dtype=torch.int64, pin_memory=self._cuda)  # the total, some steps old
        self._copied = torch.cuda.Event() if self._cuda else None
        self._steps, self._warned = 0, 0

    def forget(self) -> None:
        """Clear the flags, which other work than the run's steps may have set."""
        self._flags.zero_()

    def count(self) -> None:
        """Count the overflows of a step, on the device. Call it after every step."""
        self.lost = (self._flags & LOST) != 0
        self._total += self.lost.sum()
        self._flags.zero_()

    def look(self) -> None:
        """Read the count now and then. Call it after steps that are not captured, or between others."""
        self._steps += 1
        if self._steps % self.EVERY == 1:
            self._warn()
            self._seen.copy_(self._total, non_blocking=True)
            if self._copied is not None:
                self._copied.record(torch.cuda.current_stream(self._total.device))
            else:
                self._warn()

    def _warn(self) -> None:
        if self._copied is not None and not self._copied.query():
            return
        count = int(self._seen)
        if count > 2 * self._warned:
            self._warned = count
            sizes = "{} contacts and {} constraint rows per simulation".format(*self._sizes)
            message = f"MuJoCo Warp's buffers of {sizes} have overflowed {count} times: contacts were lost"
            larger = "task.kwargs.contacts=[{},{}]".format(*self._sizes)
            warnings.warn(f"{message}. Enlarge them by half: {larger}.", PqlWarning, stacklevel=2)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _arrays(holder: Any) -> list[Any]:
    """Return all Warp arrays of a dataclass and of the dataclasses nested in it."""
    found = []
    for field in dataclasses.fields(holder):
        value = getattr(holder, field.name)
        if isinstance(value, wp.array):
            found.append(value)
        elif dataclasses.is_dataclass(value):
            found += _arrays(value)
    return found
