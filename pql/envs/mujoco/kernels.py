"""Compilation of MuJoCo Warp's kernels before the first step, with progress.

Warp compiles a module of kernels when one of them is launched for the first time on a machine, and keeps it in a folder
(``WARP_CACHE_PATH``). A robot has 40 to 90 modules. :class:`Kernels` lists them by a launch in which nothing runs, and
then loads them, several at a time.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import warp as wp

from pql.errors import PqlWarning

AT_ONCE = min(os.cpu_count() or 1, 8)
"""Modules that are compiled at the same time."""

SLOW = 5.0
"""Seconds after which modules are being compiled, not read from the folder."""

Variant = tuple[wp.Module, int | None]
"""A module, and the block size that it is compiled for."""


class Unlaunched(Exception):  # noqa: N818
    """Leaves a launch whose kernel must not run."""


def variants(launches: Sequence[Callable[[], None]]) -> list[Variant]:
    """Return what ``launches`` would load, in order. No kernel runs; both sides of each branch are followed. A module
    that is asked for outside of a launch is loaded: on a GPU, MuJoCo Warp asks some for their best block size."""
    found: dict[Variant, None] = {}
    with _listing(found):
        for launch in launches:
            launch()
    return [*found]


@contextmanager
def _listing(found: dict[Variant, None]) -> Iterator[None]:
    module_class: Any = wp.Module
    me, load = threading.get_ident(), module_class.load
    real = {name: getattr(wp, name) for name in ("launch", "launch_tiled", "capture_while", "capture_if")}
    depth = 0  # of launches of this thread: launch_tiled calls launch

    def loaded(module: wp.Module, device: Any, block_dim: int | None = None, *more: Any, **named: Any) -> Any:
        if threading.get_ident() != me or not depth:
            return load(module, device, block_dim, *more, **named)
        found[module, block_dim] = None
        raise Unlaunched

    def launching(name: str) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            nonlocal depth
            if threading.get_ident() != me:
                return real[name](*args, **named)
            depth += 1
            try:
                return real[name](*args, **named)
            except Unlaunched:
                return None
            finally:
                depth -= 1

        return launch

    def branching(name: str, bodies: Sequence[str]) -> Callable[..., Any]:
        def branch(condition: Any, *args: Any, stream: Any = None, **named: Any) -> None:
            if threading.get_ident() != me:
                return real[name](condition, *args, stream=stream, **named)
            given = [*args, *(named.pop(body) for body in bodies if body in named)]
            for body in given:
                if callable(body):
                    body(**named)
            return None

        return branch

    try:
        module_class.load = loaded
        wp.launch, wp.launch_tiled = launching("launch"), launching("launch_tiled")
        wp.capture_while = branching("capture_while", ("while_body",))
        wp.capture_if = branching("capture_if", ("on_true", "on_false"))
        yield
    finally:
        module_class.load = load
        for name, function in real.items():
            setattr(wp, name, function)


class Kernels:
    """The modules of one engine.

    Attributes:
        text: progress in words; other threads read it.
    """

    def __init__(self) -> None:
        self.text = ""

    def load(self, launches: Sequence[Callable[[], None]], device: Any) -> None:
        """Compile, or read, what ``launches`` need on ``device``; warn once that it takes minutes."""
        wanted, began, warned = variants(launches), time.monotonic(), False
        for first in range(0, len(wanted), AT_ONCE):
            self.text = f"module {first + 1} of {len(wanted)} of MuJoCo Warp's kernels"
            some = wanted[first : first + AT_ONCE]
            for block in dict.fromkeys(block for _, block in some):
                wp.force_load(device, [m for m, b in some if b == block], block_dim=block, max_workers=AT_ONCE)
            if not warned and time.monotonic() - began > SLOW and first + AT_ONCE < len(wanted):
                warned = True
                warnings.warn(slow_text(len(wanted)), PqlWarning, stacklevel=2)
        self.text = ""


def slow_text(count: int) -> str:
    return (
        f"MuJoCo Warp compiles {count} modules of kernels, which takes minutes the first time; they are kept in "
        f"{wp.config.kernel_cache_dir} (WARP_CACHE_PATH). pql warm-up compiles them ahead"
    )
