"""Data races between the streams of a run, found by torch's CUDA sanitizer, on a device or on a stand-in for it.

The sanitizer compares whole tensors. A replay's ring is written and read in the same tick by design: learners read the
rows below the cursor of the tick before, while the collector writes others. So

* on the stand-in the ring's rows are compared one by one (``rows=True``), and no race at all is allowed;
* on a device, where indices cannot be read, an ``index_select`` and an ``index_copy_`` (or ``index_fill_``) of the same
  tensor of a ring may meet; every other pair of accesses, and every other tensor, counts.

``python -m races WORDS``, with ``tests/support`` on the path, trains without graphs, whose kernels the sanitizer does
not see, and prints the races.
"""

import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from stand_in import RecordingStreams
from torch import Tensor

from pql.config.compose import compose
from pql.data.replay import Replay
from pql.run.components import Parts
from pql.run.session import Session

if __name__ != "__main__":  # a process that has it on calls Python at every CUDA event
    torch._C._activate_gpu_trace = lambda: None
from torch.cuda import _sanitizer as csan

aten = torch.ops.aten
READS, WRITES = {aten.index_select.default}, {aten.index_copy_.default, aten.index_fill_.int_Scalar}
"""Operations on the rows that an index names; their second and third arguments are dimension and index."""

DISTINCT = [{read._schema.name, write._schema.name} for read in READS for write in WRITES]


def ring_tensors(parts: Parts) -> dict[str, Tensor]:
    """Return the tensors of a run's replay rings by name."""
    found = {}
    for number, ring in enumerate(store for store in parts.collector.stores if isinstance(store, Replay)):
        named = {**ring._by_row(), **{f"obs.{k}": v for k, v in ring.obs.items()}}
        found |= {f"ring {number} {name}": tensor for name, tensor in named.items()}
    return found


class Accesses(csan.ArgumentHandler):
    """The tensors, or their rows, that one operation reads and writes."""

    def __init__(self, rings: dict[int, int], rows: list[int] | None, kept: list[Tensor] | None):
        super().__init__()
        self.rings, self.rows, self.kept = rings, rows, kept

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if not isinstance(value, Tensor) or not (value.is_cuda or self.kept is not None):
            return
        if self.kept is not None:
            self.kept.append(value)  # or another tensor would get its address
        for key in self.keys(value):
            if is_write:
                self.dataptrs_written.add(key)
            elif not metadata_only:
                self.dataptrs_read.add(key)
            self.tensor_aliases.setdefault(key, []).extend([name] if name else [])
            if is_output:
                self.outputs.add(key)

    def keys(self, value: Tensor) -> list[Hashable]:
        address = value.data_ptr() or id(value)
        if self.kept is None or address not in self.rings:
            return [address]
        every = range(self.rings[address])
        return [(address, row) for row in (every if self.rows is None else self.rows)]


class Races(csan.CUDASanitizerDispatchMode):
    """Collects the races of a run in :attr:`found`, as "tensor: operation, operation".

    Args:
        rows: compare the ring's rows instead of its tensors; only on a stand-in, whose executor is :class:`Watched`.
    """

    def __init__(self, parts: Parts, rows: bool):
        super().__init__()
        named = ring_tensors(parts)
        self.names = {tensor.data_ptr(): name for name, tensor in named.items()}
        self.rings = {tensor.data_ptr(): len(tensor) for tensor in named.values()}
        self.exact, self.found = rows, list[str]()
        executor = parts.schedule.executor
        self.pretended = executor if isinstance(executor, Watched) else None
        self.kept: list[Tensor] | None = None
        if self.pretended is not None:
            self.kept, self.pretended.handler = [], self.event_handler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.record_stream.default:
            return func(*args, **kwargs)
        by_row = self.exact and func in READS | WRITES and args[1] == 0
        accesses = Accesses(self.rings if self.exact else {}, args[2].tolist() if by_row else None, self.kept)
        factory = bool(csan.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        accesses.parse_inputs(func._schema, args, kwargs, is_factory=factory)
        out = func(*args, **kwargs)
        accesses.parse_outputs(func._schema, out, is_factory=factory)
        read, written = accesses.dataptrs_read, accesses.dataptrs_written
        more: Any = (accesses.outputs, func._schema, accesses.tensor_aliases)
        for error in self.event_handler._handle_kernel_launch(self._stream(), read - written, written, *more):
            self._note(error)
        return out

    def _stream(self) -> Any:
        if self.pretended is not None:
            return self.pretended.now
        return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0

    def _note(self, error: Any) -> None:
        key = error.data_ptr
        address = key[0] if isinstance(key, tuple) else key
        operations = [access.operator.name for access in (error.previous_access, error.current_access)]
        if address in self.names and not self.exact and {*operations} in DISTINCT:
            return
        self.found.append(f"{self.names.get(address, 'another tensor')}: {', '.join(operations)}")


class Watched(RecordingStreams):
    """Streams of the stand-in that tell the sanitizer which is current, and which waits for which."""

    handler: Any = None

    def __init__(self, names: Any):
        self.now = "main"
        super().__init__(names, self.tell)

    def tell(self, kind: str, *about: str) -> None:
        if self.handler is None:
            return
        if kind == "wait":
            self.handler._handle_event_wait(about[1], about[0])
        elif kind == "record":
            self.handler._handle_event_record(about[1], about[0])

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


def main(words: list[str]) -> int:
    session = Session(compose(words), quiet=True, overrides=words)
    with Races(session.parts, rows=isinstance(session.parts.schedule.executor, Watched)) as races:
        session.train()
    print(f"{len(races.found)} races", *dict.fromkeys(races.found), sep="\n")
    return 1 if races.found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
