"""Data exchange between workers: versioned copies of weights, statistics and replay cursors.

A worker never touches another's tensors. The owner publishes a copy at the end of its tick; readers pull a copy at the
start of theirs. Two buffers alternate, so that publishing version v + 1 never touches version v, which may still be
read: the join of all workers between ticks is the only synchronisation needed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class WeightSlot:
    """Published copies of a fixed list of tensors with one owner.

    Args:
        name: used in traces and errors.
        source: the owner's tensors, copied by every ``publish``.
        lag: readers that ask for version v get v - lag, or version 0 if that is negative; for experiments with old
            weights.
    """

    def __init__(self, name: str, source: Sequence[Tensor], lag: int = 0):
        self.name, self.lag = name, lag
        self.source = [t.detach() for t in source]
        self.buffers = [[t.clone() for t in self.source] for _ in range(2 + lag)]
        self.version = 0  # number of publications

    @torch.no_grad()
    def publish(self) -> int:
        """Copy the owner's tensors into the buffer that is not being read. Returns the new version."""
        torch._foreach_copy_(self.buffers[(self.version + 1) % len(self.buffers)], self.source)
        self.version += 1
        return self.version

    @torch.no_grad()
    def pull(self, target: Sequence[Tensor], version: int) -> int:
        """Copy ``version`` minus ``lag`` into ``target``, in place and across devices. Returns the version copied.

        Raises:
            AssertionError: that version is not available: the schedule violated its order.
        """
        assert version in (self.version, self.version - 1), f"slot {self.name}: {version} of {self.version}"
        version = max(version - self.lag, 0)
        for t, s in zip(target, self.buffers[version % len(self.buffers)], strict=True):
            t.copy_(s, non_blocking=True)
        return version

    def reload(self, version: int) -> None:
        """Publish the owner's tensors as ``version``, after a checkpoint changed them."""
        self.version = version - 1
        self.publish()

    def state_dict(self) -> dict[str, Tensor]:
        """With a lag, return all buffered versions; without, nothing: the owner's tensors are saved elsewhere."""
        pairs = ((f"{i}.{j}", t) for i, buffer in enumerate(self.buffers) for j, t in enumerate(buffer))
        return dict(pairs) if self.lag else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore in place, before :meth:`reload`."""
        for k, t in self.state_dict().items():
            t.copy_(state[k])
