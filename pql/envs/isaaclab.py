"""Isaac Lab's tasks (2.3, and 3 where it is started the same way): ``task=isaaclab task.kwargs.task=Isaac-Ant-v0``.

It has its own torch and Python, and room for one environment in a process: give it ``task.process.python``.

Episodes end and begin in the same step. The final observation is lost (``final_obs="never"``), but for versions whose
configuration has ``compute_final_obs``: there ``final_obs=True`` asks for it, and is refused where an observation group
keeps a history, which would lack its newest frame. A time limit is a truncation, or terminal where the task's
``is_finite_horizon`` says that the problem ends there. Actions of its managers have no bounds of their own: [-1, 1]
here is ``action_bound`` times that there (FastTD3 took 1 or 3, by the task).

The numbers of its log are means over the environments reset in a step; they count once for each of these. Of the
reasons for an end it logs how many; here each is the share of episodes that it ended.
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from pql.env import EnvSpec, ObsSpec
from pql.envs.adapt import Actions, change
from pql.errors import ConfigError
from pql.types import Obs, Step, chosen

COUNTS = "Episode_Termination/"  # how many environments each reason ended


def isaaclab(
    num_envs: int = 4096,
    device: str | torch.device = "cuda:0",
    task: str = "Isaac-Ant-v0",
    action_bound: float = 1.0,
    final_obs: bool = False,
    settings: Mapping[str, Any] | None = None,
    random_lengths: bool = False,
    cameras: bool = False,
) -> "IsaacLabVec":
    """A registered task of ``isaaclab_tasks``.

    Args:
        num_envs: N.
        device: of the simulator and the tensors.
        task: its gymnasium id.
        action_bound: what an action of 1 is there, where its space has no bounds.
        final_obs: have final observations computed, where this version can.
        settings: attributes of its configuration, by dotted name: ``{"episode_length_s": 10.0}``.
        random_lengths: first episodes begin at random places, so that their limits do not come all at once.
        cameras: render, for observations from cameras.
    Raises:
        ConfigError: a setting that the configuration does not have, or that cannot be.
    """
    from isaaclab.app import AppLauncher

    app = AppLauncher(headless=True, device=str(device), enable_cameras=cameras).app  # before all else of isaaclab
    import gymnasium
    import isaaclab_tasks  # noqa: F401  registers the ids
    from isaaclab_tasks.utils import parse_env_cfg

    config = parse_env_cfg(task, device=str(device), num_envs=num_envs)
    change(config, settings or {})
    config.seed = 0
    if final_obs:
        if not hasattr(config, "compute_final_obs"):
            raise ConfigError("final_obs", True, "false: this version of Isaac Lab cannot compute them")
        config.compute_final_obs = True
    return IsaacLabVec(gymnasium.make(task, cfg=config).unwrapped, task, action_bound, random_lengths, app)


class IsaacLabVec:
    """An unwrapped environment of Isaac Lab with the contract of ``pql.env.VecEnv``.

    Args:
        env: the simulator, manager-based or direct.
        app: what is closed after it.
    Raises:
        ConfigError: observations in other than flat groups, or final observations that would be wrong.
    """

    def __init__(
        self, env: Any, name: str, action_bound: float = 1.0, random_lengths: bool = False, app: Any = None
    ):  # fmt: skip
        self.env, self.app, self.random_lengths = env, app, random_lengths
        self.finite = bool(getattr(env.cfg, "is_finite_horizon", False))
        self.computes_final = bool(getattr(env.cfg, "compute_final_obs", False))
        if self.computes_final and (group := group_with_history(env.cfg)):
            raise ConfigError("final_obs", True, f"false: {group} keeps a history, whose newest frame it would lack")
        self.actions = Actions(env.single_action_space, action_bound)
        obs, extras = env.reset(seed=None)  # what it logs shows here first
        self.log = Log(extras)
        self.spec = EnvSpec(
            name, env.num_envs, group_specs(obs), self.actions.spec, torch.device(env.device),
            max_episode_steps=int(env.max_episode_length), final_obs="on_done" if self.computes_final else "never",
            log=self.log.terms, single_instance=True, deterministic=False, stream="default",
        )  # fmt: skip

    def reset(self, seed: int | None = None) -> Obs:
        """All environments. ``seed`` seeds torch's global generator, and others."""
        obs, extras = self.env.reset(seed=None if seed is None else seed % 2**31)
        self.log.seen(extras)
        if self.random_lengths:
            randomize_lengths(self.env, self.spec)
        return copies(obs)

    def step(self, action: Tensor) -> Step:
        obs, reward, terminated, time_outs, extras = self.env.step(self.actions(action))
        terminated, truncated = ends(terminated, time_outs, self.finite)
        over, seen = terminated | truncated, copies(obs)
        final, final_ok = dict(seen), ~over
        if self.computes_final:
            final_ok = torch.ones_like(over)
            if "final_obs" in extras:  # written where anything ended, and then left there: only these rows are news
                final = chosen(over, copies(extras["final_obs"]), seen)
        yes = torch.ones_like(over)
        return Step(seen, reward.float().clone(), terminated, truncated, over, final, final_ok, yes,
                    self.log.rows(extras, over))  # fmt: skip

    def close(self) -> None:
        self.env.close()
        if self.app is not None:
            self.app.close()


# -- shared with mjlab, which has the same managers -------------------------------------------------------------------


class Log:
    """``extras["log"]``: means over the environments reset in a step, or (of what ended them) counts, which become
    shares; on other steps the old one may still be there."""

    def __init__(self, extras: Mapping[str, Any]):
        self.last = extras.get("log")
        self.terms = tuple(
            k for k, v in (self.last or {}).items()
            if isinstance(v, Real) or (isinstance(v, Tensor) and v.numel() == 1)
        )  # fmt: skip

    def seen(self, extras: Mapping[str, Any]) -> None:
        self.last = extras.get("log")

    def rows(self, extras: Mapping[str, Any], over: Tensor) -> dict[str, Tensor]:
        """[N] per term: the number on the rows ``over``, if it is news; else 0."""
        log, none = extras.get("log"), torch.zeros(len(over), device=over.device)
        fresh, self.last = log is not self.last, log
        if not (fresh and log):
            return dict.fromkeys(self.terms, none)
        found = {k: torch.as_tensor(log.get(k, 0.0), device=over.device).float() for k in self.terms}
        shares = {k: v / over.sum() for k, v in found.items() if k.startswith(COUNTS)}
        return {k: torch.where(over, v, none) for k, v in {**found, **shares}.items()}


def ends(terminated: Tensor, time_outs: Tensor, finite: bool) -> tuple[Tensor, Tensor]:
    """(terminated, truncated), new and disjoint; time limits are terminal where the problem is finite."""
    if finite:
        return terminated | time_outs, torch.zeros_like(time_outs)
    return terminated.clone(), time_outs & ~terminated


def copies(obs: Mapping[str, Any]) -> Obs:
    """Its groups by our names: rewritten, some of them, at the next step."""
    return {("policy" if name == "actor" else name): value.clone() for name, value in obs.items()}


def group_specs(obs: Mapping[str, Any]) -> dict[str, ObsSpec]:
    """Raises ``ConfigError`` for a group that is no tensor, or where there is none for the policy."""
    for name, value in obs.items():
        if not isinstance(value, Tensor):
            raise ConfigError("observations", name, "a group whose terms are concatenated: concatenate_terms = True")
    groups = {name: ObsSpec(tuple(value.shape[1:]), value.dtype) for name, value in copies(obs).items()}
    if "policy" not in groups:
        raise ConfigError("observations", ", ".join(groups), "a group policy (or actor)")
    return groups


def group_with_history(config: Any) -> str | None:
    """An observation group of which a term keeps earlier frames, if there is one."""
    for name, group in getattr(getattr(config, "observations", None), "__dict__", {}).items():
        terms = [group, *vars(group).values()] if hasattr(group, "__dict__") else []
        if any((getattr(term, "history_length", None) or 0) > 0 for term in terms):
            return name
    return None


def randomize_lengths(env: Any, spec: EnvSpec) -> None:
    """Begin in the middle of episodes: in place, since its managers hold the buffer."""
    env.episode_length_buf[:] = torch.randint_like(env.episode_length_buf, spec.max_episode_steps or 1)
