"""Collector: act -> env.step -> write. It owns the running statistics and the exploration noise.

``CollectorState`` holds what is collected from and into, env slices step over it, and a stepper orders them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator

from pql.collect.actors import Actor
from pql.collect.env_slice import EnvSlice
from pql.collect.nonfinite import mask_and
from pql.collect.state import CollectorState
from pql.collect.steppers import EvenStepper, Going, LateStepper
from pql.contract.env import VecEnv, make_ready
from pql.contract.rules import check_answer, check_stacks
from pql.data.normalize import Normalizer
from pql.data.replay import Replay
from pql.data.store import Store
from pql.engine.graph import EAGER, Execution


class Collector:
    """Steps all environments with its own copy of the policy.

    Args:
        actor: the collecting policy.
        stores: destinations of rows: rings (all but the first are observation-only copies on other devices) or a
            rollout.
        execution: of acting and recording, with the simulator's step if possible; on the CPU, of acting only.

    Attributes:
        obs: observations [N, ...] to act on next.
        saturation: statistics of actions near the ends of their range; None: the policy has no tanh.
        quarantine: environments with non-finite values.
        recorder: flight recorder.
        count: 0-dim int64, the env steps so far over all environments; None: nobody reads it.
    """

    count: torch.Tensor | None = None

    def __init__(
        self,
        env: VecEnv,
        actor: Actor,
        normalizer: Normalizer,
        stores: Sequence[Store],
        gen: Generator,
        execution: Execution = EAGER,
    ):
        self.state = state = CollectorState(env, actor, normalizer, stores, gen)
        self.env, self.actor, self.normalizer, self.stores, self.gen = env, actor, normalizer, stores, gen
        self.device, self.obs, self.episodes = state.device, state.obs, state.episodes
        self.saturation, self.quarantine, self.recorder = state.saturation, state.quarantine, state.recorder
        self.slices = [EnvSlice(part, execution._replace(worker="collector")) for part in state.slices()]
        self.stepper = (LateStepper if state.late else EvenStepper)(state, self.slices)

    @property
    def replays(self) -> list[Replay]:
        """Return the stores that are replay rings."""
        return [s for s in self.stores if isinstance(s, Replay)]

    @property
    def steps(self) -> float:
        """Return the env steps per environment so far (mean), warm-up included."""
        return self.stepper.steps

    def prepare(self) -> None:
        """Prepare the simulator and capture graphs. Call it before the first reset, while stores are empty."""
        make_ready(self.env)
        for one in self.slices:
            one.prepare()

    def start(self, seed: int) -> None:
        """Reset the simulator and write the first observation."""
        self.recorder.forget()
        if self.saturation is not None:
            self.saturation.reset()  # capturing has called the policy
        check_answer("reset", shown := self.env.reset(seed), self.env.spec)
        obs = self.quarantine.begin(shown)
        check_stacks("reset", obs, obs, every := ~self.quarantine.out, every, self.env.spec)
        self.state.keep(obs)
        for store in self.stores:
            store.begin({k: v.to(store.device) for k, v in obs.items()})
        present = self.stepper.start()
        present = None if present is None else present.to(self.device)
        self.normalizer.observe(obs, mask_and(present, ~self.quarantine.out))
        self.normalizer.freeze()

    def behind_target(self) -> bool:
        """Return True if the last tick ended before all its transitions were collected: updates must wait."""
        return self.stepper.behind_target()

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Take ``steps`` steps per environment with the policy; then freeze the statistics for the next tick."""
        for store in self.stores:
            store.open({k: v.to(store.device) for k, v in self.obs.items()}, self.actor.memory)
        self._step(steps, False)

    @torch.no_grad()
    def warm_up(self, steps: int, going: Callable[[], bool] = lambda: True) -> None:
        """Take ``steps`` steps per environment with actions uniform in [-1, 1], or among all discrete ones.

        Args:
            going: called before each step, with ``self.steps`` up to date; False ends the warm-up there. Continuing it
                later gives the same result as an uninterrupted one.
        """
        self._step(steps, True, going)

    def _step(self, steps: int, randomly: bool, going: Going | None = None) -> None:
        if self.stepper.run(steps, randomly, going):
            self.normalizer.freeze()
            self._mend()
        self._counted()

    def _counted(self) -> None:
        if self.count is not None:
            self.count.fill_(round(self.steps * self.env.spec.num_envs))

    def _mend(self) -> None:
        """Restart the environments in quarantine, between two ticks."""
        if self.quarantine.look() and self.state.restarts and not self.state.late:
            mask = self.quarantine.out.clone()
            with self.state.simulator():
                fresh = self.state.restart(mask)
            self.state.keep(self.quarantine.admit(mask, fresh, self.obs))

    def counters(self) -> dict[str, int]:
        """Return the steps per environment, or, if answers may be late, the transitions."""
        return self.stepper.counters()

    def load_counters(self, counters: Mapping[str, float]) -> None:
        """Restore the output of :meth:`counters`."""
        self.stepper.load_counters(counters)
        self._counted()

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`CollectorState.state_dict`."""
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`CollectorState.load_state_dict`."""
        self.state.load_state_dict(state)
