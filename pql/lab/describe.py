"""Specification and steps of an environment with rsl_rl's interface, as pql's ``EnvSpec`` and ``Step``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.envs.adapters.adapt import LIMITS, Actions
from pql.envs.adapters.isaaclab import ends
from pql.errors import ConfigError
from pql.lab.finals import given_final, install
from pql.types import Obs, Step, chosen

AUTO = "auto"


class Described:
    """An environment of a robot stack in pql's terms.

    Args:
        env: with rsl_rl's interface (version 5: observations by group).
        obs: its observations, name -> [N, ...].
        obs_groups: rsl_rl's: the groups of the sets ``actor`` and ``critic``. Others are left out; None: all are kept.
        action_bound: the simulator's action for an action of 1: a number, ``limits`` (the joints'), or ``auto``:
            ``limits`` where actions are joint positions, else 1.
        final: see ``finals.install``, which it is given to.

    Attributes:
        names: pql's name of each group, by the environment's.
        words: settings that say which groups policy and critics read.
        source: where final observations come from.
    """

    def __init__(
        self,
        env: Any,
        obs: Mapping[str, Tensor],
        obs_groups: Mapping[str, Sequence[str]] | None = None,
        action_bound: float | str = AUTO,
        final: str = "auto",
    ):
        self.names, self.words = _groups(obs, obs_groups)
        self.actions, self.bound = _actions(env, action_bound)
        self.source = install(env, final)
        groups = {new: ObsSpec(tuple(obs[old].shape[1:]), obs[old].dtype) for old, new in self.names.items()}
        core = getattr(env, "unwrapped", env)
        info = {"dt": float(core.step_dt)} if hasattr(core, "step_dt") else {}
        self.spec = EnvSpec(
            name=type(core).__name__,
            num_envs=int(env.num_envs),
            obs=groups,
            action=self.actions.spec,
            device=torch.device(env.device),
            max_episode_steps=int(env.max_episode_length),
            final_obs="never" if self.source == "never" else "on_done",
            deterministic=False,
            stream="default",
            info=info,
        )

    def act_within(self, action: Box) -> None:
        """Use the bounds of ``action``, with which a policy was trained."""
        self.actions.act_within(action)

    @torch.inference_mode(False)
    @torch.no_grad()
    def obs(self, given: Mapping[str, Tensor]) -> Obs:
        """Copy observations [N, ...] under pql's names: simulators overwrite theirs."""
        return {new: given[old].to(self.spec.device, copy=True) for old, new in self.names.items()}

    @torch.inference_mode(False)  # runners step in inference mode, whose tensors the run's updates cannot use
    @torch.no_grad()
    def step(self, answer: Sequence[Any]) -> Step:
        """Return the row of ``(obs, rewards [N], dones [N], extras)``, as ``env.step`` returned them."""
        given, reward, done, extras = answer
        device, obs = self.spec.device, self.obs(given)
        over = done.to(device) > 0
        late = extras["time_outs"].to(device) > 0 if "time_outs" in extras else torch.zeros_like(over)
        terminated, truncated = ends(over & ~late, over & late, False)
        found, final, known = given_final(extras), obs, ~over
        if self.source != "never" and found is not None:
            final, known = chosen(over, self.obs(found), obs), torch.ones_like(over)
            if "final_lost" in extras:
                known = ~(over & extras["final_lost"])
        reward = reward.to(device, torch.float32, copy=True)
        return Step(obs, reward, terminated, truncated, over, final, known, torch.ones_like(over), {})


def _groups(obs: Mapping[str, Tensor], sets: Mapping[str, Sequence[str]] | None) -> tuple[dict[str, str], list[str]]:
    """Return names by group, and settings that select them."""
    for name, value in obs.items():
        if not isinstance(value, Tensor):
            raise ConfigError("observations", name, "a group whose terms are concatenated: concatenate_terms = True")
    known = list(obs.keys())
    main = next((n for n in ("policy", "actor") if n in known), known[0])
    actor = list((sets or {}).get("actor") or (sets or {}).get("policy") or [main])
    critic = list((sets or {}).get("critic") or (["critic"] if "critic" in known else actor))
    for name in (*actor, *critic):
        if name not in known:
            raise ConfigError("obs_groups", name, f"groups that the environment has: {', '.join(known)}")
    if "policy" not in actor:
        main = "actor" if "actor" in actor else actor[0]
    wanted = list(dict.fromkeys((main, *(known if sets is None else (*actor, *critic)))))
    names = {old: "policy" if old == main else old for old in wanted if old == main or old != "policy"}
    if missing := [n for n in wanted if n not in names]:  # another group of pql's reserved name
        names |= {n: f"{n}_group" for n in missing}
    words, read = [], [names[n] for n in actor]
    if read != ["policy"]:
        words.append(f"algo.policy.obs=[{','.join(read)}]")
    if (also := [names[n] for n in critic]) != (["critic"] if "critic" in names.values() else read):
        words.append(f"algo.critic.obs=[{','.join(also)}]")
    return names, words


def _actions(env: Any, bound: float | str) -> tuple[Actions, float | str]:
    """Return the map to the simulator's actions, and the bound that it has."""
    core, clip = getattr(env, "unwrapped", env), getattr(env, "clip_actions", None)
    if isinstance(bound, str) and bound.replace(".", "", 1).isdecimal():
        bound = float(bound)
    space = SimpleNamespace(low=-torch.inf, high=torch.inf, shape=(int(env.num_actions),))
    space = getattr(core, "single_action_space", space) if clip is None else space
    seen = SimpleNamespace(single_action_space=space, action_manager=getattr(core, "action_manager", None))
    try:
        made, bound = (Actions(seen, LIMITS), LIMITS) if bound == AUTO else (Actions(seen, bound), bound)
    except ConfigError:
        if bound != AUTO:
            raise
        made, bound = Actions(seen, 1.0), 1.0
    if clip is not None:
        low, high = (tuple(min(max(x, -clip), clip) for x in side) for side in made.spec.bounds)
        made.act_within(replace(made.spec, low=low, high=high))
    return made, bound
