"""Stacks of frames: what a replay ring keeps of a stacked observation group, and where it finds the rest again.

An observation that shows the last S frames repeats S - 1 of them in the next. A ring keeps each row's newest frame
alone, and a stack is looked up when it is sampled: the frames of rows t - S + 1 .. t. Those from before the episode,
which the environment showed as zeros, are one blank cell at the end of the ring. ::

    row          5       6       7       8       9
    frame        a       b       c       d       e
    NEXT_FIRST           x                               an episode begins with c
    stack of 9   .       .       c       d       e       S = 4: blank, c, d, e
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from pql.contract.env import ObsSpec


def kept_shape(spec: ObsSpec) -> tuple[int, ...]:
    """Return the stored shape of an observation: the newest frame of a stack, else all of it."""
    return spec.shape[1:] if spec.stack > 1 else spec.shape


def newest_frame(obs: Tensor, stack: int) -> Tensor:
    """Observations [n, ...] -> what a ring keeps of them, [n, ...]."""
    return obs[:, -1] if stack > 1 else obs


def deepest(specs: Iterable[ObsSpec]) -> int:
    """Frames of the largest stack; 1 where nothing is stacked."""
    return max(s.stack for s in specs)


def put(store: Tensor, index: Tensor, rows: Tensor) -> None:
    """``store[index] = rows`` along the first axis. Bytes go eight at a time where their layout allows it: a CPU copies
    element by element, and needs six times as long for a frame's single ones."""
    if store.dtype == torch.uint8 and (words := eights(rows)) is not None and (places := eights(store)) is not None:
        store, rows = places, words
    store.index_copy_(0, index, rows)


def eights(rows: Tensor) -> Tensor | None:
    """uint8 [n, ...] seen as int64 [n, m]; None where their layout does not allow it."""
    flat = rows.flatten(1)
    if flat.shape[1] % 8 or flat.stride(0) % 8 or flat.stride(1) != 1 or flat.storage_offset() % 8:
        return None
    return flat.view(torch.int64)


class Stacker:
    """Index of the frames of a stack in a ring of ``rows`` x ``num_envs`` cells.

    Args:
        depth: S, frames of the largest stack.
        blank: the cell of zeros.
        same_episode: [32] bool, a flag's meaning (see ``pql.data.flags.RULES``).
    """

    def __init__(self, depth: int, rows: int, num_envs: int, blank: int, same_episode: Tensor):
        self.depth, self.rows, self.num_envs, self.blank = depth, rows, num_envs, blank
        self._same_episode = same_episode
        self._back = torch.arange(depth - 1, -1, -1, device=same_episode.device)

    def cells(self, flags: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Cells of the S newest frames as of logical ``row`` of ``column`` (both [B]), oldest first: [B, S].

        Args:
            flags: packed, of all cells. Of the rows asked for, only those before them are read, as their frames are:
                S - 1 rows, which nobody may be writing.
        """
        rows = row.unsqueeze(1) - self._back
        cells = torch.add(column.unsqueeze(1), rows % self.rows, alpha=self.num_envs)
        before = cells[:, :-1]
        found = flags.index_select(0, before.reshape(-1)).int()
        shown = self._same_episode.index_select(0, found).view_as(before) & (rows[:, :-1] >= 0)
        for i in range(self.depth - 3, -1, -1):  # a frame is shown where all newer ones are
            shown[:, i] &= shown[:, i + 1]
        return torch.cat((torch.where(shown, before, self.blank), cells[:, -1:]), 1)
