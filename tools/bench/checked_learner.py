"""A learner that checks what remote actors send, for ``load.py``.

    checked_learner.py TALLY WORDS ...   ``pql WORDS ...``; checks each row of the replay and appends counts to TALLY

The actors' simulator is ``actors.Counting``, whose observations number every row.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np


class Checker:
    """Checks each row as it is written into the replay, and that none is there twice.

    Attributes:
        rows: valid rows received; ``torn``: those whose successor does not follow them; ``repeated``: rows that were
            received before, in any column.
    """

    def __init__(self, tally: Path):
        self.tally, self.said = tally.open("a", buffering=1), 0.0
        self.rows = self.torn = self.repeated = 0
        self.newest: dict[tuple[float, float], tuple[float, float]] = {}  # life, environment -> episode, row
        self.lives: Counter[int] = Counter()

    def insert(self, replay: Any, step: Any, columns: Any, arrived: Any) -> None:
        """Check the rows that are about to be written."""
        at = replay.columns if columns is None else columns
        store, n = replay.obs["policy"], replay.num_envs
        before = store[replay.live.head[at] % replay.rows * n + at].numpy()
        after, final = step.obs["policy"].numpy(), step.final_obs["policy"].numpy()
        first, valid = step.first.tolist(), step.valid.tolist()
        for i, here in enumerate([True] * len(at) if arrived is None else arrived.tolist()):
            if here and valid[i]:
                self._row(before[i], final[i] if first[i] else after[i], after[i], first[i])
        if time.monotonic() - self.said > 0.2:
            self.say()

    def _row(self, before: Any, successor: Any, after: Any, first: bool) -> None:
        self.rows += 1
        self.lives[int(before[0])] += 1
        follows = (successor == before + np.array([0, 0, 0, 1], np.float32)).all()
        begins = not first or (after == [before[0], before[1], before[2] + 1, 0]).all()
        self.torn += not (follows and begins)
        who, where = (float(before[0]), float(before[1])), (float(before[2]), float(before[3]))
        self.repeated += who in self.newest and where <= self.newest[who]
        self.newest[who] = where

    def say(self) -> None:
        self.said = time.monotonic()
        facts = {"rows": self.rows, "torn": self.torn, "repeated": self.repeated, "lives": dict(self.lives)}
        print(json.dumps(facts), file=self.tally)


def check_ring(replay: Any) -> dict[str, int]:
    """Count valid rows that can be drawn, rows that are there twice, and rows not followed by their successor."""
    n, heads = replay.num_envs, replay.live.head.tolist()
    seen: Counter[bytes] = Counter()
    torn = 0
    for column, head in enumerate(heads):
        oldest = max(0, head - (replay.rows - replay.guard))
        for row in range(oldest, head):
            cell = row % replay.rows * n + column
            flags = replay.flags[cell : cell + 1].int()
            if not bool(replay.rule("valid", flags)):
                continue
            here = replay.obs["policy"][cell]
            seen[here.numpy().tobytes()] += 1
            if bool(replay.rule("goes on", flags)):
                after = replay.obs["policy"][(row + 1) % replay.rows * n + column]
                torn += int(after[3] != here[3] + 1 or (after[:3] != here[:3]).any())
    return {"ring": len(seen), "ring_repeated": sum(seen.values()) - len(seen), "ring_torn": torn}


def main(tally: str, *words: str) -> int:
    from pql.cli.main import main as pql
    from pql.data.replay import Replay

    checker = Checker(Path(tally))
    found: list[Any] = []
    original = Replay.insert

    def insert(self: Any, acted: Any, step: Any, columns: Any = None, arrived: Any = None) -> None:
        found[:] = [self]
        checker.insert(self, step, columns, arrived)
        original(self, acted, step, columns, arrived)

    Replay.insert = insert  # type: ignore[method-assign]
    try:
        return pql(list(words))
    finally:
        checker.say()
        if found:
            print(json.dumps(check_ring(found[0])), file=checker.tally)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
