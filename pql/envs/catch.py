"""Catch: a pixel task that a small network solves in seconds, on any device. Test task for algorithms with discrete
actions and image observations."""

import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.envs import draw
from pql.envs.classic import TorchEnv, Transition
from pql.envs.draw import Drawn


class Catch(Drawn, TorchEnv):
    """A ball falls one row a step; the paddle on the bottom row must be under it when it arrives.

    obs [N, 2, 8, 8] uint8: the current frame and the previous one (``stack=2``; zeros before the episode), ball and
    paddle drawn as pixels of 255. The ball moves one column per step and bounces off the walls, or (in one episode of
    four) falls straight down; a single frame does not show which. action [N] int64: 0 left, 1 stay, 2 right. reward:
    1 if the ball is caught, else -1, on the seventh and last row of an episode, which terminates; 0 before.

    The best return is 1 and always reachable: the paddle starts in the middle and sees the drift from its second
    action on. Random actions give about -0.73; moving below the ball's latest position gives about -0.5.

    Simplified from Catch in Mnih et al. 2014 (Recurrent Models of Visual Attention), with a drift added.
    """

    name, action_size, discrete, state_size = "catch", 3, True, 5
    size = 8  # rows and columns
    time_limit = size - 1
    terms = ("success",)  # 1 where the ball is caught
    capturable = True
    dt = 0.1
    view, paint = ((-1.0, -1.0), (size, size)), staticmethod(draw.catch)

    @classmethod
    def obs_spec(cls) -> ObsSpec:
        return ObsSpec((2, cls.size, cls.size), torch.uint8, stack=2)

    def draw(self) -> Tensor:
        """Draw phase (the ball's column on a circle: there and back), drift (0 or 1), row, paddle, previous paddle."""
        turn, straight = self._rand(2).unbind(1)
        phase = (turn * 2 * (self.size - 1)).floor()
        middle = torch.full_like(phase, self.size // 2)
        return torch.stack((phase, (straight >= 0.25).float(), torch.zeros_like(phase), middle, middle), 1)

    def observe(self, state: Tensor) -> Tensor:
        phase, drift, row, paddle, before = state.unbind(1)
        phases, rows = torch.stack((phase - drift, phase), 1), torch.stack((row - 1, row), 1)  # [N, 2]: before, now
        ball = rows * self.size + self.column(phases)
        bottom = torch.stack((before, paddle), 1) + (self.size - 1) * self.size
        cells = torch.arange(self.size**2, device=state.device)
        lit = (cells == ball.unsqueeze(2)) | (cells == bottom.unsqueeze(2))  # [N, 2, cells]
        lit &= (rows >= 0).unsqueeze(2)  # no frame before the episode
        return lit.to(torch.uint8).mul_(255).view(-1, 2, self.size, self.size)

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        phase, drift, row, paddle, _ = state.unbind(1)
        moved = (paddle + action - 1).clamp(0, self.size - 1)
        phase, row = phase + drift, row + 1
        landed = row >= self.size - 1
        caught = landed & (self.column(phase) == moved)
        success = caught.float()
        reward = torch.where(landed, 2 * success - 1, 0.0)
        return Transition(torch.stack((phase, drift, row, moved, paddle), 1), reward, landed, {"success": success})

    def column(self, phase: Tensor) -> Tensor:
        """Return the position, 0 .. size - 1, of a ball that bounces between both ends; any shape."""
        far = self.size - 1
        return far - (phase.remainder(2 * far) - far).abs()

    def optimal_action(self) -> Tensor:
        """Return the moves [N] int64 towards the column where the ball will land."""
        phase, drift, row, paddle, _ = self._state.unbind(1)
        landing = self.column(phase + drift * (self.size - 1 - row))
        return (landing - paddle).sign().long() + 1
