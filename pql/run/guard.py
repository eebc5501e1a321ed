"""Warnings about a run's health, from its rows of metrics: numbers that are not finite, and a frozen policy.

Updates whose gradient is not finite are skipped by the optimisers, and rows of environments that show, pay or are
asked for such numbers by ``quarantine.py``. How far a policy uses the ends of its range is measured by
``saturation.py``.
"""

from collections.abc import Callable, Mapping

from pql.errors import RunError
from pql.run.log.sinks import Row

LIMIT = 100  # updates in a row of one learner
FROZEN_SHARE, FROZEN_UPDATES = 0.5, 5_000  # of all action components; policy updates in a row
PENALTY = "algo.policy.saturation_penalty=0.01 (or more)"
REMEDIES = "a smaller algo.policy.lr, a larger action scale of the task"


class NonFiniteMonitor:
    """Reads ``skipped/NAME``, the share of a learner's updates that were left out since the row before, and
    ``env/dropped``, the rows left out so far.

    Args:
        warn: takes a line for people; once for each learner, and once for the environments.
        updates: "v" and "p": how many there have been.
        restarts: the simulator can restart single environments.
    """

    def __init__(self, warn: Callable[[str], None], updates: Mapping[str, int], restarts: bool = True):
        self.warn, self.restarts = warn, restarts
        self._seen: dict[str, float] = {**updates}
        self._warned = set[str]()
        self._row: dict[str, float] = {}  # by learner: updates left out one after the other, at least
        self._reported = False  # of environments

    def look(self, row: Row) -> None:
        """One row after the other.

        Raises:
            RunError: ``LIMIT`` updates in a row were left out; weights are still those from before them.
        """
        if not all(f"updates/{k}" in row for k in self._seen):
            return  # of an evaluation
        self._look_at_rows(row.get("env/dropped", 0))
        updates = {k: row[f"updates/{k}"] for k in self._seen}
        new = {k: updates[k] - self._seen[k] for k in updates}
        self._seen = updates
        for key in [k for k in row if k.startswith("skipped/")]:
            name, share = key.removeprefix("skipped/"), row[key]
            count = new["p" if name == "p" else "v"]
            if share > 0 and name not in self._warned:
                self._warned.add(name)
                self.warn(f"{share * count:,.0f} of {count:,.0f} updates of {name} left out: gradient not finite")
            self._row[name] = self._row.get(name, 0) + count if share == 1 else 0
            if self._row[name] >= LIMIT:
                raise RunError(
                    f"{self._row[name]:,.0f} updates of {name} in a row had gradients that are not finite; the weights "
                    f"are those from before them (look at rewards, observations and learning rates)"
                )

    def _look_at_rows(self, dropped: float) -> None:
        if dropped == 0 or self._reported:
            return
        self._reported = True
        then = "was restarted" if self.restarts else "stays out until its simulator, which can restart no single "
        then += "" if self.restarts else "environment, begins an episode"
        self.warn(
            f"{dropped:,.0f} rows left out: an observation, reward or action was not finite; the environment {then}"
        )


class FrozenPolicy:
    """Reads ``policy/frozen``, the share of action components that stay at one end of their range over time.

    Args:
        warn: takes a line for people; once.
        updates: of the policy so far.
        penalized: the algorithm reads ``algo.policy.saturation_penalty``.
    """

    def __init__(self, warn: Callable[[str], None], updates: int, penalized: bool):
        self.warn, self.remedies = warn, f"{PENALTY}, {REMEDIES}" if penalized else REMEDIES
        self._seen: float = updates
        self._row: float = 0  # updates one after the other
        self._warned = False

    def look(self, row: Row) -> None:
        """One row after the other."""
        if "policy/frozen" not in row:
            return
        new, self._seen = row["updates/p"] - self._seen, row["updates/p"]
        self._row = self._row + new if row["policy/frozen"] >= FROZEN_SHARE else 0
        if self._row < FROZEN_UPDATES or self._warned:
            return
        self._warned = True
        self.warn(
            f"{row['policy/frozen']:.0%} of all action components stayed at one end of their range for "
            f"{self._row:,.0f} policy updates, in nearly every step; a saturated tanh hardly learns its way back. "
            f"Remedies: {self.remedies}"
        )
