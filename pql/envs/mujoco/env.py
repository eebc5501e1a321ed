"""``MujocoVec``: a task on an engine, with episodes. Results go to the configured device, wherever the physics runs."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from pql.contract.env import Box, EnvSpec, LogKind
from pql.envs.mujoco.curriculum import Curriculum, Levels
from pql.envs.mujoco.engine import Engine, Masked, Rows, Taken
from pql.envs.mujoco.engines import EngineOptions, choose, make_engine
from pql.envs.mujoco.mirror import reflected
from pql.envs.mujoco.randomize import Randomize, Randomizer
from pql.envs.mujoco.task import Draw, Memory, Robot, Task, check_model, load_model, physics_steps
from pql.types import Obs, Step

if TYPE_CHECKING:
    from pql.envs.mujoco.render import Renderer, Viewer, WebViewer


@dataclass(frozen=True)
class Options(EngineOptions):
    """Options of all MuJoCo tasks; ``pql.envs.mujoco.Maker`` documents them and checks the values."""

    max_episode_steps: int | None = None
    model: str | None = None
    randomize: Randomize = field(default_factory=Randomize)
    curriculum: Curriculum | None = None
    stagger: bool = False


def describe(task: type[Task], num_envs: int, device: torch.device, options: Options) -> EnvSpec:
    """The spec of a task, without loading its model."""
    warp = choose(options.engine, device) == "warp"
    known = {"action_reach": task.action_reach(), "symmetry": task.symmetry(), "robot": task.robot_record()}
    log: dict[str, LogKind] = {**dict.fromkeys((*task.terms, *task.metrics), "sum"), "diverged": "episode"}
    if warp:
        log["overflow"] = "sum"
    if options.curriculum:
        log["level"] = "episode"
    return EnvSpec(
        name=task.name,
        num_envs=num_envs,
        obs=task.obs_spec() | options.randomize.group(lambda: load_model(task, options.model)),
        action=Box.within(task.action_size, task.ctrl_limit),
        device=device,
        max_episode_steps=options.max_episode_steps or task.time_limit,
        autoreset="same_step",
        final_obs="on_done",
        log=log,
        deterministic=not (warp and device.type == "cuda"),
        info={"dt": task.dt, "frame_skip": physics_steps(task, options.model)}
        | {"model": check_model(task, options.model), "truncates_at_limit": task.expired is Task.expired}
        | {k: v for k, v in known.items() if v is not None},
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch's operations on the calling thread (the setting is per thread, and costs 0.2 us). OpenMP's threads
    spin for milliseconds after every parallel operation, on the cores that the physics threads need: with two cores,
    1,024 Ants stepped 1.4 to 5 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class MujocoVec:
    """N MuJoCo simulations as one ``VecEnv``.

    Observations, rewards and terminations of Gymnasium's tasks equal those of its ``-v5`` classes on the same model. In
    addition, a simulation whose state diverges (not finite, or beyond 1e10) is restarted in the same step: its row is
    ``truncated`` with ``final_ok=False`` and zero reward, and ``log["diverged"]`` counts it, so observations are always
    finite, unless an action is NaN, which may stay in a task's memory until the episode ends.

    Every tensor of a ``Step`` is new, except ``valid`` and flags that are equal in all environments, which are shared
    between steps. All may be kept, and none may be written to. With physics on Warp a step can be captured in a
    CUDA graph (``Capturable``): the state is then kept at the addresses that it had first.

    Args:
        task: the task class.
        num_envs: N.
        device: device of actions and results. With physics on the CPU, a step waits for the action.
        options: threads, model, time limit, randomisation, ...
    Raises:
        ConfigError: a model that the task cannot use, or a randomisation that it does not support.
    """

    def __init__(self, task: type[Task], num_envs: int, device: torch.device, options: Options):
        self.spec = describe(task, num_envs, device, options)
        self.model = load_model(task, options.model)
        wanted = options.randomize
        self.engine: Engine = make_engine(task, self.model, num_envs, device, options, wanted.parameters)
        there, dtype = self.engine.device, self.engine.dtype
        robot = Robot(self.model, there, dtype)
        self.task = task(robot)
        self._generator = torch.Generator(there)
        self._draw = Draw(self._generator, dtype)
        self._limit = self.spec.max_episode_steps or task.time_limit
        self._stagger = options.stagger
        self._levels = Levels(options.curriculum, num_envs, self._limit, there)
        if self._levels.active:
            self.progress, self.load_progress = self._levels.progress, self._levels.load_progress
        self._randomizer: Randomizer | None = None
        if wanted != Randomize():
            shape = self.spec.obs["policy"].shape
            size = shape[0] if len(shape) == 1 else 0
            self._randomizer = Randomizer(wanted, robot, self.engine, self._draw, task.dt, size)
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=there)
        self._memory: Memory = {}
        self._obs: Obs = {}  # as last returned, on the engine's device
        self._fixed: dict[str, Tensor] = {}  # where a capturable engine's environments keep all of these
        self._yes = torch.ones(num_envs, dtype=torch.bool, device=there)
        self._no, self._zeros = ~self._yes, torch.zeros(num_envs, device=there, dtype=dtype)
        self._yes_there = self._yes.to(device)
        self._on_host = there.type == device.type == "cpu" and not self.capturable  # values may be read
        self._spare = 0  # steps until an episode can reach the time limit; 0: not known
        self._renderer: Renderer | None = None  # made by the first render
        if self.capturable:
            self.engine.read_at_start(self._read_at_start())

    @property
    def capturable(self) -> bool:
        """True if the physics runs on Warp."""
        return self.engine.capturable

    @property
    def generators(self) -> list[torch.Generator]:
        """What steps and resets draw from."""
        return [self._generator]

    def _read_at_start(self) -> set[str]:
        """Return the names of the fields that first observations and memories are made of."""
        fields = Taken(self.engine.fields, Masked(self._yes))
        start = self.task.start(self.spec.num_envs, Draw(torch.Generator(self.engine.device), self.engine.dtype))
        fields.taken |= self.task.derive(fields)
        self.task.observe(fields, {**start.memory, **self.task.track(fields), "level": self._levels.level})
        return {*fields.taken}

    @_one_thread()
    def prepare(self) -> None:
        """Compile and capture what steps and resets launch, on a GPU. See ``Preparable.prepare``."""
        self.engine.prepare(self.spec.info["frame_skip"])
        if self.capturable and not self._fixed:  # a step can be captured before the first reset
            drawn = self._generator.get_state()
            self._restart(self.engine.rows(self._yes))
            self._keep()
            self._generator.set_state(drawn)

    def preparation(self) -> str:
        """Return what :meth:`prepare` is doing, in words. Other threads may call it."""
        return self.engine.preparation()

    @_one_thread()
    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments: observations by group, [N, ...]. See ``VecEnv.reset``."""
        if seed is not None:
            self._generator.manual_seed(seed)
            self._levels.restart()
        self._restart(self.engine.rows(self._yes))
        self._spare = 0
        if self._stagger:
            begun = self._draw.uniform(0.0, self._limit, self.spec.num_envs)
            self._steps = begun.long().clamp_(max=self._limit - 1)
            self._levels.cut_short()
        return self._kept()

    @_one_thread()
    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        rows = self.engine.rows(mask.to(self.engine.device))
        if rows.count:
            self._restart(rows)
        return self._kept()

    @_one_thread()
    def step(self, action: Tensor) -> Step:
        """Apply ``action`` [N, A] (clamped to [-1, 1]) for one env step. See ``VecEnv.step``."""
        task, engine = self.task, self.engine
        memory = self._memory
        unit = action.to(engine.device, engine.dtype).clamp(-1.0, 1.0)
        if self._randomizer:
            self._randomizer.push(self._levels.level)
        engine.step(task.control(unit, engine.fields, memory), self.spec.info["frame_skip"])
        self._steps += 1

        fields = {**engine.fields, **task.derive(engine.fields)}
        terms, terminated, metrics = task.judge(fields, memory)
        self._memory = {**memory, **task.evolve(fields, memory, self._draw), **task.track(fields)}
        obs = _rounded(task.observe(fields, self._memory))
        if self._randomizer:
            obs = self._randomizer.sense(obs, self._levels.level)
        diverged = engine.diverged()
        # [1 + K, N]: the reward is summed in the task's precision, and everything is rounded once
        parts = [terms[name] for name in task.terms]
        logged = [metrics[name] for name in task.metrics]
        lost = engine.overflowed()
        counted = [self._zeros if diverged is None else diverged, *([] if lost is None else [lost])]
        rows = torch.stack((sum(parts[1:], parts[0]), *parts, *logged, *counted)).float()

        final_ok = self._yes_there
        if diverged is not None:
            bad = engine.rows(diverged)
            obs = {name: bad.put(value, bad.take(self._obs[name])) for name, value in obs.items()}
            rows[: 1 + len(parts) + len(logged)].masked_fill_(diverged, 0.0)
            terminated = None if terminated is None else terminated & ~diverged
            final_ok = self._send(~diverged)
        truncated = _either(self._late(), task.expired(self._memory), diverged)
        if truncated is not None and terminated is not None:
            truncated = truncated & ~terminated
        done = _either(terminated, truncated)
        if self._levels.active:
            ended = self._no if done is None else done
            level = self._levels.follow(rows[0], metrics.get("success"), ended, self._steps)
            rows = torch.cat((rows, level[None]))
        return self._finish(obs, rows, (terminated, truncated, done), final_ok)

    def _late(self) -> Tensor | None:
        """Return [N] bool: the time limit is reached. None: in no environment, known from earlier steps."""
        if self._on_host:
            self._spare = self._spare - 1 if self._spare else self._limit - int(self._steps.max())
            if self._spare > 0:
                return None
            self._spare = 0
        return self._steps >= self._limit

    def _finish(self, obs: Obs, rows: Tensor, ends: tuple[Tensor | None, ...], final_ok: Tensor) -> Step:
        """Restart what has ended, and make the step. ``ends``: terminated, truncated, either, each [N] bool or None."""
        done = ends[-1]
        self._obs = obs
        next_obs = final_obs = self._send_obs(obs)
        ended = None if done is None else self.engine.rows(done)
        if ended is not None and ended.count:
            self._restart(ended)
            next_obs = self._send_obs(self._obs)
        self._keep()
        reward, *log = self._send(rows).unbind(0)
        flags = [self._no if each is None else each for each in ends]
        if not self._on_host:
            flags = [*self._send(torch.stack(flags)).unbind(0)]
        terminated, truncated, first = flags
        named = dict(zip(self.spec.log, log, strict=True))
        return Step(next_obs, reward, terminated, truncated, first, final_obs, final_ok, self._yes_there, named)

    def _restart(self, rows: Rows) -> None:
        """Start new episodes in ``rows`` and update their memory and observations."""
        self._levels.abandon(rows)
        level = rows.take(self._levels.level) if self._randomizer or self._levels.active else self._levels.level
        if self._randomizer:
            self._randomizer.begin(rows, level)
        start = self.task.start(rows.count, self._draw)
        self.engine.reset(rows, start.qpos, start.qvel)
        fields = Taken(self.engine.fields, rows)
        fields.taken |= self.task.derive(fields)
        memory = {**start.memory, **self.task.track(fields)}
        if self._levels.active:
            memory["level"] = level
        obs = _rounded(self.task.observe(fields, memory))
        if self._randomizer:
            obs = self._randomizer.sense_first(rows, obs, level)
        self._memory = _put_all(rows, self._memory, memory)
        self._obs = _put_all(rows, self._obs, obs)
        self._steps = rows.zero(self._steps)

    def _kept(self) -> Obs:
        """Keep the state; return the observations of all, [N, ...], in memory of their own."""
        obs = self._send_obs(self._obs)
        self._keep()
        return obs

    def _keep(self) -> None:
        """Copy the state to where it was first, if a captured step reads it there."""
        if not self.capturable:
            return
        new = {"steps": self._steps} | {f"memory.{k}": v for k, v in self._memory.items()}
        new |= {f"obs.{k}": v for k, v in self._obs.items()}
        taken = {v.untyped_storage().data_ptr() for v in self._fixed.values()}
        moved = {k: v for k, v in new.items() if v is not self._fixed.get(k)}
        for name, value in moved.items():
            if name not in self._fixed or value.untyped_storage().data_ptr() in taken:
                moved[name] = value.clone()  # before another entry is written over it
        for name, value in moved.items():
            self._fixed.setdefault(name, value).copy_(value)
        self._steps = self._fixed["steps"]
        self._memory = {k: self._fixed[f"memory.{k}"] for k in self._memory}
        self._obs = {k: self._fixed[f"obs.{k}"] for k in self._obs}

    def measures(self) -> dict[str, float]:
        """Return nothing; warn of contacts that Warp lost, which captured steps cannot. See ``Measured``."""
        self.engine.report_overflows()
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything later steps depend on; they then repeat bit for bit."""
        return {
            "physics": self.engine.state(),
            "memory": {name: value.clone() for name, value in self._memory.items()},
            "steps": self._steps.clone(),
            "obs": {name: value.clone() for name, value in self._obs.items()},
            "generator": self._generator.get_state(),
            **({"levels": self._levels.state_dict()} if self._levels.active else {}),
            **({"randomizer": self._randomizer.state_dict()} if self._randomizer else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict` of the same task and N."""
        self.engine.load_state(state["physics"])
        there = self.engine.device
        self._memory = {name: value.to(there, copy=True) for name, value in state["memory"].items()}
        self._steps.copy_(state["steps"])
        self._spare = 0
        self._obs = {name: value.to(there, copy=True) for name, value in state["obs"].items()}
        self._generator.set_state(state["generator"].cpu())
        if self._levels.active:
            self._levels.load_state_dict(state["levels"])
        if self._randomizer:
            self._randomizer.load_state_dict(state["randomizer"], self.engine.rows(self._yes))
        self._keep()

    reflected = reflected

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Render simulation ``index``, by default 640 x 480 pixels: uint8 [H, W, 3]. The camera follows the robot.
        Raises ``ConfigError``: neither EGL nor OSMesa works here; says what to install."""
        from pql.envs.mujoco.render import Renderer

        size = (width or 640, height or 480)
        if self._renderer is None or self._renderer.size != size:
            self._stop_rendering()
            self._renderer = Renderer(self.model, *size)
        return self._renderer.render(self._data(index))

    def viewer(self, index: int = 0) -> "Viewer":
        """Open a viewer window on simulation ``index``; needs a screen."""
        from pql.envs.mujoco.render import Viewer

        return Viewer(self.model, lambda data: self._data(index, data))

    def web_viewer(self, port: int, index: int = 0) -> "WebViewer | None":
        """Serve a page with a free camera on simulation ``index``; None without the package mjviser."""
        from pql.envs.mujoco.render import WebViewer

        if importlib.util.find_spec("mjviser") is None:
            return None
        return WebViewer(self.model, lambda data: self._data(index, data), port)

    def _data(self, index: int, data: mujoco.MjData | None = None) -> mujoco.MjData:
        """Return simulation ``index`` as an ``MjData`` with its derived fields up to date."""
        data = self.engine.data(index, data or mujoco.MjData(self.model))
        self.task.show(data, {name: value[index] for name, value in self._memory.items()})
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
        return {**obs} if self._on_host else {name: self._send(value) for name, value in obs.items()}

    def _send(self, value: Tensor) -> Tensor:
        if self._on_host:
            return value
        if self.spec.device.type == value.device.type:
            return value.to(self.spec.device)
        if self.spec.device.type == "cuda":
            value = value.pin_memory()  # torch's host allocator keeps it until the copy is complete
        return value.to(self.spec.device, non_blocking=True)


def _either(*masks: Tensor | None) -> Tensor | None:
    """Return where any of some masks [N] is true; None stands for one that is false everywhere."""
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(torch.bitwise_or, given) if given else None


def _rounded(obs: Obs) -> Obs:
    """Convert floats of any shape to float32; leave uint8 images unchanged."""
    return {name: value.float() if value.is_floating_point() else value for name, value in obs.items()}


def _put_all(rows: Rows, values: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    """``rows.put`` by name. In the first call ``values`` is empty, and all rows are put."""
    return {name: rows.put(values.get(name, part), part) for name, part in new.items()}
