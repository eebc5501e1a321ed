"""Collector: act -> env.step -> write. It owns the running statistics and the exploration noise.

If a simulator steps in groups, the groups alternate: while actions of one are computed, the others step (the
alternating sampler of Stooke & Abbeel 2018, section 3, with two halves). ::

    group 0   act send ......... record act send ......... record act
    group 1            act send ........ record act send ........ record
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Generator, Tensor

from pql.collect.actors import Actor
from pql.collect.asynchronous import Ragged
from pql.collect.env_slice import EnvSlice
from pql.collect.episodes import EpisodeStats
from pql.collect.nonfinite import Quarantine, mask_and
from pql.collect.recorder import FlightRecorder
from pql.collect.saturation import Saturation
from pql.contract.env import VecEnv, make_ready
from pql.contract.optional import PartialReset, Resumable, supports
from pql.contract.rules import check_answer
from pql.data.normalize import Normalizer
from pql.data.replay import Replay
from pql.engine.graph import Capture
from pql.types import Memory, Obs, Step


class Store(Protocol):
    """Destination of rows: a replay or a rollout."""

    device: torch.device

    def begin(self, obs: Obs) -> None:
        """Set the first observation that the run acts on."""
        ...

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """Begin a tick at this observation, with the policy's memory (None: it has none)."""
        ...

    def insert(self, acted: Any, step: Step, columns: Tensor | None = None) -> None:
        """Append a row to ``columns`` ([n] int64; default: all): the data of ``Actor.record`` and the resulting step.

        A store whose columns may advance independently (``ragged``) gets a fourth argument: the columns that have
        answered, [n] bool.
        """
        ...

    def restart(self, obs: Obs) -> None:
        """Continue from ``obs`` [N, ...] in new episodes: an unannounced restart."""
        ...

    def positions(self) -> list[Tensor]:
        """Return the write positions, which are restored after a warm-up of the captured recording."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Collector:
    """Steps all environments with a private copy of the policy.

    Args:
        actor: the collecting policy.
        stores: destinations of rows: rings (all but the first are observation-only copies on other devices) or a
            rollout.
        capture: acting and recording in graphs, with the simulator's step if possible; on the CPU, acting only.

    Attributes:
        overlap: step some env slices while others' actions are computed; False: one after the other, with the same
            results bit for bit.
        saturation: statistics of actions near the ends of their range; None: the policy has no tanh.
        quarantine: environments with non-finite values.
        box: flight recorder.
    """

    def __init__(
        self,
        env: VecEnv,
        actor: Actor,
        normalizer: Normalizer,
        stores: Sequence[Store],
        gen: Generator,
        capture: Capture = "off",
    ):
        self.env, self.actor, self.normalizer, self.gen = env, actor, normalizer, gen
        self.stores = stores
        spec = env.spec
        self.device = spec.device
        self.episodes = EpisodeStats(spec.num_envs, spec.log, self.device)
        ends = actor.squashed
        self.saturation = None if ends is None else Saturation(ends.shape[0], ends.shape[1], self.device)
        self.obs = {
            k: torch.zeros(spec.num_envs, *s.shape, dtype=s.dtype, device=self.device) for k, s in spec.obs.items()
        }
        self.steps: float = 0  # env steps per environment (mean), warm-up included
        self.overlap = True
        self.late = spec.spread > 1 and all(getattr(s, "ragged", False) for s in stores)
        groups = 1 if spec.spread > 1 and not self.late else spec.groups  # without ragged stores a step waits for all
        size = spec.num_envs // groups
        together = groups == 1 and not self.late
        self.box = FlightRecorder(env, groups)
        restart = self.restart if together and self.restarts else None
        goes_on = spec.autoreset == "next_step" and not spec.info.get("lost_life")
        self.quarantine = Quarantine(spec.num_envs, self.device, together, restart, goes_on)
        ranges = [slice(g * size, (g + 1) * size) for g in range(groups)] if groups > 1 or self.late else [None]
        self.lanes = [EnvSlice(self, columns, capture) for columns in ranges]
        self.ragged = Ragged(self) if self.late else None

    @property
    def replays(self) -> list[Replay]:
        """Return the stores that are replay rings."""
        return [s for s in self.stores if isinstance(s, Replay)]

    def prepare(self) -> None:
        """Prepare the simulator and capture graphs. Call it before the first reset, while stores are empty."""
        make_ready(self.env)
        for lane in self.lanes:
            lane.prepare()

    def start(self, seed: int) -> None:
        """Reset the simulator and write the first observation."""
        self.box.forget()
        if self.saturation is not None:
            self.saturation.reset()  # capturing has called the policy
        check_answer("reset", shown := self.env.reset(seed), self.env.spec)
        obs = self.quarantine.begin(shown)
        self._keep(obs)
        for store in self.stores:
            store.begin({k: v.to(store.device) for k, v in obs.items()})
        present = None if self.ragged is None else self.ragged.start().to(self.device)
        self.normalizer.observe(obs, mask_and(present, ~self.quarantine.out))
        self.normalizer.freeze()

    def behind_target(self) -> bool:
        """Return True if the last tick ended before all its transitions were collected: updates must wait."""
        return self.ragged is not None and self.ragged.behind_target()

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Take ``steps`` steps per environment with the policy; then freeze the statistics for the next tick."""
        for store in self.stores:
            store.open({k: v.to(store.device) for k, v in self.obs.items()}, self.actor.memory)
        self._step(steps, EnvSlice.act)

    @torch.no_grad()
    def warm_up(self, steps: int, going: Callable[[], bool] = lambda: True) -> None:
        """Take ``steps`` steps per environment with actions uniform in [-1, 1], or among all discrete ones.

        Args:
            going: called before each step, with ``self.steps`` up to date; False ends the warm-up there. Continuing it
                later gives the same result as an uninterrupted one.
        """
        self._step(steps, EnvSlice.act_randomly, going)

    def _step(self, steps: int, choose: Callable[[EnvSlice], None], going: Callable[[], bool] | None = None) -> None:
        """Step all env slices in turn until none is in flight; then freeze the statistics for the next tick.

        Slices choose and record in the same order with and without overlap, so shared state (the generator, sums of
        statistics) takes the same values.
        """
        if self.ragged is not None:
            complete = self.ragged.step(steps, choose, going)
        else:
            complete = self._all_step(steps, choose, going)
        if complete:
            self.normalizer.freeze()
            self._mend()

    def _all_step(self, steps: int, choose: Callable[[EnvSlice], None], going: Callable[[], bool] | None) -> bool:
        """Return False if it was stopped before its last step."""
        with self.lanes[0].simulator():
            self.box.open(self.obs)
        if choose is EnvSlice.act and self.lanes[0].captured:
            for _ in range(steps):
                self.lanes[0].step()
            self.steps += steps
            return True
        return self._by_turns(steps, choose, going)

    def _by_turns(self, steps: int, choose: Callable[[EnvSlice], None], going: Callable[[], bool] | None) -> bool:
        lanes, turns, turn, before = self.lanes, steps * len(self.lanes), 0, self.steps
        behind = len(lanes) - 1 if self.overlap else 0  # turns between a step's start and its end
        while turn < turns + behind:
            if going is not None and turn < turns and turn % len(lanes) == 0:
                self.steps = before + turn // len(lanes)
                turns = turns if going() else turn  # steps in flight are completed
            if turn < turns:
                choose(lanes[turn % len(lanes)])
                lanes[turn % len(lanes)].send()
            if behind <= turn < turns + behind:
                lanes[(turn - behind) % len(lanes)].receive()
            turn += 1
        self.steps = before + turns // len(lanes)
        return turns == steps * len(lanes)

    @property
    def restarts(self) -> bool:
        """Return True if the simulator can restart single environments."""
        return supports(self.env, PartialReset)

    def restart(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` ([N] bool) and return all current observations."""
        self.box.restarted(mask)
        check_answer("reset_where", shown := cast(PartialReset, self.env).reset_where(mask), self.env.spec)
        return shown

    def _mend(self) -> None:
        """Restart the environments in quarantine, between two ticks."""
        if self.quarantine.look() and self.restarts and self.ragged is None:
            mask = self.quarantine.out.clone()
            with self.lanes[0].simulator():
                fresh = self.restart(mask)
            self._keep(self.quarantine.admit(mask, fresh, self.obs))

    def _keep(self, obs: dict[str, Tensor]) -> None:
        for k, v in self.obs.items():
            v.copy_(obs[k])

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the steps per environment, or, if answers may be late, the transitions."""
        return {"steps": int(self.steps)} if self.ragged is None else self.ragged.counters()

    def load_counters(self, counters: Mapping[str, float]) -> None:
        """Restore the output of :meth:`counters`."""
        if self.ragged is None:
            self.steps = int(counters["steps"])
            return
        self.ragged.load_counters(counters)
        self.steps = self.ragged.transitions / self.env.spec.num_envs

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
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place. A simulator without ``state_dict`` begins new episodes: an unannounced restart."""
        self.box.forget()
        fresh, out = {k: v.clone() for k, v in self.obs.items()}, self.quarantine.out.clone()
        self._keep(state["obs"])
        self.gen.set_state(state["gen"].cpu())
        self.actor.load_state_dict(state["explore"])
        self.normalizer.load_state_dict(state["normalizer"])
        self.episodes.load_state_dict(state["episodes"])
        self.quarantine.load_state_dict(state["quarantine"])
        for store, saved in zip(self.stores, state["replay"], strict=True):
            store.load_state_dict(saved)
        if "env" in state:
            cast(Resumable, self.env).load_state_dict(state["env"])
            return
        self._keep(fresh)
        self.quarantine.begin_episodes(out)
        for store in self.stores:
            store.restart({k: v.to(store.device) for k, v in fresh.items()})
        self.actor.restart()
        self.episodes.running.zero_()
        if self.normalizer.reward_gamma is not None:
            self.normalizer.running_return.zero_()
