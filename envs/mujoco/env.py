"""``MujocoVec``: a task on an engine, with episodes. The state lives on the CPU; results go to the asked device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.env import Box, EnvSpec, ObsSpec
from pql.envs.mujoco.engine import BatchEngine, Engine
from pql.envs.mujoco.tasks import Task, load_model, start_states
from pql.types import Obs, Step

if TYPE_CHECKING:
    from pql.envs.mujoco.render import Renderer, Viewer


def describe(task: Task, num_envs: int, device: torch.device, max_episode_steps: int) -> EnvSpec:
    """The spec of a task, without loading its model."""
    return EnvSpec(
        name=task.name,
        num_envs=num_envs,
        obs={"policy": ObsSpec((task.obs_size,))},
        action=Box.within(task.action_size, task.ctrl_limit),
        device=device,
        max_episode_steps=max_episode_steps,
        autoreset="same_step",
        final_obs="on_done",
        log=(*task.terms, "distance", "diverged"),
        info={"dt": task.dt, "frame_skip": task.frame_skip},
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch's operations on the calling thread (the setting is per thread, and costs 0.2 us).

    OpenMP's threads spin for milliseconds after every parallel operation, on the cores that the physics threads
    need: with two cores, 1,024 Ants stepped 1.4 to 5 times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class MujocoVec:
    """N MuJoCo simulations as one ``VecEnv``.

    Observations, rewards and terminations equal those of Gymnasium's ``-v5`` environment of the same model. Beyond
    it: a simulation whose state diverges (not finite, or beyond 1e10) is restarted in the same step, its row is
    ``truncated`` with ``final_ok=False`` and zero reward, and ``log["diverged"]`` counts it, so observations are always
    finite. (An action that is not a number gives such a reward.) ``log["distance"]`` is the metres gained in the step.

    Every tensor of a ``Step`` is new, except ``valid`` and, where nothing diverged, ``final_ok``: these constants are
    shared between steps. Keep any for as long as you like, but write into none.

    Args:
        task: what to simulate.
        num_envs: N.
        device: where actions come from and results go. Physics stays on the CPU, so a step waits for the action.
        threads: physics threads; 0 for one per core. The results do not depend on it.
        max_episode_steps: time limit in env steps.
    """

    def __init__(self, task: Task, num_envs: int, device: torch.device, threads: int, max_episode_steps: int):
        self.spec = describe(task, num_envs, device, max_episode_steps)
        self.task = task
        self.model = load_model(task)
        self.engine: Engine = BatchEngine(self.model, num_envs, threads, task.outputs)
        self._qpos0 = torch.from_numpy(self.model.qpos0.copy())
        self._qvel0 = torch.zeros(self.model.nv, dtype=self._qpos0.dtype)
        self._generator = torch.Generator()
        self._limit = max_episode_steps
        self._all = torch.arange(num_envs)
        self._steps = torch.zeros(num_envs, dtype=torch.int64)
        self._position = torch.zeros(num_envs, dtype=self._qpos0.dtype)  # before the step to come
        self._obs = torch.zeros(num_envs, task.obs_size)  # as last returned
        self._yes = torch.ones(num_envs, dtype=torch.bool)
        self._yes_there = self._yes.to(device)
        self._renderer: Renderer | None = None  # made by the first picture

    @_one_thread()
    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments: ``{"policy": [N, D] float32}``. See ``VecEnv.reset``."""
        if seed is not None:
            self._generator.manual_seed(seed)
        self._obs = self._restart(self._all)
        return {"policy": self._send(self._obs)}

    @_one_thread()
    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        ids = mask.cpu().nonzero().squeeze(1)
        if len(ids):
            self._obs = self._obs.index_copy(0, ids, self._restart(ids))
        return {"policy": self._send(self._obs)}

    @_one_thread()
    def step(self, action: Tensor) -> Step:
        """Apply ``action`` [N, A] (clamped to [-1, 1]) for one env step. See ``VecEnv.step``."""
        task, engine = self.task, self.engine
        engine.step(action.cpu(), task.frame_skip)
        position = task.position(engine.fields)
        distance = position - self._position
        self._position.copy_(position)
        self._steps += 1

        obs = task.observe(engine.fields).float()
        healthy = None if task.healthy is None else task.healthy(engine.fields)
        terms = task.reward(engine.fields, distance / task.dt, healthy)
        terminated = ~(self._yes if healthy is None else healthy)
        diverged = engine.diverged()
        # [1 + K, N]: the reward is summed in the engine's precision, then everything is rounded once
        parts = [terms[name] for name in task.terms]
        rows = torch.stack((sum(parts[1:], parts[0]), *parts, distance, diverged)).float()

        final_ok = self._yes_there
        if diverged.any():
            obs = torch.where(diverged[:, None], self._obs, obs)
            rows[:-1, diverged] = 0.0
            terminated &= ~diverged
            final_ok = self._send(~diverged)
        truncated = ((self._steps >= self._limit) | diverged) & ~terminated
        return self._finish(obs, rows, terminated, truncated, final_ok)

    def _finish(self, obs: Tensor, rows: Tensor, terminated: Tensor, truncated: Tensor, final_ok: Tensor) -> Step:
        done = terminated | truncated
        ids = done.nonzero().squeeze(1)
        final_obs = {"policy": self._send(obs)}
        next_obs = final_obs
        if len(ids):
            obs = obs.index_copy(0, ids, self._restart(ids))
            next_obs = {"policy": self._send(obs)}
        self._obs = obs
        reward, *log = self._send(rows).unbind(0)
        terminated, truncated, first = self._send(torch.stack((terminated, truncated, done))).unbind(0)
        return Step(
            obs=next_obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            first=first,
            final_obs=final_obs,
            final_ok=final_ok,
            valid=self._yes_there,
            log=dict(zip(self.spec.log, log, strict=True)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything later steps depend on: continuing from it repeats them bit for bit."""
        return {
            "physics": self.engine.state(),
            "position": self._position.clone(),
            "steps": self._steps.clone(),
            "obs": self._obs.clone(),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken (same task and N)."""
        self.engine.load_state(state["physics"])
        self._position.copy_(state["position"])
        self._steps.copy_(state["steps"])
        self._obs = state["obs"].to("cpu", copy=True)
        self._generator.set_state(state["generator"].cpu())

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Simulation ``index`` as it stands, by default 640 x 480 pixels: uint8 [H, W, 3]. The camera follows it.

        Raises:
            ConfigError: neither EGL nor OSMesa works here; says what to install.
        """
        from pql.envs.mujoco.render import Renderer

        size = (width or 640, height or 480)
        if self._renderer is None or self._renderer.size != size:
            self._stop_rendering()
            self._renderer = Renderer(self.model, *size)
        return self._renderer.render(self._data(index))

    def viewer(self, index: int = 0) -> "Viewer":
        """A window on simulation ``index``, for a machine with a screen."""
        from pql.envs.mujoco.render import Viewer

        return Viewer(self.model, lambda data: self._data(index, data))

    def _data(self, index: int, data: mujoco.MjData | None = None) -> mujoco.MjData:
        """Simulation ``index`` as MuJoCo's own object, its derived fields up to date."""
        data = cast(BatchEngine, self.engine).batch.get_data(index, data)
        mujoco.mj_forward(self.model, data)
        return data

    def _stop_rendering(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = None

    def close(self) -> None:
        """Stop the physics threads. The environment cannot be stepped afterwards."""
        self._stop_rendering()
        self.engine.close()

    def _restart(self, ids: Tensor) -> Tensor:
        """New episodes for ``ids`` [K]: their first observations, [K, D] float32 on the CPU."""
        qpos, qvel = start_states(self.task, self._qpos0, self._qvel0, len(ids), self._generator)
        self.engine.reset(ids, qpos, qvel)
        fields = {name: field[ids] for name, field in self.engine.fields.items()}
        self._position[ids] = self.task.position(fields)
        self._steps[ids] = 0
        return self.task.observe(fields).float()

    def _send(self, value: Tensor) -> Tensor:
        if self.spec.device.type == "cuda":
            value = value.pin_memory()  # torch's host allocator keeps it until the copy is over
        return value.to(self.spec.device, non_blocking=True)
