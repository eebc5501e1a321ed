"""Processes of one run, started by ``torchrun``, and their collectives.

Every process (a rank) has its own environments, data and learners. Gradients (before clipping), statistics and a few
decisions are summed over all ranks, so all ranks hold the same weights and statistics, bit for bit, without sending
them.

Each role (V-learner, collector ...) has its own process group: roles run on separate threads or streams, and the
collectives of one group must be issued in the same order on every rank.

Does not depend on configs, learners or runs; ``ranks.py`` uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pql.errors import RunError


class PeerError(RunError):
    """A collective failed, usually because another process has ended or hangs."""


class Order:
    """Serialises bursts of collectives on a CUDA device, in the order in which the host queues them.

    Collectives of several communicators that run concurrently can deadlock: one rank's device waits inside the first,
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
    """The ranks' processes for one role. With one process, every method returns its input.

    Every method is a collective: all ranks call it, in the same order. On CUDA none waits for the device.

    Args:
        handle: a process group of this device's back end; None: one process.
        order: shared by the groups of a CUDA device.
    """

    def __init__(self, handle: Any = None, order: Order | None = None):
        self.handle, self.order = handle, order
        self.size: int = 1 if handle is None else handle.size()
        self.waiting = False  # True while waiting for other ranks

    def sum_(self, x: Tensor) -> Tensor:
        """Sum ``x``, of any shape, over all ranks, in place."""
        if self.size > 1:
            with self._talking():
                dist.all_reduce(x, group=self.handle)
        return x

    def mean_(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Average ``x[:-1]`` over all ranks, in place; the last entry is scratch space for the ranks' row counts.

        Args:
            x: [P + 1]; a mean over valid rows.
            mask: 1 for each valid row, so that the result is the mean over all ranks' rows; None: equal weights.
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
        """Average a scalar over all ranks, as :meth:`mean_` does."""
        if self.size == 1:
            return x
        pair = torch.stack((x, x))
        self.mean_(pair, mask)
        return pair[0]

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [...], in the order of ranks: [K, ...]."""
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
        """Leave the group; processes that still wait for this one then fail at once instead of at the time limit."""
        if self.handle is not None:
            dist.destroy_process_group(self.handle)
        self.handle, self.size = None, 1  # drop the last reference, which keeps the connections open

    @contextmanager
    def _talking(self) -> Iterator[None]:
        self.waiting = True
        with explained():
            yield
        self.waiting = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Enclose a burst of work that contains collectives, captured or not."""
        if self.order is None:
            yield
        else:
            with self.order.turn(torch.device("cuda", torch.cuda.current_device())):
                yield


ALONE = Group()


@contextmanager
def explained() -> Iterator[None]:
    """Convert a collective's failure into a one-line ``PeerError``."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(str(error).splitlines()[0]) from error
