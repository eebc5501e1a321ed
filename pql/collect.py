"""The collector: act -> env.step -> write. It owns the rows it writes, the statistics and the exploration noise."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from pql.env import Discrete, EnvSpec, VecEnv
from pql.explore import Exploration
from pql.graph import Graph
from pql.normalize import Normalizer
from pql.replay import Replay
from pql.types import Memory, Obs, Step

ActFunction = Callable[[nn.Module, Obs, Generator], Tensor]
"""(policy, normalised obs, generator) -> action [N, A]: what algorithms differ in when acting."""


class Store(Protocol):
    """Where rows go: the replay, or a rollout."""

    device: torch.device

    def begin(self, obs: Obs) -> None:
        """The observation that a run acts on first."""
        ...

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """A tick begins, from this observation and the policy's memory (None: it has none)."""
        ...

    def insert(self, acted: Any, step: Step) -> None:
        """Append a row: what ``Actor.record`` gave, and what followed."""
        ...

    def restart(self, obs: Obs) -> None:
        """Go on from ``obs`` in new episodes that nothing announced."""
        ...

    def positions(self) -> list[Tensor]:
        """What a warm-up of the recording must leave as it was; beyond these positions a store holds nothing."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Actor(Protocol):
    """A policy at work: it turns observations into actions, and keeps what it needs from one step to the next."""

    action: Tensor  # [N, A] or [N] int64: what the simulator gets, at a fixed address
    memory: Memory | None

    @property
    def policy(self) -> nn.Module:
        """A private copy, that pulls land in."""
        ...

    def act(self, obs: Obs, gen: Generator) -> None:
        """Normalised observations -> ``action``."""
        ...

    def record(self, device: torch.device) -> Any:
        """What a store on ``device`` keeps of the last ``act``."""
        ...

    def observe(self, first: Tensor) -> None:
        """Note where the next action begins an episode ([N] bool)."""
        ...

    def restart(self) -> None:
        """Every next action begins an episode."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class NoisyActor:
    """A policy without memory, and exploration noise on its action."""

    memory: Memory | None = None

    def __init__(self, policy: nn.Module, act: ActFunction, explore: Exploration, spec: EnvSpec):
        self.policy, self.explore, self._act = policy, explore, act
        self.action = action_buffer(spec)

    def act(self, obs: Obs, gen: Generator) -> None:
        self.action.copy_(self.explore(self._act(self.policy, obs, gen), gen))

    def record(self, device: torch.device) -> Tensor:
        return self.action.to(device)

    def observe(self, first: Tensor) -> None:
        self.explore.observe(first)

    def restart(self) -> None:
        self.explore.fresh.fill_(True)

    def state_dict(self) -> dict[str, Tensor]:
        return self.explore.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.explore.load_state_dict(state)


def action_buffer(spec: EnvSpec) -> Tensor:
    """Zeros in the shape and type of an action: [N, A] float32, or [N] int64."""
    if isinstance(spec.action, Discrete):
        return torch.zeros(spec.num_envs, dtype=torch.int64, device=spec.device)
    return torch.zeros(spec.num_envs, spec.action.size, device=spec.device)


class EpisodeStats:
    """Returns, lengths and log terms of finished episodes, summed on the device."""

    def __init__(self, num_envs: int, terms: Sequence[str], device: torch.device):
        self.terms = tuple(terms)
        rows = 2 + len(self.terms)  # return, length, then one per term
        self.running = torch.zeros(rows, num_envs, device=device)
        self.finished = torch.zeros(rows, device=device)
        self.count = torch.zeros((), device=device)

    def update(self, step: Step) -> None:
        new = torch.stack([step.reward, torch.ones_like(step.reward), *(step.log[k] for k in self.terms)])
        self.running += torch.where(step.valid, new, 0)
        ended = (step.terminated | step.truncated) & step.valid
        self.finished += torch.where(ended, self.running, 0).sum(1)
        self.count += ended.sum()
        self.running.copy_(torch.where(ended | step.first, 0, self.running))

    def absorb(self, other: "EpisodeStats") -> None:
        """Take the episodes that ended in ``other``, which has the same terms; it starts over."""
        for mine, theirs in ((self.finished, other.finished), (self.count, other.count)):
            mine += theirs.to(mine.device)
            theirs.zero_()

    def drain(self) -> dict[str, Tensor]:
        """Means over the episodes that ended since the last drain, and their number; then start over."""
        mean = self.finished / self.count.clamp(min=1)
        names = ["train/return_mean", "train/length_mean", *(f"episode/{k}" for k in self.terms)]
        out = dict(zip(names, mean, strict=True)) | {"train/episodes": self.count.clone()}
        self.finished.zero_()
        self.count.zero_()
        return out

    def state_dict(self) -> dict[str, Tensor]:
        return {"running": self.running, "finished": self.finished, "count": self.count}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class Collector:
    """Steps all environments with a private copy of the policy.

    Args:
        actor: the policy that acts.
        stores: where rows go: rings (all but the first are observation-only copies on other devices) or a rollout.
        capture: put acting and recording into CUDA graphs (the simulator's own step stays outside).
    """

    def __init__(
        self,
        env: VecEnv,
        actor: Actor,
        normalizer: Normalizer,
        stores: Sequence[Store],
        gen: Generator,
        capture: bool = False,
    ):
        self.env, self.actor, self.normalizer, self.gen = env, actor, normalizer, gen
        self.stores = stores
        spec = env.spec
        self.device = spec.device
        self.episodes = EpisodeStats(spec.num_envs, spec.log, self.device)
        self.obs = {
            k: torch.zeros(spec.num_envs, *s.shape, dtype=s.dtype, device=self.device) for k, s in spec.obs.items()
        }
        self.now: Step | None = None
        self.steps = 0  # env steps of each environment, warm-up included
        self._act = Graph(self._act_body, self.device, [gen], _ActState(self), capture)
        # A copy to another device joins that device's current stream, which no capture may do.
        here = all(store.device == actor.action.device for store in stores)
        self._record = Graph(self._record_body, self.device, [], _RecordState(self), capture and here)

    @property
    def replays(self) -> list[Replay]:
        """Those of the stores that are rings."""
        return [s for s in self.stores if isinstance(s, Replay)]

    def prepare(self) -> None:
        """Capture, where that is on; before the first reset, while the stores are empty."""
        if self._act.capture:
            spec = self.env.spec
            flag = torch.zeros(spec.num_envs, dtype=torch.bool, device=self.device)
            zero = torch.zeros(spec.num_envs, device=self.device)
            obs = {k: v.clone() for k, v in self.obs.items()}
            final = {k: v.clone() for k, v in self.obs.items()}
            log = {k: zero.clone() for k in spec.log}
            flags = [flag.clone() for _ in range(5)]
            self.now = Step(obs, zero, flags[0], flags[1], flags[2], final, flags[3], flags[4], log)
            self._act.prepare()
            self._record.prepare()

    def start(self, seed: int) -> None:
        """Reset the simulator and write the first observation."""
        obs = self.env.reset(seed)
        self._keep(obs)
        for store in self.stores:
            store.begin({k: v.to(store.device) for k, v in obs.items()})
        self.normalizer.observe(obs)
        self.normalizer.freeze()

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """``steps`` steps of every environment with the policy; then freeze the statistics for the next tick."""
        for store in self.stores:
            store.open({k: v.to(store.device) for k, v in self.obs.items()}, self.actor.memory)
        for _ in range(steps):
            self._act()
            self._advance()
        self.normalizer.freeze()

    @torch.no_grad()
    def warm_up(self, steps: int) -> None:
        """``steps`` steps with actions uniform in [-1, 1], or among all discrete ones."""
        action = self.actor.action
        for _ in range(steps):
            if isinstance(self.env.spec.action, Discrete):
                action.random_(self.env.spec.action.n, generator=self.gen)
            else:
                action.copy_(torch.rand(action.shape, generator=self.gen, device=self.device).mul_(2).sub_(1))
            self._advance()
        self.normalizer.freeze()

    def _advance(self) -> None:
        step = self._env_step(self.actor.action)
        if self._record.graph is None:
            self.now = step
        else:
            self._load(step)
        self._record()
        self.steps += 1

    def _act_body(self) -> None:
        self.actor.act(self.normalizer(self.obs), self.gen)

    def _record_body(self) -> None:
        step = self.now
        assert step is not None
        for store in self.stores:
            store.insert(self.actor.record(store.device), step_to(step, store.device))
        over = step.terminated | step.truncated
        # Next-step autoreset shows the final observation here: where the simulator lost it, this is no real frame.
        lost = over & ~step.final_ok & ~step.first if self.env.spec.final_obs == "never" else None
        self.normalizer.observe(step.obs, None if lost is None else ~lost)
        self.normalizer.observe_reward(step.reward, over | step.first, step.valid)
        self.episodes.update(step)
        self.actor.observe(step.first)
        self._keep(step.obs)

    def _keep(self, obs: dict[str, Tensor]) -> None:
        for k, v in self.obs.items():
            v.copy_(obs[k])

    def _load(self, step: Step) -> None:
        """Copy a simulator's step to the addresses that the captured recording reads, groups and terms by name."""
        source = named(step)
        for name, target in named(self.now).items():
            target.copy_(source[name], non_blocking=True)

    def _env_step(self, action: Tensor) -> Step:
        if self.env.spec.stream == "current" or self.device.type != "cuda":
            return self.env.step(action)
        # The simulator works on the legacy default stream, which PyTorch's side streams are not ordered with.
        mine, theirs = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
        theirs.wait_stream(mine)
        with torch.cuda.stream(theirs):
            step = self.env.step(action)
        mine.wait_stream(theirs)
        for tensor in named(step).values():
            tensor.record_stream(mine)
        return step

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, the simulator included where it offers ``state_dict``."""
        state = {
            "obs": self.obs, "gen": self.gen.get_state(), "explore": self.actor.state_dict(),
            "normalizer": self.normalizer.state_dict(), "episodes": self.episodes.state_dict(),
            "replay": [s.state_dict() for s in self.stores],
        }  # fmt: skip
        if hasattr(self.env, "state_dict"):
            state["env"] = self.env.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place. A simulator that offers no ``state_dict`` begins new episodes, which nothing announced."""
        fresh = {k: v.clone() for k, v in self.obs.items()}
        self._keep(state["obs"])
        self.gen.set_state(state["gen"].cpu())
        self.actor.load_state_dict(state["explore"])
        self.normalizer.load_state_dict(state["normalizer"])
        self.episodes.load_state_dict(state["episodes"])
        for store, saved in zip(self.stores, state["replay"], strict=True):
            store.load_state_dict(saved)
        if "env" in state:
            self.env.load_state_dict(state["env"])  # type: ignore[attr-defined]
            return
        self._keep(fresh)
        for store in self.stores:
            store.restart({k: v.to(store.device) for k, v in fresh.items()})
        self.actor.restart()
        self.episodes.running.zero_()
        if self.normalizer.reward_gamma is not None:
            self.normalizer.running_return.zero_()


class _ActState:
    """What a warm-up of acting must leave as it was."""

    def __init__(self, collector: Collector):
        self.c = collector

    def state_dict(self) -> dict[str, Any]:
        return {"gen": self.c.gen.get_state(), "actor": self.c.actor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.c.gen.set_state(state["gen"].cpu())
        self.c.actor.load_state_dict(state["actor"])


class _RecordState:
    """What a warm-up of recording must leave as it was. Rows past a head hold nothing, so heads suffice."""

    def __init__(self, collector: Collector):
        self.c = collector

    def _cursors(self) -> dict[str, Tensor]:
        return {f"{i}.{j}": t for i, s in enumerate(self.c.stores) for j, t in enumerate(s.positions())}

    def state_dict(self) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "actor": self.c.actor,
            "normalizer": self.c.normalizer,
            "episodes": self.c.episodes,
        }
        return {**{k: v.state_dict() for k, v in parts.items()}, "cursors": self._cursors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.c.actor.load_state_dict(state["actor"])
        self.c.normalizer.load_state_dict(state["normalizer"])
        self.c.episodes.load_state_dict(state["episodes"])
        for k, t in self._cursors().items():
            t.copy_(state["cursors"][k])


def named(step: Step | None) -> dict[str, Tensor]:
    """A step's tensors by name: ``reward``, ``obs.policy``, ``log.speed`` ..."""
    assert step is not None
    out: dict[str, Tensor] = {}
    for field, part in step._asdict().items():
        out |= {f"{field}.{k}": v for k, v in part.items()} if isinstance(part, dict) else {field: part}
    return out


def step_to(step: Step, device: torch.device) -> Step:
    """The step on ``device`` (itself where it is there already)."""
    if step.reward.device == device:
        return step
    move = {k: v.to(device, non_blocking=True) for k, v in step.obs.items()}
    final = {k: v.to(device, non_blocking=True) for k, v in step.final_obs.items()}
    rest = {
        f: getattr(step, f).to(device, non_blocking=True)
        for f in ("reward", "terminated", "truncated", "first", "final_ok", "valid")
    }
    return Step(obs=move, final_obs=final, log={}, **rest)
