"""A run's health: numbers that are not finite and a frozen policy, from its rows of metrics; failed allocations.

Updates whose gradient is not finite are skipped by the optimisers, and rows with non-finite observations,
rewards or actions are dropped by ``quarantine.py``. ``saturation.py`` measures how far a policy saturates.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from pql.collect.nonfinite import LARGEST
from pql.engine.placement import device_memory, host_memory
from pql.errors import RunError, first_line, with_cause
from pql.run.log.sinks import Row, memory

LIMIT = 100  # updates in a row of one learner
FROZEN_SHARE, FROZEN_UPDATES = 0.5, 5_000  # of all action components; policy updates in a row
PENALTY = "algo.policy.saturation_penalty=0.01 (or more)"
REMEDIES = "a smaller algo.policy.lr, a larger action scale of the task"


class NonFiniteMonitor:
    """Reads ``skipped/NAME``, the share of a learner's updates skipped since the last row; ``env/dropped``, the number
    of rows dropped so far; and ``replay/bootstrap_lost``, that of windows without a final observation.

    Args:
        warn: called with a message, once per learner and once for each count.
        updates: number of updates so far of "v" and "p".
        restarts: the simulator can restart single environments.
    """

    def __init__(self, warn: Callable[[str], None], updates: Mapping[str, int], restarts: bool = True):
        self.warn, self.restarts = warn, restarts
        self._seen: dict[str, float] = {**updates}
        self._warned = set[str]()
        self._row: dict[str, float] = {}  # by learner: lower bound of consecutive skipped updates
        self._reported = False  # of environments
        self._lost = False  # final observations, reported

    def look(self, row: Row) -> None:
        """Process the next row. Raises ``RunError``: ``LIMIT`` consecutive updates were skipped; the weights are
        unchanged since then."""
        if not all(f"updates/{k}" in row for k in self._seen):
            return  # of an evaluation
        self._look_at_rows(row.get("env/dropped", 0))
        self._look_at_ends(row.get("replay/bootstrap_lost", row.get("rollout/bootstrap_lost", 0)))
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
            f"{dropped:,.0f} rows left out: an observation, reward or action was not finite, or {LARGEST:g} and more; "
            f"the environment {then}"
        )

    def _look_at_ends(self, lost: float) -> None:
        if lost == 0 or self._lost:
            return
        self._lost = True
        self.warn(
            f"{lost:,.0f} windows left out: they end in a truncation, and the simulator did not return the final "
            f"observation (with Isaac Lab: task.kwargs.final_obs=true), or version 0.2 of pql did not save it; "
            f"bootstrap_lost counts them"
        )


class FrozenPolicy:
    """Reads ``policy/frozen``, the share of action components that stay at one end of their range.

    Args:
        warn: called once with a message.
        updates: policy updates so far.
        penalized: the algorithm reads ``algo.policy.saturation_penalty``.
    """

    def __init__(self, warn: Callable[[str], None], updates: int, penalized: bool):
        self.warn, self.remedies = warn, f"{PENALTY}, {REMEDIES}" if penalized else REMEDIES
        self._seen: float = updates
        self._row: float = 0  # consecutive updates
        self._warned = False

    def look(self, row: Row) -> None:
        """Process the next row."""
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


# -- memory -----------------------------------------------------------------------------------------------------------


def short_of_memory(error: BaseException) -> bool:
    """Return True if the error, or what caused it, is a failed allocation on the host or a GPU."""
    texts = str(error) if isinstance(error, RuntimeError) else ""
    if isinstance(error, MemoryError) or re.search("(allocate|out of) memory", texts):
        return True
    return error.__cause__ is not None and short_of_memory(error.__cause__)


@contextmanager
def naming_memory(device: torch.device) -> Iterator[None]:
    """Turn a failed allocation of a run into an error with the sizes of what is used and free, and what to do. Raises
    ``RunError``: memory ran out."""
    try:
        yield
    except (RunError, RuntimeError, MemoryError) as error:
        if not short_of_memory(error):
            raise
        used, free = memory(device), host_memory() / 2**30
        sizes = f"at most {used['memory/host_gib']:.2f} GiB used by this process, {free:.2f} GiB free"
        if "memory/gpu_gib" in used:
            free = device_memory(device) / 2**30
            sizes += f"; on the GPU {used['memory/gpu_gib']:.2f} GiB used, {free:.2f} GiB free"
        cause = str(error) if isinstance(error, RunError) else first_line(error)
        remedy = "resume the run where there is more, or choose a smaller replay.capacity, num_envs or algo.batch_size"
        raise RunError(with_cause("out of memory: ", f"{cause} ({sizes}): {remedy}")) from error
