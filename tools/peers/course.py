"""Course of a benchmark run against other libraries: its budget, its training time and its evaluations.

Training time stops during evaluations. Nothing here knows a contender.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pql.types import Obs

Act = Callable[[Obs], Tensor]  # a deterministic policy: obs by group [N, D] -> action [N, A]
Point = dict[str, Any]
FOREVER = 10**9  # steps, for libraries that want a number: the course ends a run


class Over(Exception):  # noqa: N818
    """End of a course, for training loops that have no other way out."""


@dataclass(frozen=True)
class Budget:
    """Budget of a run: seconds of training, or env steps, which take precedence."""

    seconds: float
    env_steps: int | None = None

    def share(self, seconds: float, env_steps: int) -> float:
        """Return the part that is spent: 1 at the end."""
        return seconds / self.seconds if self.env_steps is None else env_steps / self.env_steps


class Course:
    """Counts a run's training time, evaluates its policy ``points`` times at equal parts of the budget, and ends it.

    Attributes:
        curve: one entry per evaluation: ``seconds`` of training, ``env_steps``, ``updates`` (of the critic; of all
            networks for PPO), and what ``evaluate`` returned. The last entry is the trained policy.
    """

    def __init__(self, budget: Budget, points: int = 1, evaluate: Callable[[Act], Point] = lambda act: {}):
        self.budget, self.points, self.evaluate = budget, points, evaluate
        self.curve: list[Point] = []
        self._mark, self._start = 1, 0.0

    def begin(self) -> None:
        """Start the clock, where training begins: libraries and networks are loaded."""
        self._start = time.perf_counter()

    def over(self, env_steps: int, updates: int, act: Act) -> bool:
        """Return True at the end of the budget. Call it after every training step, with the totals so far.

        Evaluates ``act`` where the next part of the budget has passed; the clock stands still meanwhile.
        """
        seconds = time.perf_counter() - self._start
        if self.due(seconds, env_steps):
            self.add(seconds, env_steps, updates, act)
            self._start = time.perf_counter() - seconds
        return self.budget.share(seconds, env_steps) >= 1

    def due(self, seconds: float, env_steps: int) -> bool:
        """Return True if parts of the budget have passed since the last True: once for several at a time."""
        passed = int(self.budget.share(seconds, env_steps) * self.points)
        if passed < self._mark:
            return False
        self._mark = passed + 1
        return True

    def add(self, seconds: float, env_steps: int, updates: int, act: Act) -> None:
        """Evaluate ``act`` and append it to the curve."""
        row = {"seconds": seconds, "env_steps": int(env_steps), "updates": int(updates)}
        self.curve.append({**row, **self.evaluate(act)})
