"""Physics of N copies of one model: ``Engine``, and its implementation on MuJoCo's C thread pool.

An engine holds and advances state; it does not know observations, rewards or episodes. The other engine is MuJoCo Warp
on a GPU (``warp.py``). Two things depend on where the state is: an engine's tensors have its device and float type, and
:class:`Rows` defines how a subset of the environments is read and written there.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import mujoco
import numpy as np
import torch
from mujoco.batch import Batch, SimulationError
from torch import Tensor

from pql.types import column

Fields = Mapping[str, Tensor]
"""MjData's field names -> ``[N, ...]`` in the engine's dtype: ``qpos``, ``qvel``, ``ctrl`` and the requested derived
fields. Units and layouts are MuJoCo's."""

MAX_STATE = 1e10
"""Largest valid coordinate: MuJoCo's bound (``mjMAXVAL``), beyond which a simulation has diverged."""

DERIVING = ("body_mass", "body_inertia")
"""Parameters from which MuJoCo derives other constants of the model."""

_NO_STAGE = mujoco.mjtStage.mjSTAGE_NONE.value


class Rows(Protocol):
    """A subset of N environments. On a host only the K selected rows are processed, by index; on a device all N are
    processed and masked, so that shapes are static and no synchronisation is needed."""

    count: int  # K, the rows to process: the number of selected environments, or N

    def take(self, values: Tensor) -> Tensor:
        """Select the rows: [N, ...] -> [K, ...]."""
        ...

    def zero(self, values: Tensor) -> Tensor:
        """Return a copy of ``values`` [N] with zeros for the selected environments."""
        ...

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        """Return a copy of ``values`` [N, ...] with the selected environments' rows taken from ``new`` [K, ...]."""
        ...


class Listed:
    """Rows by number: ``ids`` [K] int64."""

    def __init__(self, mask: Tensor):
        self.ids = torch.from_numpy(mask.numpy().nonzero()[0])  # a quarter of the time of torch's nonzero
        self.count = len(self.ids)

    def take(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.ids)

    def zero(self, values: Tensor) -> Tensor:
        return values.index_fill(0, self.ids, 0)

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        return values.index_copy(0, self.ids, new)


class Masked:
    """Rows by ``mask`` [N] bool."""

    def __init__(self, mask: Tensor):
        self.mask = mask
        self.count = len(mask)

    def take(self, values: Tensor) -> Tensor:
        return values

    def zero(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.mask, 0)

    def put(self, values: Tensor, new: Tensor) -> Tensor:
        return torch.where(column(self.mask, values), new, values)


class Taken(Mapping[str, Tensor]):
    """Fields of some rows, each taken when it is read first, and entries derived from them."""

    def __init__(self, fields: Fields, rows: Rows):
        self._fields, self._rows = fields, rows
        self.taken: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.taken:
            self.taken[name] = self._rows.take(self._fields[name])
        return self.taken[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._fields, **self.taken})

    def __len__(self) -> int:
        return len({**self._fields, **self.taken})


class Engine(Protocol):
    """N simulations of one model."""

    device: torch.device
    dtype: torch.dtype
    fields: Fields  # live views of the state after the latest call
    capturable: bool  # calls launch work on a device and never wait for it, so that a step can be captured

    def rows(self, mask: Tensor) -> Rows:
        """Return the environments of ``mask`` ([N] bool) in the form that :meth:`reset` takes."""
        ...

    def read_at_start(self, names: Collection[str]) -> None:
        """Say which fields are read after :meth:`reset`; others may then be stale until the next step."""
        ...

    def prepare(self, substeps: int) -> None:
        """Do one-time work of the first calls now; the state is unchanged. Call it before the first reset."""
        ...

    def preparation(self) -> str:
        """Return what :meth:`prepare` is doing, in words. Other threads may call it."""
        ...

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Hold ``ctrl`` ([N, nu], in the model's units) for ``substeps`` steps. Derived fields then describe the start
        of the last substep, as after ``mj_step``."""
        ...

    def reset(self, rows: Rows, qpos: Tensor, qvel: Tensor) -> None:
        """Restart ``rows`` at ``qpos`` [K, nq], ``qvel`` [K, nv], time 0, and update their fields. Derived fields of
        other rows may be updated to the current state."""
        ...

    def set_parameters(self, rows: Rows, values: Fields) -> None:
        """Set per-simulation values of the model's fields that were named when the engine was made.

        Args:
            rows: the environments to change.
            values: MjModel's field names -> [N, ...]; rows of other environments are ignored.
        """
        ...

    def diverged(self) -> Tensor | None:
        """Return [N] bool: positions and velocities are not finite, or their norm is beyond ``MAX_STATE``. None: in no
        environment, which an engine on a device cannot know."""
        ...

    def overflowed(self) -> Tensor | None:
        """Return [N] bool: the latest step lost contacts because a buffer was full. None: buffers cannot overflow."""
        ...

    def report_overflows(self) -> None:
        """Warn of lost contacts. Called now and then, also if steps are captured."""
        ...

    def state(self) -> Tensor:
        """Return a copy of everything the next step depends on, [N, S]."""
        ...

    def load_state(self, state: Tensor) -> None:
        """Restore the output of :meth:`state`, [N, S]; derived fields are stale until the next call. Raises
        ``ValueError``: the state is of another model, kind of engine, or N."""
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
        parameters: the model's fields that have one value per simulation.
    """

    device = torch.device("cpu")
    dtype = torch.float64
    capturable = False

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
        self._qpos, self._qvel = np.split(self._motion.numpy(), [model.nq], 1)  # writing NumPy's rows takes less time
        self._derived = bool(outputs)
        self._parameters = {name: torch.from_numpy(self._batch.expand(name)) for name in parameters}
        self._constants = not {*parameters}.isdisjoint(DERIVING)
        self._batch.reset(stage=_NO_STAGE)
        self._fresh = self._batch.state[:1].copy()

    @property
    def batch(self) -> Batch:
        """MuJoCo's ``Batch``, for data that this engine does not offer."""
        if self._batch is None:
            raise RuntimeError("the environment is closed")
        return self._batch

    def rows(self, mask: Tensor) -> Listed:
        """Return the indices of ``mask`` [N] bool."""
        return Listed(mask)

    def read_at_start(self, names: Collection[str]) -> None:
        """Do nothing: MuJoCo computes all fields at once."""

    def prepare(self, substeps: int) -> None:
        """Do nothing: no call has one-time work."""

    def preparation(self) -> str:
        return ""

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Hold ``ctrl`` [N, nu] for ``substeps`` steps."""
        self.fields["ctrl"].copy_(ctrl)
        self._guarded(lambda: self.batch.step(nstep=substeps))

    def reset(self, rows: Rows, qpos: Tensor, qvel: Tensor) -> None:
        """Restart ``rows`` at ``qpos`` [K, nq], ``qvel`` [K, nv]."""
        assert isinstance(rows, Listed)
        # a row is everything mj_resetData resets, and writing it is cheaper than a round of the thread pool
        ids = rows.ids.numpy()
        self.batch.state[ids] = self._fresh
        self._qpos[ids], self._qvel[ids] = qpos.numpy(), qvel.numpy()
        if self._derived:  # a forward call changes no coordinate, velocity or warm start
            self._guarded(lambda: self.batch.forward(ids))

    def set_parameters(self, rows: Rows, values: Fields) -> None:
        assert isinstance(rows, Listed)
        for name, value in values.items():
            self._parameters[name][rows.ids] = value[rows.ids]
        if self._constants:
            self.batch.set_const(rows.ids.numpy())

    def diverged(self) -> Tensor | None:
        if torch.linalg.vector_norm(self._motion).item() <= MAX_STATE:  # no row's norm is larger
            return None
        # NaN compares false, so it counts; the 2-norm is 10 times cheaper than the maximum norm here
        return ~(torch.linalg.vector_norm(self._motion, dim=1) <= MAX_STATE)

    def overflowed(self) -> None:
        return None

    def report_overflows(self) -> None:
        """Do nothing: buffers grow."""

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
            # MuJoCo leaves these simulations unchanged, which would look like a step without motion
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
