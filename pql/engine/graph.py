"""CUDA graphs with an eager twin: ``graph()`` runs its body, captured or not.

A capture is made after a warm-up that leaves no trace, on a separate capture stream and memory pool: cuBLAS keeps one
workspace per stream, so graphs captured on the same stream must not be replayed concurrently.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Generator, Tensor

WARMUP = 3

Capture = Literal["auto", "on", "off"]


class Restorable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Captured(Protocol):
    def replay(self) -> None: ...


def clone_state(state: Any) -> Any:
    """Return a deep copy of nested dicts of tensors."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {k: clone_state(v) for k, v in state.items()}
    return state


_here = threading.local()


@contextmanager
def recording() -> Iterator[None]:
    """Have bodies run in the block as when they are captured: :func:`host_reads` is False in this thread."""
    _here.recording = True
    try:
        yield
    finally:
        _here.recording = False


def host_reads(device: torch.device) -> bool:
    """Return True if a body on ``device`` may read values of tensors: it is eager, and no device must be waited for."""
    return not (Graph.possible(device) or getattr(_here, "recording", False))


class Graph:
    """A body of device work that reads and writes fixed addresses.

    Args:
        body: without host syncs, allocations that outlive it, or branches on tensors.
        generators: all generators that it draws from.
        owner: its state is saved before the warm-up and restored in place after it.
        capture: ``off``: ``body`` always runs eagerly; ``on``: it is an error if it cannot be captured.
        name: for messages.
    """

    def __init__(
        self,
        body: Callable[[], None],
        device: torch.device,
        generators: Sequence[Generator],
        owner: Restorable,
        capture: Capture,
        name: str = "a graph",
    ):
        self.body, self.device, self.generators, self.owner = body, device, generators, owner
        self.capture, self.required = capture != "off" and self.possible(device), capture == "on"
        self.name = name
        self.graph: Captured | None = None

    # Only the four methods below call CUDA; a CPU stand-in (``tape.py``) replaces them.
    @staticmethod
    def possible(device: torch.device) -> bool:
        """Return True if work on ``device`` can be captured; host code there runs ahead and must not read values."""
        return device.type == "cuda"

    def place(self) -> AbstractContextManager[Any]:
        """Make the device current: a generator's seed is stored there."""
        return torch.cuda.device(self.device)

    def take(self) -> Captured | None:
        """Warm up and capture, on a separate stream."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.body()
        stream.synchronize()
        # The workspace is then allocated again during the capture, in this graph's pool. Otherwise the stream's
        # workspace would be shared with, and freed with, any other graph captured on this stream (there are 32 in all).
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.body()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def finish(self) -> None:
        """Wait for the device. Called before the loop, when no other worker runs."""
        torch.cuda.synchronize(self.device)

    def prepare(self) -> None:
        """Warm up and capture, then restore the owner's state. Called before the loop, with the device idle."""
        if not self.capture or self.graph is not None:
            return
        with self.place():
            saved = clone_state(self.owner.state_dict())
            graph = self.take()
            self.owner.load_state_dict(saved)
            self.finish()
        self.graph = graph

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()
