"""What a run does about numbers that are not finite: updates whose gradient is not are left out, and counted here."""

from collections.abc import Callable, Mapping

from pql.errors import RunError
from pql.log import Row

LIMIT = 100  # updates in a row of one learner


class Guard:
    """Reads ``skipped/NAME``, the share of a learner's updates that were left out since the row before.

    Args:
        warn: takes a line for people; once for each learner.
        updates: "v" and "p": how many there have been.
    """

    def __init__(self, warn: Callable[[str], None], updates: Mapping[str, int]):
        self.warn = warn
        self._seen: dict[str, float] = {**updates}
        self._warned = set[str]()
        self._row: dict[str, float] = {}  # by learner: updates left out one after the other, at least

    def look(self, row: Row) -> None:
        """One row after the other.

        Raises:
            RunError: ``LIMIT`` updates in a row were left out; weights are still those from before them.
        """
        if not all(f"updates/{k}" in row for k in self._seen):
            return  # of an evaluation
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
