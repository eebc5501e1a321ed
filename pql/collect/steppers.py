"""Steppers: the order in which a collector's env slices act, send and record during a tick.

``EvenStepper`` steps every environment equally often. If a simulator steps in groups, the groups alternate: while
actions of one are computed, the others step (the alternating sampler of Stooke & Abbeel 2018, section 3, with two
halves). ::

    group 0   act send ......... record act send ......... record act
    group 1            act send ........ record act send ........ record

``LateStepper`` steps remote environments that may be late, lost or newly joined. Columns of the ring advance
independently. A tick ends when its number of transitions has been recorded, whichever environments made them. While an
environment is late, its action and its actor's memory are kept and nothing is written, so lateness leaves no trace in
its rows. One environment makes at most ``spread`` times its share of a tick's steps, as allowed by the replay's guard
band. If that does not suffice, the tick ends short: the learners skip the next tick, and the collector collects the
missing transitions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pql.collect.env_slice import EnvSlice
from pql.collect.state import CollectorState
from pql.contract.optional import AsyncEnv
from pql.engine import interrupt

Going = Callable[[], bool]
"""Called before each step of a warm-up, with ``steps`` up to date; False ends the warm-up there."""


class EvenStepper:
    """Steps env slices in turn, each equally often.

    Attributes:
        steps: env steps per environment so far, warm-up included.
        overlap: step some env slices while others' actions are computed; False: one after the other, with the same
            results bit for bit.
    """

    def __init__(self, state: CollectorState, slices: Sequence[EnvSlice]):
        self.state, self.slices = state, slices
        self.steps, self.overlap = 0, True

    def start(self) -> Tensor | None:
        """Return the environments present after a reset: None, which stands for all."""
        return None

    def behind_target(self) -> bool:
        """Return False: every tick collects all its transitions."""
        return False

    def run(self, steps: int, randomly: bool, going: Going | None = None) -> bool:
        """Take ``steps`` steps with every environment, until none is in flight.

        Slices act and record in the same order with and without overlap, so shared state (the generator, sums of
        statistics) takes the same values.

        Returns:
            False if ``going`` ended it before its last step.
        """
        with self.state.simulator():
            self.state.recorder.open(self.state.obs)
        if randomly or not self.slices[0].whole:
            return self._alternate(steps, randomly, going)
        for _ in range(steps):
            self.slices[0].step()
        self.steps += steps
        return True

    def _alternate(self, steps: int, randomly: bool, going: Going | None) -> bool:
        slices, count, turn, before = self.slices, len(self.slices), 0, self.steps
        turns = steps * count
        behind = count - 1 if self.overlap else 0  # turns between a step's start and its end
        while turn < turns + behind:
            if going is not None and turn < turns and turn % count == 0:
                self.steps = before + turn // count
                turns = turns if going() else turn  # steps in flight are completed
            if turn < turns:
                slices[turn % count].act(randomly)
                slices[turn % count].send()
            if behind <= turn < turns + behind:
                slices[(turn - behind) % count].receive()
            turn += 1
        self.steps = before + turns // count
        return turns == steps * count

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_counters(self, counters: Mapping[str, float]) -> None:
        self.steps = int(counters["steps"])


class LateStepper:
    """Steps env slices in turn, with the environments that have answered.

    Attributes:
        due: [N] bool, on the host; the last answer has been recorded and no action has been sent since.
        transitions: number recorded so far, over all environments, warm-up included.
        target: number requested by the ticks so far.
        overlap: slices always overlap.
    """

    overlap = True

    def __init__(self, state: CollectorState, slices: Sequence[EnvSlice]):
        self.slices, self.env = slices, cast(AsyncEnv, state.env)
        self.due = np.zeros(state.env.spec.num_envs, dtype=bool)
        self.transitions, self.target, self._turn = 0, 0, 0

    @property
    def steps(self) -> float:
        """Return the env steps per environment so far, on the mean."""
        return self.transitions / len(self.due)

    def start(self) -> Tensor | None:
        """Return the environments present after a reset, [N] bool, on the CPU."""
        present = self.env.present()
        self.due[:] = present.numpy()
        return present

    def behind_target(self) -> bool:
        """Return True if the last tick ended short."""
        return self.transitions < self.target

    def run(self, steps: int, randomly: bool, going: Going | None = None) -> bool:
        """Make ``steps`` transitions per possible environment, or the missing ones of a short tick.

        Args:
            going: if given (the warm-up), collect until the target without a limit per environment, and stop when it
                returns False or on Ctrl-C.

        Returns:
            False if it was stopped early.
        """
        spec = self.env.spec
        if not self.behind_target():
            self.target += steps * spec.num_envs
        if going is None:
            self._until(steps * spec.spread, randomly)
            return True
        while self.behind_target() and going() and not interrupt.asked():
            self._until(self.target, randomly, going)
        return not self.behind_target()

    def _until(self, room: int, randomly: bool, going: Going = lambda: True) -> None:
        """Collect until the target, or until no more answers arrive; at most ``room`` rows per environment."""
        left, idle = np.full(self.due.shape, room), 0
        while self.behind_target() and idle <= len(self.slices) and going():
            self._send(self.slices[self._turn], left > 0, randomly)
            self._turn = (self._turn + 1) % len(self.slices)
            ids = self._receive(self._turn)
            left[ids] -= 1
            idle = 0 if len(ids) else idle + 1

    def _send(self, one: EnvSlice, may: np.ndarray, randomly: bool) -> None:
        """Act for the environments of a slice that are due and allowed by ``may`` [N] bool."""
        assert one.ids is not None
        assert one.mask is not None
        asked = (self.due & may)[one.ids.numpy()]
        if not asked.any():
            return
        one.mask.copy_(torch.from_numpy(asked))
        one.act(randomly)
        rows, action = torch.from_numpy(np.flatnonzero(asked)), one.state.actor.action
        self.env.send(action if asked.all() else action[rows.to(action.device)], one.ids[rows])
        self.due[one.ids[rows].numpy()] = False

    def _receive(self, group: int) -> np.ndarray:
        """Record the answers that have arrived for slice ``group``. Return their environments' ids."""
        one = self.slices[group]
        assert one.ids is not None
        assert one.mask is not None
        ids, step = self.env.answers(group)
        if len(ids):
            self.due[ids.numpy()] = True
            self.transitions += len(ids)
            one.mask.copy_(torch.isin(one.ids, ids))
            one.record(step)
        return ids.numpy()

    def counters(self) -> dict[str, int]:
        return {"transitions": self.transitions, "target": self.target}

    def load_counters(self, counters: Mapping[str, float]) -> None:
        self.transitions, self.target = int(counters["transitions"]), int(counters["target"])
