"""Saturation of a tanh policy's actions, measured during collection.

Saturation by itself is no fault: bang-bang policies alternate between the ends. A policy is frozen if its actions stay
at one end over time: a saturated tanh passes hardly any gradient, so the policy may never recover.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from pql.engine.collectives import ALONE, Group

SATURATED = 0.95  # threshold, as a share of the range; there the slope of a tanh is below a tenth
FROZEN = 0.9  # threshold for an action's mean over time
WINDOW = 64  # time constant of this mean, in steps


class Saturation:
    """Sums on the device, without a host sync, over the actions that a policy gave before exploration noise.

    Args:
        num_envs, size: N and A.
    """

    def __init__(self, num_envs: int, size: int, device: torch.device):
        self.mean = torch.zeros(num_envs, size, device=device)  # [N, A] running mean per environment
        # Since the last drain: components beyond SATURATED, and their total.
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)
        self.size = torch.tensor(num_envs * size, device=device)

    def __call__(self, action: Tensor, mask: Tensor | None = None) -> None:
        """Count a step's ``action`` [N, A] in [-1, 1] in the environments of ``mask`` [N] bool (None: all)."""
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
        """Return the meter of a range of the environments, with shared sums."""
        part = copy.copy(self)
        part.mean = self.mean[columns]
        part.size = torch.tensor(part.mean.numel(), device=self.mean.device)
        return part

    def reset(self) -> None:
        """Clear sums and means."""
        self.mean.zero_()
        self.sums.zero_()

    def take(self) -> Tensor:
        """Return [4] int64: the sums, which are cleared, then the number of frozen components and their total."""
        out = torch.stack((*self.sums, (self.mean.abs() > FROZEN).sum(), self.size))
        self.sums.zero_()
        return out


def drain(meters: Sequence[Saturation], group: Group = ALONE) -> dict[str, Tensor]:
    """Return the metrics over several replicas and all processes of ``group``.

    Returns:
        ``policy/saturated``: share of action components beyond +-``SATURATED`` since the last drain.
        ``policy/frozen``: share of components whose mean over the last ``WINDOW`` steps or so is beyond +-``FROZEN``.
    """
    first, *others = [meter.take() for meter in meters]
    sums = group.sum_(sum((other.to(first.device) for other in others), first))
    return {"policy/saturated": sums[0] / sums[1].clamp(min=1), "policy/frozen": sums[2] / sums[3]}
