"""Ball balance as batched torch code, by the rules of ``pql/envs/classic.py``."""

import math

import torch
from torch import Tensor

from pql.envs import draw
from pql.envs.classic import TorchEnv, Transition, times
from pql.envs.draw import Drawn


class BallBalance(Drawn, TorchEnv):
    """Catch a falling ball on a plate carried by three legs, and hold it at rest in the middle.

    After IsaacGymEnvs' BallBalance (obs 24, action 3), written as rigid-body equations: a solid sphere in 3D with
    spring-damper contact along the plate's normal and Coulomb friction (mu = 0.8), semi-implicit Euler at 200 Hz,
    control at 50 Hz, 500 steps. Differences from Isaac's task: actions are the legs' target heights (Isaac: increments
    of joint targets), legs follow with a lag of 0.1 s and do not feel the ball, there are no force sensors (12 of
    Isaac's 24 observations), the reward's distance is scaled, and the episode ends where the ball leaves the plate's
    circle (Isaac: where it falls below a height).

    obs [N, 12]: leg heights / 0.05 m, ball position (m, from the middle of the level plate), ball velocity (m/s),
    spin times radius (m/s). action [N, 3]: leg targets / 0.05 m, at 90, 210 and 330 degrees. reward = centred * calm
    = 1 / (1 + distance / 0.1 m) * 1 / (1 + speed / 1 m/s), at most 1, distance to rest in the middle.
    """

    name, obs_size, action_size, state_size, time_limit = "ball_balance", 12, 3, 12, 500
    terms = ("centred", "calm")
    capturable = True
    gravity, ball, plate, leg_radius, leg_range, lag = 9.81, 0.05, 0.5, 0.4, 0.05, 0.1
    action_limit = leg_range
    view, paint = ((-0.7, -0.5), (0.7, 0.5)), staticmethod(draw.ball_balance)
    stiffness, damping, friction, dt, substeps = 1500.0, 39.0, 0.8, 0.02, 4

    def setup(self) -> None:
        turn = torch.tensor([90.0, 210.0, 330.0], device=self.spec.device).deg2rad()
        slope = 2 / (3 * self.leg_radius)
        # Leg heights [N, 3] @ plane [3, 3] = the plate's height in the middle and its slopes along x and y.
        self._plane = torch.stack((torch.full_like(turn, 1 / 3), slope * turn.cos(), slope * turn.sin()), 1)
        self._up = torch.tensor([0.0, 0.0, 1.0], device=self.spec.device)

    def draw(self) -> Tensor:
        unit = self._rand(5)
        away, turn = 0.3 * unit[:, 0].sqrt(), 2 * math.pi * unit[:, 1]
        still = torch.zeros_like(away)
        position = (away * turn.cos(), away * turn.sin(), self.ball + 0.1 * unit[:, 2])
        velocity = (0.6 * unit[:, 3] - 0.3, 0.6 * unit[:, 4] - 0.3, still)
        return torch.stack((still, still, still, *position, *velocity, still, still, still), 1)

    def observe(self, state: Tensor) -> Tensor:
        legs, position, velocity, spin = state.split(3, 1)
        return torch.cat((legs / self.leg_range, position, velocity, spin * self.ball), 1)

    def substep(self, state: Tensor, target: Tensor, dt: float) -> Tensor:
        """Advance legs and ball by ``dt`` seconds: state [N, 12] (legs, position, velocity, spin), target [N, 3] in
        metres."""
        legs, position, velocity, spin = state.split(3, 1)
        moved = target + (legs - target) * math.exp(-dt / self.lag)
        height, slope = times(moved, self._plane).split((1, 2), 1)
        rise, twist = times((moved - legs) / dt, self._plane).split((1, 2), 1)
        flat = position[:, :2]
        normal = torch.cat((-slope, torch.ones_like(height)), 1)
        normal = normal / normal.norm(dim=1, keepdim=True)
        above = (position[:, 2:] - height - (slope * flat).sum(1, keepdim=True)) * normal[:, 2:]
        gap = above - self.ball
        relative = velocity - (rise + (twist * flat).sum(1, keepdim=True)) * self._up
        closing = (relative * normal).sum(1, keepdim=True)
        press = (-self.stiffness * gap - self.damping * closing).clamp(min=0) * (gap < 0)
        arm = -self.ball * normal  # from the ball's centre to the contact
        slip = relative - closing * normal + torch.linalg.cross(spin, arm)
        speed = slip.norm(dim=1, keepdim=True)
        # Removing 2/7 of the slip makes a solid sphere roll, so friction is limited to that per step.
        drag = torch.minimum(self.friction * press, 2 / 7 * speed / dt)
        push = -drag * slip / (speed + 1e-9)
        velocity = velocity + dt * (press * normal + push - self.gravity * self._up)
        spin = spin + dt * torch.linalg.cross(arm, push) / (0.4 * self.ball**2)
        return torch.cat((moved, position + dt * velocity, velocity, spin), 1)

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        for _ in range(self.substeps):
            state = self.substep(state, action * self.leg_range, self.dt / self.substeps)
        position, velocity = state[:, 3:6], state[:, 6:9]
        distance = (position - self.ball * self._up).norm(dim=1)
        log = {"centred": 1 / (1 + distance / 0.1), "calm": 1 / (1 + velocity.norm(dim=1))}
        fell = position[:, :2].norm(dim=1) > self.plate
        return Transition(state, log["centred"] * log["calm"], fell, log)
