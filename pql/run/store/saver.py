"""Background writing of checkpoints: copied between ticks, then hashed, written and synced by a thread.

Training waits only for the copy. Checkpoints are written one at a time, in the order of the requests.
"""

import math
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pql.engine import crash, deadlines
from pql.engine.deadlines import Limit, answer_of, idle_get
from pql.engine.placement import host_memory
from pql.engine.watchdog import Watch, watching
from pql.errors import HungError, RunError, first_line
from pql.run.store import checkpoint

SHARE = 0.5  # share of the host's free memory that a copy may use

Job = Callable[[], object]


class Saver:
    """Writes checkpoints, one at a time. Call its methods from one thread only. ``limit``: time without progress after
    which a write counts as hung, by whoever waits for it; None: no limit."""

    def __init__(self, limit: Limit | None = None) -> None:
        self.limit = limit or Limit(math.inf, "")
        self._watch: Watch | None = None  # of the thread's current job
        self._jobs: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
        self._ended: list[tuple[str, BaseException | None]] = []  # received, not reported yet
        self._thread: threading.Thread | None = None
        self._asked = self._reported = 0

    @property
    def idle(self) -> bool:
        """Return True if every requested write has ended and been reported."""
        return self._asked == self._reported

    def later(self, path: Path, tree: Any, manifest: Mapping[str, Any]) -> None:
        """Copy ``tree`` and write it to the checkpoint ``path`` in the background.

        If the copy would take more than half of the host's free memory, it is written synchronously in parts."""
        tensors = checkpoint.flatten(tree)
        try:
            if sum(t.nbytes for t in tensors.values()) > SHARE * host_memory():
                raise MemoryError
            copies, events = copied(tensors)
        except (MemoryError, RuntimeError):  # PyTorch raises the latter
            self.now(path, tensors, manifest)
            return

        def write() -> None:
            for event in events:
                event.synchronize()
            checkpoint.save(path, copies, manifest)

        self.do(path.name, write)

    def now(self, path: Path, tree: Any, manifest: Mapping[str, Any]) -> None:
        """Write a checkpoint synchronously, after earlier requests."""
        self.flush()
        self._asked += 1
        with watching(f"writing {path}", self.limit):
            self._outcomes.put(self._run(path.name, lambda: checkpoint.save(path, tree, manifest)))

    def do(self, name: str, job: Job) -> None:
        """Queue a function for the thread, after earlier requests."""
        if self._thread is None:
            me = threading.current_thread()
            self._thread = threading.Thread(target=self._work, args=(me,), name="pql-saver", daemon=True)
            self._thread.start()
        self._asked += 1
        self._jobs.put((name, job))

    def outcomes(self, wait: bool = False) -> list[tuple[str, OSError | None]]:
        """Return writes finished since the last call: (name, the error or None).

        Args:
            wait: wait until all have finished.
        Raises:
            HungError: as :meth:`flush`.
            RunError: an error other than a failed write.
        """
        if wait:
            self.flush()
        while not self._outcomes.empty():
            self._ended.append(self._outcomes.get_nowait())
        found: list[tuple[str, OSError | None]] = []
        while self._ended:
            name, error = self._ended.pop(0)
            self._reported += 1
            if error is not None and not isinstance(error, OSError):
                raise RunError(f"{name} could not be written: {first_line(error)}") from error
            found.append((name, error))
        return found

    def flush(self) -> None:
        """Wait until every requested write has ended. Raises ``HungError``: one has made no progress within
        ``limit``."""
        while self._reported + len(self._ended) < self._asked:
            assert self._thread is not None or not self._outcomes.empty()
            self._ended.append(answer_of(self._thread or threading.current_thread(), self._outcomes, self._late))

    def _late(self) -> HungError | None:
        watch = self._watch
        return watch.error() if watch is not None and watch.late else None

    def close(self, patience: float | None = None) -> None:
        """End the thread. Writes unfinished after ``patience`` seconds are abandoned; older checkpoints are kept.
        ``patience``: default ``deadlines.SAVE``."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(deadlines.SAVE if patience is None else patience)

    def _work(self, owner: threading.Thread) -> None:
        crash.name_thread("the writer of checkpoints")
        while (job := idle_get(self._jobs, owner)) is not None:
            with watching(f"writing {job[0]}", self.limit, polled=True) as self._watch:
                outcome = self._run(*job)
            self._watch = None
            del job  # it refers to the copy, which would stay in memory until the next job
            self._outcomes.put(outcome)

    def _run(self, name: str, job: Job) -> tuple[str, BaseException | None]:
        try:
            job()
        except HungError:  # from the watchdog, which interrupts the main thread
            raise
        except Exception as error:
            return name, error
        return name, None


def copied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Any]]:
    """Return copies of the same shapes on the host, and events after which those of CUDA tensors have arrived.

    This does not wait for the GPU: copies are queued ahead of later work on the current streams.
    """
    out, devices = {}, set()
    for name, tensor in tensors.items():
        if tensor.device.type == "cuda":
            out[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            out[name].copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        else:
            out[name] = tensor.clone(memory_format=torch.contiguous_format)
    return out, [torch.cuda.current_stream(device).record_event() for device in devices]
