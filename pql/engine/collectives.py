"""Processes that share one run's work, as ``torchrun`` starts them, and their collectives by role.

Every process (a rank) has environments, data and learners of its own. What makes them one run are sums over all of
them: of gradients before clipping, of statistics, of the few numbers that decide something. All ranks then hold the
same weights and statistics, bit for bit, without ever sending those.

A role (the V-learner, the collector ...) has a process group of its own, because roles run on threads, or streams, of
their own, and collectives on one group must be issued in the same order everywhere.

This file knows nothing of configs, learners or runs; ``ranks.py`` puts it to work.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pql.errors import RunError


class PeerError(RunError):
    """A collective failed: as a rule, because another process has ended or hangs."""


class Order:
    """Lets bursts of collectives on a CUDA device follow one another, in the order in which the host queues them.

    Collectives of several communicators that run side by side can deadlock: one rank's device waits inside the first,
    another's inside the second. One host thread queues all bursts, in the same order on every rank.
    """

    def __init__(self) -> None:
        self.last: torch.cuda.Event | None = None

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        stream = torch.cuda.current_stream(device)
        if self.last is not None:
            stream.wait_event(self.last)
        yield
        self.last = stream.record_event()


class Group:
    """The ranks' processes for one role. Of one process alone, every method hands back what it was given.

    Every method is a collective: all ranks call it, in the same order. On CUDA none waits for the device.

    Args:
        handle: a process group on this device's back end; None: one process.
        order: shared by the groups of a CUDA device.
    """

    def __init__(self, handle: Any = None, order: Order | None = None):
        self.handle, self.order = handle, order
        self.size: int = 1 if handle is None else handle.size()
        self.waiting = False  # for the others, at this moment

    def sum_(self, x: Tensor) -> Tensor:
        """Sum ``x``, of any shape, over all ranks, in place."""
        if self.size > 1:
            with self._talking():
                dist.all_reduce(x, group=self.handle)
        return x

    def mean_(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Average ``x[:-1]`` over all ranks, in place; the last entry is room for what the ranks weigh.

        Args:
            x: [P + 1]; a mean over the rows that count.
            mask: 1 for each of those rows, so that the result is the mean over all ranks' rows; None: equally many.
        """
        if self.size == 1:
            return
        if mask is None:
            x[-1] = 1
        else:
            x[-1] = mask.sum()
            x[:-1].mul_(x[-1])
        self.sum_(x)
        x[:-1].div_(x[-1].clamp(min=1))

    def mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Average one number (shape: 0-dim) over all ranks, as :meth:`mean_`."""
        if self.size == 1:
            return x
        pair = torch.stack((x, x))
        self.mean_(pair, mask)
        return pair[0]

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` [...], by rank: [K, ...]."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size, *x.shape)
        with self._talking():
            dist.all_gather(list(out.unbind(0)), x.contiguous(), group=self.handle)
        return out

    def broadcast_(self, x: Tensor) -> None:
        """Copy rank 0's ``x``, of any shape, to all ranks, in place."""
        if self.size > 1:
            with self._talking():
                dist.broadcast(x, 0, group=self.handle)

    def close(self) -> None:
        """Leave: whoever still waits for this process then fails, and need not wait for a time limit."""
        if self.handle is not None:
            dist.destroy_process_group(self.handle)
        self.handle, self.size = None, 1  # nothing else may keep the connections open

    @contextmanager
    def _talking(self) -> Iterator[None]:
        self.waiting = True
        with explained():
            yield
        self.waiting = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a burst of work with collectives in it, captured or not."""
        if self.order is None:
            yield
        else:
            with self.order.turn(torch.device("cuda", torch.cuda.current_device())):
                yield


ALONE = Group()


@contextmanager
def explained() -> Iterator[None]:
    """A collective's failure as a ``PeerError`` of one line."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(str(error).splitlines()[0]) from error
