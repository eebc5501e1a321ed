"""Physics of N copies of one model: ``Engine``, and its implementation on MuJoCo's C thread pool.

An engine holds state and advances it; it knows nothing of observations, rewards or episodes. The other engine is MuJoCo
Warp on a GPU (``warp.py``). What depends on where the state lives is in two places: an engine's tensors are of its own
device and float type, and :class:`Rows` says how some of the environments are read and written there.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch, SimulationError
from torch import Tensor

from pql.types import column

Fields = Mapping[str, Tensor]
"""MjData's field names -> ``[N, ...]`` in the engine's dtype: ``qpos``, ``qvel``, ``ctrl`` and the derived fields
asked for. Units and layouts are MuJoCo's."""

MAX_STATE = 1e10
"""Largest coordinate that counts as a state: MuJoCo's own bound (``mjMAXVAL``) for calling one diverged."""

DERIVING = ("body_mass", "body_inertia")
"""Parameters from which MuJoCo derives other constants of the model."""

_NO_STAGE = mujoco.mjtStage.mjSTAGE_NONE.value


class Rows(Protocol):
    """Some of N environments. A host works on the few rows by number; a device that nobody waits for works on all N
    and keeps those that are meant, so that shapes are static."""

    count: int  # rows to work on, K: the number of environments meant, or N

    def take(self, values: Tensor) -> Tensor:
        """[N, ...] -> [K, ...]."""
        ...

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        """``values`` [N, ...] with the environments meant from ``new`` [K, ...]: a new tensor."""
        ...


class Listed:
    """Rows by number: ``ids`` [K] int64."""

    def __init__(self, mask: Tensor):
        self.ids = mask.nonzero().squeeze(1)
        self.count = len(self.ids)

    def take(self, values: Tensor) -> Tensor:
        return values[self.ids]

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        return values.index_copy(0, self.ids, new)


class Masked:
    """Rows by ``mask`` [N] bool."""

    def __init__(self, mask: Tensor):
        self.mask = mask
        self.count = len(mask)

    def take(self, values: Tensor) -> Tensor:
        return values

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        return torch.where(column(self.mask, values), new, values)


class Engine(Protocol):
    """N simulations of one model."""

    device: torch.device
    dtype: torch.dtype
    fields: Fields  # live: they show the state after the latest call

    def rows(self, mask: Tensor) -> Rows:
        """Return the environments of ``mask`` ([N] bool) in the form that :meth:`reset` takes."""
        ...

    def prepare(self, substeps: int) -> None:
        """Do now what the first calls would do once; the state is as before. Before the first reset."""
        ...

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Hold ``ctrl`` ([N, nu], in the model's units) for ``substeps`` steps.

        Derived fields then describe the start of the last substep, as after ``mj_step``.
        """
        ...

    def reset(self, rows: Rows, qpos: Tensor, qvel: Tensor) -> None:
        """Restart ``rows`` at ``qpos`` [K, nq], ``qvel`` [K, nv], time 0. Their fields follow; derived fields of other
        rows may move on to the present state."""
        ...

    def set_parameters(self, rows: Rows, values: Fields) -> None:
        """Give ``rows`` other values of the model's fields named when the engine was made.

        Args:
            rows: the environments meant.
            values: MjModel's field names -> [N, ...]; the rows of others are as they were.
        """
        ...

    def diverged(self) -> Tensor:
        """[N] bool; coordinates and velocities that are not finite, or of a norm beyond ``MAX_STATE``."""
        ...

    def overflowed(self) -> Tensor | None:
        """[N] bool; the latest step lost contacts, for want of room. None: an engine that always has room."""
        ...

    def state(self) -> Tensor:
        """Copy of everything the next step depends on, one row a simulation."""
        ...

    def load_state(self, state: Tensor) -> None:
        """Restore the output of :meth:`state`, [N, S]; derived fields are stale until the next call.

        Raises:
            ValueError: the state is of another model, kind of engine, or N.
        """
        ...

    def data(self, index: int, data: mujoco.MjData) -> mujoco.MjData:
        """Copy simulation ``index`` into ``data`` for rendering; derived fields are not computed."""
        ...

    def close(self) -> None: ...


class BatchEngine:
    """``mujoco.batch.Batch``: float64 state on the CPU, ``threads`` threads (0: all cores).

    The fields are tensors on MuJoCo's own memory, never copies. Results do not depend on ``threads``, and the GIL
    is released while the simulations run. A simulation in which MuJoCo raises an error becomes a diverged one.

    Args:
        model: compiled model; the engine keeps a copy.
        num_envs: N.
        threads: threads that step, this one included; 0 for one per core.
        outputs: derived fields to keep current (each costs a copy per simulation and call).
        parameters: the model's fields that get a value for each simulation.
    """

    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        threads: int = 0,
        outputs: Sequence[str] = (),
        parameters: Sequence[str] = (),
    ):
        self._batch: Batch | None = Batch(model, nsim=num_envs, nthread=threads)
        self._rows = torch.from_numpy(self._batch.state)
        self.fields: Fields = {name: _view(self._batch.bind(name)) for name in ("qpos", "qvel", "ctrl", *outputs)}
        # time, qpos and qvel open a state row, in this order: one view covers the latter two
        start = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_TIME)
        self._motion = self._rows[:, start : start + model.nq + model.nv]
        self._derived = bool(outputs)
        self._parameters = {name: torch.from_numpy(self._batch.expand(name)) for name in parameters}
        self._constants = not {*parameters}.isdisjoint(DERIVING)
        self._batch.reset(stage=_NO_STAGE)
        self._fresh = self._rows[:1].clone()

    @property
    def batch(self) -> Batch:
        """MuJoCo's object, to read what this engine does not offer."""
        if self._batch is None:
            raise RuntimeError("the environment is closed")
        return self._batch

    def rows(self, mask: Tensor) -> Listed:
        """Return the indices of ``mask`` [N] bool."""
        return Listed(mask)

    def prepare(self, substeps: int) -> None:
        """Nothing: no call is dearer than the others."""

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Hold ``ctrl`` [N, nu] for ``substeps`` steps."""
        self.fields["ctrl"].copy_(ctrl)
        self._guarded(lambda: self.batch.step(nstep=substeps))

    def reset(self, rows: Rows, qpos: Tensor, qvel: Tensor) -> None:
        """Restart ``rows`` at ``qpos`` [K, nq], ``qvel`` [K, nv]."""
        assert isinstance(rows, Listed)
        # a row is everything mj_resetData resets, and writing it is cheaper than a round of the thread pool
        self._rows[rows.ids] = self._fresh
        self._motion[rows.ids] = torch.cat((qpos, qvel), 1)
        if self._derived:  # a forward call changes no coordinate, velocity or warm start
            self._guarded(lambda: self.batch.forward(rows.ids.numpy()))

    def set_parameters(self, rows: Rows, values: Fields) -> None:
        assert isinstance(rows, Listed)
        for name, value in values.items():
            self._parameters[name][rows.ids] = value[rows.ids]
        if self._constants:
            self.batch.set_const(rows.ids.numpy())

    def diverged(self) -> Tensor:
        # NaN compares false, so it counts; the 2-norm is 10 times cheaper here than the largest magnitude
        return ~(torch.linalg.vector_norm(self._motion, dim=1) <= MAX_STATE)

    def overflowed(self) -> None:
        return None

    def state(self) -> Tensor:
        return self._rows.clone()

    def load_state(self, state: Tensor) -> None:
        """Restore the output of :meth:`state`, [N, S]."""
        check_state(state, self._rows)
        self._rows.copy_(state)

    def data(self, index: int, data: mujoco.MjData) -> mujoco.MjData:
        return self.batch.get_data(index, data)

    def close(self) -> None:
        self._batch = None

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except SimulationError as error:
            # MuJoCo kept these simulations where they were, which would pass for a step that did nothing
            self._motion[torch.from_numpy(np.asarray(error.ids))] = torch.nan


def check_state(state: Tensor, own: Tensor) -> None:
    """Raise ``ValueError`` if a saved state does not have the shape of ``own``, [N, S]."""
    if state.shape != own.shape:
        shapes = f"{tuple(state.shape)}, not {tuple(own.shape)}"
        raise ValueError(f"physics state of another task, engine or number of environments: shape {shapes}")


def _view(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # derived fields are read-only, which torch cannot express
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
