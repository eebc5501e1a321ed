"""``Tape``: a CPU stand-in for a CUDA graph, which records a body's operations and replays them on the same memory.

For checks on machines without a GPU. Operations that a capture refuses raise errors here: a value read back to the
host, a shape that depends on values, an unregistered generator. Values that a capture would freeze (a Python branch or
counter, a new tensor where one at a fixed address should be written) show as different numbers on replay. Gradients are
recorded too, as their operations.

Does not depend on environments, networks or workers.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pql.errors import RunError

Mode = TypeVar("Mode", bound=TorchDispatchMode)

INDEXING = ("index", "index_put", "index_put_")
"""Operations whose shape depends on values only if an index is a mask."""


def waits(func: Any, args: Sequence[Any]) -> bool:
    """Return True if an operation makes the host wait for a device: its shape or result depends on values."""
    indexes, depends = _about(func)
    if indexes:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return depends


@cache
def _about(func: Any) -> tuple[bool, bool]:
    """Return whether an operation indexes, and whether its shape or result depends on values by its tags."""
    depends = not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(func.tags)
    return func.overloadpacket.__name__ in INDEXING, depends


class Count(TorchDispatchMode):
    """Counts operations that compute or copy, by name: approximately the kernels that a device runs. Views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.names.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket.__name__ in FREE):
            name = str(func.overloadpacket.__name__)
            self.names[name] = self.names.get(name, 0) + 1
        return out


ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations that allocate memory, whose content does not matter."""

FREE = (*ALLOCATIONS, "lift_fresh", "detach", "alias", "_unsafe_view", "_reshape_alias", "_local_scalar_dense")
"""Operations that launch no kernel: they allocate memory or create a view."""


def undecorated(mode: type[Mode]) -> type[Mode]:
    """Remove torch's decorator from a mode: it imports ``torch._dynamo``, which takes a second or two."""
    dispatch = mode.__torch_dispatch__
    mode.__torch_dispatch__ = getattr(dispatch, "__wrapped__", dispatch)  # type: ignore[method-assign]
    return mode


@undecorated
class Tape(TorchDispatchMode):
    """Records the operations inside it; :meth:`replay` runs them again.

    Args:
        generators: generators that may be drawn from.
    Raises:
        RunError: an operation that cannot be captured.
    """

    def __init__(self, generators: Sequence[Generator] = ()):
        super().__init__()
        self.generators = {_identity(g): g for g in generators}  # keeps the objects alive: an id may be reused
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []  # operation, arguments, result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise ``RunError`` for an operation that cannot be captured."""
        if waits(func, args):
            raise RunError(f"{func} cannot be captured: the host would wait for the device")
        drawn = kwargs.get("generator")
        if drawn is not None and _identity(drawn) not in self.generators:
            raise RunError(f"{func} cannot be captured: it draws from a generator that is not among the registered")

    def replay(self) -> None:
        """Run all operations again on the current contents of memory."""
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                again = run_again(func, args, kwargs)
                if again is made:  # written in place
                    continue
                for old, value in zip(tensors_of(made), tensors_of(again), strict=True):
                    if old.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                        old.copy_(value)


def run_again(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a recorded operation. Collectives are waited for, which was no operation."""
    out = func(*args, **kwargs)
    if func.namespace == "c10d":
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.ScriptObject):
                leaf.wait()  # type: ignore[attr-defined]
    return out


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors in an operation's result."""
    if isinstance(out, Tensor):
        return [out]
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def _identity(generator: Any) -> int:
    """Return a number that is the same for all Python objects that represent one generator."""
    return generator._cdata
