"""Gymnasium's environments with NumPy arrays: construction, wrappers, spaces, seeds and actions. Needs no torch.

Shared by ``task=gymnasium`` and its remote actors.
"""

import copy
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation, FrameStackObservation

from pql.contract.plain import Box, Discrete, EnvSpec, MultiDiscrete, ObsSpec
from pql.contract.registry import import_name
from pql.errors import ConfigError, RunError, first_line, nearest

MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
OWN = "vector_entry_point"  # the value of ``vectorization`` for a vector environment of the user
NO_LEARNING = {"vector", "RecordVideo", "HumanRendering"}  # names in gymnasium.wrappers: pql records and shows episodes
# Their running statistics are in no checkpoint, evaluation or export.
STATISTICS = {"NormalizeObservation": "algo.normalize_obs", "NormalizeReward": "algo.normalize_reward"}
WRAPPERS = "a list of names, or of mappings with name and keywords: [{name: FrameStackObservation, stack_size: 4}]"


@dataclass(frozen=True)
class GymnasiumSettings:
    """Keywords of ``task=gymnasium`` and of its remote actors.

    Attributes:
        id: registered name, or ``module:Name-v0``.
        autoreset: ``next_step`` (a filler row follows each end) or ``same_step``. None: ``next_step`` (in remote actors
            ``same_step``), with ``vector_entry_point`` that of the environment.
        vectorization: ``sync`` (one after the other, in this process), ``async`` (a process each), or
            ``vector_entry_point`` (the vector environment registered for the id).
        render_mode: ``rgb_array`` makes ``render`` work; passed to ``gymnasium.make``.
        kwargs: keywords for ``gymnasium.make``, ``max_episode_steps`` included.
        wrappers: applied to each copy, the first one innermost: names in ``gymnasium.wrappers``, ``module:attribute``,
            or mappings of ``name`` and the wrapper's keywords. With ``vector_entry_point`` they are applied to the
            vector environment, and the names are those in ``gymnasium.wrappers.vector``.
        deterministic: False for an environment that draws from a generator which ``reset(seed)`` does not seed. None:
            as registered (``nondeterministic``).
    """

    id: str = "Pendulum-v1"
    autoreset: str | None = None
    vectorization: str = "sync"
    kwargs: Mapping[str, Any] | None = None
    render_mode: str | None = None
    wrappers: Sequence[str | Mapping[str, Any]] | None = None
    deterministic: bool | None = None


class CopyObservation(gymnasium.ObservationWrapper):
    """Copies each observation, because an environment that reuses its array would overwrite the final observation in
    ``reset`` (gymnasium issue 1132)."""

    def observation(self, observation: Any) -> Any:
        return copy.deepcopy(observation)


def check_settings(num_envs: int, settings: GymnasiumSettings) -> None:
    """Raise ``ConfigError`` for a value out of range."""
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ConfigError("num_envs", num_envs, "a whole number, at least 1")
    for setting, value, allowed in (
        ("autoreset", settings.autoreset, (None, *MODES)),
        ("vectorization", settings.vectorization, ("sync", "async", OWN)),
    ):
        if value not in allowed:
            raise ConfigError(setting, value, " or ".join(name for name in allowed if name))


# -- construction -----------------------------------------------------------------------------------------------------


def make_one(settings: GymnasiumSettings) -> gymnasium.Env:
    """Make one copy, in its wrappers. Raises ``ConfigError``: unknown id, missing package, or a keyword or wrapper that
    does not fit."""
    with _errors_of(settings):
        env = gymnasium.make(settings.id, **(settings.kwargs or {}))
    for wrap in _wrappers(settings, "gymnasium.wrappers"):
        env = wrap(env)
    return env


def make_vector(
    settings: GymnasiumSettings, num_envs: int, autoreset: str, outer: Sequence[Any] = (), spawn: bool = False
) -> VectorEnv:
    """Make ``num_envs`` copies. Errors as for :func:`make_one`.

    Args:
        autoreset: a key of ``MODES``; not used with ``vector_entry_point``.
        outer: wrappers of each copy around those of the settings; not used with ``vector_entry_point``.
        spawn: start the processes of ``async`` anew, instead of by a fork.
    """
    kwargs: dict[str, Any] = dict(settings.kwargs or {})
    if settings.render_mode is not None:
        kwargs["render_mode"] = settings.render_mode
    if settings.vectorization == OWN:
        with _errors_of(settings):
            envs = gymnasium.make_vec(settings.id, num_envs, OWN, **kwargs)
        for wrap in _wrappers(settings, "gymnasium.wrappers.vector"):
            envs = wrap(envs)
        if envs.num_envs != num_envs:
            made = envs.num_envs
            envs.close()
            raise ConfigError("num_envs", num_envs, f"{made}: {settings.id} makes {made} environments")
        return envs
    vector: dict[str, Any] = {"autoreset_mode": MODES[autoreset], "copy": False}
    if settings.vectorization == "async" and spawn:
        vector["context"] = "spawn"
    wrappers: list[Any] = [*_wrappers(settings, "gymnasium.wrappers"), *outer]
    wrappers += [CopyObservation] if autoreset == "same_step" else []
    with _errors_of(settings):
        return gymnasium.make_vec(settings.id, num_envs, settings.vectorization, vector, wrappers, **kwargs)


@contextmanager
def _errors_of(settings: GymnasiumSettings) -> Iterator[None]:
    """Convert gymnasium's errors to ``ConfigError``."""
    id, kwargs = settings.id, settings.kwargs or {}
    try:
        yield
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        module, _, name = id.rpartition(":")
        near = nearest(name, gymnasium.registry)
        other = near if module or near else f"; with the module that registers it: {module_of(name)}:{id}"
        raise ConfigError("id", id, f"a registered gymnasium id{other}") from error
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise ConfigError("id", id, f"an environment whose packages are installed ({error})") from error
    except TypeError as error:
        if not kwargs:  # a fault of its own
            raise RunError(_unmade(id, error)) from error
        raise ConfigError("kwargs", kwargs, f"keywords that {id} takes ({error})") from error
    except gymnasium.error.Error as error:
        entry = gymnasium.registry.get(id.rpartition(":")[2])
        if entry is None or (entry.entry_point and entry.vector_entry_point):
            raise ConfigError("id", id, f"an environment that can be made ({error})") from error
        allowed = f"{OWN}: {id} has no entry_point" if entry.vector_entry_point else f"sync or async: {id} has no {OWN}"
        raise ConfigError("vectorization", settings.vectorization, allowed) from error
    except Exception as error:
        raise RunError(_unmade(id, error)) from error


def _unmade(id: str, error: Exception) -> str:
    other = "if it needs other versions of its packages, give it a Python that has them (task.process.python)"
    return f"{id} could not be made: {first_line(error)}; {other}"


def module_of(id: str) -> str:
    """Return the likely module of an id ``namespace/Name-v0``; MODULE if it has no namespace."""
    namespace, _, _ = id.rpartition("/")
    return namespace if namespace.isidentifier() else "MODULE"


def _wrappers(settings: GymnasiumSettings, module: str) -> list[Callable[[Any], Any]]:
    """Return the wrappers of the settings; ``module`` holds those that have a name without ``:``."""
    given = () if settings.wrappers is None else settings.wrappers
    if isinstance(given, str | Mapping):
        raise ConfigError("wrappers", given, WRAPPERS)
    found: list[Callable[[Any], Any]] = []
    for entry in given:
        kwargs = {"name": entry} if isinstance(entry, str) else entry
        if not (isinstance(kwargs, Mapping) and isinstance(name := kwargs.get("name"), str)):
            raise ConfigError("wrappers", entry, WRAPPERS)
        _refuse_statistics(name)
        wrapper = import_name("wrappers", name) if ":" in name else _gymnasiums_wrapper(name, module)
        found.append(partial(_wrap, wrapper, name, {k: v for k, v in kwargs.items() if k != "name"}))
    return found


def _refuse_statistics(name: str) -> None:
    module, _, wrapper = name.rpartition(":")
    if wrapper in STATISTICS and module.partition(".")[0] in ("", "gymnasium"):
        wanted = f"no running statistics, which neither checkpoints nor evaluations would have: {STATISTICS[wrapper]}"
        raise ConfigError("wrappers", name, f"{wanted}=true does this")


def _gymnasiums_wrapper(name: str, module: str) -> Any:
    try:
        found = importlib.import_module(module)  # only now: that of vector environments needs a package more
        known = [n for n in found.__all__ if n not in NO_LEARNING and n not in STATISTICS]
        if name in known:
            return getattr(found, name)
    except ImportError as error:
        raise ConfigError("wrappers", name, f"a wrapper whose packages are installed ({error})") from error
    raise ConfigError("wrappers", name, f"module:attribute, or one of {', '.join(known)}{nearest(name, known)}")


def _wrap(wrapper: Callable[..., Any], name: str, kwargs: dict[str, Any], env: Any) -> Any:
    try:
        return wrapper(env, **kwargs)
    except Exception as error:  # a wrapper that does not fit may raise anything, NotImplementedError included
        given = f" with {kwargs}" if kwargs else ""
        wanted = f"a wrapper that takes this environment{given} ({first_line(error)})"
        raise ConfigError("wrappers", name, wanted) from error


# -- specification ----------------------------------------------------------------------------------------------------


def spec_of_copies(settings: GymnasiumSettings, num_envs: int, default: str) -> EnvSpec:
    """Return the specification of ``num_envs`` ``sync`` or ``async`` copies; makes one of them, and closes it.
    ``default``: the autoreset mode if the settings name none. Raises ``ConfigError`` for an unsupported space."""
    env = make_one(settings)
    try:
        limit = env.spec.max_episode_steps if env.spec else None
        mode, repeats = settings.autoreset or default, settings.deterministic
        return _spec(env, settings.id, num_envs, limit, mode, repeats)
    finally:
        env.close()


def spec_of_vector(
    envs: VectorEnv, setting: str, name: str, autoreset: str | None = None, deterministic: bool | None = None
) -> EnvSpec:
    """Return the specification of a vector environment.

    Args:
        setting, name: the setting that chose it, and its name: for errors.
        autoreset: the mode that the settings demand; None: any.
        deterministic: as in :class:`GymnasiumSettings`.
    Raises:
        ConfigError: its ``metadata`` declare no autoreset mode, or one that is not supported; an unsupported space.
    """
    declared = envs.metadata.get("autoreset_mode")
    mode = next((k for k, v in MODES.items() if declared in (v, v.value)), None)
    if mode is None:
        said = "none" if declared is None else getattr(declared, "name", declared)
        wanted = "AutoresetMode.NEXT_STEP or SAME_STEP"
        raise ConfigError(setting, name, f"metadata['autoreset_mode'] to be gymnasium.vector.{wanted}, not {said}")
    if autoreset not in (None, mode):
        raise ConfigError("autoreset", autoreset, f"null or {mode}, as {name} has")
    spec = envs.spec
    limit = None if spec is None else spec.kwargs.get("max_episode_steps", spec.max_episode_steps)
    return _spec(envs, name, envs.num_envs, limit, mode, deterministic)


def _spec(
    env: Any,
    name: str,
    num_envs: int,
    limit: int | None,
    autoreset: str,
    deterministic: bool | None,
) -> EnvSpec:
    rate, one = env.metadata.get("render_fps"), "single_" if isinstance(env, VectorEnv) else ""
    seen, action = (getattr(env, f"{one}{what}_space") for what in ("observation", "action"))  # of one copy
    if deterministic is None:
        deterministic = not (env.spec and env.spec.nondeterministic)
    return EnvSpec(
        name=name,
        num_envs=num_envs,
        obs={k: ObsSpec(*part, **stack_fields(env)) for k, part in obs_parts(seen).items()},
        action=action_spec(action),
        device="cpu",
        max_episode_steps=limit if limit and limit > 0 else None,
        autoreset=autoreset,
        final_obs="always",
        info={"dt": 1 / rate} if rate else {},
        deterministic=deterministic,
    )


def stack_fields(env: Any) -> dict[str, Any]:
    """Return the stack of ``ObsSpec`` if the outermost wrapper is gymnasium's ``FrameStackObservation``, flattened or
    not; else {}."""
    env = env.env if type(env) is FlattenObservation else env
    fill = {"reset": "first", "zero": "zeros"}.get(getattr(env, "padding_type", ""))
    return {"stack": env.stack_size, "fill": fill} if type(env) is FrameStackObservation and fill else {}


def resets_copies(envs: VectorEnv) -> bool:
    """Return True for gymnasium's own classes, whose ``reset`` takes a list of seeds and a mask of copies."""
    return isinstance(envs.unwrapped, SyncVectorEnv | AsyncVectorEnv)


def reset_copies(envs: VectorEnv, seed: int | None) -> Any:
    """Restart all copies; return the first observations [N, ...] and the infos. Each copy has an element of numpy's
    ``SeedSequence``: with ``seed + i``, neighbouring seeds would share all copies but one."""
    if seed is None:
        return envs.reset()
    seeds = copy_seeds(seed, envs.num_envs)
    return envs.reset(seed=seeds if resets_copies(envs) else seeds[0])


def copy_seeds(seed: int, count: int) -> list[int]:
    """Return a seed below 2^31 for each of ``count`` copies, from numpy's ``SeedSequence``."""
    return (np.random.SeedSequence(seed).generate_state(count) >> 1).tolist()


# -- spaces -----------------------------------------------------------------------------------------------------------


def groups_of(obs: Any) -> dict[str, Any]:
    """Return observations by group: those of a Dict space, or one group ``policy``."""
    return dict(obs) if isinstance(obs, Mapping) else {"policy": obs}


def final_groups(info: Mapping[str, Any], index: int) -> dict[str, Any] | None:
    """Return the final observation of copy ``index`` under same-step autoreset, by group; None: ``info`` has none."""
    final, there = info.get("final_obs"), info.get("_final_obs")
    if final is None or not (there is None or there[index]):
        return None
    if isinstance(final, Mapping):
        return {k: v[index] for k, v in final.items()}
    return None if final[index] is None else groups_of(final[index])


def obs_parts(space: spaces.Space) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the name of the dtype of each observation group: bytes stay uint8, others become float32.
    Raises ``ConfigError``: neither a Box nor a Dict of these with the entry ``policy``."""
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"policy": space}
    found = {}
    for name, part in parts.items():
        if "policy" not in parts or not isinstance(part, spaces.Box) or part.dtype.kind not in "fiub":
            wanted = "a Box, or a Dict of these with a 'policy' entry"
            raise ConfigError("observation_space", space, f"{wanted}; {_flattening(space)}")
        found[name] = (part.shape, "uint8" if part.dtype == np.uint8 else "float32")
    return found


def _flattening(space: spaces.Space) -> str:
    """Return the setting, quoted for a shell, that makes one array of a space, and what it does."""
    if _flat(space):
        return "task.kwargs.wrappers=[FlattenObservation] makes one array of it"
    keys = ",".join(name for name, part in space.items() if _flat(part)) if isinstance(space, spaces.Dict) else ""
    if not keys:
        return "task.kwargs.wrappers=[module:Wrapper] of your own can convert it"
    chosen = f"[{{name:FilterObservation,filter_keys:[{keys}]}},FlattenObservation]"
    return f'"task.kwargs.wrappers={chosen}" makes one array of the entries that have a fixed size'


def _flat(space: spaces.Space) -> bool:
    try:
        return bool(space.is_np_flattenable)
    except NotImplementedError:  # a space of a package's own, such as MiniGrid's missions
        return False


def action_spec(space: spaces.Space) -> Any:
    """Return the action specification, of ``pql.contract.plain``. Raises ``ConfigError``: a Dict, a Tuple, or a Box
    without finite bounds or of integers."""
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        start = tuple(map(int, space.start.reshape(-1)))
        return MultiDiscrete(tuple(map(int, space.nvec.reshape(-1))), start if any(start) else None)
    if isinstance(space, spaces.MultiBinary):
        return MultiDiscrete((2,) * math.prod(space.shape))
    bounded = isinstance(space, spaces.Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all()
    if not bounded or not np.issubdtype(space.dtype, np.floating):
        allowed = "a Box of floats with finite bounds, Discrete, MultiDiscrete or MultiBinary"
        raise ConfigError("action_space", space, f"{allowed}; task.kwargs.wrappers=[module:Wrapper] can convert others")
    assert isinstance(space, spaces.Box)
    low, high = (tuple(b.astype(float).reshape(-1).tolist()) for b in (space.low, space.high))
    return Box(math.prod(space.shape), low, high)


def simulator_action(space: spaces.Space, action: np.ndarray) -> np.ndarray:
    """Map actions to a space: [N, A] in [-1, 1] to [N, ...] in a Box, [N] or [N, K] from 0 to [N] or [N, ...]."""
    if isinstance(space, spaces.Discrete):
        return action + space.start
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        shaped = action.reshape(-1, *space.shape)
        return (shaped + space.start if isinstance(space, spaces.MultiDiscrete) else shaped).astype(space.dtype)
    assert isinstance(space, spaces.Box)
    low, high = (b.astype(np.float64).reshape(-1) for b in (space.low, space.high))
    scaled = low + (action.astype(np.float64).clip(-1, 1) + 1) / 2 * (high - low)
    return scaled.clip(low, high).reshape(-1, *space.shape).astype(space.dtype)
