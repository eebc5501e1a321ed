"""Parameters and moments that replicas share: pulled, and pushed to, in chunks that each have a lock of their own.

A replica computes a gradient on its private copy of the parameters, which by then may be old. A push takes it to the
central ones: for each chunk of them, under that chunk's lock, the update rule changes the central moments and
parameters, and the new parameters become the replica's own. Sources: Stooke & Abbeel 2018 (chunks, central update
rule); Mnih et al. 2016 (A3C, shared moments).

This file knows nothing of algorithms, environments or threads other than those that happen to call it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from pql.engine.optim import Optimizer

FREE: AbstractContextManager[None] = nullcontext()
LINE = 64  # parameters: a chunk is a whole number of these, so that no kernel treats its ends otherwise than its middle


class Chunk:
    """Some of the central parameters, with their moments and counts, under one lock.

    On CUDA the lock orders the threads that queue work, and an event orders the work: each user's stream waits for
    the last one's.
    """

    def __init__(self, part: slice, data: Tensor, state: dict[str, Tensor]):
        self.part, self.data, self.state = part, data, state
        self.lock = threading.Lock()
        self.done = torch.cuda.Event() if data.device.type == "cuda" else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nobody else reads or writes it."""
        with self.lock:
            if self.done is None:
                yield
                return
            stream = torch.cuda.current_stream(self.data.device)
            stream.wait_event(self.done)  # one that was never recorded is nothing to wait for
            try:
                yield
            finally:
                self.done.record(stream)


class Central:
    """Parameters and moments that replicas share, one flat tensor each, on the device of the optimiser given.

    Each chunk counts its own steps (Adam's bias correction): a push adds 1 to a chunk's count under the chunk's lock,
    together with the gradient that it adds to the moments. So a count is at any moment the number of gradients that
    the moments beside it hold, whatever other pushes come in between; of two pushes that overlap, one may be the
    earlier in one chunk and the later in another. Where no push is under way all counts are equal: the number of
    pushes so far, less the skipped ones.

    A reader may find a push in some chunks and not yet in others, never half a chunk.

    Args:
        optimizer: its parameters are copied; its rule and its moments become the central ones.
        chunk: parameters under one lock, rounded up to a multiple of 64.
    Attributes:
        data: [P] the parameters.
        pushes: begun so far, skipped ones included.
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
        """Views of the moments; counts are the chunk's own, but for the first, whose are those of ``state_dict``."""
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
        """One step along ``grad`` [P], whose result ``own`` [P] gets.

        Args:
            skip: 0-dim float; where it is 1, nothing changes, and ``own`` is pulled.
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
        """Moments and count, where no push is under way. The parameters are, at such a time, every replica's own."""
        return self._state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self._state.items():
            tensor.copy_(state[name])
            if tensor.dim() == 0:
                for chunk in self.chunks:
                    chunk.state[name].copy_(tensor)


class ReplicaStopped(BaseException):
    """The run has ended while a replica waited for its turn. No ``Exception``: nobody on the way up may report it."""


class Turns:
    """Lets ``count`` threads by in a fixed order, over and over: 0, 1, ..., ``count`` - 1, 0, ...

    Args:
        waiting: entered with a thread's number while it waits.
    """

    def __init__(self, count: int, waiting: Callable[[int], AbstractContextManager[None]] = lambda number: FREE):
        self.count, self.waiting = count, waiting
        self.next, self.ended = 0, False
        self.changed = threading.Condition()

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Wait for the turn of ``number``; it lasts until the block's end.

        Raises:
            ReplicaStopped: :meth:`halt` was called.
        """
        with self.changed:
            with self.waiting(number):
                self.changed.wait_for(lambda: self.ended or self.next == number)
            if self.ended:
                raise ReplicaStopped
        yield  # what fails in here keeps its turn: nobody may go on from a push that was cut off
        with self.changed:
            self.next = (number + 1) % self.count
            self.changed.notify_all()

    def halt(self) -> None:
        """Wake everybody who waits, for good."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class CentralOptimizer(Optimizer):
    """A replica's optimiser: it clips the replica's gradient by itself, and steps on the central parameters.

    The learning rate is the replica's own: one that follows the KL follows what this replica sees.

    Args:
        own: what the replica would step with alone: its parameters, learning rate and clipping are kept.
        turns: pulls and pushes come in the order of the replicas; None: as they come.
        number: the replica's. The first one's checkpoint holds the central moments.
    """

    def __init__(self, own: Optimizer, central: Central, turns: Turns | None = None, number: int = 0):
        super().__init__(own.flat, float(own.lr), own.clip)
        self.central, self.turns, self.number = central, turns, number
        self.seen = 0  # pushes that had begun when the parameters in hand were last read
        self.lags: Counter[int] = Counter()  # of the pushes since the last ``drain_lags``

    def _turn(self) -> AbstractContextManager[None]:
        return FREE if self.turns is None else self.turns.of(self.number)

    def pull(self) -> None:
        """Bring the private parameters up to date."""
        with self._turn():
            self.seen = self.central.pushes  # before they are read: a push that comes meanwhile counts as lag
            self.central.pull(self.flat.data)

    def apply(self, grad: Tensor, skip: Tensor | None) -> None:
        with self._turn():
            before = self.central.begin_push()
            self.lags[before - self.seen] += 1
            self.seen = before + 1
            self.central.push(self.flat.data, grad, self.lr, skip)

    def drain_lags(self) -> Counter[int]:
        """How many pushes there were since the last call, by lag: the other replicas' pushes that had begun since the
        parameters which the gradient is of were read."""
        lags, self.lags = self.lags, Counter()
        return lags

    def state_dict(self) -> dict[str, Tensor]:
        return {"lr": self.lr, **(self.central.state_dict() if self.number == 0 else {})}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.lr.copy_(state["lr"])
        if self.number == 0:
            self.central.load_state_dict(state)
