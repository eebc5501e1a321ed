"""The environment contract: ``VecEnv`` and its ``EnvSpec``; ``make_env``.

A simulator is one object that steps N environments at once and speaks in device tensors. This file imports
none; names resolve lazily, see ``registry.py``.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from pql.contract.registry import check_chosen, find_factory
from pql.errors import ConfigError, nearest
from pql.types import Obs, Step


@dataclass(frozen=True)
class ObsSpec:
    """Shape and dtype of one environment's observation group (without the N axis).

    Attributes:
        stack: above 1: the first axis of ``shape`` holds the newest ``stack`` frames, oldest first; those from before
            the episode are zeros. A replay then stores each frame once and stacks anew when sampled.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    stack: int = 1


@dataclass(frozen=True)
class Box:
    """Continuous actions: ``[N, size]`` float32 in [-1, 1]; the adapter rescales to the simulator's bounds.

    Attributes:
        low, high: the simulator's own bounds, one pair per dimension, for an exported policy, which gives actions in
            these; None: [-1, 1].
    """

    size: int
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    @property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(low, high), [-1, 1] where none were given."""
        return self.low or (-1.0,) * self.size, self.high or (1.0,) * self.size

    @classmethod
    def within(cls, size: int, limit: float) -> "Box":
        """``size`` actions, each of which the simulator takes within +-``limit``."""
        return cls(size, (-limit,) * size, (limit,) * size)


@dataclass(frozen=True)
class Discrete:
    """Integer actions: ``[N]`` int64 in [0, n)."""

    n: int


@dataclass(frozen=True)
class EnvSpec:
    """What a learner must know of an environment before the first step.

    Attributes:
        obs: observation groups; ``"policy"`` is required.
        max_episode_steps: time limit in env steps, None where the simulator has none. It sizes the replay's
            store of final observations.
        autoreset: ``same_step``: the row that ends an episode returns the next episode's first observation;
            ``next_step``: it returns the final one, and a filler row (``valid=False``) follows.
        final_obs: ``always``: ``final_obs`` is true on every row; ``on_done``: only where an episode ended
            (it aliases ``obs`` elsewhere, which is the same thing); ``never``: lost, ``final_ok`` is False there.
        log: keys of ``Step.log``, constant over the run. One named ``success`` is above 0 on rows where the task is
            solved: evaluations then report the share of episodes with such a row.
        single_instance: only one simulator fits in a process, so evaluation needs a process of its own.
        deterministic: same seed and actions, same bits.
        groups: above 1: this many groups of environments can step apart, by ``send`` and ``recv``. Group g of G is the
            N / G environments from g N / G on.
        spread: above 1: environments may answer late, so that one may make up to this many times the steps of an equal
            share while others are missing. ``present`` and ``answers`` are there, too.
        stream: CUDA stream the simulator works on: ``current`` (PyTorch's), or ``default`` (the legacy default
            stream; the collector then bridges the two with events).
    """

    name: str
    num_envs: int
    obs: Mapping[str, ObsSpec]
    action: Box | Discrete
    device: torch.device
    max_episode_steps: int | None = None
    autoreset: Literal["same_step", "next_step"] = "same_step"
    final_obs: Literal["always", "on_done", "never"] = "on_done"
    log: tuple[str, ...] = ()
    single_instance: bool = False
    deterministic: bool = True
    groups: int = 1
    spread: int = 1
    stream: Literal["current", "default"] = "current"
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class VecEnv(Protocol):
    """N environments that step together. See ``Step`` for the meaning of each field.

    Optional, found by ``hasattr``: ``state_dict() -> dict`` and ``load_state_dict(d)`` for exact resume;
    ``reset_where(mask) -> Obs`` to restart single environments ([N] bool; returns all current observations; a filler
    row that was due is then not), as a run does with those whose numbers are not finite; ``send(action, ids)`` /
    ``recv() -> (ids, Step)`` for simulators whose environments answer in groups: ``send`` hands a group's actions
    ([n, A] or [n], ``ids`` [n] int64, ascending) to the simulator and returns at once, ``recv`` waits for the group
    that was sent first and returns its ids and what followed there (fields of [n, ...]); ``start(action)`` /
    ``result() -> Step``, the two halves of ``step``, for a simulator that works elsewhere (``Grouped`` then needs no
    thread for it);
    ``render(index=0, width=None, height=None)`` -> numpy uint8 [H, W, 3], a picture of one environment as
    it stands (None: a size of its own), and ``viewer(index=0)``, a window with ``open``, ``show()`` and ``close()``,
    both for ``pql play``. A factory with a keyword ``render_mode`` is given ``"rgb_array"`` there.
    ``spec.info["dt"]``, the seconds of a step, sets a video's speed.

    ``prepare()``, optional: do now what the first step or reset would do once, compile kernels and capture graphs say.
    Called once, before the first reset, while nothing of the run is under way on a GPU; the state is as before. (While
    one thread captures, in mid-run for an evaluation say, CUDA forbids all others the legacy default stream.)

    ``capturable``, optional, False where it is missing: True says that ``step`` can be put into a CUDA graph, together
    with the policy's action before it and the recording after it. Then ``step`` never waits for the device, and takes
    no way in Python that depends on values or on how often it was called; it keeps its state at fixed addresses
    (``copy_``, never a new tensor in place of an old one), and draws from ``generators`` (a list of
    ``torch.Generator``, which is there too) alone; ``state_dict`` and ``load_state_dict``, which writes in place, are
    there and work before the first reset. What ``step`` returns is read before the next one.

    Where ``spec.groups`` is above 1: ``send(action, ids)`` starts a step of one group and returns at once; ``ids`` [n]
    int64, on the CPU, are the group's environments in order; ``action`` [n, ...] is left alone until the answer.
    ``recv() -> (ids, Step)`` waits for the oldest group sent; its step's fields are [n, ...], and stay as they are
    until the same group is sent again. ``step`` is there as ever, while no answer is due.

    Where ``spec.spread`` is above 1: ``send`` takes any environments of a group; ``answers(group) -> (ids, Step)``
    waits for a bounded time and returns whose answers came ([k] int64, on the CPU; possibly none), with a step of the
    whole group: rows of the others are fillers that repeat the observation they had. ``present() -> [N] bool``, on the
    CPU, says who answered the last ``reset``. An environment that was lost comes back by a filler row with ``first``.
    ``step`` waits for all that are there: the rows of others are fillers.
    ``beside() -> VecEnv | None``, optional: environments for evaluations, where a second simulator cannot be built.
    ``measures() -> dict[str, float]``, optional: numbers of its own for every row of the log.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, seed: int | None = None) -> Obs:
        """Restart all environments. An int seeds every random draw that follows; None goes on drawing."""
        ...

    def step(self, action: Tensor) -> Step:
        """Apply ``action`` ([N, A] float32 in [-1, 1], or [N] int64) and return what followed."""
        ...

    def close(self) -> None: ...


EnvFactory = Callable[..., VecEnv]
"""``factory(num_envs, device, **kwargs) -> VecEnv``. Where it has an attribute ``describe`` of the same signature,
that returns the ``EnvSpec`` without starting the simulator, so memory can be checked first."""


def capturable(env: VecEnv) -> bool:
    """Whether a step of ``env`` can be put into a CUDA graph; see :class:`VecEnv`."""
    return bool(getattr(env, "capturable", False))


def make_ready(env: VecEnv) -> None:
    """Let ``env`` do now what its first step would do once; see :class:`VecEnv`."""
    if hasattr(env, "prepare"):
        env.prepare()


def make_env(name: str, num_envs: int = 64, device: str | torch.device = "cpu", **kwargs: Any) -> VecEnv:
    """Build a registered environment: ``make_env("halfcheetah", num_envs=64)``.

    Raises:
        ConfigError: unknown name, missing simulator, or a keyword the simulator does not take.
    """
    factory = find_factory(name)
    check_keywords(factory, kwargs)
    check_chosen(name, kwargs)
    given = {"num_envs": num_envs, "device": torch.device(device), **kwargs}
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise ConfigError("task", name, f"a factory that takes (num_envs, device): {error}") from error
    env = factory(**given)
    check_protocol(env, "task", name)
    return env


def check_protocol(env: Any, setting: str = "env", name: str | None = None) -> None:
    """Raises ``ConfigError`` for an object that is no ``VecEnv``; one of gymnasium's is had by its id instead."""
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


def check_answer(method: str, answer: Any, kind: type, spec: EnvSpec) -> None:
    """Raises ``ConfigError`` where an environment's ``reset`` or ``step`` returned something else than a ``kind``."""
    if not isinstance(answer, kind):
        what = f"{method}() to return a {'dict of observations' if kind is dict else 'pql.Step'}"
        like = ", as gymnasium has it" if isinstance(answer, tuple) else ""
        raise ConfigError(
            "task", spec.name, f"{what}, not a {type(answer).__name__}{like}: pql doctor --env NAME tests it"
        )


def check_keywords(factory: Callable[..., Any], kwargs: Mapping[str, Any], prefix: str = "") -> None:
    """``ConfigError`` for the first keyword that ``factory`` does not take; one that takes any checks its own. The
    error names it with ``prefix`` before it."""
    taken = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        return
    known = [p.name for p in taken if p.name not in ("num_envs", "device")]
    for key, value in kwargs.items():
        if key not in known:
            raise ConfigError(prefix + key, value, f"one of the keywords {', '.join(known)}{nearest(key, known)}")
