"""A trained policy apart from its run: how it is copied out of one, stored, loaded, and given to another.

What a policy checkpoint holds is ``Policy.state_dict()``: the network and the normaliser's statistics.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pql import checkpoint
from pql.build import Parts, make_policy
from pql.config import Config, from_dict, leaves
from pql.env import Box, EnvSpec, ObsSpec
from pql.errors import ConfigError, show
from pql.nets import Flat
from pql.normalize import Normalizer
from pql.types import Obs

if TYPE_CHECKING:
    from pql.export import ExportedPolicy


class Policy:
    """A trained policy ready to act: raw observations in, actions out, normaliser included.

    ``policy(obs)``: [N, D] tensor (or groups by name) -> [N, A] in [-1, 1], without exploration.

    A network says what it needs by two optional attributes: ``groups``, the observation groups it reads, and, where it
    is recurrent, ``state_shapes``: name -> shape of one environment's state, zeros at an episode's start;
    ``mean_action`` then takes (obs, state) and returns (action, state).
    """

    def __init__(self, net: nn.Module, norm: Normalizer, spec: EnvSpec):
        self.net, self.norm, self.spec = net, norm, spec
        self.groups: tuple[str, ...] = groups_read(net)
        self.state_shapes: dict[str, tuple[int, ...]] = dict(getattr(net, "state_shapes", {}))

    @torch.no_grad()
    def __call__(self, obs: Obs | Tensor) -> Tensor:
        return self.act(obs, {})[0]

    @torch.no_grad()
    def act(self, obs: Obs | Tensor, state: Obs) -> tuple[Tensor, Obs]:
        """One step: (action, the state after it). A policy without state takes, and returns, an empty one."""
        known = obs if isinstance(obs, dict) else {"policy": obs}
        inputs = self.norm({k: known[k] for k in self.groups})
        if self.state_shapes:
            return self.net.mean_action(inputs, state)  # type: ignore[operator]
        return self.net.mean_action(inputs), {}  # type: ignore[operator]

    def initial_state(self, num_envs: int) -> Obs:
        """What an episode begins with, zeros [N, ...] each; empty where the policy has no state."""
        return zeros(self.state_shapes, num_envs, self.norm.reward_scale.device)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.net.state_dict(), "norm": self.norm.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy in place; entries that a policy does not need are passed over."""
        own, new = checkpoint.flatten(self.state_dict()), checkpoint.flatten(state)
        torch._foreach_copy_(list(own.values()), [new[k] for k in own])


def zeros(shapes: Mapping[str, tuple[int, ...]], num_envs: int, device: torch.device) -> Obs:
    """Name -> zeros [N, ...]."""
    return {k: torch.zeros(num_envs, *shape, device=device) for k, shape in shapes.items()}


def fresh_policy(config: Config, spec: EnvSpec, device: str | torch.device) -> Policy:
    """An untrained policy of the config's shape."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]):  # whoever draws from torch's own generator must not notice
        net = make_policy(config, spec).to(device)
    read = {k: spec.obs[k] for k in groups_read(net)}
    norm = Normalizer(read, 1, device, config.algo.normalize_obs, config.task.reward_scale)
    return Policy(net, norm, spec)


def groups_read(net: nn.Module) -> tuple[str, ...]:
    """The observation groups that a policy network asks for."""
    return tuple(getattr(net, "groups", ("policy",)))


def snapshot(parts: Parts) -> dict[str, Any]:
    """A run's policy as it stands, in the form of ``Policy.state_dict`` (the tensors themselves, not copies)."""
    return {"policy": parts.policy.state_dict(), "norm": parts.collector.normalizer.state_dict()}


def load_policy(path: str | Path, device: str | torch.device = "cpu") -> "Policy | ExportedPolicy":
    """The policy of a run directory, checkpoint or export (``.pt2``, ``.onnx``): obs [N, D] -> action [N, A].

    The normaliser is included, and actions are in [-1, 1], as every environment here takes them, whichever it is.

    Raises:
        ConfigError: nothing of these there, a damaged one, or an export whose package is not installed.
    """
    if (file := Path(path)).suffix in (".pt2", ".onnx"):
        from pql.export import ExportedPolicy

        return ExportedPolicy(file, device)
    tensors, manifest = checkpoint.load(checkpoint.find(file))
    return policy_of(tensors, manifest, device)


def policy_of(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], device: str | torch.device) -> Policy:
    """The policy in a loaded checkpoint of either kind."""
    policy = fresh_policy(from_dict(manifest["config"]), spec_from_dict(manifest["spec"]), device)
    policy.load_state_dict(checkpoint.unflatten(_policy_tensors(tensors, manifest), policy.state_dict()))
    return policy


def _policy_tensors(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names of a policy checkpoint; a resume point has them among all others."""
    if manifest["kind"] == "policy":
        return dict(tensors)
    homes = {"policy/": "learners/p/state/policy/", "norm/": "collector/normalizer/"}
    return {new + k.removeprefix(old): t for k, t in tensors.items() for new, old in homes.items() if k.startswith(old)}


# -- a new run from old weights -------------------------------------------------------------------------------------

SAME_POLICY = ("algo.family", "algo.normalize_obs", "algo.policy.hidden", "algo.policy.activation",
               "algo.policy.layer_norm", "algo.policy.net", "algo.policy.obs", "algo.encoder.channels",
               "algo.encoder.features")  # fmt: skip
SAME_CRITIC = ("algo.critic.hidden", "algo.critic.activation", "algo.critic.layer_norm", "algo.critic.ensemble",
               "algo.critic.atoms", "algo.critic.v_min", "algo.critic.v_max", "algo.critic.net",
               "algo.critic.obs")  # fmt: skip


def init_from(parts: Parts, source: Path) -> None:
    """Start from another run's weights: policy, statistics and critics; the policy alone from a checkpoint of one.

    Optimisers start afresh: their state belongs to the settings of the other run.

    Raises:
        ConfigError: no checkpoint there, or one of other networks, observations or actions.
    """
    try:
        tensors, manifest = checkpoint.load(checkpoint.find(source, whole=True))
    except ConfigError as error:
        raise ConfigError("init_from", source, error.allowed) from error
    spec, old = spec_to_dict(parts.env.spec), manifest["spec"]
    for what in ("obs", "action"):
        if spec[what] != old[what]:
            raise ConfigError("init_from", source, f"a run with this task's {what} ({spec[what]}, not {old[what]})")
    whole = manifest["kind"] == "resume"
    mine, theirs = dict(leaves(parts.config)), dict(leaves(from_dict(manifest["config"])))
    for name in SAME_POLICY + (SAME_CRITIC if whole else ()):
        if mine[name] != theirs[name]:
            raise ConfigError(name, mine[name], f"{show(theirs[name])}, as in init_from={source}")
    policy = policy_of(tensors, manifest, "cpu").state_dict()["policy"]
    parts.policy.load_state_dict(policy)
    for worker, learner in parts.learners.items():
        for name, flat in _networks(learner.state).items():
            prefix = f"learners/{worker}/state/{name}"
            if any(k.startswith(f"{prefix}/") for k in tensors):
                flat.load_state_dict(checkpoint.unflatten(tensors, flat.state_dict(), prefix))
            elif (worker, name) == ("p", "target"):
                flat.load_state_dict(policy)
    norm = parts.collector.normalizer.state_dict()
    prefix = "collector/normalizer" if whole else "norm"
    # Statistics of observations alone: the reward's scale is this run's own.
    known = [k for k in norm if k.startswith(("moments.", "scale_", "shift_")) and f"{prefix}/{k}" in tensors]
    seen = {k: norm[k] for k in known}
    parts.collector.normalizer.load_state_dict(norm | checkpoint.unflatten(tensors, seen, prefix))


def _networks(state: Any) -> dict[str, Flat]:
    members = {f.name: getattr(state, f.name) for f in fields(state)}
    return {k: v for k, v in members.items() if isinstance(v, Flat)}


# -- what loading a policy needs to know of its environment, as JSON ------------------------------------------------


def spec_to_dict(spec: EnvSpec) -> dict[str, Any]:
    assert isinstance(spec.action, Box)
    groups = {k: {"shape": list(s.shape), "dtype": str(s.dtype).removeprefix("torch.")} for k, s in spec.obs.items()}
    action = {"action": spec.action.size, "action_low": spec.action.low, "action_high": spec.action.high}
    return {"name": spec.name, "obs": groups, **action, "max_episode_steps": spec.max_episode_steps}


def spec_from_dict(data: Mapping[str, Any]) -> EnvSpec:
    obs = {k: ObsSpec(tuple(s["shape"]), getattr(torch, s["dtype"])) for k, s in data["obs"].items()}
    low, high = (tuple(b) if (b := data.get(f"action_{end}")) else None for end in ("low", "high"))
    action, limit = Box(data["action"], low, high), data["max_episode_steps"]
    return EnvSpec(data["name"], 1, obs, action, torch.device("cpu"), max_episode_steps=limit)
