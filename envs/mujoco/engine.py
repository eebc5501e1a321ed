"""Physics of N copies of one model: ``Engine``, and its implementation on MuJoCo's C thread pool.

An engine holds state and advances it; it knows nothing of observations, rewards or episodes. A second engine (on
a GPU) needs the same few methods over tensors of its own device and dtype.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch, SimulationError
from torch import Tensor

Fields = Mapping[str, Tensor]
"""MjData's field names -> ``[N, ...]`` in the engine's dtype: ``qpos``, ``qvel``, ``ctrl`` and the derived fields
asked for. Units and layouts are MuJoCo's."""

MAX_STATE = 1e10
"""Largest coordinate that counts as a state: MuJoCo's own bound (``mjMAXVAL``) for calling one diverged."""

_NO_STAGE = mujoco.mjtStage.mjSTAGE_NONE.value


class Engine(Protocol):
    """N simulations of one model."""

    fields: Fields  # live: they show the state after the latest call

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Hold ``ctrl`` ([N, A], clamped to [-1, 1] and rescaled to the model's range) for ``substeps`` steps.

        Derived fields then describe the start of the last substep, as after ``mj_step``.
        """
        ...

    def reset(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Restart the simulations ``ids`` ([K] int64) at ``qpos`` [K, nq], ``qvel`` [K, nv], time 0; fields follow."""
        ...

    def forward(self) -> None:
        """Compute the derived fields of the state as it is."""
        ...

    def diverged(self) -> Tensor:
        """[N] bool; coordinates and velocities that are not finite, or of a norm beyond ``MAX_STATE``."""
        ...

    def state(self) -> Tensor:
        """Copy of everything the next step depends on, one row a simulation."""
        ...

    def load_state(self, state: Tensor) -> None:
        """Put back what :meth:`state` returned; derived fields are stale until the next call.

        Raises:
            ValueError: the state is of another model or another N.
        """
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
    """

    def __init__(self, model: mujoco.MjModel, num_envs: int, threads: int = 0, outputs: Sequence[str] = ()):
        self._batch: Batch | None = Batch(model, nsim=num_envs, nthread=threads)
        self._rows = torch.from_numpy(self._batch.state)
        self.fields = {name: _view(self._batch.bind(name)) for name in ("qpos", "qvel", "ctrl", *outputs)}
        # time, qpos and qvel open a state row, in this order: one view covers the latter two
        start = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_TIME)
        self._motion = self._rows[:, start : start + model.nq + model.nv]
        self._derived = bool(outputs)
        self._batch.reset(stage=_NO_STAGE)
        self._fresh = self._rows[:1].clone()
        low, high = torch.from_numpy(model.actuator_ctrlrange.copy()).unbind(1)
        self._middle, self._half = (low + high) / 2, (high - low) / 2
        self._identity = bool((low == -1).all() and (high == 1).all())

    @property
    def batch(self) -> Batch:
        """MuJoCo's object, to render a simulation or read what this engine does not offer."""
        if self._batch is None:
            raise RuntimeError("the environment is closed")
        return self._batch

    def step(self, ctrl: Tensor, substeps: int) -> None:
        held = self.fields["ctrl"]
        held.copy_(ctrl)
        held.clamp_(-1.0, 1.0)
        if not self._identity:
            held.mul_(self._half).add_(self._middle)
        self._guarded(lambda: self.batch.step(nstep=substeps))

    def reset(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        # a row is everything mj_resetData resets, and writing it is cheaper than a round of the thread pool
        self._rows[ids] = self._fresh
        self._motion[ids] = torch.cat((qpos, qvel), 1)
        if self._derived:  # a forward call changes no coordinate, velocity or warm start
            self._guarded(lambda: self.batch.forward(ids.numpy()))

    def forward(self) -> None:
        self._guarded(self.batch.forward)

    def diverged(self) -> Tensor:
        # NaN compares false, so it counts; the 2-norm is 10 times cheaper here than the largest magnitude
        return ~(torch.linalg.vector_norm(self._motion, dim=1) <= MAX_STATE)

    def state(self) -> Tensor:
        return self._rows.clone()

    def load_state(self, state: Tensor) -> None:
        if state.shape != self._rows.shape:
            shapes = f"{tuple(state.shape)}, not {tuple(self._rows.shape)}"
            raise ValueError(f"physics state of another task or number of environments: shape {shapes}")
        self._rows.copy_(state)

    def close(self) -> None:
        self._batch = None

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except SimulationError as error:
            # MuJoCo kept these simulations where they were, which would pass for a step that did nothing
            self._motion[torch.from_numpy(np.asarray(error.ids))] = torch.nan


def _view(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # derived fields are read-only, which torch cannot express
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
