"""Inductor, PyTorch's compiler: whether it is here, its settings, and its cache."""

import hashlib
import importlib.util
import os
import shlex
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from pql.engine import forms
from pql.errors import PqlWarning

Choice = Literal["auto", "on", "off"]

SETTINGS = {
    "deterministic": True,
    "triton.cudagraphs": False,
    "shape_padding": False,  # measures; ``forms.product`` pads
    "combo_kernels": True,
    "combo_kernels_autotune": 0,
    "combo_kernels_pointwise_only": True,  # combined reductions get blocks that take minutes to compile
}
"""Inductor's settings. Versions of PyTorch that lack the last one do not combine kernels."""


def inductor(
    module: torch.fx.GraphModule, example: list[Tensor], text: str
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Compile a graph, or load it from Inductor's cache. Returns a function of a list of tensors like ``example``'s.

    Args:
        text: operations and layouts of tensors: part of the key in the cache.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    combines = hasattr(config, "combo_kernels_pointwise_only")
    settings: dict[str, Any] = {k: v for k, v in SETTINGS.items() if combines or not k.startswith("combo")}
    settings["unsafe_marked_cacheable_functions"] = cacheable()
    # Inductor's own key lacks alignment and, in some versions, threads and the CPU's vectors.
    tag = f"{torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}\n{text}"
    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one it caches nothing
    given = [mode.from_tensor(tensor, static_shapes=True) for tensor in example]
    tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
    tagged = cast(Any, torch.compiler.config).patch(cache_key_tag=tag)
    with torch.no_grad(), tracing, tagged:
        function = cast(Any, compile_fx(module, given, config_patches=settings))
    return lambda given: function(*given)


def cacheable() -> dict[str, str]:
    """Return the functions of ``forms.py`` and, for each, what Inductor's cache must tell apart: their source."""
    source = hashlib.sha256(Path(str(forms.__file__)).read_bytes()).hexdigest()
    own = (forms.product, forms.sum_and_product, forms.adamw_, forms.cast_views)
    return {f"{forms.__name__}.{one.__name__}": source for one in own}


def _found(variable: str, *programs: str) -> bool:
    given = shlex.split(os.environ.get(variable, ""))[:1]
    return any(map(shutil.which, given or programs))


def no_compiler(device: torch.device) -> str | None:
    """Return what Inductor lacks to compile for a device, or None."""
    if device.type != "cuda":
        found = _found("CXX", "g++", "clang++")
        return None if found else "no C++ compiler was found; install g++ or set CXX"
    if not _found("CC", "cc", "gcc", "clang"):
        return "no C compiler was found; install gcc or set CC"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h was not found; install Python's headers (Debian: python3-dev)"
    return None


def compilable(choice: Choice, device: torch.device) -> Choice:
    """Return ``choice``; with a warning ``off`` in place of ``auto`` if Inductor cannot compile for the device."""
    if choice == "auto" and device.type == "cuda" and (why := no_compiler(device)) is not None:
        warnings.warn(f"placement.compile=auto: nothing is compiled, {why}", PqlWarning, stacklevel=2)
        return "off"
    return choice
