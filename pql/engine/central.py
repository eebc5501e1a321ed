"""Parameters and optimiser moments shared by replicas, pulled and pushed in chunks with one lock each.

A replica computes a gradient on its private copy of the parameters, which may be old by then. For each chunk, under its
lock, a push applies the update rule to the central moments and parameters, and copies the new parameters back to the
replica. Sources: Stooke & Abbeel 2018 (chunks, central update rule); Mnih et al. 2016 (A3C, shared moments).

Does not depend on algorithms, environments or on which threads call it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from pql.engine.optim import Optimizer

FREE: AbstractContextManager[None] = nullcontext()
LINE = 64  # chunk sizes are multiples of this, so that kernels treat a chunk's ends like its middle


class Chunk:
    """Part of the central parameters, with their moments and counts, under one lock.

    On CUDA the lock orders the threads that queue work, and an event orders the work: each user's stream waits for
    the previous user's.
    """

    def __init__(self, part: slice, data: Tensor, state: dict[str, Tensor]):
        self.part, self.data, self.state = part, data, state
        self.lock = threading.Lock()
        self.done = torch.cuda.Event() if data.device.type == "cuda" else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock: no other thread reads or writes the chunk."""
        with self.lock:
            if self.done is None:
                yield
                return
            stream = torch.cuda.current_stream(self.data.device)
            stream.wait_event(self.done)  # an event that was never recorded does not block
            try:
                yield
            finally:
                self.done.record(stream)


class Central:
    """Parameters and moments that replicas share, one flat tensor each, on the optimiser's device.

    Each chunk counts its steps (Adam's bias correction): under the chunk's lock, a push adds its gradient to the
    moments and 1 to the count. A count therefore always equals the number of gradients in the moments of its chunk,
    even if pushes overlap and reach two chunks in a different order. While no push is running all counts are equal:
    the number of pushes so far minus the skipped ones.

    A reader may see a push in some chunks and not yet in others, but never part of one chunk's update.

    Args:
        optimizer: its parameters are copied; its rule and its moments become the central ones.
        chunk: parameters under one lock, rounded up to a multiple of 64.
    Attributes:
        data: [P] the parameters.
        pushes: number of pushes begun, including skipped ones.
    """

    def __init__(self, optimizer: Optimizer, chunk: int):
        self.rule = optimizer.rule
        self.data = optimizer.flat.data.detach().clone()
        self.pushes = 0
        self._counting = threading.Lock()
        self._state = {k: v for k, v in optimizer.state_dict().items() if k != "lr"}
        size, total = -(-chunk // LINE) * LINE, self.data.numel()
        parts = [slice(start, min(start + size, total)) for start in range(0, total, size)]
        self.chunks = [Chunk(part, self.data[part], self._rows(part)) for part in parts]

    def _rows(self, part: slice) -> dict[str, Tensor]:
        """Views of the moments; counts belong to the chunk, and the first chunk's are those of ``state_dict``."""
        own = part.start > 0
        return {k: v[part] if v.dim() else v.clone() if own else v for k, v in self._state.items()}

    @torch.no_grad()
    def pull(self, own: Tensor) -> None:
        """Copy the parameters into ``own`` [P]."""
        for chunk in self.chunks:
            with chunk.held():
                own[chunk.part].copy_(chunk.data)

    @torch.no_grad()
    def push(self, own: Tensor, grad: Tensor, lr: Tensor, skip: Tensor | None) -> None:
        """Take one step along ``grad`` [P] and copy the result into ``own`` [P].

        Args:
            skip: 0-dim float; where it is 1, no step is taken, and ``own`` is only pulled.
        """
        home = self.data.device
        lr, skip = lr.to(home), None if skip is None else skip.to(home)
        for chunk in self.chunks:
            with chunk.held():
                self.rule(chunk.data, grad[chunk.part].to(home), {**chunk.state, "lr": lr}, skip)
                own[chunk.part].copy_(chunk.data)

    def begin_push(self) -> int:
        """Count a push. Returns how many had begun before it."""
        with self._counting:
            self.pushes += 1
            return self.pushes - 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return moments and count; call it while no push is running, when every replica has the same parameters."""
        return self._state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._state.items():
            tensor.copy_(state[name])
            if tensor.dim() == 0:
                for chunk in self.chunks:
                    chunk.state[name].copy_(tensor)


class ReplicaStopped(BaseException):
    """The run ended while a replica waited for its turn. Not an ``Exception``, so that no caller reports it."""


class ReplicaTurns:
    """Admits ``count`` threads in a fixed cyclic order: 0, 1, ..., ``count`` - 1, 0, ...

    Args:
        waiting: context manager entered with a thread's number while it waits.
    """

    def __init__(self, count: int, waiting: Callable[[int], AbstractContextManager[None]] = lambda number: FREE):
        self.count, self.waiting = count, waiting
        self.next, self.ended = 0, False
        self.changed = threading.Condition()

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Wait for the turn of ``number``; it lasts until the end of the block.

        Raises:
            ReplicaStopped: :meth:`halt` was called.
        """
        with self.changed:
            with self.waiting(number):
                self.changed.wait_for(lambda: self.ended or self.next == number)
            if self.ended:
                raise ReplicaStopped
        yield  # after a failure the turn is kept, so that no replica continues from a partial push
        with self.changed:
            self.next = (number + 1) % self.count
            self.changed.notify_all()

    def halt(self) -> None:
        """Stop all waiting threads, now and later, with :class:`ReplicaStopped`."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class CentralOptimizer(Optimizer):
    """Optimiser of a replica: it clips the replica's gradient and steps on the central parameters.

    The learning rate is per replica, so that an adaptive one follows this replica's KL.

    Args:
        own: the replica's standalone optimiser: its parameters, learning rate and clipping are kept.
        turns: order of pulls and pushes by replica; None: any order.
        number: the replica's. Replica 0's checkpoint contains the central moments.
    """

    def __init__(self, own: Optimizer, central: Central, turns: ReplicaTurns | None = None, number: int = 0):
        super().__init__(own.flat, float(own.lr), own.clip)
        self.central, self.turns, self.number = central, turns, number
        self.seen = 0  # pushes begun when the parameters were last pulled
        self.lags: Counter[int] = Counter()  # lags of the pushes since the last ``drain_lags``

    def _turn(self) -> AbstractContextManager[None]:
        return FREE if self.turns is None else self.turns.of(self.number)

    def pull(self) -> None:
        """Bring the private parameters up to date."""
        with self._turn():
            self.seen = self.central.pushes  # before the read: a push during it counts as lag
            self.central.pull(self.flat.data)

    def apply(self, grad: Tensor, skip: Tensor | None) -> None:
        with self._turn():
            before = self.central.begin_push()
            self.lags[before - self.seen] += 1
            self.seen = before + 1
            self.central.push(self.flat.data, grad, self.lr, skip)

    def drain_lags(self) -> Counter[int]:
        """Return a histogram of the lags of this replica's pushes since the last call.

        The lag of a push is the number of other replicas' pushes that began after its parameters were pulled.
        """
        lags, self.lags = self.lags, Counter()
        return lags

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, **(self.central.state_dict() if self.number == 0 else {})}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.lr.copy_(state["lr"])
        if self.number == 0:
            self.central.load_state_dict(state)
