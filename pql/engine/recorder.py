"""Recordings of bodies: their operations, with references in place of tensors, for compilation."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from pql.engine.tape import Tape, tensors_of, undecorated


class NotCompiledError(Exception):
    """A body that cannot be compiled; the text says why."""


@dataclass(frozen=True)
class Made:
    """A tensor that an operation of the recording created: its number, in the order of creation."""

    number: int


@dataclass(frozen=True)
class Outside:
    """A tensor that existed before the recording, at a fixed address: its number, in the order of use."""

    number: int


class TensorLayout(NamedTuple):
    """Size, stride, dtype and device of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class Call(NamedTuple):
    """An operation with references in place of tensors."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    made: Any  # the result, with references in place of tensors

    def inputs(self) -> list[Any]:
        return references((self.args, self.kwargs))

    def created(self) -> list[Made]:
        given = set(self.inputs())
        return [r for r in references(self.made) if r not in given]


def references(tree: Any) -> list[Any]:
    """Return the references in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if is_reference(leaf)]


def is_reference(leaf: Any) -> bool:
    return isinstance(leaf, (Made, Outside))


def replaced(tree: Any, value: Callable[[Any], Any]) -> Any:
    """Return nested arguments with ``value(reference)`` in place of each reference."""
    return tree_map(lambda leaf: value(leaf) if is_reference(leaf) else leaf, tree)


@undecorated
class Recorder(Tape):
    """Records operations without keeping their results, which would need the memory of all of them at once.

    Attributes:
        outside: tensors that existed before.
        layouts: size, stride, dtype and device of each tensor that was created.
        segments: operations, divided by :meth:`end_segment`; each with the tensors that are in use after it.
    """

    def __init__(self, generators: Sequence[Generator]):
        super().__init__(generators)
        self.outside: list[Tensor] = []
        self.layouts: list[TensorLayout] = []
        self.segments: list[tuple[list[Call], set[Made]]] = []
        self._known: Any = WeakIdKeyDictionary()
        self._made: list[weakref.ref[Tensor]] = []
        self._roots: list[Made | int] = []
        self._calls: list[Call] = []
        self._storages: dict[int, StorageWeakRef] = {}  # of results, by address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_map(self._reference, (args, kwargs))
        self.check(func, args, kwargs)
        out = func(*args, **kwargs)
        sources = tensors_of((args, kwargs))
        made = tree_map(lambda leaf: self._result(leaf, sources), out)
        self._calls.append(Call(func, given[0], given[1], made))
        return out

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf not in self._known:
            made = self._storages.get(leaf.untyped_storage().data_ptr())
            if made is not None and not made.expired():
                raise NotCompiledError("it uses a result outside of operations, such as its .data")
            self._known[leaf] = Outside(len(self.outside))
            self.outside.append(leaf)
        return self._known[leaf]

    def _result(self, leaf: Any, given: Sequence[Tensor]) -> Any:
        if isinstance(leaf, Tensor) and leaf not in self._known:
            self._known[leaf] = made = Made(len(self._made))
            storage = leaf.untyped_storage()
            source = next((one for one in given if one.untyped_storage()._cdata == storage._cdata), None)
            if storage.nbytes() and source is None:
                self._storages[storage.data_ptr()] = StorageWeakRef(storage)
            self._roots.append(made if source is None else self.root(self._known[source]))
            self._made.append(weakref.ref(leaf))
            self.layouts.append(layout_of(leaf))
        return self._known[leaf] if isinstance(leaf, Tensor) else leaf

    def reference(self, tensor: Tensor) -> Made | Outside | None:
        """Return the reference to a tensor (any shape); None: it is not in the recording."""
        return cast("Made | Outside | None", self._known.get(tensor))

    def root(self, ref: Made | Outside) -> Made | int:
        """Return what tensors in the same storage have in common: the first result in it, or where it was before."""
        if isinstance(ref, Made):
            return self._roots[ref.number]
        return int(self.outside[ref.number].untyped_storage()._cdata)

    def end_segment(self) -> None:
        """End a segment: what follows is compiled apart."""
        if self._calls:
            used = {Made(i) for i, tensor in enumerate(self._made) if tensor() is not None}
            self.segments.append((self._calls, used))
            self._calls = []


def layout_of(tensor: Tensor) -> TensorLayout:
    """Return the layout of a tensor of any shape."""
    return TensorLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def written_by(call: Call) -> list[Any]:
    """Return the references that a call writes."""
    written = []
    for i, argument in enumerate(call.func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = call.args[i] if i < len(call.args) else call.kwargs.get(argument.name)
            written += references(given)
    return written


_here = threading.local()


def boundary() -> None:
    """End a segment of the recording in this thread, if there is one; see :class:`Recorder`."""
    recorder = getattr(_here, "recorder", None)
    if recorder is not None:
        recorder.end_segment()


@contextmanager
def recorded(generators: Sequence[Generator]) -> Iterator[Recorder]:
    """Record the operations of this thread in the block, gradients included."""
    recorder = _here.recorder = Recorder(generators)
    try:
        with torch.enable_grad(), recorder:
            yield recorder
    finally:
        del _here.recorder
    recorder.end_segment()
