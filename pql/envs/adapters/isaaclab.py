"""Isaac Lab's tasks, of versions 2.3 and 3.0: ``task=isaaclab task.kwargs.task=Isaac-Ant``.

Isaac Lab needs its own torch and Python, and allows one environment per process: set ``task.process.python``.

The two versions start in opposite orders. 2.3 starts Isaac Sim first (``AppLauncher``); only then may the tasks be
imported. 3.0 resolves the task's configuration first (``resolve_presets`` selects physics and renderer);
``launch_simulation`` then starts what the configuration needs: Newton only, or Isaac Sim. 3.0 also dropped the ``-v0``
of its ids; either form is found here.

Episodes end and begin in the same step. The final observation is lost (``final_obs="never"``), except in versions whose
configuration has ``compute_final_obs``: there ``final_obs=True`` requests it. It is refused if an observation group
keeps a history, which would lack its latest frame. A time limit is a truncation, or terminal if the task's
``is_finite_horizon`` is set. The managers' actions have no bounds: [-1, 1] here is ``action_bound`` times that in the
simulator (FastTD3 uses 1 or 3, depending on the task).

The simulator's log has means over the environments reset in a step; each counts once per reset environment. For the
reasons of episode ends it has counts; here each is the share of episodes that it ended. What is logged in every step
(mjlab's ``Metrics/slip_velocity_mean``) is the mean of all environments, a number of each step.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import EnvSpec, ObsSpec
from pql.envs.adapters.adapt import Actions, Bound, change
from pql.envs.adapters.managers import PLAIN, Course, Log, Stages, picture
from pql.envs.adapters.quiet import quiet
from pql.envs.adapters.robot import managed_robot, with_stacks, with_symmetry
from pql.errors import ConfigError, nearest
from pql.types import Obs, Step, chosen

LIMITED = {"time_limit": "settings.episode_length_s"}  # the keyword that sets it


def isaaclab(
    num_envs: int = 4096,
    device: str | torch.device = "cuda:0",
    task: str = "Isaac-Ant",
    action_bound: Bound = 1.0,
    final_obs: bool = False,
    settings: Mapping[str, Any] | None = None,
    random_lengths: bool = True,
    cameras: bool = False,
    presets: Sequence[str] = (),
    curriculum_scale: float = 1.0,
    play: bool = False,
    render_mode: str | None = None,
    mirror: Mapping[str, Any] | None = None,
) -> "IsaacLabVec":
    """Make a registered task of ``isaaclab_tasks``.

    Args:
        num_envs: N.
        device: device of the simulator and the tensors.
        task: its gymnasium id, with or without ``-v0``.
        action_bound: the simulator's action for an action of 1, if its space has no bounds: a number, or one for each
            dimension; ``limits``, ``limits_asym``: as far as the joints' limits, see ``adapt.joint_spans``.
        final_obs: compute final observations, if this version can.
        settings: attributes of its configuration, by dotted name: ``{"episode_length_s": 10.0}``.
        random_lengths: start the first episodes at random points of the time limit, so that they do not end together.
        cameras: enable rendering, for camera observations.
        presets: names of configuration variants such as ``newton_mjwarp`` (3.0 only); default: the task's.
        curriculum_scale: factor on the steps at which stages of curricula begin; below 1: earlier; infinity: never.
        play: use the task ``...-Play``, if it is registered, with this task's time limit. Settings that it does not
            have are left out.
        render_mode: ``rgb_array`` makes ``render`` work.
        mirror: which joints are on which side, for ``algo.symmetry``: ``{"sides": {"FL": "FR"}, "odd": ["hip"]}``, see
            ``pql.contract.symmetry.of_robot``.
    Raises:
        ConfigError: an unknown task, a setting that the configuration does not have, or one that this version of Isaac
            Lab does not support.
    """
    start = _start_3 if hasattr(importlib.import_module("isaaclab.app"), "launch_simulation") else _start_2
    cameras |= render_mode is not None
    with ExitStack() as running, quiet():  # a failure on the way closes what was started
        name, config = start(running, Wanted(num_envs, str(device), task, final_obs, settings, cameras, presets, play))
        import gymnasium

        shown: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
        simulator = gymnasium.make(name, cfg=config, **shown).unwrapped
        course = Course(random_lengths, curriculum_scale, "-Play" in name)
        env = with_symmetry(IsaacLabVec(simulator, name, action_bound, course, running), mirror)
        env.app = running.pop_all()
    return env


class Wanted(NamedTuple):
    """The keywords of :func:`isaaclab` that its configuration is made of."""

    num_envs: int
    device: str
    task: str
    final_obs: bool
    settings: Mapping[str, Any] | None
    cameras: bool
    presets: Sequence[str]
    play: bool

    def read(self, load: Callable[[str], Any]) -> tuple[str, Any]:
        """Return the id and the configuration of the task, or of that for play; ``load`` reads an id's."""
        name = registered(self.task)
        shown, settings = play_id(name) if self.play else None, self.settings or {}
        config = load(shown or name)
        if shown is not None:
            config.episode_length_s = load(name).episode_length_s  # in play, episodes may have no end
        change(config, settings, known_only=shown is not None)
        config.seed = 0
        if self.final_obs:
            if not hasattr(config, "compute_final_obs"):
                raise ConfigError("final_obs", True, "false: this version of Isaac Lab cannot compute them")
            config.compute_final_obs = True
        return shown or name, config


def _start_2(running: ExitStack, wanted: Wanted) -> tuple[str, Any]:
    """Start Isaac Sim, then read the task's configuration: (its id, the configuration)."""
    from isaaclab.app import AppLauncher

    if wanted.presets:
        raise ConfigError("presets", list(wanted.presets), "none: Isaac Lab 2 has no presets")
    # Before any other import of isaaclab.
    app = AppLauncher(headless=True, device=wanted.device, enable_cameras=wanted.cameras).app
    running.callback(app.close)
    import isaaclab_tasks  # noqa: F401  registers the ids
    from isaaclab_tasks.utils import parse_env_cfg

    return wanted.read(lambda name: parse_env_cfg(name, device=wanted.device, num_envs=wanted.num_envs))


def _start_3(running: ExitStack, wanted: Wanted) -> tuple[str, Any]:
    """Resolve the task's configuration, then start what it needs: (its id, the configuration)."""
    import isaaclab_tasks  # noqa: F401  registers the ids
    from isaaclab.app import launch_simulation
    from isaaclab_tasks.utils import load_cfg_from_registry
    from isaaclab_tasks.utils.hydra import resolve_presets

    def load(name: str) -> Any:
        config = resolve_presets(load_cfg_from_registry(name, "env_cfg_entry_point"), tuple(wanted.presets))
        config.sim.device, config.scene.num_envs = wanted.device, wanted.num_envs
        return config

    name, config = wanted.read(load)
    launch = {"device": wanted.device, "headless": True, "enable_cameras": wanted.cameras, "visualizer": None}
    running.enter_context(launch_simulation(config, {**launch, "visualizer_explicit": True}))
    return name, config


def registered(task: str) -> str:
    """Return the gymnasium id of ``task``, which may be given with or without ``-v0``. Raises ``ConfigError``: neither
    is registered."""
    import gymnasium

    for name in (task, f"{task}-v0", task.removesuffix("-v0")):
        if name in gymnasium.registry:
            return name
    raise ConfigError("task", task, f"a registered task of Isaac Lab{nearest(task, gymnasium.registry)}")


def play_id(name: str) -> str | None:
    """Return the id of the play configuration of a registered task, or None."""
    import gymnasium

    base, version = (name[:-3], "-v0") if name.endswith("-v0") else (name, "")
    return found if (found := f"{base}-Play{version}") in gymnasium.registry else None


class Managed:
    """Environment with Isaac Lab's managers, which mjlab has too, as a ``VecEnv``; a subclass adds ``step``.

    Args:
        env: the simulator.
        fields: further ones of its ``EnvSpec``.
    """

    runtime = "isaaclab"

    def __init__(self, env: Any, name: str, action_bound: Bound, course: Course, **fields: Any):
        self.env, self.course, self.stages = env, course, Stages(env, course)
        self.finite = bool(getattr(env.cfg, "is_finite_horizon", False))
        self.robot = managed_robot(env, self.runtime)
        self.actions = Actions(env, action_bound)
        obs, extras = env.reset()
        self.log, shapes, limit = Log(name, env), group_specs(obs), int(env.max_episode_length)
        self.seen = copies(obs)  # [N, ...] as last returned
        after, over = self._learn_log(extras)
        shapes = with_stacks(shapes, self.robot, self.seen, copies(after), over)
        if self.stages.counted:
            self.progress, self.load_progress = self.stages.progress, self.stages.load_progress
        if "env_ids" in inspect.signature(env.reset).parameters and self.scoped(env):
            self.reset_where = self._reset_where
        info = {"dt": float(env.step_dt), "play": course.play, "random_lengths": course.random_lengths, **LIMITED}
        info |= {} if self.robot is None else {"robot": self.robot}
        fields |= {"max_episode_steps": limit, "log": self.log.kinds, "deterministic": False, "stream": "default"}
        fields["info"] = {**info, **fields.get("info", {})}
        self.spec = EnvSpec(name, env.num_envs, shapes, self.actions.spec, torch.device(env.device), **fields)

    @staticmethod
    def scoped(env: Any) -> bool:
        """Return True if a reset of single environments leaves the histories of the others alone."""
        return group_with_history(env.cfg) is None

    def _learn_log(self, extras: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], Tensor]:
        """Find the log's terms: those of a reset, then, from a step without actions, those of a step. The counters are
        set back. Returns the step's observations, and where episodes ended, [N] bool."""
        env, names = self.env, ("common_step_counter", "_sim_step_counter")
        counters = {name: getattr(env, name) for name in names if hasattr(env, name)}
        self.log.add_reset(extras)
        still = torch.zeros(env.num_envs, self.actions.spec.size, device=env.device)
        obs, _, terminated, time_outs, extras = env.step(self.actions(still))
        over = terminated | time_outs
        self.log.add_step(extras, bool(over.any()))
        for name, count in counters.items():
            setattr(env, name, count)
        return obs, over

    def reset(self, seed: int | None = None) -> Obs:
        """Reset all environments. ``seed`` seeds torch's global generator, among others."""
        with quiet():
            obs, extras = self.env.reset(seed=None if seed is None else seed % 2**31)
            if self.stages.levels is not None:
                obs, extras = self.stages.reset_on_levels()
        self.log.seen(extras)
        if self.course.random_lengths:  # in place, because the managers hold the buffer
            lengths = self.env.episode_length_buf
            lengths[:] = torch.randint_like(lengths, self.spec.max_episode_steps or 1)
        self.seen = copies(obs)
        return dict(self.seen)

    def _reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` [N] bool. Of the others, the observations stay as they were."""
        if len(ids := mask.nonzero().flatten()):
            obs, extras = self.env.reset(env_ids=ids)
            self.log.seen(extras)
            self.seen = chosen(mask, copies(obs), self.seen)
        return dict(self.seen)

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Return an image of environment ``index``; see :func:`picture`."""
        return picture(self.env, index, width, height)

    def close(self) -> None:
        self.env.close()


class IsaacLabVec(Managed):
    """An unwrapped environment of Isaac Lab as a ``pql.contract.env.VecEnv``.

    Args:
        env: the simulator, manager-based or direct.
        app: the simulator's runtime, closed after the environment.
    Raises:
        ConfigError: observation groups that are not flat, or final observations that would be wrong.
    """

    def __init__(self, env: Any, name: str, action_bound: Bound = 1.0, course: Course = PLAIN, app: Any = None):
        self.app, self.computes_final = app, bool(getattr(env.cfg, "compute_final_obs", False))
        if self.computes_final and (group := group_with_history(env.cfg)):
            raise ConfigError("final_obs", True, f"false: {group} keeps a history, whose newest frame it would lack")
        final_obs = "on_done" if self.computes_final else "never"
        super().__init__(env, name, action_bound, course, final_obs=final_obs, single_instance=True)

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A]."""
        obs, reward, terminated, time_outs, extras = self.env.step(self.actions(action))
        self.stages.count_step()
        terminated, truncated = ends(terminated, time_outs, self.finite)
        over, seen = terminated | truncated, copies(obs)
        self.seen = dict(seen)
        final, final_ok = dict(seen), ~over
        if self.computes_final:
            final_ok = torch.ones_like(over)
            if "final_obs" in extras:  # updated only on rows that ended; the others are stale
                final = chosen(over, copies(extras["final_obs"]), seen)
        reward, yes, log = reward.float().clone(), torch.ones_like(over), self.log.rows(over, extras)
        return Step(seen, reward, terminated, truncated, over, final, final_ok, yes, log)

    def close(self) -> None:
        super().close()
        if self.app is not None:
            self.app.close()


# -- shared with mjlab, which uses the same managers -------------------------------------------------------------------


def ends(terminated: Tensor, time_outs: Tensor, finite: bool) -> tuple[Tensor, Tensor]:
    """Return new, disjoint (terminated, truncated), [N] bool each; if ``finite``, time limits count as terminated."""
    if finite:
        return terminated | time_outs, torch.zeros_like(time_outs)
    return terminated.clone(), time_outs & ~terminated


def copies(obs: Mapping[str, Any]) -> Obs:
    """Copy the groups under pql's names, because the simulator overwrites some at the next step."""
    return {("policy" if name == "actor" else name): value.clone() for name, value in obs.items()}


def group_specs(obs: Mapping[str, Any]) -> dict[str, ObsSpec]:
    """Return the groups' specs. Raises ``ConfigError`` for a group that is not a tensor, or without a policy group."""
    for name, value in obs.items():
        if not isinstance(value, Tensor):
            raise ConfigError("observations", name, "a group whose terms are concatenated: concatenate_terms = True")
    groups = {name: ObsSpec(tuple(value.shape[1:]), value.dtype) for name, value in copies(obs).items()}
    if "policy" not in groups:
        raise ConfigError("observations", ", ".join(groups), "a group policy (or actor)")
    return groups


def group_with_history(config: Any) -> str | None:
    """Return the name of an observation group with a term that keeps earlier frames, or None."""
    for name, group in getattr(getattr(config, "observations", None), "__dict__", {}).items():
        terms = [group, *vars(group).values()] if hasattr(group, "__dict__") else []
        if any((getattr(term, "history_length", None) or 0) > 0 for term in terms):
            return name
    return None
