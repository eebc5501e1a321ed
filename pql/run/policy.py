"""Trained policies outside their run: extract, store and load them, and start new runs from them.

A policy checkpoint holds ``Policy.state_dict()``: the network and the normaliser's statistics.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pql.algos.registry import make_policy
from pql.config import Config, PlacementConfig, from_dict, leaves
from pql.config.fields import reads, settings
from pql.config.files import expanded
from pql.config.migrate import as_trained
from pql.config.trust import NETWORKS, check_links, check_networks, check_task
from pql.contract.env import EnvSpec, VecEnv
from pql.contract.optional import set_stage
from pql.contract.spec_json import spec_from_dict, spec_to_dict
from pql.data.normalize import Normalizer
from pql.data.tensorfile import digest_of
from pql.engine.deadlines import start_limit
from pql.engine.flat import Flat
from pql.engine.watchdog import watching
from pql.errors import ConfigError, show
from pql.nets.mlp import groups_read
from pql.run.base_policy import BasePolicy
from pql.run.components import Parts
from pql.run.environment import build_eval_env
from pql.run.store import checkpoint
from pql.run.store.own import started_here
from pql.types import Obs

if TYPE_CHECKING:
    from pql.run.export.policy import ExportedPolicy

EXPORTS = (".pt2", ".onnx")  # suffixes of the files of ``pql export``
POLICIES = ("policy", "resume")  # kinds of checkpoints that hold one
ALLOCATE = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
SPARE = 1 << 24  # allowance in elements for intermediate tensors


class Policy(BasePolicy):
    """A trained policy ready to act: network and normaliser.

    A network states its inputs by two optional attributes: ``groups``, the observation groups it reads, and, where it
    is recurrent, ``state_shapes``: name -> shape of one environment's state, zeros at an episode's start;
    ``mean_action`` then takes (obs, state) and returns (action, state).
    """

    def __init__(self, net: nn.Module, norm: Normalizer, spec: EnvSpec):
        self.net, self.norm, self.spec = net, norm, spec
        self.groups, self.device = groups_read(net), norm.reward_scale.device
        self.state_shapes = dict(getattr(net, "state_shapes", {}))

    @torch.no_grad()
    def act(self, obs: Obs | Tensor, state: Obs) -> tuple[Tensor, Obs]:
        inputs = self.norm(self.readable(obs))
        if self.state_shapes:
            return self.net.mean_action(inputs, state)  # type: ignore[operator]
        return self.net.mean_action(inputs), {}  # type: ignore[operator]

    def digest(self) -> str:
        return digest_of(checkpoint.flatten(self.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.net.state_dict(), "norm": self.norm.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy in place; entries that the policy does not have are ignored."""
        own, new = checkpoint.flatten(self.state_dict()), checkpoint.flatten(state)
        torch._foreach_copy_(list(own.values()), [new[k] for k in own])


def fresh_policy(config: Config, spec: EnvSpec, device: str | torch.device) -> Policy:
    """Return an untrained policy with the shapes of the config."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]):  # leaves torch's global generator unchanged
        net = make_policy(config, spec).to(device)
    read = {k: spec.obs[k] for k in groups_read(net)}
    algo, factor = config.algo, config.task.reward_scale
    norm = Normalizer(read, 1, device, algo.normalize_obs, factor, integers=algo.normalize_integers)
    return Policy(net, norm, spec)


def snapshot(parts: Parts) -> dict[str, Any]:
    """Return the current policy of a run as a ``Policy.state_dict`` (without copying the tensors)."""
    return {"policy": parts.policy.state_dict(), "norm": parts.collector.normalizer.state_dict()}


def load_policy(path: str | Path, device: str | torch.device = "cpu", trust: bool = False) -> "Policy | ExportedPolicy":
    """Load the policy of a run directory, checkpoint or export (``.pt2``, ``.onnx``): obs [N, D] -> action [N, A].

    The policy includes the normaliser. Actions are in [-1, 1], as all environments of this library expect.

    Args:
        trust: accept networks that are neither built in nor registered, and a ``.pt2`` (``docs/security.md``).
    Raises:
        ConfigError: no such file, a damaged one, one that names or holds untrusted code, or an export whose package is
            not installed.
    """
    return _open(path, device, trust).policy


class Stored(NamedTuple):
    """A policy on disk.

    Attributes:
        path: its checkpoint or export.
        config: config of its run; for an export only task and algorithm are known, and float32 products are exact.
        counters: of a checkpoint.
    """

    path: Path
    policy: "Policy | ExportedPolicy"
    config: Config
    counters: Mapping[str, float] = {}

    def for_play(self, play: bool | None) -> "Stored":
        """Return it with ``eval.play``, for :meth:`make_env`; None: as it is."""
        changed = replace(self.config, eval=replace(self.config.eval, play=play))
        return self if play is None else self._replace(config=changed)

    def make_env(self, num_envs: int, **kwargs: Any) -> VecEnv:
        """Build environments of its task for episodes that count, on the policy's device and at the stage of its
        checkpoint. ``kwargs``: further ones, for factories that take them."""
        task = replace(self.config.task, remote={})
        device = str(self.policy.device)
        with watching(f"building {task.title}", start_limit(self.config.placement)):
            here = replace(self.config, task=task, device=device, placement=PlacementConfig())
            env = build_eval_env(here, num_envs, **kwargs)
        set_stage(env, self.counters)
        return env


def open_stored(path: str | Path, device: str | torch.device = "cpu", trust: bool = False) -> Stored:
    """Load a policy whose task will be built, see :func:`load_policy`; ``trust`` applies to both."""
    stored = _open(path, device, trust)
    if not trust:
        check_links(checkpoint.home(stored.path), "evaluations", "videos")
    if not (trust or started_here(checkpoint.home(stored.path), stored.config)):
        here = replace(stored.config, task=replace(stored.config.task, remote={}))  # as ``make_env`` builds it
        check_task(here, path)
    return stored


def _open(path: str | Path, device: str | torch.device, trust: bool) -> Stored:
    file = expanded("run", path)
    if file.suffix in EXPORTS:
        from pql.run.export.policy import ExportedPolicy

        exported = ExportedPolicy(file, device, trust)
        about = exported.metadata
        algo = {"name": about["algorithm"], "family": about["family"]}
        kept = {"task": about["task"], "algo": algo, "placement": {"matmul": "exact"}}
        return Stored(file, exported, from_dict(as_trained(kept, about.get("release", ""))))
    tensors, manifest, found = checkpoint.find(file, POLICIES)
    config = from_dict(manifest["config"])
    policy = policy_of(tensors, manifest, device, trust or started_here(checkpoint.home(found), config))
    return Stored(found, policy, config, manifest.get("counters", {}))


def policy_of(
    tensors: Mapping[str, Tensor],
    manifest: Mapping[str, Any],
    device: str | torch.device,
    trust: bool = False,
    given: Collection[str] = (),
) -> Policy:
    """Return the policy in a loaded policy checkpoint or resume point.

    Args:
        trust: accept networks that it names by module.
        given: network settings given by the user, which need no trust.
    Raises:
        ConfigError: settings that no run can have.
        CorruptCheckpointError: non-finite tensors, or tensors that do not match the policy.
    """
    check_finite(tensors, manifest)
    config, found = from_dict(manifest["config"]), _policy_tensors(tensors, manifest)
    if not trust:
        check_networks(config, manifest["spec"]["name"], given)
    try:
        with Allowance(found.values()):
            policy = fresh_policy(config, spec_from_dict(manifest["spec"]), device)
    except ConfigError:
        raise
    except Exception as error:  # invalid settings raise many types of errors in network constructors
        why = f"settings that make a policy of its size ({type(error).__name__}: {error})"
        raise checkpoint.CorruptCheckpointError("checkpoint", config.task.title, why) from error
    policy.load_state_dict(checkpoint.unflatten(found, policy.state_dict()))
    return policy


def check_finite(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Raise ``CorruptCheckpointError`` if the policy in a loaded checkpoint has non-finite weights, of any shape."""
    for name, tensor in _policy_tensors(tensors, manifest).items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise checkpoint.CorruptCheckpointError("checkpoint", name, "finite numbers in a checkpoint's policy")


class Allowance(TorchFunctionMode):
    """Context manager: limit new tensors to the size of the ``stored`` ones plus an allowance.

    Widths in untrusted settings thus cannot fill the memory; beyond the limit it raises ``ValueError``."""

    def __init__(self, stored: Iterable[Tensor]):
        super().__init__()
        self.left = 4 * sum(t.numel() for t in stored) + SPARE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ALLOCATE and args:
            size = args[0] if isinstance(args[0], tuple | list | torch.Size) else args
            self.left -= math.prod(n for n in size if isinstance(n, int))
            if self.left < 0:
                raise ValueError(f"a tensor of {list(size)}, which the weights stored do not fill")
        return func(*args, **(kwargs or {}))


def _policy_tensors(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the policy's tensors of a policy checkpoint or resume point, by their names in a policy checkpoint."""
    if manifest["kind"] == "policy":
        return dict(tensors)
    state = r"learners/[^/]+/state/"
    homes = {rf"{state}(?:policy|q)/": "policy/", rf"{state}average/": "policy/", "collector/normalizer/": "norm/"}
    found = ((new, re.match(old, k), k, t) for old, new in homes.items() for k, t in tensors.items())  # averages last
    return {new + k[match.end() :]: t for new, match, k, t in found if match}


# -- a new run from old weights -------------------------------------------------------------------------------------


def init_from(parts: Parts, source: Path) -> None:
    """Load the weights of another run: policy, statistics and critics; from a policy checkpoint only the policy.

    Optimiser state is not loaded, because it belongs to the settings of the other run.

    Raises:
        ConfigError: no checkpoint, or one with other networks, observations or actions.
    """
    try:
        tensors, manifest, _ = checkpoint.find(source, POLICIES, whole=True)
    except ConfigError as error:
        raise ConfigError("init_from", source, error.allowed) from error
    load_weights(parts, tensors, manifest, source)


def load_weights(parts: Parts, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], source: object) -> None:
    """Load weights as :func:`init_from` does, from the tensors of a checkpoint, each of its own shape."""
    spec, old = spec_to_dict(parts.env.spec), manifest["spec"]
    for what in ("obs", "action"):
        if spec[what] != old[what]:
            raise ConfigError("init_from", source, f"a run with this task's {what} ({spec[what]}, not {old[what]})")
    resume = manifest["kind"] == "resume"
    if not resume and getattr(parts.policy, "borrowed", []):
        wanted = "a run with a resume point: its critics have the encoder of the policy (algo.policy.encoder=critic)"
        raise ConfigError("init_from", source, wanted)
    other = from_dict(manifest["config"])
    saved = dict(leaves(other)) | {"algo.family": other.algo.policy_family}
    same = deciding(parts.config, resume or not reads(parts.config, "algo.policy.hidden"))
    same["algo.family"] = parts.config.algo.policy_family
    if all(s.dtype.is_floating_point for s in parts.env.spec.obs.values()):
        same.pop("algo.normalize_integers", None)
    mine = dict(leaves(parts.config))
    for name, value in {**same, **{n: mine[n] for n in NETWORKS if n in mine}}.items():
        if value != saved.get(name, value):
            raise ConfigError(name, value, f"{show(saved[name])}, as in init_from={source}")
    policy = policy_of(tensors, manifest, "cpu", given=NETWORKS).state_dict()["policy"]  # which are this run's
    parts.policy.load_state_dict(policy)
    for worker, learner in parts.learners.items():
        networks = networks_of(learner.state)
        for name, flat in networks.items():
            prefix = f"learners/{worker}/state/{name}"
            if any(k.startswith(f"{prefix}/") for k in tensors):
                flat.load_state_dict(checkpoint.unflatten(tensors, flat.state_dict(), prefix))
            elif name in ("policy", "target") and parts.policy in networks.values():  # of the evaluated network
                flat.load_state_dict(policy)
    norm = parts.collector.normalizer.state_dict()
    prefix = "collector/normalizer" if resume else "norm"
    # Observation statistics only: the reward scale belongs to this run.
    known = [k for k in norm if k.startswith(("moments.", "scale_", "shift_")) and f"{prefix}/{k}" in tensors]
    seen = {k: norm[k] for k in known}
    parts.collector.normalizer.load_state_dict(norm | checkpoint.unflatten(tensors, seen, prefix))


def deciding(config: Config, critic: bool) -> dict[str, Any]:
    """Return settings that must be equal to load weights from another run.

    Args:
        critic: include those of the critic.
    """
    found = {}
    for one in settings(config):
        of_critic = one.declaration.weights == "critic" or one.name.startswith("algo.critic.")
        if one.declaration.weights and (critic or not of_critic):
            found[one.name] = one.value
    return found


def networks_of(state: Any) -> dict[str, Flat | nn.Module]:
    """Return the networks in a learner's state, by name."""
    members = {f.name: getattr(state, f.name) for f in fields(state)}
    return {k: v for k, v in members.items() if isinstance(v, Flat | nn.Module)}


# -- what loading a policy needs to know of its environment, as JSON ------------------------------------------------
