"""Graphs on the CPU: TorchScript programs of a body's operations, which run without Python and without the GIL.

Small networks spend about half of an update in Python, and threads that run small operations wait for each other's GIL.
A program calls the same kernels with the same arguments as the eager body, so its results are the same bits;
:meth:`CpuGraph.take` checks that. Only the interpreter of TorchScript is used, on graphs that are built here from
recorded operations: no source is parsed, traced or compiled, and no optimisation runs.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

from pql.engine.graph import Captured, Execution, Graph, Restorable, clone_state, recording
from pql.engine.tape import Tape, tensors_of, undecorated
from pql.errors import ConfigError, PqlWarning, RunError, first_line
from pql.types import bytes_of

ROOM = 256 * 2**20
"""Bytes of intermediate results above which a body stays eager: the recording holds all of them at once, and large
operations gain nothing."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CODES = {kind: code for code, kind in enumerate((*INTEGERS, torch.float16, torch.float32, torch.float64))}
CODES |= {torch.bool: 11, torch.bfloat16: 15}
CODES |= {torch.strided: 0, torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}  # type: ignore[dict-item]
"""How TorchScript writes dtypes, layouts and memory formats (c10/core/ScalarType.h, Layout.h, MemoryFormat.h)."""


class UnsupportedError(Exception):
    """A body that cannot become a program; the text says why."""


@undecorated
class BoundedTape(Tape):
    """A tape that stops where intermediate results exceed ``ROOM``."""

    def __init__(self, generators: Sequence[Generator] = ()):
        super().__init__(generators)
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view and not func._schema.is_mutable:
            self.bytes += sum(t.numel() * t.element_size() for t in tensors_of(out))
        if self.bytes > ROOM:
            raise TooLargeError
        return out


class TooLargeError(Exception):
    """Intermediate results need too much memory."""


class Kind(NamedTuple):
    """A type of TorchScript's."""

    type: Any
    name: str  # without ``Optional``
    element: "Kind | None"  # of a list


class Argument(NamedTuple):
    name: str
    default: Any
    kind: Kind
    changed: bool  # by the operation


class Signature(NamedTuple):
    """An operation's schema: reading torch's own is slow, and a body calls few operations many times."""

    name: str
    arguments: tuple[Argument, ...]
    returns: tuple[Any, ...]
    returns_list: bool


def kind_of(given: Any) -> Kind:
    inner = given.getElementType() if given.kind() == "OptionalType" else given
    return Kind(given, inner.kind(), kind_of(inner.getElementType()) if inner.kind() == "ListType" else None)


@cache
def signature(func: Any) -> Signature:
    schema = func._schema
    arguments = (Argument(a.name, a.default_value, kind_of(a.type), a.alias_info is not None) for a in schema.arguments)
    returns = tuple(result.type for result in schema.returns)
    return Signature(schema.name, tuple(arguments), returns, [r.kind() for r in returns] == ["ListType"])


def outputs(node: Any, count: int) -> list[Any]:
    """Return a node's outputs by number: torch's iterator ends with an exception of C++, the slowest step of all."""
    return [node.outputsAt(i) for i in range(count)]


class Recorded:
    """The operations of a tape as a TorchScript function.

    Args:
        tape: recorded operations. Tensors that no operation of the tape created are read and written where they are.
    Raises:
        UnsupportedError: an argument that TorchScript cannot hold.
    """

    def __init__(self, tape: Tape):
        self.graph: Any = torch._C.Graph()
        self.values: dict[int, Any] = {}  # by id of a tensor
        self.inputs: list[Tensor] = []
        self.written: list[Any] = []  # lists with tensors that an operation changes
        for func, args, kwargs, out in tape.calls:
            self._call(func, args, kwargs, out)
        # Lists whose tensors are changed are returned, because TorchScript would drop these operations as unused.
        changed = torch._C.TupleType([value.type() for value in self.written])
        self.graph.registerOutput(self._node("prim::TupleConstruct", self.written, changed))
        self.graph.lint()
        self.function = torch._C._create_function_from_graph("body", self.graph)
        self.values.clear()  # the tape keeps all tensors, and so their ids, until here
        self.written.clear()

    def replay(self) -> None:
        """Run all operations on the current contents of memory."""
        with torch.no_grad(), torch.jit.optimized_execution(False):
            self.function(*self.inputs)

    def _node(self, kind: str, inputs: Sequence[Any], result: Any) -> Any:
        node = self.graph.create(kind, list(inputs), 1)
        self.graph.insertNode(node)
        node.output().setType(result)
        return node.output()

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        schema, inputs = signature(func), []
        for i, argument in enumerate(schema.arguments):
            given = args[i] if i < len(args) else kwargs.get(argument.name, argument.default)
            inputs.append(self._argument(given, argument.kind))
            if argument.changed and isinstance(given, list):
                self.written.append(inputs[-1])
        node = self.graph.create(schema.name, inputs, len(schema.returns))
        self.graph.insertNode(node)
        values = outputs(node, len(schema.returns))
        for value, result in zip(values, schema.returns, strict=True):
            value.setType(result)
        made = list(out) if isinstance(out, (list, tuple)) else [out]
        if schema.returns_list:
            node = self.graph.create("prim::ListUnpack", values, len(made))
            self.graph.insertNode(node)
            values = outputs(node, len(made))
        for tensor, value in zip(made, values, strict=False):  # none is listed for an operation without a result
            if isinstance(tensor, Tensor):
                self.values[id(tensor)] = value

    def _argument(self, given: Any, kind: Kind) -> Any:
        """Return the graph's value for an argument of the type ``kind``."""
        if isinstance(given, Tensor):
            return self._tensor(given)
        if given is None or isinstance(given, (Generator, torch.device, str)):
            return self.graph.insertConstant(given)
        if kind.element is not None:
            return self._list(given if isinstance(given, (list, tuple)) else [given], kind.element)
        return self.graph.insertConstant(self._number(given, kind.name))

    def _list(self, given: Sequence[Any], element: Kind) -> Any:
        if given and all(isinstance(g, (bool, int, float)) for g in given) and element.name != "NumberType":
            return self.graph.insertConstant([self._number(g, element.name) for g in given])
        values = [self._argument(g, element) for g in given]
        return self._node("prim::ListConstruct", values, torch._C.ListType(element.type))

    def _number(self, given: Any, kind: str) -> Any:
        if isinstance(given, (torch.dtype, torch.layout, torch.memory_format)):
            if given not in CODES:
                raise UnsupportedError(f"a program cannot hold {given}")
            return CODES[given]
        if not isinstance(given, (bool, int, float)):
            raise UnsupportedError(f"a program cannot hold a {type(given).__name__}")
        convert: Callable[[Any], Any] = {"FloatType": float, "BoolType": bool, "IntType": int}.get(kind, type(given))
        return convert(given)

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) not in self.values:
            value = self.graph.addInput()
            value.setType(torch._C.TensorType.get())
            self.values[id(tensor)] = value
            self.inputs.append(tensor.detach())
        return self.values[id(tensor)]


class CpuGraph(Graph):
    """A graph whose capture is a program, on the CPU.

    A body that cannot become one stays eager: with a warning, unless it is only too large.
    """

    @staticmethod
    def possible(device: torch.device) -> bool:
        return device.type == "cpu" and hasattr(torch._C, "_create_function_from_graph")

    def place(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def take(self) -> Captured | None:
        if self.program is not None:
            return self.program
        try:
            return self._program()
        except TooLargeError:
            why = f"its intermediate results exceed {ROOM >> 20} MiB"
        except (UnsupportedError, RuntimeError, RunError) as error:
            why = first_line(error)
            if not self.required:
                warnings.warn(f"{self.name}: no graph, {why}", PqlWarning, stacklevel=2)
        if self.required:
            raise ConfigError("graphs", "on", f"auto or off: {self.name} cannot be captured, {why}")
        return None

    def _program(self) -> Recorded:
        state = clone_state(self.owner.state_dict())
        with recording(), torch.enable_grad():  # as in a worker's thread
            self.body()  # allocates what is allocated once
            with BoundedTape(self.generators) as tape:
                self.body()
            program = Recorded(tape)
            after = []
            for run in (self.body, program.replay):
                self.owner.load_state_dict(clone_state(state))
                for _ in range(2):
                    run()
                after.append(clone_state(self.owner.state_dict()))
        if not same(*after):
            raise UnsupportedError("it depends on values that change outside of tensors")
        return program

    def finish(self) -> None:
        pass


def same(one: Any, two: Any) -> bool:
    """Return True if two nested dicts of tensors have the same bits; NaN equals NaN."""

    def bits(state: Any) -> Iterable[Any]:
        return [bytes_of(x) if isinstance(x, Tensor) else x for x in tree_leaves(state)]

    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(bits(one), bits(two), strict=True)
    )


def make_graph(
    body: Callable[[], None],
    device: torch.device,
    generators: Sequence[Generator],
    owner: Restorable,
    execution: Execution,
    name: str,
) -> Graph:
    """Create the graph of a body (see ``Graph``): a CUDA graph, or a program on the CPU."""
    return (Graph if Graph.possible(device) else CpuGraph)(body, device, generators, owner, execution, name)
