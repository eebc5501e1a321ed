"""CUDA graphs, in one place, with the eager twin: ``graph()`` runs its body, captured or not.

A capture is taken after a warm-up that leaves no trace, on a capture stream and memory pool of its own: cuBLAS
keeps one workspace per stream, so graphs captured on one stream must not be replayed side by side.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

WARMUP = 3


class Restorable(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Captured(Protocol):
    def replay(self) -> None: ...


def clone_state(state: Any) -> Any:
    """A deep copy of nested dicts of tensors."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {k: clone_state(v) for k, v in state.items()}
    return state


class Graph:
    """A body of device work that reads and writes fixed addresses.

    Args:
        body: no host sync, no allocation that must outlive it, no branch on a tensor.
        generators: every generator it draws from.
        owner: its state is saved before the warm-up and restored in place after it.
        capture: False runs ``body`` eagerly for ever (the CPU, or ``cuda_graphs=off``).
    """

    def __init__(
        self,
        body: Callable[[], None],
        device: torch.device,
        generators: Sequence[Generator],
        owner: Restorable,
        capture: bool,
    ):
        self.body, self.device, self.generators, self.owner = body, device, generators, owner
        self.capture = capture and self.possible(device)
        self.graph: Captured | None = None

    # The four below are all that touches CUDA: a stand-in on the CPU (``tape.py``) replaces them.
    @staticmethod
    def possible(device: torch.device) -> bool:
        """Return True if work on ``device`` can be captured. The host runs ahead there and must not read values."""
        return device.type == "cuda"

    def place(self) -> AbstractContextManager[Any]:
        """The device made current: a generator's seed is stored there."""
        return torch.cuda.device(self.device)

    def take(self) -> Captured:
        """Warm up and capture, on a stream of its own."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.body()
        stream.synchronize()
        # The workspace is then made anew during the capture, in this graph's own pool. Kept by stream outside of it,
        # it would be shared with, and freed with, any other graph captured on this stream (there are 32 in all).
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.body()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def finish(self) -> None:
        """Wait for the device. Before the loop: nothing runs beside us yet."""
        torch.cuda.synchronize(self.device)

    def prepare(self) -> None:
        """Warm up and capture; the owner's state is as before. Called before the loop, with the device idle."""
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
