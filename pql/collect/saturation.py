"""How much a policy that a tanh bounds uses the ends of its range, measured where it acts.

Saturation alone is no fault: bang-bang policies push to one end and then to the other. A policy is frozen where its
actions stay at one end over time: a saturated tanh passes hardly any gradient, so it may never come back.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from pql.engine.collectives import ALONE, Group

SATURATED = 0.95  # of the range; there the slope of a tanh is below a tenth
FROZEN = 0.9  # of an action's mean over time
WINDOW = 64  # steps that this mean remembers


class Saturation:
    """Sums on the device, without a host sync, over the actions that a policy gave before exploration noise.

    Args:
        num_envs, size: N and A.
    """

    def __init__(self, num_envs: int, size: int, device: torch.device):
        self.mean = torch.zeros(num_envs, size, device=device)  # [N, A] running, of each environment's own actions
        # Since a drain: components beyond SATURATED, of how many.
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)
        self.size = torch.tensor(num_envs * size, device=device)

    def __call__(self, action: Tensor, mask: Tensor | None = None) -> None:
        """A step: ``action`` [N, A] in [-1, 1]; ``mask`` [N] bool: those that act (None: all)."""
        finite = action.nan_to_num(0.0, 0.0, 0.0)
        beyond = finite.abs() > SATURATED
        if mask is None:
            self.mean.lerp_(finite, 1 / WINDOW)
            self.sums += torch.stack((beyond.sum(), self.size))
            return
        acts = mask.unsqueeze(1)  # [N, 1]
        self.mean.lerp_(finite, acts.float() / WINDOW)
        self.sums += torch.stack((torch.logical_and(beyond, acts).sum(), mask.sum() * beyond.shape[1]))

    def part(self, columns: slice) -> "Saturation":
        """For a range of the environments: the same sums."""
        part = copy.copy(self)
        part.mean = self.mean[columns]
        part.size = torch.tensor(part.mean.numel(), device=self.mean.device)
        return part

    def reset(self) -> None:
        """Forget all."""
        self.mean.zero_()
        self.sums.zero_()

    def take(self) -> Tensor:
        """[4] int64: the sums, which start over; and how many components are frozen now, of how many."""
        out = torch.stack((*self.sums, (self.mean.abs() > FROZEN).sum(), self.size))
        self.sums.zero_()
        return out


def drain(meters: Sequence[Saturation], group: Group = ALONE) -> dict[str, Tensor]:
    """Metrics of several replicas, and of all processes of ``group``.

    Returns:
        ``policy/saturated``: share of action components beyond +-``SATURATED`` since the last drain.
        ``policy/frozen``: share of components whose mean over the last ``WINDOW`` steps or so is beyond +-``FROZEN``.
    """
    first, *others = [meter.take() for meter in meters]
    sums = group.sum_(sum((other.to(first.device) for other in others), first))
    return {"policy/saturated": sums[0] / sums[1].clamp(min=1), "policy/frozen": sums[2] / sums[3]}
