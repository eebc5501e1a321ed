"""Bodies of device work with an eager twin: ``graph()`` runs its body, compiled or not, captured or not.

Compiled, a body is a :class:`~pql.engine.compiled.Program`. It is compared with its eager form before it is used.

On a GPU the capture is a CUDA graph. It is made after a warm-up that leaves no trace, on a separate capture stream and
memory pool: cuBLAS keeps one workspace per stream, so graphs captured on the same stream must not be replayed
concurrently. On the CPU see ``cpu_graph.py``.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from pql.engine.compiled import Program, compile_body
from pql.engine.inductor import Choice, no_compiler
from pql.engine.interrupt import asked
from pql.errors import ConfigError, PqlWarning, first_line

WARMUP = 3


LARGEST = 1200
"""Operations of an update that ``placement.compile=auto`` compiles; those of REPPO are 850."""


class Execution(NamedTuple):
    """How bodies run.

    Attributes:
        capture: ``off``: eagerly; ``on``: it is an error if one cannot be captured.
        compile: ``auto``: on a GPU, if it works; ``on``: it is an error if one cannot be compiled.
        worker: the name of the worker that runs them.
    """

    capture: Choice = "off"
    compile: Choice = "off"
    worker: str = "learner"


EAGER = Execution()


def priority(worker: str) -> int:
    """Return the priority of a worker's CUDA stream, the lower the sooner: a step is a chain of small kernels, which
    would queue behind the learners' large ones. Evaluations come last."""
    return {"collector": -2, "evaluation": 0}.get(worker, -1)


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
        name: the body's, for messages.

    Attributes:
        program: the compiled body; None: it is eager.
        graph: the captured body; None: it is not captured.
    """

    def __init__(
        self,
        body: Callable[[], None],
        device: torch.device,
        generators: Sequence[Generator],
        owner: Restorable,
        execution: Execution = EAGER,
        name: str = "a body",
    ):
        self.body, self.device, self.generators, self.owner, self.name = body, device, generators, owner, name
        self.capture, self.required = execution.capture != "off" and self.possible(device), execution.capture == "on"
        here_too = device.type == "cuda" or execution.compile != "auto"
        self.compile: Choice = execution.compile if here_too else "off"
        self.priority = priority(execution.worker)
        self.program: Program | None = None
        self.graph: Captured | None = None
        self.preparing = False

    @property
    def wanted(self) -> bool:
        """Return True if the body is to be compiled or captured."""
        return self.capture or self.compile != "off"

    @property
    def fixed(self) -> bool:
        """Return True if calls do not run the body: they read and write the tensors that it used first."""
        return self.graph is not None or self.program is not None

    def current(self, made: Tensor) -> Tensor:
        """Return what the last call has in place of a tensor (any shape) that the body made when it ran last."""
        return made if self.program is None else self.program.current(made)

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
        stream = torch.cuda.Stream(self.device, self.priority)  # a graph's kernels keep the priority
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
        """Compile, warm up and capture, then restore the owner's state.

        Called before the loop, with the device idle.
        """
        if self.fixed or not self.wanted:
            return
        self.preparing = True
        try:
            with self.place(), self.unchanged() as restore:
                if self.compile != "off":
                    self._compile(restore)
                self.graph = self.take() if self.capture else None
        finally:
            self.preparing = False

    @contextmanager
    def unchanged(self) -> Iterator[Callable[[], None]]:
        """Context manager: restore the owner's state in the end, and where the function that it gives is called."""
        saved = clone_state(self.owner.state_dict())

        def restore() -> None:
            self.owner.load_state_dict(clone_state(saved))

        try:
            yield restore
        finally:
            restore()
            self.finish()

    def _compile(self, restore: Callable[[], None]) -> None:
        """Replace the body by its compiled form, or say why it stays as it is."""
        why = no_compiler(self.device)
        if why is None:
            try:
                with recording(), torch.enable_grad():
                    self.body()  # allocates what is allocated once
                    restore()
                    program = compile_body(self.body, self.generators, LARGEST if self.compile == "auto" else math.inf)
                restore()
                why = program.difference()
            except Exception as error:  # Inductor's errors have no common type
                if asked():  # the signal may have reached the C++ compiler
                    raise KeyboardInterrupt from error
                why = first_line(error)
            restore()
        if why is None:
            self.program, self.body = program, program.replay
        elif self.compile == "on":
            raise ConfigError("placement.compile", "on", f"auto or off: {self.name} cannot be compiled, {why}")
        else:
            warnings.warn(f"{self.name}: not compiled, {why}", PqlWarning, stacklevel=2)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()
