"""Statistics of the episodes that end while transitions are collected."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from pql.engine.collectives import ALONE, Group
from pql.types import Step


class EpisodeStats:
    """Returns, lengths and log terms of finished episodes, summed on the device.

    An episode is counted when the next one begins (one row later under next-step autoreset). A lost life does not end
    an episode, and an episode cut short by an unannounced restart is left out.
    """

    def __init__(self, num_envs: int, terms: Mapping[str, str], device: torch.device):
        self.terms = dict(terms)  # name -> kind, see ``EnvSpec.log``
        rows = 2 + len(self.terms)  # return, length, then one per term
        # The current episode's sums; in the last row, 1 where its latest row terminated or was truncated.
        self.running = torch.zeros(rows + 1, num_envs, device=device)
        self.finished = torch.zeros(rows, device=device)
        self.count = torch.zeros((), device=device)

    def update(self, step: Step) -> None:
        new = torch.stack([step.reward, torch.ones_like(step.reward), *(step.log[k] for k in self.terms)])
        sums, over = self.running[:-1], self.running[-1]
        sums += torch.where(step.valid, new, 0)
        over.copy_(torch.where(step.valid, (step.terminated | step.truncated).float(), over))
        finished = step.first & (over > 0)
        self.finished += torch.where(finished, sums, 0).sum(1)
        self.count += finished.sum()
        self.running.copy_(torch.where(step.first, 0, self.running))

    def absorb(self, other: "EpisodeStats") -> None:
        """Add the ended episodes of ``other``, which has the same terms, and clear it."""
        for total, added in ((self.finished, other.finished), (self.count, other.count)):
            total += added.to(total.device)
            added.zero_()

    def drain(self, group: Group = ALONE) -> dict[str, Tensor]:
        """Return the means over the episodes that ended since the last drain, of all processes of ``group``, and their
        number."""
        count, *sums = group.sum_(torch.cat((self.count.view(1), self.finished)))
        each = [(f"step/{k}", sums[1]) if v == "step" else (f"episode/{k}", count) for k, v in self.terms.items()]
        names, parts = zip(("train/return_mean", count), ("train/length_mean", count), *each, strict=True)
        mean = torch.stack(sums) / torch.stack(parts).clamp(min=1)
        out = dict(zip(names, mean, strict=True)) | {"train/episodes": count}
        self.finished.zero_()
        self.count.zero_()
        return out

    def part(self, columns: slice) -> "EpisodeStats":
        """Return the statistics of a range of the environments, with shared sums."""
        part = copy.copy(self)
        part.running = self.running[:, columns]
        return part

    def state_dict(self) -> dict[str, Tensor]:
        return {"running": self.running, "finished": self.finished, "count": self.count}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
