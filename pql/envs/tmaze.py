"""T-maze: a task that cannot be solved without memory, on any device. Test task for recurrent agents."""

import torch
from torch import Tensor

from pql.contract.env import EnvSpec
from pql.envs import draw
from pql.envs.classic import TorchEnv, Transition, positive
from pql.envs.draw import Drawn


class TMaze(Drawn, TorchEnv):
    """A sign in the first cell shows which way to turn at the far end of a corridor, where it is no longer visible.

    obs [N, 2]: the sign (1 up, -1 down; 0 beyond the first cell), and 1 at the junction. action [N] int64: 0 forward,
    1 up, 2 down. Forward moves along the corridor, up and down turn at the junction; elsewhere an action has no effect.
    reward: 1 for the turn that the sign showed, else 0; turning terminates.

    The best return is 1; without a memory it is .5, by guessing.

    Simplified from the T-maze in Bakker 2001 (Reinforcement Learning with Long Short-Term Memory).

    Args:
        length: steps from the first cell to the junction.
        max_episode_steps: None: four times the shortest path.
        num_envs, device, stagger: see :class:`~pql.envs.classic.TorchEnv`.
    """

    name, obs_size, action_size, discrete, state_size = "tmaze", 2, 3, True, 2
    terms = ("success",)  # 1 where the turn is correct
    capturable = True
    dt = 0.1
    paint = staticmethod(draw.tmaze)

    def __init__(
        self,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        stagger: bool = False,
        length: int = 10,
    ):
        limit = self.describe(num_envs, device, max_episode_steps, stagger, length).max_episode_steps
        super().__init__(num_envs, device, limit, stagger)
        self.length, self.view = length, ((-1.0, -2.0), (length + 1.0, 2.0))

    @classmethod
    def describe(
        cls,
        num_envs: int = 64,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        stagger: bool = False,
        length: int = 10,
    ) -> EnvSpec:
        """Return the ``EnvSpec`` of an environment with these arguments."""
        limit = 4 * (positive("length", length) + 1) if max_episode_steps is None else max_episode_steps
        return super().describe(num_envs, device, limit, stagger)

    def draw(self) -> Tensor:
        """Draw sign (1 or -1) and cell."""
        sign = torch.where(self.uniform(1) < 0, -1.0, 1.0)
        return torch.cat((sign, torch.zeros_like(sign)), 1)

    def observe(self, state: Tensor) -> Tensor:
        sign, cell = state.unbind(1)
        return torch.stack((torch.where(cell == 0, sign, 0.0), (cell == self.length).float()), 1)

    def advance(self, state: Tensor, action: Tensor) -> Transition:
        sign, cell = state.unbind(1)
        turned = (cell == self.length) & (action > 0)
        right = turned & ((action == 1) == (sign > 0))
        moved = torch.where(action == 0, cell + 1, cell).clamp(max=self.length)
        reward = right.float()
        return Transition(torch.stack((sign, moved), 1), reward, turned, {"success": reward})
