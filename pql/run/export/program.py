"""Interpreter for the graph in a ``.pt2`` file: validates its JSON and runs only operators from an allow-list.

torch's own loader unpickles sample inputs, evaluates text as expressions and builds source code from names; this one
only looks names up. A file can therefore only compute with its own weights and the observation.

The JSON is torch's schema of exported programs, major version 8 (``torch/_export/serde/schema.py``, torch 2.13).
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

SCHEMA = 8
NODES = 20_000
ELEMENTS = 1 << 26  # limit for all tensors that a graph creates, for a batch of two
FROM_STORED = 8  # additional elements allowed for each stored one
EACH = 256  # every tensor counts as this many elements more than it has
PIECES = 1 << 16  # pieces into which a tensor may be split; at least the batch's rows
SIZE = 1 << 62

NAMES = """
_adaptive_avg_pool2d _log_softmax _softmax _to_copy _unsafe_view abs acos acosh adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_max_pool2d add addbmm addcdiv addcmul addmm addmv alias all amax amin aminmax any arange
argmax argmin argsort asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm bitwise_and bitwise_not
bitwise_or bitwise_xor bmm cat ceil celu chunk clamp clamp_max clamp_min clone concat constant_pad_nd contiguous
conv1d conv2d conv3d convolution copysign cos cosh cumprod cumsum detach diff div dot dropout einsum elu embedding eq
erf exp exp2 expand expand_as expm1 flatten flip floor floor_divide fmod frac full full_like gather ge gelu glu
group_norm gru_cell gt hardsigmoid hardswish hardtanh hypot index index_select instance_norm isfinite isinf isnan
layer_norm le leaky_relu lerp lift_fresh_copy linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid
log_softmax logaddexp logical_and logical_not logical_or logical_xor logit logsumexp lstm_cell lt masked_fill matmul
max max_pool1d max_pool2d max_pool3d maximum mean min minimum mish mm movedim mul mv nan_to_num narrow
native_group_norm native_layer_norm ne neg new_full new_ones new_zeros norm one_hot ones ones_like outer pad permute
pixel_shuffle pow prelu prod reciprocal reflection_pad2d relu relu6 remainder repeat repeat_interleave
replication_pad2d reshape rms_norm rnn_relu_cell rnn_tanh_cell roll round rsqrt rsub scalar_tensor
scaled_dot_product_attention select selu sigmoid sign silu sin sinh slice softmax softplus sort split split_with_sizes
sqrt square squeeze stack std sub sum swapaxes swapdims sym_size t tan tanh tile to topk transpose tril triu
true_divide trunc type_as unbind unflatten unsqueeze upsample_bilinear2d upsample_nearest2d var var_mean view view_as
where zero zeros zeros_like
"""
OPERATORS = frozenset(NAMES.split())
"""Allowed operators of ``torch.ops.aten``, also in place (``relu_``). None accesses files, processes or foreign
memory."""
RETURNS = ("Tensor", "List[Tensor]")  # their return types: overloads with others compute with strings and lists
SPLIT = ("aten::chunk", "aten::split", "aten::split_with_sizes", "aten::unbind")
CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async")  # the exporter's assertions, which are skipped


def of_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict a function to integers and booleans, with results below ``SIZE``: others can grow without bound."""

    def checked(*values: Any) -> Any:
        result = function(*values) if all(type(value) in (int, bool) for value in values) else None
        if result is None or not -SIZE < result < SIZE:
            raise ValueError(f"{function.__name__} of invalid sizes")
        return result

    return checked


OF_SIZES = {
    f"_operator.{f.__name__}": of_sizes(f)
    for f in (
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.neg,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
    )
}
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"

DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}
PLAIN = {"as_int": int, "as_float": float, "as_bool": bool, "as_string": str}


class UnknownOperatorError(ValueError):
    """An operator is not on the allow-list: the file may be harmless, but does not contain one of pql's networks."""


class Program:
    """A validated graph with its weights: observations and states -> action and states, by position.

    Args:
        model: ``models/model.json``, parsed.
        tensors: weights, buffers and constants by their names in the model's signature.
        device: where it computes.
    Raises:
        ValueError: the model differs from what the exporter writes.
        UnknownOperatorError: it uses an operator that is not on the allow-list.
    """

    def __init__(self, model: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device):
        if model["schema_version"]["major"] != SCHEMA:
            raise ValueError(f"schema {model['schema_version']['major']!s:.9}, not {SCHEMA}: export it again")
        module = model["graph_module"]
        self.device, self._fixed, self._free = device, dict[str, Tensor](), list[str]()
        self._used = dict[int, int]()  # batch rows -> elements of intermediate tensors
        for spec in module["signature"]["input_specs"]:
            ((kind, entry),) = spec.items()
            if kind == "user_input":
                self._free.append(entry["arg"]["as_tensor"]["name"])
            elif kind in ("parameter", "buffer", "tensor_constant"):
                self._fixed[entry["arg"]["name"]] = tensors[entry[f"{kind}_name"]].to(device)
            else:
                raise ValueError(f"an input of the kind {kind!s:.20}")
        if any(spec.keys() != {"user_output"} for spec in module["signature"]["output_specs"]):
            raise ValueError("an output that is not a new tensor")
        self.graph = ProgramGraph(module["graph"], device)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return self.graph.run({**self._fixed, **dict(zip(self._free, inputs, strict=True))})

    def check(self, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]], rows: int = 2) -> None:
        """Check the graph against an export's metadata, with shapes only (meta tensors).

        Args:
            inputs, outputs: name, shape and dtype of each tensor.
            rows: batch size. The first check uses 2; larger batches may use proportionally more memory. Each size is
                checked once.
        Raises:
            ValueError: shapes or types differ from the metadata, or intermediate tensors would be too large.
        """
        if rows in self._used:
            return
        stored = sum(value.numel() for value in self._fixed.values())
        most = ELEMENTS + FROM_STORED * stored if rows == 2 else self._used[2] * max(rows, 2) // 2
        meter = Meter(most, rows)
        shown = [torch.empty(rows, *i["shape"][1:], dtype=getattr(torch, i["dtype"]), device="meta") for i in inputs]
        fixed = {name: value.to("meta") for name, value in self._fixed.items()}
        given = dict(zip(self._free, shown, strict=True))
        found = ProgramGraph(self.graph.data, torch.device("meta")).run({**fixed, **given}, meter)
        for tensor, about in zip(found, outputs, strict=True):
            if [*tensor.shape] != [rows, *about["shape"][1:]] or tensor.dtype != getattr(torch, about["dtype"]):
                raise ValueError(f"{about['name']} is {list(tensor.shape)}, unlike in its metadata")
        self._used[rows] = most - meter.left


class Meter:
    """Counts the elements of the tensors that a graph would create. ``before`` and ``after`` raise ``ValueError`` when
    a limit is exceeded."""

    def __init__(self, most: int, rows: int):
        self.left, self.pieces = most, max(PIECES, rows)

    def before(self, function: Any, given: Iterable[Any]) -> None:
        """Check operators that split a tensor: they create one object per piece before ``after`` can count them."""
        if getattr(getattr(function, "_schema", None), "name", "") in SPLIT:
            for value in given:
                if isinstance(value, Tensor) and max(value.shape, default=0) > self.pieces:
                    raise ValueError(f"more than {self.pieces:,} pieces")

    def after(self, result: Any) -> None:
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor):
                self.left -= one.numel() + EACH
                if one.device.type != "meta":
                    raise ValueError("a tensor on another device")
                if self.left < 0:
                    raise ValueError(f"more elements than its size justifies, at a tensor of {math.prod(one.shape):,}")


class ProgramGraph:
    """Operators in order of execution. Names are resolved once, arguments at every run."""

    def __init__(self, data: Mapping[str, Any], device: torch.device):
        self.data, self.device = data, device
        if len(data["nodes"]) > NODES:
            raise ValueError(f"more than {NODES:,} operators")
        self.names = [_name(entry) for entry in data["inputs"]]
        self.outputs = [_name(entry) for entry in data["outputs"]]
        self.steps = [(find_operator(node["target"]), node["inputs"], node["outputs"]) for node in data["nodes"]]
        self.inner = {id(node): self._graphs(node) for node in data["nodes"]}

    def _graphs(self, node: Mapping[str, Any]) -> "list[ProgramGraph]":
        return [
            ProgramGraph(i["arg"]["as_graph"]["graph"], self.device) for i in node["inputs"] if "as_graph" in i["arg"]
        ]

    def run(self, values: dict[str, Any], meter: Meter | None = None) -> list[Tensor]:
        """Return the outputs. Raises ``ValueError`` if ``meter`` does."""
        for (function, inputs, outputs), node in zip(self.steps, self.data["nodes"], strict=True):
            if function is None:
                continue
            if function is AUTOCAST:
                result: Any = self._autocast(self.inner[id(node)][0], inputs, values, meter)
            else:
                args = [self._value(i["arg"], values) for i in inputs if i["kind"] != 2]
                named = {i["name"]: self._value(i["arg"], values) for i in inputs if i["kind"] == 2}
                if takes_device(function):
                    named["device"] = self.device
                if meter is not None:
                    meter.before(function, [*args, *named.values()])
                result = function(*args, **named)
                if meter is not None:
                    meter.after(result)
            _keep(outputs, result, values)
        return [values[name] for name in self.outputs]

    def _autocast(
        self, inner: "ProgramGraph", inputs: Sequence[Any], values: dict[str, Any], meter: Meter | None
    ) -> list[Tensor]:
        """Run a part of a graph with autocast on or off; inputs: (device, type, on, cached, graph, *arguments)."""
        args = [None if "as_graph" in i["arg"] else self._value(i["arg"], values) for i in inputs]
        given = dict(zip(inner.names, args[5:], strict=True))
        if self.device.type not in ("cpu", "cuda"):
            return inner.run(given, meter)
        with torch.autocast(self.device.type, args[1], enabled=bool(args[2]), cache_enabled=bool(args[3])):
            return inner.run(given, meter)

    def _value(self, argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
        """Convert an argument for torch. Devices in the file are replaced by this program's device."""
        ((kind, value),) = argument.items()
        if kind == "as_float" and value in ("Infinity", "-Infinity", "NaN"):
            return float(value)
        if kind in PLAIN and type(value) is PLAIN[kind]:
            return value
        if kind == "as_none":
            return None
        if kind in ("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float", "as_optional_tensor"):
            return _part(value, values)
        if kind in ("as_tensors", "as_optional_tensors", "as_sym_ints"):
            return [_part(v, values) for v in value]
        if kind in ("as_ints", "as_floats", "as_bools") and all(type(v) is PLAIN[kind[:-1]] for v in value):
            return list(value)
        if kind == "as_scalar_type":
            return DTYPES[value]
        if kind == "as_memory_format":
            return MEMORY_FORMATS[value]
        if kind == "as_device":
            return self.device
        if kind == "as_layout" and value == 7:
            return torch.strided
        raise ValueError(f"an argument of the kind {kind!s:.20}")


def find_operator(target: Any) -> Any:
    """Resolve an operator's name; None for the exporter's own checks.

    Raises:
        UnknownOperatorError: it is not on the list.
    """
    if target in OF_SIZES:
        return OF_SIZES[target]
    if target == AUTOCAST:
        return AUTOCAST
    match = re.fullmatch(r"torch\.ops\.aten\.(\w+)\.(\w+)", target)
    name, overload = match.groups() if match else ("", "")
    if name in CHECKS:
        return None
    if name.removesuffix("_") not in OPERATORS or "out" in overload:
        raise UnknownOperatorError(f"the operator {target[:60]}, which pql's own networks do not use")
    function = getattr(getattr(torch.ops.aten, name), overload)
    returns = [str(r.type) in RETURNS for r in function._schema.returns]
    if name != "sym_size" and (not returns or not all(returns)):
        raise UnknownOperatorError(f"the operator {target[:60]}, which gives no tensor")
    return function


@cache
def takes_device(function: Any) -> bool:
    """Return True if an operator takes a device for its result, which would otherwise be on the CPU."""
    schema = getattr(function, "_schema", None)
    return schema is not None and any(a.name == "device" and a.kwarg_only for a in schema.arguments)


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["as_tensor"]["name"])


def _part(entry: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Resolve an entry: a named value, a literal or None."""
    for key in ("name", "as_name"):
        if key in entry:
            return values[entry[key]]
    ((kind, value),) = entry.items()
    if kind == "as_tensor":
        return values[value["name"]]
    if kind == "as_none":
        return None
    if kind in PLAIN and type(value) is PLAIN[kind]:
        return value
    raise ValueError(f"an argument of the kind {kind!s:.20}")


def _keep(outputs: Sequence[Mapping[str, Any]], result: Any, values: dict[str, Any]) -> None:
    """Store an operator's result under its names in the graph."""
    names: list[Any] = []
    for entry in outputs:
        ((kind, value),) = entry.items()
        names += value if kind in ("as_tensors", "as_sym_ints") else [value if kind != "as_none" else None]
    results = [result] if not isinstance(result, list | tuple) else list(result)
    for name, one in zip(names, results, strict=True) if names else ():
        if name is not None:
            values[name.get("name", name.get("as_name"))] = one
