"""Environment contract: ``VecEnv`` (N environments stepped together), its ``EnvSpec``, and ``make_env``.

A ``VecEnv`` takes and returns tensors on its own device; ``pql.types.Step`` defines each field. This file imports no
simulator: ``registry.py`` resolves names when they are used.
"""

import functools
import inspect
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import torch
from torch import Tensor

from pql.contract.registry import check_chosen, check_keywords, find_factory, import_name
from pql.contract.shapes import layout_fault
from pql.errors import ConfigError, PqlWarning, nearest
from pql.types import Obs, Step


@dataclass(frozen=True)
class ObsSpec:
    """Shape and dtype of one observation group, for a single environment.

    Attributes:
        shape: without the N axis: ``(D,)`` for a vector, ``(C, H, W)`` or ``(H, W, C)`` for an image.
        dtype: float32 for vectors, usually uint8 for images; also bool, uint8, signed integers and other floats. Replay
            and rollout store integers as they are; ``docs/networks.md`` says how networks read them.
        stack: number S of stacked frames, the newest observations, oldest first. If above 1, the replay buffer stores
            each frame once and rebuilds the stacks when it samples. ``shape`` has this size as its first axis, or is
            that of a flat history, ``(S * D,)``.
        terms: widths of the terms of a flat history, of which each has its own: ``(3, 12)`` are S times 3 numbers, then
            S times 12. (): one term of D numbers.
        fill: frames from before the episode: ``zeros``, or the episode's ``first`` frame.

    Raises:
        ConfigError: fields that do not fit each other.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    stack: int = 1
    terms: tuple[int, ...] = ()
    fill: Literal["zeros", "first"] = "zeros"

    def __post_init__(self) -> None:
        if fault := layout_fault(self.shape, self.stack, self.terms, self.fill):
            raise ConfigError(f"ObsSpec.{fault[0]}", getattr(self, fault[0]), fault[1])

    def read_dtype(self, integers: bool = True) -> torch.dtype:
        """Return the dtype in which networks read the group: float32, but uint8 for images of bytes.

        Args:
            integers: integers and booleans become float32; False: they keep their dtype.
        """
        bytes_of_image = self.dtype == torch.uint8 and len(self.shape) > 1
        return torch.float32 if self.dtype.is_floating_point or (integers and not bytes_of_image) else self.dtype


@dataclass(frozen=True)
class Box:
    """Continuous actions: ``[N, size]`` float32 in [-1, 1], which the environment rescales to the simulator's bounds.

    Attributes:
        size: action dimensions A.
        low, high: the simulator's bounds, one value per dimension; None means [-1, 1]. Exported policies return actions
            within these bounds, and ``algo.entropy_unit=action`` measures entropies in their unit.
        center: the simulator's actions for actions of 0, within the bounds; None: the middle. Actions are linear in
            [-1, 0] and in [0, 1].
    """

    size: int
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    center: tuple[float, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one environment's action."""
        return (self.size,)

    @property
    def dtype(self) -> torch.dtype:
        """Type of its numbers."""
        return torch.float32

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """``(low, high)``; -1 and 1 in every dimension if none were given."""
        return self.low or (-1.0,) * self.size, self.high or (1.0,) * self.size

    def random(self, rows: int, gen: torch.Generator) -> Tensor:
        """Return ``rows`` uniform actions, [rows, A] float32 in [-1, 1), on the device of ``gen``."""
        return torch.rand(rows, self.size, generator=gen, device=gen.device).mul_(2).sub_(1)

    @classmethod
    def within(cls, size: int, limit: float) -> "Box":
        """Return ``size`` action dimensions whose simulator bounds are [-``limit``, ``limit``]."""
        return cls(size, (-limit,) * size, (limit,) * size)


@dataclass(frozen=True)
class Discrete:
    """Discrete actions: ``[N]`` int64 in [0, n), to which the environment adds ``start``.

    Attributes:
        n: number of actions.
        start: the simulator's first action. Only exported policies and ``pql.wrap``, which have the simulator's own
            actions, read it.
    """

    n: int
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one environment's action."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """Type of its numbers."""
        return torch.int64

    def random(self, rows: int, gen: torch.Generator) -> Tensor:
        """Return ``rows`` uniform actions, [rows] int64, on the device of ``gen``."""
        return torch.randint(self.n, (rows,), generator=gen, device=gen.device)


@dataclass(frozen=True)
class MultiDiscrete:
    """Several discrete actions at once: ``[N, K]`` int64, of which number k is in [0, nvec[k]).

    Attributes:
        nvec: numbers of actions, as gymnasium calls them; K twos for gymnasium's ``MultiBinary(K)``.
        start: the simulator's first actions, which the environment adds; None: zeros. See :class:`Discrete`.
    """

    nvec: tuple[int, ...]
    start: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one environment's action."""
        return (len(self.nvec),)

    @property
    def dtype(self) -> torch.dtype:
        """Type of its numbers."""
        return torch.int64

    def random(self, rows: int, gen: torch.Generator) -> Tensor:
        """Return ``rows`` uniform actions, [rows, K] int64, on the device of ``gen``."""
        drawn = torch.randint(2**62, (rows, len(self.nvec)), generator=gen, device=gen.device)
        return drawn % torch.tensor(self.nvec, device=gen.device)


Action = Box | Discrete | MultiDiscrete
LogKind = Literal["sum", "step", "episode"]


@dataclass(frozen=True)
class EnvSpec:
    """Static description of a ``VecEnv``: shapes, spaces and episode semantics. Constant over a run.

    Attributes:
        name: task name, for logs and error messages.
        num_envs: number of environments N.
        obs: observation groups by name; ``"policy"`` is required, ``"critic"`` (privileged) is optional.
        action: :class:`Box` (continuous), :class:`Discrete` or :class:`MultiDiscrete`.
        device: device of all tensors that ``reset`` and ``step`` return, and of the actions.
        max_episode_steps: time limit in environment steps; None if the simulator has none. Episodes may also be
            truncated earlier.
        autoreset: ``same_step``: the row that ends an episode returns the next episode's first observation in ``obs``;
            ``next_step``: it returns the final observation, and a filler row (``valid=False``) follows.
        final_obs: when ``Step.final_obs`` is a separate tensor: ``always`` (every row), ``on_done`` (only where an
            episode ended; elsewhere it is ``obs``) or ``never`` (the simulator does not return final observations:
            ``final_ok`` is False where an episode ended).
        log: keys of ``Step.log``, or a mapping of keys to kinds. ``sum`` (also without a mapping): part of a sum over
            the episode, such as a reward term; ``step``: a measurement of each step, of which the mean counts;
            ``episode``: of a whole episode, on the row that ends it, 0 elsewhere. The key ``success`` is special: it is
            above 0 in rows where the task is solved, and evaluations report the share of episodes with such a row.
        single_instance: a process can hold only one such simulator, so that evaluation needs a second process.
        deterministic: the same seed and actions give the same bits.
        groups: number G of environment groups that step independently by ``send`` and ``recv``; 1 if all step
            together. Group g holds the N / G environments from index g N / G on.
        spread: above 1 for asynchronous environments, which may answer late: upper bound on the steps of one
            environment, as a multiple of an equal share. ``present`` and ``answers`` must then exist.
        stream: CUDA stream on which the simulator works: ``current`` (PyTorch's current stream) or ``default`` (the
            legacy default stream, with which the collector then synchronises by events).
        info: optional properties. ``dt``: seconds per step, for videos; ``lost_life``: ``terminated`` may be set where
            the episode continues; ``restarts``: the simulator may begin an episode (``first``) without ending one;
            ``truncates_at_limit``: episodes are truncated at ``max_episode_steps`` only, so a rollout has room for few
            final observations (those without room count as lost);
            ``action_reach``: see the property of this name; ``symmetry``: see ``pql.contract.symmetry``; ``robot``:
            names, pose, gains and observation terms of a robot, see ``pql.contract.robot``.
    """

    name: str
    num_envs: int
    obs: Mapping[str, ObsSpec]
    action: Action
    device: torch.device
    max_episode_steps: int | None = None
    autoreset: Literal["same_step", "next_step"] = "same_step"
    final_obs: Literal["always", "on_done", "never"] = "on_done"
    log: Collection[str] | Mapping[str, LogKind] = ()
    single_instance: bool = False
    deterministic: bool = True
    groups: int = 1
    spread: int = 1
    stream: Literal["current", "default"] = "current"
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = get_args(LogKind)
        for name, kind in self.log_kinds.items():
            if kind not in kinds:
                raise ConfigError(f"spec.log[{name}]", kind, f"one of {', '.join(kinds)}{nearest(str(kind), kinds)}")

    @property
    def log_kinds(self) -> dict[str, LogKind]:
        """Kind of each key of ``Step.log``."""
        return dict(self.log) if isinstance(self.log, Mapping) else dict.fromkeys(self.log, "sum")

    @property
    def action_reach(self) -> tuple[float, ...]:
        """Distance in the simulator's units from an action of 0 to one of 1, for each dimension of a :class:`Box`.

        ``info["action_reach"]`` where an action of 1 here is several of an original task, else half of each range (the
        mean of both sides of a ``center``).
        """
        if (reach := self.info.get("action_reach")) is not None:
            return tuple(float(one) for one in reach)
        low, high = cast(Box, self.action).bounds
        return tuple((top - bottom) / 2 for bottom, top in zip(low, high, strict=True))


@runtime_checkable
class VecEnv(Protocol):
    """N environments that step together and reset themselves when an episode ends.

    Required are ``spec``, ``reset``, ``step`` and ``close``, below. ``check_env`` tests an implementation. Tensors that
    ``reset`` and ``step`` return are not modified by later steps. Actions outside [-1, 1] are clamped.

    Optional members are protocols in ``pql.contract.optional``: ``Resumable`` (exact resume), ``Staged`` (curricula),
    ``PartialReset``, ``SplitStep``, ``Renderable``, ``Viewable``, ``Preparable``, ``Measured``, ``WithEvaluation``,
    ``Capturable`` (CUDA graphs), ``GroupedEnv`` and ``AsyncEnv``.
    """

    @property
    def spec(self) -> EnvSpec:
        """Static description of the environments."""
        ...

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments and return their first observations, name -> [N, ...].

        Args:
            seed: seeds all random draws that follow; None continues the current random streams.
        """
        ...

    def step(self, action: Tensor) -> Step:
        """Step all environments.

        Args:
            action: [N, A] float32 in [-1, 1] for a :class:`Box`, [N] int64 for :class:`Discrete`, [N, K] int64 for
                :class:`MultiDiscrete`. It is not modified.
        Returns:
            A :class:`~pql.types.Step` with fields of [N, ...].
        """
        ...

    def close(self) -> None:
        """Free the simulator."""
        ...


def capturable(env: VecEnv) -> bool:
    """Return True if ``env.step`` can be captured in a CUDA graph; see ``pql.contract.optional``. A class that
    overrides methods of a capturable one must declare it anew: Python code of its own would run only while the graph is
    captured. If it does not, the answer is False, with a warning, once for each class."""
    if not getattr(env, "capturable", False):
        return False
    if changed := undeclared(env):
        _tell_undeclared(type(env), changed)
    return not changed


BESIDE_STEP = {
    "close",
    "describe",
    "obs_spec",
    "prepare",
    "render",
    "viewer",
    "web_viewer",
    "measures",
    "beside",
    "progress",
}
"""Methods that a step does not call."""


def undeclared(env: VecEnv) -> str:
    """Return the first method that ``env`` or its class overrides below the declaration of ``capturable``, or ""."""
    places = [getattr(env, "__dict__", {}), *map(vars, type(env).__mro__)]
    level = next((i for i, place in enumerate(places) if "capturable" in place), len(places))
    inherited = {name for place in places[level:] for name in place} | {"step", "reset"}
    own = [k for place in places[:level] for k, v in place.items() if callable(v) or isinstance(v, classmethod)]
    return next((n for n in own if n in inherited - BESIDE_STEP and not n.startswith("__")), "")


@functools.cache
def _tell_undeclared(kind: type, changed: str) -> None:
    what = f"{kind.__name__} overrides {changed} of a capturable environment: its step is not captured in a CUDA graph"
    warnings.warn(f"{what} unless {kind.__name__} itself declares capturable = True", PqlWarning, stacklevel=3)


def make_ready(env: VecEnv) -> None:
    """Call ``env.prepare()`` if ``env`` has it; see ``pql.contract.optional``."""
    if hasattr(env, "prepare"):
        env.prepare()


def preparation(env: VecEnv) -> str:
    """Return what ``env.prepare()`` is doing, in words; "" if it does not say. Other threads may ask."""
    return str(env.preparation()) if hasattr(env, "preparation") else ""


def make_env(name: str, num_envs: int = 64, device: str | torch.device = "cpu", **kwargs: Any) -> VecEnv:
    """Build an environment by name: ``make_env("halfcheetah", num_envs=64)``.

    A task's preset is not read: give its ``task.kwargs`` as keywords (``pql train task=NAME --cfg`` shows them).

    Args:
        name: a registered name, or ``module:attribute`` of a factory.
        num_envs: number of environments N.
        device: device of the simulation and of all tensors.
        kwargs: keywords of the factory.
    Raises:
        ConfigError: unknown name, missing simulator, or a keyword that the factory does not take.
    """
    factory = find_factory(name)
    check_keywords(factory, kwargs)
    check_chosen(name, kwargs)
    given = {"num_envs": num_envs, "device": torch.device(device), **kwargs}
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise ConfigError("task", name, f"a factory that takes (num_envs, device): {error}") from error
    env = adapted(factory(**given), given["device"])
    check_protocol(env, "task", name)
    return env


def adapted(env: Any, device: torch.device | None = None) -> Any:
    """Return ``env``, or, if it is a ``gymnasium.vector.VectorEnv``, a ``VecEnv`` of it with tensors on ``device``.
    Raises ``ConfigError``: an unsupported space or autoreset mode."""
    if isinstance(getattr(env, "spec", None), EnvSpec) or not hasattr(env, "single_action_space"):
        return env
    return import_name("env", "pql.envs.adapters.gymnasium:GymnasiumVec").of(env, device or torch.device("cpu"))


def check_protocol(env: Any, setting: str = "env", name: str | None = None) -> None:
    """Raise ``ConfigError`` if ``env`` is not a ``VecEnv``; for a Gymnasium environment it suggests ``task.id``."""
    methods = all(callable(getattr(env, m, None)) for m in ("reset", "step", "close"))
    if methods and isinstance(getattr(env, "spec", None), EnvSpec):
        return
    kind = type(env).__name__
    name = kind if name is None else name
    if hasattr(env, "action_space"):
        known = getattr(getattr(env, "spec", None), "id", None) or "Pendulum-v1"
        raise ConfigError(setting, name, f"a pql.VecEnv; {kind} is gymnasium's: 'task=gymnasium', 'task.id={known}'")
    wanted = "a pql.VecEnv: a spec (pql.EnvSpec), reset, step and close (pql.check_env tests it)"
    raise ConfigError(setting, name, f"{wanted}, not {kind}" if name != kind else wanted)
