"""Greedy evaluation: exactly one episode per environment, on environments of its own, beside the run."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pql import checkpoint
from pql.config import Config, from_dict
from pql.env import Box, EnvSpec, ObsSpec, VecEnv
from pql.errors import ConfigError
from pql.normalize import Normalizer
from pql.types import Obs

LONGEST = 100_000  # steps, where an environment has no time limit
CHECK_EVERY = 64  # steps between looks at whether all episodes have ended (a look is a host sync)


@dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of one episode per environment."""

    returns: list[float]
    lengths: list[float]

    @property
    def mean(self) -> float:
        return sum(self.returns) / len(self.returns)

    @property
    def iqm(self) -> float:
        """Interquartile mean: the mean of the middle half (Agarwal et al. 2021)."""
        cut = len(self.returns) // 4
        middle = sorted(self.returns)[cut : len(self.returns) - cut]
        return sum(middle) / len(middle)


class Policy:
    """A trained policy ready to act: raw observations in, actions out, normaliser included.

    ``policy(obs)``: [N, D] tensor (or groups by name) -> [N, A] in [-1, 1], without exploration.
    """

    def __init__(self, net: nn.Module, norm: Normalizer, spec: EnvSpec):
        self.net, self.norm, self.spec = net, norm, spec

    @torch.no_grad()
    def __call__(self, obs: Obs | Tensor) -> Tensor:
        groups = obs if isinstance(obs, dict) else {"policy": obs}
        known = {k: v for k, v in groups.items() if k == "policy"}
        return self.net.mean_action(self.norm(known))  # type: ignore[operator]

    def tensors(self) -> list[Tensor]:
        """Weights and statistics, in a fixed order."""
        return [*self.net.parameters(), *self.norm.frozen()]

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.net.state_dict(), "norm": self.norm.state_dict()}


def fresh_policy(config: Config, spec: EnvSpec, device: torch.device) -> Policy:
    """An untrained policy of the config's shape."""
    from pql.build import make_policy

    norm = Normalizer({"policy": spec.obs["policy"]}, 1, device, config.algo.normalize_obs)
    return Policy(make_policy(config, spec).to(device), norm, spec)


@torch.no_grad()
def run_episodes(env: VecEnv, policy: Callable[[Obs], Tensor], seed: int) -> Evaluation:
    """One whole episode in every environment of ``env``."""
    obs = env.reset(seed)
    n, device = env.spec.num_envs, env.spec.device
    returns, lengths = torch.zeros(n, device=device), torch.zeros(n, device=device)
    alive = torch.ones(n, dtype=torch.bool, device=device)
    for i in range(1, (env.spec.max_episode_steps or LONGEST) + 1):
        step = env.step(policy(obs))
        counted = alive & step.valid
        returns += torch.where(counted, step.reward, 0)
        lengths += counted
        alive &= ~((step.terminated | step.truncated) & step.valid)
        obs = step.obs
        if i % CHECK_EVERY == 0 and not bool(alive.any()):
            break
    return Evaluation(returns.tolist(), lengths.tolist())


class Evaluator:
    """Evaluates snapshots in a thread of its own. A request that comes while it is busy is dropped and counted."""

    def __init__(self, env: VecEnv, policy: Policy, seed: int):
        self.env, self.policy, self.seed = env, policy, seed
        self.dropped = 0
        self.results: queue.SimpleQueue[tuple[dict[str, float], Evaluation | BaseException]] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._loop, name="pql-evaluator", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def request(self, tensors: list[Tensor], counters: dict[str, float]) -> bool:
        """Copy ``tensors`` and evaluate them; ``counters`` come back with the result. False if busy."""
        if not self._idle.is_set():
            self.dropped += 1
            return False
        self._idle.clear()
        torch._foreach_copy_(self.policy.tensors(), tensors)
        self._inbox.put(counters)
        return True

    def _loop(self) -> None:
        torch.set_num_threads(1)
        while (counters := self._inbox.get()) is not None:
            try:
                self.results.put((counters, run_episodes(self.env, self.policy, self.seed)))
            except BaseException as error:
                self.results.put((counters, error))
            self._idle.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until the request in hand is done. False: it was not within ``timeout`` seconds."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self.env.close()


def spec_to_dict(spec: EnvSpec) -> dict[str, Any]:
    """What loading a policy needs to know of the environment, as JSON."""
    assert isinstance(spec.action, Box)
    groups = {k: {"shape": list(s.shape), "dtype": str(s.dtype).removeprefix("torch.")} for k, s in spec.obs.items()}
    return {"name": spec.name, "obs": groups, "action": spec.action.size, "max_episode_steps": spec.max_episode_steps}


def spec_from_dict(data: dict[str, Any]) -> EnvSpec:
    obs = {k: ObsSpec(tuple(s["shape"]), getattr(torch, s["dtype"])) for k, s in data["obs"].items()}
    return EnvSpec(
        data["name"], 1, obs, Box(data["action"]), torch.device("cpu"), max_episode_steps=data["max_episode_steps"]
    )


def find_checkpoint(path: Path) -> Path:
    """A checkpoint directory itself, or a run's: the last policy, else the best, else the newest resume point.

    Raises:
        ConfigError: none of these is there.
    """
    if (path / checkpoint.MANIFEST).exists():
        return path
    folder = path / "checkpoints"
    candidates = [folder / "last", folder / "best", *reversed(checkpoint.resume_points(folder))]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise ConfigError("run", path, "a run directory or a checkpoint in one (with manifest.json)")


def load_policy(path: str | Path, device: str | torch.device = "cpu") -> Policy:
    """The policy of a run directory or checkpoint: obs [N, D] -> action [N, A], normaliser included.

    Raises:
        ConfigError: no checkpoint there, or a damaged one.
    """
    tensors, manifest = checkpoint.load(find_checkpoint(Path(path)))
    policy = fresh_policy(from_dict(manifest["config"]), spec_from_dict(manifest["spec"]), torch.device(device))
    load_policy_tensors(policy, tensors)
    return policy


def load_policy_tensors(policy: Policy, tensors: dict[str, Tensor]) -> None:
    """Fill ``policy`` from a policy checkpoint's or a resume point's tensors."""
    like = policy.state_dict()
    full = "learners/p/state/policy/" in " ".join(tensors)
    prefixes = {"policy": "learners/p/state/policy", "norm": "collector/normalizer"} if full else {}
    state = {k: checkpoint.unflatten(tensors, v, prefixes.get(k, k)) for k, v in like.items()}
    policy.net.load_state_dict(state["policy"])
    policy.norm.load_state_dict(state["norm"])
