"""One environment of a task as a ``gymnasium.Env``. Reached through ``gymnasium.make("pql/...")``."""

import inspect
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from pql.config import Config
from pql.contract.env import find_factory
from pql.contract.optional import Renderable, supports
from pql.errors import ConfigError
from pql.run.environment import build_env, task_kwargs
from pql.types import Obs
from pql.wrap.rows import SameStep, clamped, to_device, to_host
from pql.wrap.to_gymnasium import action_space, box


class SingleEnv(gymnasium.Env):
    """The task of ``config`` with one environment, in gymnasium's single form.

    Observations are the group ``policy``; other groups, such as a critic's privileged one, are in ``info`` by name,
    with the task's log terms. The time limit is the task's own, reported as ``truncated``.

    Args:
        config: as ``compose`` returns it; ``num_envs`` is not read.
        render_mode: ``rgb_array`` or None.
        kwargs: keywords of the simulator in addition to those of the task's preset.

    Raises:
        ConfigError: an unknown keyword, or a ``render_mode`` that the task does not have.
    """

    def __init__(self, config: Config, render_mode: str | None = None, kwargs: dict[str, Any] | None = None):
        kwargs = dict(kwargs or {})
        factory = find_factory(config.task.name)
        if render_mode not in (None, "rgb_array"):
            raise ConfigError("render_mode", render_mode, "rgb_array, or none")
        if render_mode is not None and "render_mode" in inspect.signature(factory).parameters:
            kwargs["render_mode"] = render_mode
        named = {k: kwargs.pop(k) for k in ("game", "model") if k in kwargs}
        task = replace(config.task, **named, kwargs={**config.task.kwargs, **kwargs})
        config = replace(config, task=task)
        task_kwargs(config)  # refuses a keyword given twice
        self.env = build_env(config, num_envs=1)
        self._rows = SameStep(self.env)
        spec = self.env.spec
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / spec.info.get("dt", 1 / 30))}
        self.observation_space = box(spec.obs["policy"])
        self.action_space = action_space(spec)
        self._begun = False  # True if the last step's row already began the next episode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode: (observation, info). ``seed`` seeds every draw that follows."""
        super().reset(seed=seed)
        if options:
            raise ConfigError("options", options, "none: this environment has no options of a reset")
        if seed is not None or not self._begun:
            self._rows.reset(seed)
        self._begun = False
        obs, info = _first(self._rows.obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step with ``action`` [A], clamped, or an integer; the last step returns the final observation."""
        batch = np.asarray(action)[None]
        row = self._rows.step(clamped(self.env, to_device(batch, self.env), from_start=True))
        self._begun = done = bool(row.done)
        obs, info = _first(row.final_obs if done else row.obs)
        log = {name: float(value[0]) for name, value in row.log.items()}
        truncated = bool(row.time_out)
        return obs, float(row.reward), done and not truncated, truncated, {**log, **info}

    def render(self) -> np.ndarray | None:
        """Return an image [H, W, 3] uint8 of the current state; None without ``render_mode``."""
        if self.render_mode is None:
            return None
        if not supports(self.env, Renderable):
            raise ConfigError("render_mode", self.render_mode, f"none: {self.env.spec.name} renders no images")
        return self.env.render(0)

    def close(self) -> None:
        self.env.close()


def _first(obs: Obs) -> tuple[Any, dict[str, Any]]:
    """Split observations [1, ...] into that of the group ``policy`` and a dict of the other groups, as arrays."""
    groups = {name: to_host(value[0]) for name, value in obs.items()}
    return groups.pop("policy"), groups
