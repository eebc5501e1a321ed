"""Construction of a simulator by name, its specification as JSON, and the layout of its arrays in shared memory.

Used by ``far.py`` and by actors. It runs on Python 3.8 with NumPy alone.
"""

from __future__ import annotations

import inspect
import operator
import sys
from typing import Any, Callable, Mapping

import numpy as np

from pql.contract.registry import check_keywords, find_factory
from pql.contract.shapes import FLAGS, array_fault, groups_fault, log_keys_fault, step_fault
from pql.errors import ConfigError

ORDINARY = (False, False, False, True, True)  # FLAGS of a row in which no episode ended or began
flags_of = operator.attrgetter(*FLAGS)
ALIGN = 64


def find_simulator(name: str) -> Callable[..., Any]:
    """Return the factory ``name``, as ``pql.contract.registry.find_factory``; the error names this interpreter."""
    try:
        return find_factory(name)
    except ModuleNotFoundError as error:
        raise ConfigError("task", name, f"packages that {sys.executable} has: {error}") from error
    except ConfigError as error:
        raise ConfigError(error.setting, name, f"{error.allowed}; looked for in {sys.executable}") from error


def build_simulator(request: Mapping[str, Any]) -> Any:
    """Build the environment. An unknown keyword in ``kwargs`` is an error; one in ``offered`` is dropped."""
    env = call(find_simulator(request["name"]), request)
    if "torch" in sys.modules:  # the simulator may have imported it
        sys.modules["torch"].set_grad_enabled(False)
    return env


def foresee(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the specification without building the environment; None if its factory cannot tell."""
    describe = getattr(find_simulator(request["name"]), "describe", None)
    spec = None if describe is None else call(describe, request)
    return None if spec is None else describe_simulator(spec)


def call(factory: Any, request: Mapping[str, Any]) -> Any:
    kwargs, taken = dict(request["kwargs"]), inspect.signature(factory).parameters
    check_keywords(factory, kwargs)
    for key, value in request["offered"].items():
        if key in taken:
            kwargs.setdefault(key, value)
    device: Any = request["device"]
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_grad_enabled(False)
        device = torch.device(device)
    return factory(num_envs=request["num_envs"], device=device, **kwargs)


def describe_simulator(spec: Any) -> dict[str, Any]:
    """Return a specification as JSON types; its numbers may be NumPy scalars."""
    longest = getattr(spec, "max_episode_steps", None)
    given = dict(getattr(spec, "info", {}))
    info: dict[str, Any] = {k: v for k, v in given.items() if isinstance(v, (bool, int, float, str))}
    if given.get("action_reach") is not None:
        info["action_reach"] = [float(x) for x in given["action_reach"]]
    if given.get("robot") is not None:
        info["robot"] = given["robot"]
    if given.get("symmetry") is not None:
        found = given["symmetry"].items()
        info["symmetry"] = {k: [[int(i) for i in index], [float(s) for s in sign]] for k, (index, sign) in found}
    return {
        "name": spec.name,
        "num_envs": int(spec.num_envs),
        "obs": {
            name: [
                [int(n) for n in part.shape],
                dtype_name(part.dtype),
                int(getattr(part, "stack", 1)),
                [int(n) for n in getattr(part, "terms", ())],
                str(getattr(part, "fill", "zeros")),
            ]
            for name, part in spec.obs.items()
        },
        "action": describe_action(spec.action),
        "max_episode_steps": None if longest is None else int(longest),
        "autoreset": getattr(spec, "autoreset", "same_step"),
        "final_obs": getattr(spec, "final_obs", "on_done"),
        "log": dict(log) if isinstance(log := getattr(spec, "log", ()), Mapping) else list(log),
        "deterministic": bool(getattr(spec, "deterministic", True)),
        "info": info,
    }


def describe_action(action: Any) -> dict[str, Any]:
    """Return the fields of an action specification as JSON types; a start of 0 is left out."""
    start = getattr(action, "start", None)
    if hasattr(action, "n"):
        return {"n": int(action.n), **({"start": int(start)} if start else {})}
    if hasattr(action, "nvec"):
        return {"nvec": [int(n) for n in action.nvec], **({"start": [int(n) for n in start]} if start else {})}
    bounds = {k: getattr(action, k, None) for k in ("low", "high", "center")}
    if bounds["center"] is None:
        del bounds["center"]
    return {"size": int(action.size), **{k: None if v is None else [float(x) for x in v] for k, v in bounds.items()}}


def action_array(facts: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the dtype and the shape of one environment's action, from :func:`describe_action`."""
    if "n" in facts:
        return "int64", []
    return ("int64", [len(facts["nvec"])]) if "nvec" in facts else ("float32", [facts["size"]])


def dtype_name(dtype: Any) -> str:
    """``torch.float32``, ``numpy.float32``, ``"float32"`` -> ``"float32"``."""
    text = str(dtype)
    return text[len("torch.") :] if text.startswith("torch.") else np.dtype(dtype).name


def answer_fault(method: str, answer: Any, spec: Any, tensors: bool = False) -> str:
    """Check what ``reset``, ``reset_where`` or ``step`` returned; return the completion of "expected ...", or "".

    Numbers may have another precision than in ``spec``, since they are converted.

    Args:
        tensors: tensors are expected; otherwise arrays may be mixed with them.
    """

    def of(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> str:
        if not hasattr(value, "detach" if tensors else "dtype"):
            return f"{name} is a {type(value).__name__}, not {'a tensor' if tensors else 'an array'}"
        have, wanted = (dtype_name(d).replace("bfloat", "float") for d in (value.dtype, dtype or value.dtype))
        return array_fault(name, value, shape, np.can_cast(have, wanted, "same_kind"), (have, wanted))

    if method == "step" and not all(hasattr(answer, name) for name in ("obs", "reward", "final_obs", "log", *FLAGS)):
        said = f"it is a {type(answer).__name__}, not a pql.Step"
    elif method == "step":
        said = step_fault(answer, spec, of, "float32", None) or log_keys_fault(answer.log, spec, of, "float32")
    else:
        said = groups_fault("obs", answer, spec, of)
    return said and f"{method}() to return what its spec says, but {said}: pql doctor --env NAME tests it"


def layout(spec: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Lay out the arrays in shared memory: return name -> (dtype, shape, offset), and the total size in bytes."""
    n, (kind, one) = spec["num_envs"], action_array(spec["action"])
    fields: dict[str, tuple[str, list[int]]] = {
        "action": (kind, [n, *one]),
        "mask": ("bool", [n]),
        "flags": ("bool", [len(FLAGS), n]),
        "reward": ("float32", [n]),
        "log": ("float32", [len(spec["log"]), n]),
        "count": ("int64", [1]),  # rows of final observations, which follow: their places, then the rows themselves
        "rows": ("int64", [n]),
    }
    for prefix in ("obs", "final"):
        for name, (shape, dtype, *_) in spec["obs"].items():
            fields[f"{prefix}.{name}"] = (dtype, [n, *shape])

    places, offset = {}, 0
    for name, (dtype, shape) in fields.items():
        places[name] = [dtype, shape, offset]
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        offset += -(-size // ALIGN) * ALIGN
    return places, offset
