"""State of a collector: environment, actor, stores, statistics and generator, of all environments or of a range.

It is built first. Env slices act and record on it, steppers decide which slice comes next, and checkpoints save it.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Generator, Tensor

from pql.collect.actors import Actor
from pql.collect.episodes import EpisodeStats
from pql.collect.nonfinite import Quarantine
from pql.collect.recorder import FlightRecorder
from pql.collect.saturation import Saturation
from pql.contract.env import VecEnv
from pql.contract.optional import PartialReset, Resumable, Staged, supports
from pql.contract.rules import check_answer
from pql.data.normalize import Normalizer
from pql.data.store import Store
from pql.engine import watchdog
from pql.types import Obs


class CollectorState:
    """State that a collector reads and writes; the arguments are those of ``Collector``.

    Attributes:
        obs: observations [n, ...] to act on next.
        late: environments may answer late, and every store can take their rows apart.
        groups: number of groups that step in turn.
        columns: the range of environments; None: all of a simulator that steps them at once.
    """

    columns: slice | None = None

    def __init__(
        self, env: VecEnv, actor: Actor, normalizer: Normalizer, stores: Sequence[Store], gen: Generator
    ) -> None:
        self.env, self.actor, self.normalizer, self.stores, self.gen = env, actor, normalizer, stores, gen
        spec, n = env.spec, env.spec.num_envs
        self.device = device = spec.device
        self.late = spec.spread > 1 and all(s.ragged for s in stores)
        self.groups = 1 if spec.spread > 1 and not self.late else spec.groups  # else a step waits for all
        self.obs = {k: torch.zeros(n, *s.shape, dtype=s.dtype, device=device) for k, s in spec.obs.items()}
        self.episodes = EpisodeStats(n, spec.log_kinds, device)
        self.recorder = FlightRecorder(env, self.groups)
        squashed = actor.squashed
        self.saturation = None if squashed is None else Saturation(n, squashed.shape[1], device)
        together = self.groups == 1 and not self.late
        restart = self.restart if together and self.restarts else None
        next_step = spec.autoreset == "next_step" and not spec.info.get("lost_life")
        self.quarantine = Quarantine(n, device, together, restart, next_step)
        # Such a simulator works on the legacy default stream, which PyTorch's side streams are not ordered with.
        self.default_stream = spec.stream == "default" and device.type == "cuda"

    def slices(self) -> "list[CollectorState]":
        """Return one state for each group of environments; their tensors are views of this one's."""
        if self.groups == 1 and not self.late:
            return [self]
        size = self.env.spec.num_envs // self.groups
        return [self._slice(slice(g * size, (g + 1) * size)) for g in range(self.groups)]

    def _slice(self, columns: slice) -> "CollectorState":
        part = copy.copy(self)
        part.columns, part.obs = columns, {k: v[columns] for k, v in self.obs.items()}
        part.actor, part.episodes = self.actor.part(columns), self.episodes.part(columns)
        part.quarantine = self.quarantine.part(columns)
        part.saturation = self.saturation and self.saturation.part(columns)
        return part

    def keep(self, obs: Obs) -> None:
        """Set ``obs`` [n, ...] as the observations to act on next."""
        for k, v in self.obs.items():
            v.copy_(obs[k])

    # -- the simulator ------------------------------------------------------------------------------------------------

    @property
    def restarts(self) -> bool:
        """Return True if the simulator can restart single environments."""
        return supports(self.env, PartialReset)

    def restart(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        self.recorder.restarted(mask)
        check_answer("reset_where", obs := cast(PartialReset, self.env).reset_where(mask), self.env.spec)
        return obs

    @contextmanager
    def simulator(self) -> Iterator[None]:
        """Run the simulator's work inside on the stream it uses, ordered with the collector's before and after."""
        watchdog.touch(f"the simulator {self.env.spec.name}")
        if not self.default_stream:
            yield
            watchdog.touch()
            return
        current, default = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
        default.wait_stream(current)
        with torch.cuda.stream(default):
            yield
        current.wait_stream(default)
        watchdog.touch()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next step depends on, with the simulator's ``state_dict`` if it has one."""
        state = {
            "obs": self.obs,
            "gen": self.gen.get_state(),
            "explore": self.actor.state_dict(),
            "normalizer": self.normalizer.state_dict(),
            "episodes": self.episodes.state_dict(),
            "quarantine": self.quarantine.state_dict(),
            "replay": [s.state_dict() for s in self.stores],
        }
        if supports(self.env, Resumable):
            state["env"] = self.env.state_dict()
        elif supports(self.env, Staged):
            state["progress"] = self.env.progress()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place. A simulator without ``state_dict`` begins new episodes: an unannounced restart, at
        the saved stage of its curriculum."""
        self.recorder.forget()
        if "progress" in state:
            cast(Staged, self.env).load_progress(state["progress"])
            self.keep(self.quarantine.begin(self.env.reset()))
        fresh, out = {k: v.clone() for k, v in self.obs.items()}, self.quarantine.out.clone()
        self.keep(state["obs"])
        self.gen.set_state(state["gen"].cpu())
        self.actor.load_state_dict(state["explore"])
        self.normalizer.load_state_dict(state["normalizer"])
        self.episodes.load_state_dict(state["episodes"])
        self.quarantine.load_state_dict(state["quarantine"])
        for store, saved in zip(self.stores, state["replay"], strict=True):
            store.load_state_dict(saved)
        if "env" in state:
            cast(Resumable, self.env).load_state_dict(state["env"])
        else:
            self._begin_episodes(fresh, out)

    def _begin_episodes(self, obs: Obs, out: Tensor) -> None:
        """Continue in new episodes at ``obs`` [N, ...], which is not finite in the environments ``out`` [N] bool."""
        self.keep(obs)
        self.quarantine.begin_episodes(out)
        for store in self.stores:
            store.restart({k: v.to(store.device) for k, v in obs.items()})
        self.actor.restart()
        self.episodes.running.zero_()
        if self.normalizer.reward_gamma is not None:
            self.normalizer.running_return.zero_()
