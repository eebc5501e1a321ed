"""Domain randomisation: masses, friction and gains per episode, pushes, noisy and delayed observations.

All values are drawn from the environment's generator, for any number of rows, and none is read on the host. So it is
the same on both engines, repeats with the seed and resumes. With a curriculum, an episode's ``level`` (0..1) scales all
of it: level 0 is the nominal model, level 1 the configured ranges.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import mujoco
import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.envs.mujoco.engine import Engine, Rows
from pql.envs.mujoco.task import Draw, Robot
from pql.errors import ConfigError, nearest
from pql.types import Obs

FACTORS = {
    "mass": ("body_mass", "body_inertia"),
    "friction": ("geom_friction",),
    "gain": ("actuator_gainprm", "actuator_biasprm"),
}
"""Settings that are factors on fields of the model; these fields then have one value per simulation."""


@dataclass(frozen=True)
class Randomize:
    """Domain randomisation; by default nothing is randomised.

    Attributes:
        mass: factor on each body's mass and inertia, drawn per body and episode.
        friction: factor on all friction coefficients, drawn per episode.
        gain: factor on each actuator's force (for a servo, on stiffness and damping alike), drawn per actuator and
            episode; actuators at a site push from outside, are not part of the robot, and stay nominal.
        push: m/s; at random times each horizontal velocity of the base changes by up to this.
        push_interval: mean seconds between pushes.
        obs_noise: standard deviation of the noise added to the ``policy`` observations.
        obs_delay: env steps by which the ``policy`` observations are delayed, drawn per episode; the first observation
            is returned until later ones arrive.
        observe: add the group ``privileged``: what the episode has drawn, the factors and the delay.
        nominal: draw nothing, as at level 0 of a curriculum; ``privileged`` remains.
    """

    mass: tuple[float, float] = (1.0, 1.0)
    friction: tuple[float, float] = (1.0, 1.0)
    gain: tuple[float, float] = (1.0, 1.0)
    push: float = 0.0
    push_interval: float = 5.0
    obs_noise: float = 0.0
    obs_delay: tuple[int, int] = (0, 0)
    observe: bool = False
    nominal: bool = False

    @classmethod
    def parse(cls, settings: Mapping[str, Any] | None) -> "Randomize":
        """Build from keywords of the configuration. Raises ``ConfigError``: an unknown name, or a value out of
        range."""
        known = [f.name for f in fields(cls)]
        given: dict[str, Any] = {}
        for name, value in (settings or {}).items():
            if name not in known:
                raise ConfigError(f"randomize.{name}", value, f"one of {', '.join(known)}{nearest(name, known)}")
            if name in (*FACTORS, "obs_delay"):
                given[name] = _range(name, value)
            elif name in ("observe", "nominal"):
                if not isinstance(value, bool):
                    raise ConfigError(f"randomize.{name}", value, "true or false")
                given[name] = value
            else:
                given[name] = amount(f"randomize.{name}", value, zero=name != "push_interval")
        if "push_interval" in given and not given.get("push"):
            raise ConfigError("randomize.push_interval", given["push_interval"], "randomize.push above 0 as well")
        parsed = cls(**given)
        if parsed.observe and not (parsed.factors or parsed.obs_delay[1]):
            raise ConfigError("randomize.observe", True, f"{', '.join(FACTORS)} or obs_delay to be observed as well")
        return parsed

    @property
    def factors(self) -> dict[str, tuple[float, float]]:
        """Return the ranges of the ``FACTORS`` that are configured."""
        return {name: getattr(self, name) for name in FACTORS if getattr(self, name) != (1.0, 1.0)}

    def group(self, load: Callable[[], mujoco.MjModel]) -> dict[str, ObsSpec]:
        """Return the group ``privileged`` if there is one. Its size depends on the model, which ``load`` returns."""
        if not self.observe:
            return {}
        sizes = widths(load())
        return {"privileged": ObsSpec((sum(sizes[name] for name in self.factors) + (self.obs_delay[1] > 0),))}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the model's fields that need one value per simulation."""
        return tuple(field for name in self.factors for field in FACTORS[name])


def amount(setting: str, value: Any, zero: bool = True) -> float:
    """Return ``value`` as a finite number that is not negative, and not 0 unless ``zero``. Raises ``ConfigError``: it
    is not one."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise ConfigError(setting, value, f"a number, {'at least' if zero else 'above'} 0")
    return float(value)


def _range(name: str, value: Any) -> tuple[Any, Any]:
    kind, least, what = (int, 0, "whole numbers, 0 <= low") if name == "obs_delay" else (float, 1e-3, "0.001 <= low")
    good = isinstance(value, list | tuple) and len(value) == 2 and not any(isinstance(v, bool) for v in value)
    good = good and all(isinstance(v, int | float) and math.isfinite(v) and v == kind(v) for v in value)
    good = good and least <= value[0] <= value[1]
    if not good:
        raise ConfigError(f"randomize.{name}", value, f"[low, high], {what} <= high")
    return kind(value[0]), kind(value[1])


class Randomizer:
    """Carries out a :class:`Randomize` on an engine.

    Args:
        settings: what to randomise; its ``parameters`` are the engine's.
        robot: the nominal model.
        engine: the engine that holds the simulations.
        draw: the environment's random numbers.
        dt: seconds per env step.
        obs_size: size of the ``policy`` observations; 0 if they are not vectors.
    Raises:
        ConfigError: a setting that this model or task does not support.
    """

    def __init__(self, settings: Randomize, robot: Robot, engine: Engine, draw: Draw, dt: float, obs_size: int):
        self.settings, self._engine, self._draw = settings, engine, draw
        self._nominal = {name: robot.tensor(getattr(robot.model, name)) for name in settings.parameters}
        self._chance = min(1.0, dt / settings.push_interval)
        self._dofs = base_dofs(robot.model) if settings.push else []
        model, n = robot.model, len(engine.fields["qpos"])
        check(settings, model, bool(self._dofs), obs_size > 0)
        sizes, there, dtype = widths(model), robot.device, robot.dtype
        ones = {name: torch.ones(n, sizes[name], device=there, dtype=dtype) for name in settings.factors}
        self.factors = ones  # of the current episodes
        self._own = torch.tensor(model.actuator_trntype != mujoco.mjtTrn.mjTRN_SITE.value, device=robot.device)
        high = settings.obs_delay[1]
        self._delay = torch.zeros(n, dtype=torch.int64, device=robot.device)
        self._past = torch.zeros(n, high + 1, obs_size if high else 0, device=robot.device)
        self._now = torch.zeros((), dtype=torch.int64, device=robot.device)  # of the newest observation in ``_past``
        self._every = torch.arange(n, device=robot.device)

    def begin(self, rows: Rows, level: Tensor) -> None:
        """Draw for the episodes that begin in ``rows``, at ``level`` [K]. Call it before their states are set."""
        level = self._allowed(level)
        for name, (low, high) in self.settings.factors.items():
            width = self.factors[name].shape[1]
            drawn = 1.0 + level[:, None] * (self._draw.uniform(low, high, rows.count, width) - 1.0)
            if name == "gain":
                drawn = torch.where(self._own, drawn, 1.0)
            self.factors[name].copy_(rows.put(self.factors[name], drawn))
        if self.settings.factors:
            self._apply(rows)
        low, high = self.settings.obs_delay
        if high:
            drawn = self._draw.uniform(low, high + 1, rows.count).floor_().clamp_(max=high)
            self._delay.copy_(rows.put(self._delay, (level * drawn).round().long()))

    def _apply(self, rows: Rows) -> None:
        """Set the engine's parameters from the factors."""
        new = {}
        for name, factor in self.factors.items():
            for field in FACTORS[name]:
                nominal = self._nominal[field]
                new[field] = nominal * factor.view(*factor.shape, *(1,) * (nominal.ndim - 1))
        self._engine.set_parameters(rows, new)

    def push(self, level: Tensor) -> None:
        """Apply random pushes before a physics step. ``level`` [N]: curriculum level."""
        if not self._dofs:
            return
        n, velocity, level = len(level), self._engine.fields["qvel"], self._allowed(level)
        hit = self._draw.uniform(0.0, 1.0, n) < self._chance
        size = self.settings.push * level * hit
        for dof in self._dofs:
            velocity[:, dof] += size * self._draw.uniform(-1.0, 1.0, n)

    def sense(self, obs: Obs, level: Tensor) -> Obs:
        """Delay the observations [N, ...] after a step and add noise. ``level`` [N]: curriculum level."""
        seen = obs["policy"]
        if self.settings.obs_delay[1]:
            self._now.copy_((self._now + 1) % self._past.shape[1])
            self._past.index_copy_(1, self._now[None], seen[:, None])
            seen = self._past[self._every, (self._now - self._delay) % self._past.shape[1]]
        return {**obs, "policy": self._noisy(seen, level), **self._shown()}

    def sense_first(self, rows: Rows, obs: Obs, level: Tensor) -> Obs:
        """Add noise to the first observations of episodes, [K, ...], and restart their delay buffers."""
        seen = obs["policy"]
        if self.settings.obs_delay[1]:
            self._past.copy_(rows.put(self._past, seen[:, None].expand(-1, self._past.shape[1], -1)))
        return {**obs, "policy": self._noisy(seen, level), **self._shown(rows)}

    def _shown(self, rows: Rows | None = None) -> Obs:
        """Return what has been drawn for all environments, or for ``rows``, as a group of observations if wanted."""
        if not self.settings.observe:
            return {}
        drawn = [*self.factors.values(), *([self._delay[:, None]] if self.settings.obs_delay[1] else [])]
        return {"privileged": torch.cat([(rows.take(one) if rows else one).float() for one in drawn], 1)}

    def _allowed(self, level: Tensor) -> Tensor:
        return torch.zeros_like(level) if self.settings.nominal else level

    def _noisy(self, seen: Tensor, level: Tensor) -> Tensor:
        if not self.settings.obs_noise:
            return seen
        noise, level = self._draw.normal(self.settings.obs_noise, *seen.shape), self._allowed(level)
        return seen + (level[:, None] * noise).to(seen)

    def state_dict(self) -> dict[str, Any]:
        return {
            "factors": {name: value.clone() for name, value in self.factors.items()},
            "delay": self._delay.clone(),
            "past": self._past.clone(),
            "now": self._now.clone(),
        }

    def load_state_dict(self, state: dict[str, Any], everyone: Rows) -> None:
        for own, saved in ((self.factors[name], value) for name, value in state["factors"].items()):
            own.copy_(saved)
        self._delay.copy_(state["delay"])
        self._past.copy_(state["past"])
        self._now.fill_(state["now"])  # an int in checkpoints of before 0.3
        if self.settings.factors:
            self._apply(everyone)


def widths(model: mujoco.MjModel) -> dict[str, int]:
    """Return how many values of each factor an episode draws."""
    return {"mass": model.nbody, "friction": 1, "gain": model.nu}


def check(settings: Randomize, model: mujoco.MjModel, has_base: bool, has_vector: bool) -> None:
    """Raise ``ConfigError`` for settings that the model or the task does not support."""
    if settings.push and not has_base:
        raise ConfigError("randomize.push", settings.push, "0: this robot's base does not move along the ground")
    if settings.obs_noise and not has_vector:
        raise ConfigError("randomize.obs_noise", settings.obs_noise, "0: this task's observations are not vectors")
    if settings.obs_delay[1] and not has_vector:
        late = list(settings.obs_delay)
        raise ConfigError("randomize.obs_delay", late, "[0, 0]: this task's observations are not vectors")
    affine = (mujoco.mjtGain.mjGAIN_FIXED.value, mujoco.mjtGain.mjGAIN_AFFINE.value)
    if "gain" in settings.factors and not all(kind in affine for kind in model.actuator_gaintype):
        raise ConfigError("randomize.gain", list(settings.gain), "[1, 1]: this robot has actuators such as muscles")


def base_dofs(model: mujoco.MjModel) -> list[int]:
    """Return the degrees of freedom along which the robot's first body moves over the ground."""
    found = []
    for joint in range(model.njnt):
        if model.jnt_bodyid[joint] != 1:
            continue
        kind, first = model.jnt_type[joint], int(model.jnt_dofadr[joint])
        if kind == mujoco.mjtJoint.mjJNT_FREE:
            found += [first, first + 1]
        elif kind == mujoco.mjtJoint.mjJNT_SLIDE and abs(model.jnt_axis[joint][2]) < 0.5:
            found.append(first)
    return found
