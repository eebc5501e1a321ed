"""``MujocoVec``: a task on an engine, with episodes. Results go to the asked device, wherever the physics runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.env import Box, EnvSpec
from pql.envs.mujoco.engine import BatchEngine, Engine, Rows
from pql.envs.mujoco.task import Draw, Memory, Robot, Task, check_model, load_model
from pql.types import Obs, Step

if TYPE_CHECKING:
    from pql.envs.mujoco.render import Renderer, Viewer


def describe(
    task: type[Task], num_envs: int, device: torch.device, max_episode_steps: int | None, model: str | None
) -> EnvSpec:
    """The spec of a task, without loading its model."""
    return EnvSpec(
        name=task.name,
        num_envs=num_envs,
        obs=task.obs_spec(),
        action=Box.within(task.action_size, task.ctrl_limit),
        device=device,
        max_episode_steps=max_episode_steps or task.time_limit,
        autoreset="same_step",
        final_obs="on_done",
        log=(*task.terms, *task.metrics, "diverged"),
        info={"dt": task.dt, "frame_skip": task.frame_skip, "model": check_model(task, model)},
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

    Of Gymnasium's tasks, observations, rewards and terminations equal those of its ``-v5`` class on the same model.
    Beyond it: a simulation whose state diverges (not finite, or beyond 1e10) is restarted in the same step, its row is
    ``truncated`` with ``final_ok=False`` and zero reward, and ``log["diverged"]`` counts it, so observations are always
    finite. (An action that is not a number gives such a reward.)

    Every tensor of a ``Step`` is new, except ``valid`` and, where nothing diverged, ``final_ok``: these constants are
    shared between steps. Keep any for as long as you like, but write into none.

    Args:
        task: what to simulate.
        num_envs: N.
        device: where actions come from and results go. With physics on the CPU, a step waits for the action.
        threads: physics threads; 0 for one per core. The results do not depend on it.
        max_episode_steps: time limit in env steps; None: the task's.
        model: ``shipped`` or ``fast``; None: the task's choice.

    Raises:
        ConfigError: a model that the task cannot use.
    """

    def __init__(
        self,
        task: type[Task],
        num_envs: int,
        device: torch.device,
        threads: int = 0,
        max_episode_steps: int | None = None,
        model: str | None = None,
    ):
        self.spec = describe(task, num_envs, device, max_episode_steps, model)
        self.model = load_model(task, model)
        self.engine: Engine = BatchEngine(self.model, num_envs, threads, task.outputs)
        there, dtype = self.engine.device, self.engine.dtype
        self.task = task(Robot(self.model, there, dtype))
        self._generator = torch.Generator(there)
        self._draw = Draw(self._generator, dtype)
        self._limit = self.spec.max_episode_steps or task.time_limit
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=there)
        self._memory: Memory = {}
        self._obs: Obs = {}  # as last returned, on the engine's device
        self._yes = torch.ones(num_envs, dtype=torch.bool, device=there)
        self._yes_there = self._yes.to(device)
        self._renderer: Renderer | None = None  # made by the first picture

    @_one_thread()
    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments: observations by group, [N, ...]. See ``VecEnv.reset``."""
        if seed is not None:
            self._generator.manual_seed(seed)
        self._restart(self.engine.rows(self._yes))
        return self._send_obs(self._obs)

    @_one_thread()
    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        rows = self.engine.rows(mask.to(self.engine.device))
        if rows.count:
            self._restart(rows)
        return self._send_obs(self._obs)

    @_one_thread()
    def step(self, action: Tensor) -> Step:
        """Apply ``action`` [N, A] (clamped to [-1, 1]) for one env step. See ``VecEnv.step``."""
        task, engine = self.task, self.engine
        fields, memory = engine.fields, self._memory
        unit = action.to(engine.device, engine.dtype).clamp_(-1.0, 1.0)
        engine.step(task.control(unit, fields, memory), task.frame_skip)
        self._steps += 1

        terms, terminated, metrics = task.judge(fields, memory)
        self._memory = {**task.evolve(fields, memory, self._draw), **task.track(fields)}
        obs = self._observe(self._memory)
        diverged = engine.diverged()
        # [1 + K, N]: the reward is summed in the engine's precision, then everything is rounded once
        parts = [terms[name] for name in task.terms]
        logged = [metrics[name] for name in task.metrics]
        rows = torch.stack((sum(parts[1:], parts[0]), *parts, *logged, diverged)).float()
        if terminated is None:
            terminated = ~self._yes

        final_ok = self._yes_there
        bad = engine.rows(diverged)
        if bad.count:
            obs = {name: bad.put(value, bad.take(self._obs[name])) for name, value in obs.items()}
            rows[:-1].masked_fill_(diverged, 0.0)
            terminated = terminated & ~diverged
            final_ok = self._send(~diverged)
        truncated = ((self._steps >= self._limit) | diverged) & ~terminated
        return self._finish(obs, rows, terminated, truncated, final_ok)

    def _finish(self, obs: Obs, rows: Tensor, terminated: Tensor, truncated: Tensor, final_ok: Tensor) -> Step:
        done = terminated | truncated
        self._obs = obs
        next_obs = final_obs = self._send_obs(obs)
        ended = self.engine.rows(done)
        if ended.count:
            self._restart(ended)
            next_obs = self._send_obs(self._obs)
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

    def _restart(self, rows: Rows) -> None:
        """New episodes for ``rows``; the memory and the observations follow."""
        start = self.task.start(rows.count, self._draw)
        self.engine.reset(rows, start.qpos, start.qvel)
        fields = {name: rows.take(field) for name, field in self.engine.fields.items()}
        memory = {**start.memory, **self.task.track(fields)}
        self._memory = _put_all(rows, self._memory, memory)
        self._obs = _put_all(rows, self._obs, _rounded(self.task.observe(fields, memory)))
        self._steps = rows.put(self._steps, rows.take(torch.zeros_like(self._steps)))

    def _observe(self, memory: Memory) -> Obs:
        return _rounded(self.task.observe(self.engine.fields, memory))

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything later steps depend on: continuing from it repeats them bit for bit."""
        return {
            "physics": self.engine.state(),
            "memory": {name: value.clone() for name, value in self._memory.items()},
            "steps": self._steps.clone(),
            "obs": {name: value.clone() for name, value in self._obs.items()},
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken (same task and N)."""
        self.engine.load_state(state["physics"])
        there = self.engine.device
        self._memory = {name: value.to(there, copy=True) for name, value in state["memory"].items()}
        self._steps.copy_(state["steps"])
        self._obs = {name: value.to(there, copy=True) for name, value in state["obs"].items()}
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
        data = self.engine.data(index, data)
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

    def _send_obs(self, obs: Obs) -> Obs:
        return {name: self._send(value) for name, value in obs.items()}

    def _send(self, value: Tensor) -> Tensor:
        if self.spec.device == value.device:
            return value
        if self.spec.device.type == "cuda":
            value = value.pin_memory()  # torch's host allocator keeps it until the copy is over
        return value.to(self.spec.device, non_blocking=True)


def _rounded(obs: Obs) -> Obs:
    """Floats as float32; pictures of bytes as they are."""
    return {name: value.float() if value.is_floating_point() else value for name, value in obs.items()}


def _put_all(rows: Rows, values: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """``rows.put`` by name. The first call has no values yet, and means all rows."""
    return {name: rows.put(values.get(name, part), part) for name, part in new.items()}
