"""Choice of the engine for a task: MuJoCo's C threads on a CPU, MuJoCo Warp on a CUDA device."""

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
import torch

from pql.envs.mujoco.engine import BatchEngine, Engine
from pql.envs.mujoco.task import Task
from pql.errors import ConfigError, PqlWarning, nearest

ENGINES = ("auto", "batch", "warp")
INSTALL = "pip install 'pql-rl[warp]'"


@dataclass(frozen=True)
class EngineOptions:
    """Physics options of a task.

    Attributes:
        threads: physics threads on a CPU; 0: one per core.
        engine: one of ``ENGINES``.
        contacts: the most contacts and constraint rows of a simulation, for Warp's buffers; None: the task's.
    """

    threads: int = 0
    engine: str = "auto"
    contacts: tuple[int, int] | None = None


def choose(engine: str, device: torch.device) -> str:
    """Return ``batch`` or ``warp`` for the setting ``engine``; ``auto`` follows the device. Raises ``ConfigError``: no
    such engine, or Warp is not installed."""
    if engine not in ENGINES:
        raise ConfigError("engine", engine, f"auto, batch or warp{nearest(str(engine), ENGINES)}")
    there = importlib.util.find_spec("mujoco_warp") is not None
    if engine == "warp" and not there:
        raise ConfigError("engine", engine, f"batch; the package 'mujoco_warp' is not installed: {INSTALL}")
    if engine == "auto":
        return "warp" if device.type == "cuda" and there else "batch"
    return engine


def make_engine(
    task: type[Task],
    model: mujoco.MjModel,
    num_envs: int,
    device: torch.device,
    options: EngineOptions,
    parameters: Sequence[str] = (),
) -> Engine:
    """Create the engine of ``num_envs`` simulations of ``model``, of which ``parameters`` may differ between them."""
    if choose(options.engine, device) == "warp":
        from pql.envs.mujoco.warp import WarpEngine

        need = options.contacts or task.contacts or measure(model, round(task.dt / model.opt.timestep))
        return WarpEngine(model, num_envs, device, task.outputs, parameters, need)
    if device.type == "cuda" and options.engine == "auto":
        message = "physics runs on the CPU: for MuJoCo on this GPU, "
        warnings.warn(message + INSTALL, PqlWarning, stacklevel=2)
    return BatchEngine(model, num_envs, options.threads, task.outputs, parameters)


def measure(model: mujoco.MjModel, frame_skip: int, steps: int = 2000, seed: int = 0) -> tuple[int, int]:
    """Return the most contacts and constraint rows of one simulation in C during ``steps`` env steps of random
    controls, restarted every 200 steps near the default pose."""
    rng, data = np.random.default_rng(seed), mujoco.MjData(model)
    low, high = model.actuator_ctrlrange.T
    contacts = constraints = 0
    for step in range(steps):
        if step % 200 == 0:
            mujoco.mj_resetData(model, data)
            data.qvel[:] = rng.normal(0.0, 0.5, model.nv)
        data.ctrl[:] = rng.uniform(low, high)
        mujoco.mj_step(model, data, frame_skip)
        contacts, constraints = max(contacts, data.ncon), max(constraints, data.nefc)
    return contacts, constraints
