"""Bodies compiled by Inductor: few, full kernels instead of one for every operation.

A body is run once, and its operations are recorded (``recorder.py``), gradients included. They become :class:`Region`,
pure functions of tensors that Inductor compiles once per shape, and :class:`Single`, which run as recorded: draws of
registered generators, which come first as they depend on shapes alone, and operations of other libraries, such as
collectives. Regions with equal operations and shapes, such as the updates of a burst, share the compiled function.

Inductor runs in its deterministic mode: it picks kernels without measuring, so that every process makes the same ones.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from pql.engine.comparison import LARGE, Sizes, relative, varied
from pql.engine.forms import ALIGNED, FORMS, cast_views
from pql.engine.inductor import inductor
from pql.engine.interrupt import asked
from pql.engine.recorder import (
    Call,
    Made,
    NotCompiledError,
    Outside,
    Recorder,
    TensorLayout,
    is_reference,
    layout_of,
    recorded,
    references,
    replaced,
    written_by,
)
from pql.engine.tape import ALLOCATIONS, run_again, tensors_of
from pql.nets.distributions import fusing

aten = torch.ops.aten
ADAM = (aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr)


class SharedStorage(NamedTuple):
    """Tensors in one storage that a region uses, such as the parameters of a network, and its length up to them."""

    members: list[Outside]
    size: int


class Region:
    """Consecutive operations as one compiled function, and the tensors that it is called with.

    Args:
        calls: operations that all can be compiled.
        needed: tensors that are used after it.
        recorder: what it was recorded with.
        shared: compiled functions of earlier regions by their text; this one's is added.
    """

    def __init__(self, calls: list[Call], needed: set[Made], recorder: Recorder, shared: dict[str, Any]):
        self.calls, self.recorder = calls, recorder
        created = dict.fromkeys(made for call in calls for made in call.created())  # in order
        self.outputs = [made for made in created if made in needed]
        given = dict.fromkeys(ref for call in calls for ref in call.inputs())
        self.inputs = [ref for ref in given if ref not in created]
        self._check_views()
        self.groups = self._groups()
        grouped = {ref for group in self.groups for ref in group.members}
        self.single = [ref for ref in self.inputs if ref not in grouped]
        key = self._text(created)
        self.fixed = [self._base(group) for group in self.groups]
        self.first = key not in shared
        if self.first:
            if asked():
                raise KeyboardInterrupt
            shared[key] = inductor(self._module(), [*self.fixed, *map(self._example, self.single)], key)
        self.function = shared[key]
        self.relaid: list[int] = []  # outputs to which Inductor gives other strides than the recording

    def __call__(self, values: dict[Made, Tensor]) -> None:
        made = list(self.function(self._given(values)))
        for i in self.relaid:
            made[i] = self._layout(self.outputs[i]).empty().copy_(made[i])
        values.update(zip(self.outputs, made, strict=True))

    @property
    def tolerance(self) -> float:
        """Largest relative difference that rounding explains.

        Products in TF32 and bfloat16 have errors of 2^-11 and 2^-8. Ties that rounding breaks, such as the lower of two
        distributions, move whole rows.
        """
        lower = any(made.dtype == torch.bfloat16 for made in self.recorder.layouts)
        return 0.2 if lower else 0.05

    def _given(self, values: dict[Made, Tensor]) -> list[Tensor]:
        return [*self.fixed, *(values[r] if isinstance(r, Made) else self._outside(r) for r in self.single)]

    def difference(self, values: dict[Made, Tensor]) -> float:
        """Run compiled and eager on copies of the inputs; batches of zeros, from an empty replay, become other numbers.

        State stays as it is: sums of a tree must be those of its leaves. But for Adam's moments: from zeros, it would
        divide rounding errors by themselves. Returns the largest relative difference between results or changes of
        inputs.
        """
        moments = {ref for call in self.calls if call.func in ADAM for ref in references(call.args[2:4])}
        free = [bool(moments & {*group.members}) for group in self.groups]
        free += [isinstance(ref, Made) or ref in moments for ref in self.single]
        given = zip(self._given(values), free, strict=True)
        before = [t if t.nbytes > LARGE else varied(t) if changes else t.detach().clone() for t, changes in given]
        twins = [[t if t.nbytes > LARGE else t.clone() for t in before] for _ in range(2)]
        sizes = Sizes(self._module())
        results = [list(self.function(twins[0])), list(sizes.run(*twins[1]))]
        strides = zip(self.outputs, results[0], strict=True)
        self.relaid = [i for i, (ref, made) in enumerate(strides) if made.stride() != self._layout(ref).stride]
        for i in self.relaid:
            results[0][i] = self._layout(self.outputs[i]).empty().copy_(results[0][i])
        values.update(zip(self.outputs, results[0], strict=True))
        undefined = unwritten(self.calls)
        pairs = zip(self.outputs, *results, strict=True)
        changes = [relative(one, two, size=sizes.of(two)) for made, one, two in pairs if made not in undefined]
        states = zip(*twins, before, strict=True)
        changes += [relative(one, two, old, sizes.of(two)) for one, two, old in states if one is not two]
        return max(changes, default=0.0)

    def _outside(self, ref: Outside) -> Tensor:
        return self.recorder.outside[ref.number]

    def _layout(self, ref: Made | Outside) -> TensorLayout:
        return self.recorder.layouts[ref.number] if isinstance(ref, Made) else layout_of(self._outside(ref))

    def _example(self, ref: Made | Outside) -> Tensor:
        return self._layout(ref).empty() if isinstance(ref, Made) else self._outside(ref).detach()

    def _check_views(self) -> None:
        """Refuse to write a result of an earlier region of which another view is read: Inductor takes them for two."""
        root = self.recorder.root
        written = {root(ref) for call in self.calls for ref in written_by(call)}
        for key in written:
            views = [ref for ref in self.inputs if root(ref) == key]
            if len(views) > 1 and any(isinstance(ref, Made) for ref in views):
                raise NotCompiledError("it writes a result of which it reads another view")

    def _groups(self) -> list[SharedStorage]:
        """Return the inputs that share a storage, by storage: Inductor must know that writing one changes another."""
        written = {ref for call in self.calls for ref in written_by(call)}
        by_storage: dict[int, list[Outside]] = {}
        for ref in self.inputs:
            if isinstance(ref, Outside):
                by_storage.setdefault(self._outside(ref).untyped_storage()._cdata, []).append(ref)
        groups = []
        for members in by_storage.values():
            if len({self._outside(ref).dtype for ref in members}) == 1 < len(members):
                groups.append(SharedStorage(members, max(end(self._outside(ref)) for ref in members)))
            elif len(members) > 1 and written & set(members):
                raise NotCompiledError("it writes memory that it also reads as another type")
        return groups

    def _base(self, group: SharedStorage) -> Tensor:
        """Return a group's memory as one vector."""
        one = self._outside(group.members[0]).detach()
        return one.as_strided((group.size,), (1,), 0)

    def _text(self, created: Iterable[Made]) -> str:
        """Return the operations with tensors numbered in the order of their use: the same for equal regions."""
        numbers = {ref: f"%{i}" for i, ref in enumerate([*self.inputs, *created])}
        lines = [
            f"{group.size} " + " ".join(f"{numbers[ref]}+{self._offset(ref)}" for ref in group.members)
            for group in self.groups
        ]
        lines += [f"{numbers[ref]} {self._layout(ref)} {self._aligned(ref)}" for ref in self.inputs]
        lines += [f"{c.func} {replaced((c.args, c.kwargs, c.made), numbers.__getitem__)}" for c in self.calls]
        return "\n".join([*lines, *(numbers[ref] for ref in self.outputs)])

    def _aligned(self, ref: Made | Outside) -> bool:
        return isinstance(ref, Made) or self._outside(ref).data_ptr() % ALIGNED == 0

    def _offset(self, ref: Outside) -> int:
        return int(self._outside(ref).storage_offset())

    def _module(self) -> torch.fx.GraphModule:
        """Return the region as a graph of its operations, in the forms that compile well."""
        graph, nodes = torch.fx.Graph(), dict[Any, Any]()
        bases = [graph.placeholder(f"base{i}") for i in range(len(self.groups))]
        for i, ref in enumerate(self.single):
            nodes[ref] = graph.placeholder(f"input{i}")
        for group, base in zip(self.groups, bases, strict=True):
            for ref in group.members:
                size, stride, *_ = self._layout(ref)
                nodes[ref] = graph.call_function(torch.as_strided, (base, size, stride, self._offset(ref)))
        casts = self._casts(graph, bases)
        for call in self.calls:
            if (key := cast_of(call)) in casts:
                nodes[call.made] = casts[key]
                continue
            args, kwargs = replaced((call.args, call.kwargs), nodes.__getitem__)
            node = graph.call_function(FORMS.get(call.func, call.func), args, kwargs)
            if is_reference(call.made):
                nodes.setdefault(call.made, node)
                continue
            for i, made in enumerate(call.made or ()):
                if is_reference(made) and made not in nodes:
                    nodes[made] = graph.call_function(getitem, (node, i))
        graph.output(tuple(nodes[ref] for ref in self.outputs))
        return torch.fx.GraphModule({}, graph)

    def _casts(self, graph: torch.fx.Graph, bases: list[Any]) -> dict[Any, Any]:
        """Add one cast per group for all casts of its members before it is written. Returns their nodes."""
        found: dict[Any, Any] = {}
        for group, base in zip(self.groups, bases, strict=True):
            wanted: dict[torch.dtype, list[Outside]] = {}
            for call in self.calls:
                if any(ref in group.members for ref in written_by(call)):
                    break
                key = cast_of(call)
                if key and key[0] in group.members and self._outside(key[0]).is_contiguous():
                    wanted.setdefault(key[1], []).append(key[0])
            for dtype, refs in wanted.items():
                refs = list(dict.fromkeys(refs))
                views = [(self._offset(ref), self._layout(ref).size) for ref in refs]
                out = graph.call_function(cast_views, (base, dtype, views))
                found |= {(ref, dtype): graph.call_function(getitem, (out, i)) for i, ref in enumerate(refs)}
        return found


def end(tensor: Tensor) -> int:
    """Return the number of elements of the storage of ``tensor``, of any shape, up to its last one."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


def cast_of(call: Call) -> tuple[Outside, torch.dtype] | None:
    """Return tensor and type if a call only casts a tensor from outside."""
    if call.func is aten._to_copy.default and isinstance(call.args[0], Outside) and list(call.kwargs) == ["dtype"]:
        return call.args[0], call.kwargs["dtype"]
    return None


class Program:
    """A recorded body as regions and calls. Replay reads and writes the tensors of the recording.

    Args:
        recorder: of a body that ended with :meth:`Recorder.end_segment`.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.steps: list[Callable[[dict[Made, Tensor]], None]] = []
        self.outlived = recorder.segments[-1][1] if recorder.segments else set()
        self._kept: dict[Any, Tensor] = {}
        self.shared: dict[str, Any] = {}
        for calls, used in recorder.segments:
            self._add(*drawn_first(calls, recorder), used)

    def _add(self, draws: list[Call], calls: list[Call], used: set[Made]) -> None:
        parts: list[list[Call]] = [[]]
        for call in calls:
            if compiles(call):
                parts[-1].append(call)
            else:
                parts += [[call], []]
        for draw in draws:
            self.steps.append(Single(draw, self.recorder))
        for i, part in enumerate(parts):
            later = used | {ref for rest in parts[i + 1 :] for call in rest for ref in call.inputs()}
            if i % 2:
                self.steps.append(Single(part[0], self.recorder))
            elif part:
                self.steps.append(Region(part, later, self.recorder, self.shared))

    @torch.no_grad()
    def replay(self) -> None:
        """Run everything on the current contents of memory."""
        values: dict[Made, Tensor] = {}
        for step in self.steps:
            step(values)
        self._kept = {made: values[made] for made in self.outlived if made in values}

    def current(self, recorded: Tensor) -> Tensor:
        """Return what the last replay has in place of a tensor (any shape) that is in use since the recording."""
        return self._kept.get(self.recorder.reference(recorded), recorded)

    @torch.no_grad()
    def difference(self) -> str | None:
        """Compare each compiled function with its operations, run eagerly. Returns what is wrong, or None.

        It changes the state that the body changes.
        """
        values: dict[Made, Tensor] = {}
        for step in self.steps:
            if isinstance(step, Region) and step.first:
                apart = step.difference(values)
                if not apart <= step.tolerance:
                    return f"its results differ by {apart:.1e} of their size, more than {step.tolerance:g}"
            else:
                step(values)
        return None


class Single:
    """An operation that runs as it was recorded."""

    def __init__(self, call: Call, recorder: Recorder):
        self.call, self.outside = call, recorder.outside

    def __call__(self, values: dict[Made, Tensor]) -> None:
        def value(ref: Any) -> Tensor:
            return values[ref] if isinstance(ref, Made) else self.outside[ref.number]

        args, kwargs = replaced((self.call.args, self.call.kwargs), value)
        out = run_again(self.call.func, args, kwargs)
        values.update(zip(references(self.call.made), tensors_of(out), strict=True))


def compiles(call: Call) -> bool:
    """Return True for an operation of torch's own that draws no noise."""
    return call.kwargs.get("generator") is None and call.func.namespace in ("aten", "prims")


def drawn_first(calls: list[Call], recorder: Recorder) -> tuple[list[Call], list[Call]]:
    """Divide calls into draws that depend on shapes alone, with the allocations that they fill, and the others.

    Draws keep their order: all that follow one that depends on numbers stay where they are.
    """
    unwritten: dict[Made, int] = {}  # indices of allocations whose memory nothing has been written to
    draws: list[Call] = []
    moved: set[int] = set()
    movable = True
    for i, call in enumerate(calls):
        if call.func.overloadpacket.__name__ in ALLOCATIONS:
            unwritten[call.made] = i
        elif call.kwargs.get("generator") is not None:
            filled = call.inputs()
            movable = movable and all(ref in unwritten for ref in filled)
            if movable:
                moved |= {i, *(unwritten[ref] for ref in filled)}
                draws += [*(allocation(ref, recorder) for ref in filled), call]
        for ref in written_by(call):
            unwritten.pop(ref, None)
    return draws, [call for i, call in enumerate(calls) if i not in moved]


def unwritten(calls: Iterable[Call]) -> set[Made]:
    """Return the tensors whose memory ``calls`` allocate, or view, without writing it: what a collective receives."""
    found: set[Made] = set()
    for call in calls:
        made = call.created()
        if call.func.overloadpacket.__name__ in ALLOCATIONS or (call.func.is_view and found & {*call.inputs()}):
            found |= {*made}
        found -= {*written_by(call)}
    return found


def allocation(made: Made, recorder: Recorder) -> Call:
    """Return a call that allocates the memory of a recorded tensor, whatever allocated it."""
    size, stride, dtype, device = recorder.layouts[made.number]
    return Call(aten.empty_strided.default, (size, stride), {"dtype": dtype, "device": device}, made)


def compile_body(body: Callable[[], None], generators: Sequence[Generator], most: float = math.inf) -> Program:
    """Run a body once, and compile it.

    Args:
        generators: all generators that it draws from.
        most: operations of one update. Those of recurrent networks repeat for each row of a sequence.
    Raises:
        NotCompiledError, RunError: it has a form that cannot be compiled, or more operations.
    """
    with fusing(), recorded(generators) as recorder:
        body()
    if (largest := max((len(calls) for calls, _ in recorder.segments), default=0)) > most:
        raise NotCompiledError(f"its {largest:,} operations would take minutes (placement.compile=on compiles them)")
    return Program(recorder)
