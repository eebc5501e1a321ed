"""The map between actions in [-1, 1] and those of a simulator."""

import torch
from torch import Tensor, nn

from pql.contract.env import Box


class Bounds(nn.Module):
    """Maps actions [..., A] of ``box`` in [-1, 1] to the simulator's: linear, or with a ``center`` in [-1, 0] and in
    [0, 1].

    Attributes:
        idle: the simulator's bounds are -1 and 1.
    """

    low: Tensor
    reach: Tensor
    sides: Tensor | None  # [3, A]: center, its distance from low, from high

    def __init__(self, box: Box):
        super().__init__()
        low, high = (torch.tensor(end) for end in box.bounds)
        center = None if box.center is None else torch.tensor(box.center)
        self.idle = bool((low == -1).all() and (high == 1).all() and (center is None or (center == 0).all()))
        self.register_buffer("low", low)
        self.register_buffer("reach", (high - low) / 2)
        self.register_buffer("sides", None if center is None else torch.stack((center, center - low, high - center)))

    def forward(self, action: Tensor) -> Tensor:
        action = action.clamp(-1, 1)
        if self.sides is None:
            return self.low + (action + 1) * self.reach
        center, down, up = self.sides.unbind(0)
        return center + action.clamp(max=0) * down + action.clamp(min=0) * up

    def unit(self, action: Tensor) -> Tensor:
        """Return the simulator's ``action`` [..., A] in [-1, 1]."""
        if self.sides is None:
            return (action - self.low) / self.reach - 1
        center, down, up = self.sides.unbind(0)
        return (action - center) / torch.where(action < center, down, up)
