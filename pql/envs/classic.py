"""Classic control as batched torch code: pendulum, cart-poles; the base of tasks in torch. Any device, any number of
environments.

Nothing here waits for the device: shapes are static, resets are masked, and every step draws start states for all rows,
so the random stream does not depend on which episodes end. The state stays at fixed addresses and is written in place,
so that ``step`` can be captured in a CUDA graph (``Capturable``).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.envs import draw
from pql.envs.draw import Drawn
from pql.errors import ConfigError
from pql.types import Obs, Step


class Transition(NamedTuple):
    """Result of one step of the dynamics, before time limits and resets."""

    state: Tensor  # [N, S]
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool
    log: dict[str, Tensor]  # name -> [N] float32


def positive(setting: str, value: int) -> int:
    """Return ``value`` if it is a whole number of at least 1, else raise ``ConfigError`` naming ``setting``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(setting, value, "a whole number, at least 1")
    return value


def times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply ``rows`` [..., I] by ``matrix`` [..., I, O] in the full precision of their type. Products of float32
    matrices may be rounded to TF32 on CUDA and to bfloat16 on some CPUs (``placement.matmul``): too coarse for physics.
    """
    return (rows.unsqueeze(-1) * matrix).sum(-2)


class TorchEnv:
    """Step counter, same-step autoreset, seeding and exact resume for dynamics written in torch.

    A subclass defines the class constants and three functions: ``draw`` (start states for all rows), ``observe``
    and ``advance``. Observations returned are new tensors each step, and ``final_obs`` is valid on every row.

    Args:
        num_envs: N.
        device: device of the state.
        max_episode_steps: time limit in steps; None: the task's (``time_limit``).
        stagger: start the first episodes at random points of the time limit, so that not all environments are
            truncated on the same step.
    Raises:
        ConfigError: a size that is not a positive whole number.
    """

    name: ClassVar[str]
    obs_size: ClassVar[int]
    action_size: ClassVar[int]  # dimensions, or the number of actions if ``discrete``
    discrete: ClassVar[bool] = False
    action_limit: ClassVar[float] = 1.0  # an action of 1 in the task's units
    state_size: ClassVar[int]
    time_limit: ClassVar[int]
    terms: ClassVar[tuple[str, ...]]
    capturable: ClassVar[bool] = False  # ``advance``, ``draw``, ``observe`` follow the rules of ``Capturable``
    dt: ClassVar[float] = 0.05  # seconds per step

    def __init__(
        self,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        stagger: bool = False,
    ):
        self.spec = self.describe(num_envs, device, max_episode_steps, stagger)
        device = self.spec.device
        self.generator = torch.Generator(device)
        self._limit = self.spec.max_episode_steps or self.time_limit
        self._stagger = stagger
        self._state = torch.zeros(num_envs, self.state_size, device=device)
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._true = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.setup()

    def setup(self) -> None:
        """Make constants on the device; called when the environment is built."""

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators of all random draws of a step."""
        return [self.generator]

    @classmethod
    def describe(
        cls,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        stagger: bool = False,
    ) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments."""
        limit = cls.time_limit if max_episode_steps is None else max_episode_steps
        return EnvSpec(
            name=cls.name,
            num_envs=positive("num_envs", num_envs),
            obs={"policy": cls.obs_spec()},
            action=Discrete(cls.action_size) if cls.discrete else Box.within(cls.action_size, cls.action_limit),
            device=torch.device(device),
            max_episode_steps=positive("max_episode_steps", limit),
            final_obs="always",
            log=cls.terms,
            info={"dt": cls.dt, "truncates_at_limit": True},
        )

    @classmethod
    def obs_spec(cls) -> ObsSpec:
        """Return the spec of the observations of ``observe``."""
        return ObsSpec((cls.obs_size,))

    def draw(self) -> Tensor:
        """Draw start states for all rows, [N, S], from ``self.generator``."""
        raise NotImplementedError

    def observe(self, state: Tensor) -> Tensor:
        """Return the observation of states [N, S] as a new tensor, [N, D] or as in ``obs_spec``."""
        raise NotImplementedError

    def shown(self, state: Tensor) -> Obs:
        """Return all observation groups of states [N, S], new tensors of [N, ...]."""
        return {"policy": self.observe(state)}

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        """Advance ``state`` one control step by ``action`` ([N, A] in [-1, 1], or [N] int64); write to neither."""
        raise NotImplementedError

    def uniform(self, width: int) -> Tensor:
        """Draw [N, width] uniform in [-1, 1)."""
        return self._rand(width) * 2 - 1

    def _rand(self, width: int) -> Tensor:
        return torch.rand(self.spec.num_envs, width, device=self.spec.device, generator=self.generator)

    @torch.no_grad()
    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self.generator.manual_seed(seed)
        self._state.copy_(self.draw())
        self._steps.zero_()
        if self._stagger:
            self._steps.copy_((self._rand(1)[:, 0] * self._limit).long().clamp(max=self._limit - 1))
        return self.shown(self._state)

    @torch.no_grad()
    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        self._state.copy_(torch.where(mask[:, None], self.draw(), self._state))
        self._steps.masked_fill_(mask, 0)
        return self.shown(self._state)

    @torch.no_grad()
    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A] or [N]."""
        state, reward, terminated, log = self.advance(self._state, action if self.discrete else action.clamp(-1, 1))
        self._steps += 1
        truncated = (self._steps >= self._limit) & ~terminated
        done = terminated | truncated
        ends = self.shown(state)
        self._state.copy_(torch.where(done[:, None], self.draw(), state))
        self._steps.masked_fill_(done, 0)
        seen, yes = self.shown(self._state), self._true
        return Step(seen, reward, terminated, truncated, done, ends, yes, yes, log)

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything the next step depends on."""
        generator = self.generator.get_state()
        return {"state": self._state.clone(), "steps": self._steps.clone(), "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.copy_(state["state"])
        self._steps.copy_(state["steps"])
        self.generator.set_state(state["generator"].cpu())


def rk4(derivative: Callable[[Tensor], Tensor], state: Tensor, dt: float) -> Tensor:
    """Return ``state`` [N, S] after one classical Runge-Kutta step of ``d state / dt = derivative(state)``."""
    k1 = derivative(state)
    k2 = derivative(state + 0.5 * dt * k1)
    k3 = derivative(state + 0.5 * dt * k2)
    k4 = derivative(state + dt * k3)
    return state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def wrap_angle(angle: Tensor) -> Tensor:
    """Wrap angles of any shape, in radians, to [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


class Pendulum(Drawn, TorchEnv):
    """Torque-limited pendulum: gymnasium's Pendulum-v1, equation for equation.

    obs [N, 3]: cos and sin of the angle (0 is upright, rad), angular velocity (rad/s, within 8). action [N, 1]:
    torque / 2 N m. reward = -(angle^2 + 0.1 velocity^2 + 0.001 torque^2) of the state before the step, from -16.3 to 0.
    Never terminates; 200 steps of 0.05 s.

    Args:
        velocity: False: obs is [N, 2], without the velocity, and a group ``critic`` [N, 3] has it.
    """

    name, obs_size, action_size, state_size, time_limit = "pendulum", 3, 1, 2, 200
    terms = ("angle", "speed", "torque")
    capturable = True
    gravity, mass, length, dt, max_torque, max_speed = 10.0, 1.0, 1.0, 0.05, 2.0, 8.0
    action_limit = max_torque
    view, paint = ((-1.3, -1.15), (1.3, 1.15)), staticmethod(draw.pendulum)

    def __init__(
        self,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        stagger: bool = False,
        velocity: bool = True,
    ):
        super().__init__(num_envs, device, max_episode_steps, stagger)
        self.velocity = velocity
        if not velocity:
            self.spec = self.describe(num_envs, device, max_episode_steps, stagger, velocity=False)

    @classmethod
    def describe(cls, *args: Any, velocity: bool = True, **kwargs: Any) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments."""
        spec = super().describe(*args, **kwargs)
        return spec if velocity else replace(spec, obs={"policy": ObsSpec((2,)), "critic": ObsSpec((3,))})

    def draw(self) -> Tensor:
        unit = self.uniform(2)
        return torch.stack((unit[:, 0] * math.pi, unit[:, 1]), 1)

    def observe(self, state: Tensor) -> Tensor:
        angle, speed = state.unbind(1)
        return torch.stack((angle.cos(), angle.sin(), speed), 1)

    def shown(self, state: Tensor) -> Obs:
        obs = self.observe(state)
        return {"policy": obs} if self.velocity else {"policy": obs[:, :2].clone(), "critic": obs}

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        angle, speed = state.unbind(1)
        torque = action[:, 0] * self.max_torque
        log = {"angle": -(wrap_angle(angle) ** 2), "speed": -0.1 * speed**2, "torque": -0.001 * torque**2}
        pull = 1.5 * self.gravity / self.length * angle.sin() + 3 / (self.mass * self.length**2) * torque
        speed = (speed + pull * self.dt).clamp(-self.max_speed, self.max_speed)
        # Wrapped, unlike gymnasium's: the sine of a large float32 angle would lose digits.
        angle = wrap_angle(angle + speed * self.dt)
        reward = log["angle"] + log["speed"] + log["torque"]
        return Transition(torch.stack((angle, speed), 1), reward, torch.zeros_like(self._true), log)


class CartAndPole(Drawn, TorchEnv):
    """State and dynamics of both cart-poles, without friction; the pole is a uniform rod. Source: Florian (2007),
    "Correct equations for the dynamics of the cart-pole system"."""

    state_size, time_limit, dt = 4, 500, 0.02
    gravity, mass_cart, mass_pole, half_length, rail = 9.8, 1.0, 0.1, 0.5, 2.4
    view, paint = ((-3.45, -1.1), (3.45, 1.1)), staticmethod(draw.cartpole)

    def derivative(self, state: Tensor, force: Tensor) -> Tensor:
        """Return d/dt of (x, x_dot, angle, angle_dot), [N, 4], under ``force`` [N] in newtons."""
        _, x_dot, angle, angle_dot = state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        total, moment = self.mass_cart + self.mass_pole, self.mass_pole * self.half_length
        push = (force + moment * angle_dot**2 * sin) / total
        angle_acc = (self.gravity * sin - cos * push) / (self.half_length * (4 / 3 - self.mass_pole * cos**2 / total))
        return torch.stack((x_dot, push - moment * angle_acc * cos / total, angle_dot, angle_acc), 1)


class CartpoleSwingup(CartAndPole):
    """Cart-pole, started hanging: swing the pole up and balance it near the middle of the rail.

    Integrated with RK4 at 50 Hz. obs [N, 5]: cart position (m), cos and sin of the pole's angle (0 is upright), cart
    velocity (m/s), pole velocity (rad/s). action [N, 1]: force / 10 N.
    reward = upright * centred * calm * effort, each in [0, 1], of the state after the step; at most 1 per step.
    Terminates where the cart leaves the rail (2.4 m to either side); 500 steps, that is 10 s.
    """

    name, obs_size, action_size = "cartpole_swingup", 5, 1
    terms = ("upright", "centred", "calm", "effort")
    capturable = True
    action_limit = max_force = 10.0

    def draw(self) -> Tensor:
        start = self.uniform(4) * 0.1
        start[:, 2] += math.pi
        return start

    def observe(self, state: Tensor) -> Tensor:
        x, x_dot, angle, angle_dot = state.unbind(1)
        return torch.stack((x, angle.cos(), angle.sin(), x_dot, angle_dot), 1)

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        force = action[:, 0] * self.max_force
        state = rk4(lambda s: self.derivative(s, force), state, self.dt)
        x, x_dot, angle, angle_dot = state.unbind(1)
        log = {
            "upright": (1 + angle.cos()) / 2,
            "centred": (1 + torch.exp(-(x**2))) / 2,
            "calm": (1 + torch.exp(-((angle_dot / 4) ** 2))) / 2,
            "effort": 1 - 0.1 * action[:, 0] ** 2,
        }
        reward = log["upright"] * log["centred"] * log["calm"] * log["effort"]
        state = torch.stack((x, x_dot, wrap_angle(angle), angle_dot), 1)
        return Transition(state, reward, x.abs() > self.rail, log)


class Cartpole(CartAndPole):
    """Cart-pole, started upright: gymnasium's CartPole-v1, equation for equation. Discrete actions.

    obs [N, 4]: cart position (m), cart velocity (m/s), pole angle (0 is upright, rad), pole velocity (rad/s).
    action [N] int64: 0 pushes the cart left, 1 right, with 10 N. reward = 1 on every row. Terminates where the cart is
    2.4 m from the middle or the pole 12 degrees from upright; 500 steps of 0.02 s (Euler).
    """

    name, obs_size, action_size = "cartpole", 4, 2
    terms, discrete = (), True
    capturable = True
    force, tilt = 10.0, math.radians(12)

    def draw(self) -> Tensor:
        return self.uniform(4) * 0.05

    def observe(self, state: Tensor) -> Tensor:
        return state.clone()

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        state = state + self.dt * self.derivative(state, (2 * action - 1) * self.force)
        fell = (state[:, 0].abs() > self.rail) | (state[:, 2].abs() > self.tilt)
        return Transition(state, torch.ones_like(state[:, 0]), fell, {})
