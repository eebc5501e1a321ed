"""Optional members of an environment, one protocol each. ``supports(env, Resumable)`` tests for one.

An environment has them or not, as its simulator allows; it inherits from nothing.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor

from pql.contract.env import VecEnv
from pql.types import Obs, Step

E = TypeVar("E", bound=VecEnv)


class Resumable(VecEnv, Protocol):
    """Saves and restores the simulator's state, so that a resumed run continues with the same bits."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Reflectable(Resumable, Protocol):
    """Can be put into reflected states, so that ``pql doctor --symmetry`` compares single steps."""

    def reflected(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return ``state``, a ``state_dict``, reflected as ``spec.info["symmetry"]`` says; None: not known how."""
        ...


class Staged(VecEnv, Protocol):
    """A curriculum whose stage depends on what was done so far. The stage is saved with the run, if the environment is
    not :class:`Resumable`, and evaluations take place at the training's."""

    def progress(self) -> dict[str, Any]:
        """Return what the stage depends on: numbers from 0 on, such as a step counter; tensors, for resumes only."""
        ...

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Let the next reset begin at this stage. An environment for evaluation gets the numbers only."""
        ...


class PartialReset(VecEnv, Protocol):
    """Restarts single environments. Used to replace environments with NaN or infinite values."""

    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments where ``mask`` [N] bool is set; return the current observations of all, [N, ...].

        A filler row that was due is dropped.
        """
        ...


class SplitStep(VecEnv, Protocol):
    """``step`` in two halves, for a simulator in another process. ``Grouped`` then needs no thread for it."""

    def start(self, action: Tensor) -> None:
        """Start a step with ``action`` [N, A] or [N] and return immediately."""
        ...

    def result(self) -> Step:
        """Wait for the step, [N, ...]."""
        ...


class Renderable(VecEnv, Protocol):
    """Images, for ``pql play``.

    If the factory takes ``render_mode``, it is passed ``"rgb_array"``. ``spec.info["dt"]`` sets the video's speed.
    """

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> Any:
        """Return an image of environment ``index``, numpy uint8 [H, W, 3]; None: the environment's default size."""
        ...


class Viewable(VecEnv, Protocol):
    """A live window, for ``pql play --live``."""

    def viewer(self, index: int = 0) -> Any:
        """Open a window on environment ``index``: an object with ``open`` (bool), ``show()`` and ``close()``."""
        ...


class WebViewable(VecEnv, Protocol):
    """A page with a free camera, for ``pql play --browser``."""

    def web_viewer(self, port: int, index: int = 0) -> Any:
        """Serve environment ``index`` on the loopback address: an object with ``address``, ``show()`` and ``close()``.

        Returns None if the package that this needs is not installed.
        """
        ...


class Preparable(VecEnv, Protocol):
    """One-time work, such as compiling kernels and capturing CUDA graphs, that is done early."""

    def prepare(self) -> None:
        """Do that work, without changing the state.

        Called once, before the first reset, while the GPU is idle: during a capture, CUDA forbids all other threads the
        use of the legacy default stream. If it takes long, a method ``preparation() -> str`` may say how far it is;
        another thread calls it meanwhile.
        """
        ...


class Measured(VecEnv, Protocol):
    """Additional metrics."""

    def measures(self) -> dict[str, float]:
        """Return metrics for a row of the training log."""
        ...


class WithEvaluation(VecEnv, Protocol):
    """Environments for evaluation, for a simulator that cannot be built a second time."""

    def beside(self) -> VecEnv | None:
        """Return them, or None if there are none now."""
        ...


class Capturable(VecEnv, Protocol):
    """``step`` can be captured in one CUDA graph with the policy before it and the replay write after it. Then:

    - ``capturable`` is True, and the environment is :class:`Resumable`, from before the first reset;
    - ``step`` never synchronises with the device, and its Python control flow depends neither on tensor values nor on
      the number of calls;
    - state stays at fixed addresses (``copy_`` instead of a new tensor), in ``load_state_dict`` too;
    - all random draws come from ``generators``;
    - callers read the tensors that ``step`` returned before the next one: a replay of the graph overwrites them.
    """

    capturable: bool

    @property
    def generators(self) -> "list[torch.Generator] | tuple[torch.Generator, ...]": ...


class GroupedEnv(VecEnv, Protocol):
    """Groups of environments that step one after the other (``spec.groups > 1``).

    ``step`` still works while no answer is pending.
    """

    def send(self, action: Tensor, ids: Tensor) -> None:
        """Start a step of one group and return immediately.

        Args:
            action: [n, A] or [n]; not modified until the answer.
            ids: [n] int64 on the CPU: the group's environments, ascending.
        """
        ...

    def recv(self) -> tuple[Tensor, Step]:
        """Wait for the group sent first; return its ids [n] and its step, [n, ...].

        The step keeps its values until the same group is sent again.
        """
        ...


class AsyncEnv(VecEnv, Protocol):
    """Environments that may answer late (``spec.spread > 1``).

    ``send`` accepts any subset of a group; ``step`` waits for all environments that are connected and returns filler
    rows for the others.
    """

    def send(self, action: Tensor, ids: Tensor) -> None:
        """As :meth:`GroupedEnv.send`, with ``ids`` [k] of any subset of a group."""
        ...

    def answers(self, group: int) -> tuple[Tensor, Step]:
        """Wait for a bounded time; return the environments that answered, and a step of the whole group, [n, ...].

        The ids are [k] int64 on the CPU; k may be 0. Rows of the other environments are fillers that repeat their last
        observation. An environment that was lost returns with a filler row with ``first`` set.
        """
        ...

    def present(self) -> Tensor:
        """Return the environments that answered the last ``reset``, [N] bool on the CPU."""
        ...


def supports(env: VecEnv, kind: type[E]) -> TypeGuard[E]:
    """Return True if ``env`` has the members of an optional protocol."""
    names = {*vars(kind), *vars(kind).get("__annotations__", ())}
    return all(hasattr(env, name) for name in names if not name.startswith("_"))


def stage_of(env: VecEnv) -> dict[str, float]:
    """Return the numbers of a staged environment's progress as counters, ``stage/NAME``."""
    found = env.progress() if supports(env, Staged) else {}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {f"stage/{name}": value for name, value in numbers.items() if 0 <= value < math.inf}


def set_stage(env: VecEnv, counters: Mapping[str, float]) -> None:
    """Let the next reset of a staged environment begin at the stage in ``counters``, if there is one."""
    progress = {k.removeprefix("stage/"): v for k, v in counters.items() if k.startswith("stage/")}
    if progress and supports(env, Staged):
        env.load_progress(progress)
