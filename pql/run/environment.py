"""Build the simulator of a config's task: factory, keyword arguments and env slices."""

import inspect
import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pql.config import Config
from pql.contract.env import EnvSpec, VecEnv, make_env
from pql.contract.grouped import Grouped, grouped_spec
from pql.contract.last_action import LastAction, last_action_spec
from pql.contract.registry import check_keywords, find_factory
from pql.engine.placement import Machine, machine_of
from pql.errors import ConfigError

RESERVED = {"name", "num_envs", "device"}  # keywords of ``make_env``
CUT_SHORT = ("stagger", "random_lengths")
"""Keywords that shorten the first episode of each environment, so that episodes do not all end at once."""


def describe_env(config: Config, machine: Machine | None = None) -> EnvSpec | None:
    """Return the spec without building the environment, if its factory supports that.

    For an environment in another process see :func:`build_env`."""
    if config.task.process.python is not None or config.task.remote:
        return None
    machine = machine or machine_of(config)
    factory, groups = find_factory(config.task.name), config.placement.groups
    kwargs = env_kwargs(config, groups, machine)
    check_keywords(factory, kwargs)
    describe = getattr(factory, "describe", None)
    if describe is None:
        return None
    count = 1 if groups is None or "groups" in kwargs else groups
    one = describe(num_envs=config.num_envs // count, device=machine.devices["collector"], **kwargs)
    return None if one is None else whole_spec(config, one, count)


def whole_spec(config: Config, one: EnvSpec, groups: int) -> EnvSpec:
    """Spec of ``groups`` simulators like ``one`` combined, as the run sees it."""
    spec = one if groups == 1 else grouped_spec(one, groups)
    return last_action_spec(spec) if config.algo.needs_last_action else spec


def with_last_action(config: Config, env: VecEnv) -> VecEnv:
    """Return ``env``, wrapped to observe the last action and reward if the algorithm needs them."""
    return LastAction(env, config.task.reward_clip) if config.algo.needs_last_action else env


def task_kwargs(config: Config) -> dict[str, Any]:
    """Return the keyword arguments that the task passes to its factory. Raises ``ConfigError``: a keyword that also has
    its own setting, such as ``task.game``."""
    task = config.task
    for name in RESERVED & task.kwargs.keys():
        raise ConfigError(f"task.kwargs.{name}", task.kwargs[name], "no such keyword: the run's own settings give it")
    named = {k: v for k, v in (("id", task.id), ("game", task.game), ("model", task.model)) if v is not None}
    for name in named.keys() & task.kwargs:
        raise ConfigError(f"task.kwargs.{name}", task.kwargs[name], f"task.{name}={named[name]} alone to say it")
    return {**named, **task.kwargs}


def env_kwargs(
    config: Config, groups: int | None, machine: Machine, offered: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all arguments of the factory. A factory that takes ``threads`` gets its share of the cores; one that takes
    ``groups`` forms the slices itself; of those ``offered`` it gets what it takes."""
    given = task_kwargs(config)
    taken = inspect.signature(find_factory(config.task.name)).parameters
    given |= {name: value for name, value in (offered or {}).items() if name in taken}
    if "threads" in taken:
        given.setdefault("threads", machine.threads["simulator"])
    if "groups" in taken and groups is not None:
        given.setdefault("groups", groups)
    return given


def build_env(
    config: Config,
    num_envs: int | None = None,
    machine: Machine | None = None,
    approve: Callable[[EnvSpec], object] | None = None,
    offered: Mapping[str, Any] | None = None,
) -> VecEnv:
    """Build the task's environment.

    Args:
        num_envs: replaces the config's; one slice, with complete first episodes (for evaluation).
        machine: its device and threads; None: those of the config.
        approve: called with the spec of an environment in another process before its simulator is built, if its factory
            supports that; for others use :func:`describe_env`.
        offered: keywords that the factory gets in place of the task's, if it takes them.
    """
    if config.task.live:
        raise ConfigError("task", config.task.name, "the live object that this run was trained on: give it as env=")
    machine = machine or machine_of(config)
    device = machine.devices["collector"]
    groups, count, offered = config.placement.groups, config.num_envs, dict(offered or {})
    if num_envs is not None:
        groups, count, offered = 1, num_envs, {**offered, **dict.fromkeys(CUT_SHORT, False)}
    config = without(config, offered)
    if config.task.remote:
        make, forms = partial(remote_env, config, groups, device=device), True
    elif config.task.process.python is not None:
        shown = None if approve is None else lambda one: approve(whole_spec(config, one, groups or 1))
        make, forms = partial(process_env, config, machine=machine, approve=shown, offered=offered), False
    else:
        kwargs = env_kwargs(config, groups, machine, offered)
        make, forms = partial(make_env, config.task.name, device=device, **kwargs), "groups" in kwargs
    if groups is None or groups == 1 or forms:
        return with_last_action(config, make(num_envs=count))
    return with_last_action(config, Grouped.make(lambda: make(num_envs=count // groups), groups))


def build_eval_env(config: Config, num_envs: int, machine: Machine | None = None, **offered: Any) -> VecEnv:
    """Build environments for episodes that count: first ones are complete, no stage of a curriculum passes, and
    ``eval.play`` chooses the simulator's configuration for play. That of a task with the keyword ``randomize`` is
    without randomisation, and only by ``eval.play=true``. ``machine``, ``offered``: as for :func:`build_env`. Raises
    ``ConfigError``: it has none."""
    offered["curriculum_scale"] = math.inf  # a stage, once set, stays
    if config.eval.play is not False and "play" not in config.task.kwargs:
        offered["play"] = True
    if drawn := randomised(config):
        offered["randomize"] = {**drawn, "nominal": True} if isinstance(drawn, Mapping) else False
    env = build_env(config, num_envs, machine, offered=offered)
    if config.eval.play and not in_play(config, env.spec):
        env.close()
        raise ConfigError("eval.play", True, f"null or false: {env.spec.name} has no configuration for play")
    return env


def in_play(config: Config, spec: EnvSpec) -> bool:
    """Return True if environments for evaluations have the simulator's configuration for play."""
    return bool(spec.info.get("play") or randomised(config))


def randomised(config: Config) -> Any:
    """Return ``task.kwargs.randomize`` if ``eval.play=true`` evaluates without it: a flag, or the ranges of this
    library's tasks and of those made of them."""
    drawn = config.task.kwargs.get("randomize") if config.eval.play else None
    if not isinstance(drawn, Mapping):
        return drawn
    kind = find_factory(config.task.name)
    kind = kind.func if isinstance(kind, partial) else kind
    modules = [getattr(one, "__module__", "") for one in getattr(kind, "__mro__", [kind])]
    return drawn if any(module.startswith("pql.envs.") for module in modules) else None


def staggered(config: Config, spec: EnvSpec) -> bool:
    """Return True if the first episode of each environment is shortened."""
    return any(config.task.kwargs.get(name) or spec.info.get(name) for name in CUT_SHORT)


def without(config: Config, names: Collection[str]) -> Config:
    """Return ``config`` without the keywords ``names`` of its task."""
    kwargs = {name: value for name, value in config.task.kwargs.items() if name not in names}
    return replace(config, task=replace(config.task, kwargs=kwargs))


def process_env(
    config: Config,
    num_envs: int,
    machine: Machine,
    approve: Callable[[EnvSpec], object] | None = None,
    offered: Mapping[str, Any] | None = None,
) -> VecEnv:
    """Build ``num_envs`` environments in a separate process with its own Python."""
    from pql.remote.process.near import ProcessVec

    process, threads = config.task.process, machine.threads["simulator"]
    given = (process.python or "", task_kwargs(config), {"threads": threads, **(offered or {})})
    limits = (process.step_seconds, process.start_seconds)
    return ProcessVec(config.task.name, num_envs, machine.devices["collector"], *given, *limits, threads, approve)


def remote_env(config: Config, groups: int | None, num_envs: int, device: torch.device) -> VecEnv:
    """Build the task's environments stepped by remote actors; print the command that starts these."""
    kwargs = {k: v if isinstance(v, str) else json.dumps(v) for k, v in task_kwargs(config).items()}
    words = shlex.join([config.task.name, *(f"{k}={v}" for k, v in kwargs.items())])
    given = {"task": words, **config.task.remote}
    if groups is not None:
        given.setdefault("groups", groups)
    return make_env("remote", num_envs, device, **given)


def check_groups(config: Config, spec: EnvSpec) -> None:
    """Raise ``ConfigError`` if the env slices differ from the requested ones or in size."""
    if config.placement.groups not in (None, spec.groups):
        raise ConfigError("placement.groups", config.placement.groups, f"null or {spec.groups}, as {spec.name} has")
    if spec.num_envs % spec.groups:
        raise ConfigError("num_envs", spec.num_envs, f"a multiple of the {spec.groups} groups that {spec.name} has")
