"""Storage of frame stacks in a replay ring.

An observation of the last S frames shares S - 1 of them with the next one. A ring therefore stores only each row's
newest frame; a stack is gathered on sampling from rows t - S + 1 .. t. Frames from before the episode are read from
one blank cell at the end of the ring if the environment returned zeros, or from the episode's first row if it repeats
that frame (``ObsSpec.fill``). ::

    row          5       6       7       8       9
    frame        a       b       c       d       e
    NEXT_FIRST           x                               an episode begins with c
    stack of 9   .       .       c       d       e       S = 4: blank, c, d, e; or c, c, d, e
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.contract.stacks import newest_frame
from pql.nets.cnn import reduced
from pql.nets.encoders import channels_last, is_image

CHUNK = 4096  # images that are reduced at once


def stored_spec(spec: ObsSpec, side: int | None) -> ObsSpec:
    """Return the spec of observations as a replay stores them: images of bytes reduced to ``side`` (None: as they are).

    Images of floats stay, since they are normalised at full size.
    """
    if side is None or not is_image(spec) or spec.dtype != torch.uint8 or (spec.stack > 1 and len(spec.shape) < 3):
        return spec
    last = spec.stack == 1 and channels_last(spec.shape)
    places = (0, 1) if len(spec.shape) == 2 or last else (1, 2)
    if side >= min(spec.shape[i] for i in places):
        return spec
    return replace(spec, shape=tuple(side if i in places else n for i, n in enumerate(spec.shape)))


def fitted(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return observations [n, ...] in the ``shape`` that a replay stores, which is theirs or that of reduced images."""
    if x.shape[1:] == shape:
        return x
    last = x.shape[-1] == shape[-1]
    return reduced(x, shape[0] if last else shape[-1], last)


def in_parts(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fit observations [n, ...] as :func:`fitted`, ``CHUNK`` at a time: images are floats while they are reduced."""
    return torch.cat([fitted(part, shape) for part in x.split(CHUNK)])


def as_stored(rows: Tensor, store: Tensor, spec: ObsSpec | None) -> Tensor:
    """Return saved rows [n, ...] for ``store``, of a group's ``spec`` if they are observations. Older releases saved
    whole images, which are reduced, and whole histories of vectors, of which the newest frame is taken."""
    if spec is not None and spec.stack > 1 and rows.shape[1:] == spec.shape != store.shape[1:]:
        return newest_frame(rows, spec)
    same = rows.shape[1:] == store.shape[1:] or rows.dim() != store.dim() or rows.dtype != torch.uint8
    return rows if same else in_parts(rows, tuple(store.shape[1:]))


def deepest(specs: Iterable[ObsSpec]) -> int:
    """Return the frames of the largest stack; 1 without stacks."""
    return max(s.stack for s in specs)


def put(store: Tensor, index: Tensor, rows: Tensor) -> None:
    """Set ``store[index] = rows`` along the first axis. Bytes are copied eight at a time if the layout allows it: on a
    CPU, which copies element by element, single bytes take six times as long."""
    if store.dtype == torch.uint8 and (words := eights(rows)) is not None and (places := eights(store)) is not None:
        store, rows = places, words
    store.index_copy_(0, index, rows)


def eights(rows: Tensor) -> Tensor | None:
    """View uint8 [n, ...] as int64 [n, m]; None if the layout does not allow it."""
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
        fills: ``ObsSpec.fill`` of the stacks.
    """

    def __init__(
        self, depth: int, rows: int, num_envs: int, blank: int, same_episode: Tensor, fills: Collection[str]
    ) -> None:
        self.depth, self.rows, self.num_envs, self.blank, self.fills = depth, rows, num_envs, blank, sorted(fills)
        self._same_episode = same_episode
        self._back = torch.arange(depth - 1, -1, -1, device=same_episode.device)

    def cells(self, flags: Tensor, row: Tensor, column: Tensor) -> dict[str, Tensor]:
        """Return the cells of the S newest frames at ``row`` of ``column`` (both [B]), oldest first: fill -> [B, S].

        Args:
            flags: packed flags of all cells; read only for the S - 1 rows before ``row``, which must not be written to
                meanwhile.
        """
        rows = row.unsqueeze(1) - self._back
        cells = torch.add(column.unsqueeze(1), rows % self.rows, alpha=self.num_envs)
        before = cells[:, :-1]
        found = flags.index_select(0, before.reshape(-1)).int()
        shown = self._same_episode.index_select(0, found).view_as(before) & (rows[:, :-1] >= 0)
        for i in range(self.depth - 3, -1, -1):  # a frame is visible if all newer ones are
            shown[:, i] &= shown[:, i + 1]
        hidden: dict[str, int | Tensor] = {"zeros": self.blank}
        if "first" in self.fills:
            begun = (row - shown.sum(1)) % self.rows  # [B] place of the oldest visible frame
            hidden["first"] = torch.add(column, begun, alpha=self.num_envs).unsqueeze(1)
        return {k: torch.cat((torch.where(shown, before, hidden[k]), cells[:, -1:]), 1) for k in self.fills}
