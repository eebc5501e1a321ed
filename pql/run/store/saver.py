"""Checkpoints written beside the training: copied at a tick's boundary, then hashed, written and synced by a thread.

The tick waits for the copy, not for the disk. One checkpoint is written after the other, in the order in which they
were asked for. This file knows nothing of what they hold.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pql.engine.placement import host_memory
from pql.errors import RunError, first_line
from pql.run.store import checkpoint

SHARE = 0.5  # of the host's free memory, which a copy may take
PATIENCE = 8.0  # seconds that a run which has failed waits for what is being written

Job = Callable[[], object]


class Saver:
    """Writes checkpoints, one at a time. Its methods are for one thread."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[str, Job] | None] = queue.Queue()
        self._outcomes: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked = self._reported = 0

    @property
    def idle(self) -> bool:
        """Return True if every requested write has ended and been reported."""
        return self._asked == self._reported

    def later(self, path: Path, tree: Any, manifest: Mapping[str, Any]) -> None:
        """Copy ``tree``, to be written to the checkpoint ``path``. Where the copy would take more than half of the
        host's free memory, it is written here and now, piece by piece."""
        tensors = checkpoint.flatten(tree)
        try:
            if sum(t.nbytes for t in tensors.values()) > SHARE * host_memory():
                raise MemoryError
            copies, events = copied(tensors)
        except (MemoryError, RuntimeError):  # the latter is PyTorch's way to say it
            self.now(path, tensors, manifest)
            return

        def write() -> None:
            for event in events:
                event.synchronize()
            checkpoint.save(path, copies, manifest)

        self.do(path.name, write)

    def now(self, path: Path, tree: Any, manifest: Mapping[str, Any]) -> None:
        """Write a checkpoint here, after those that were asked for before."""
        self.wait()
        self._asked += 1
        self._run(path.name, lambda: checkpoint.save(path, tree, manifest))

    def do(self, name: str, job: Job) -> None:
        """Let the thread do something, after what it was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pql-saver", daemon=True)
            self._thread.start()
        self._asked += 1
        self._jobs.put((name, job))

    def outcomes(self, wait: bool = False) -> list[tuple[str, OSError | None]]:
        """Writes finished since the last call: (name, the error or None).

        Args:
            wait: until everything has ended.
        Raises:
            RunError: something other than the disk is to blame.
        """
        found: list[tuple[str, OSError | None]] = []
        while self._reported < self._asked and (wait or not self._outcomes.empty()):
            name, error = self._outcomes.get()
            self._reported += 1
            if error is not None and not isinstance(error, OSError):
                raise RunError(f"{name} could not be written: {first_line(error)}") from error
            found.append((name, error))
        return found

    def wait(self) -> None:
        """Until the thread has nothing left to do."""
        self._jobs.join()

    def close(self, patience: float = PATIENCE) -> None:
        """End the thread. What it has not written after ``patience`` seconds, the process's end cuts off: what was
        there before stays."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(patience)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            self._jobs.task_done()

    def _run(self, name: str, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._outcomes.put((name, error))
        else:
            self._outcomes.put((name, None))


def copied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Any]]:
    """Return copies of the same shapes on the host, and events after which those of CUDA tensors have arrived.

    This does not wait for the GPU: its copies are queued before whatever the current streams are given next.
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
