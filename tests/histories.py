"""Made-up environments that do what they are told, and a ring together with everything that was ever written to it."""

from collections import Counter as Tally

import pytest
import torch
from oracles import Event, n_step

from pql.env import ObsSpec
from pql.replay import Cursor, Replay
from pql.types import Batch, Step

CPU = torch.device("cpu")
SPECS = {"policy": ObsSpec((2,)), "frame": ObsSpec((1, 3), torch.uint8)}


class Column:
    """One environment that does what it is told; every observation it makes has a number of its own."""

    def __init__(self, index: int, next_step: bool):
        self.next_step, self.filler_due, self.made = next_step, False, 100_000 * index
        self.now = self.new()

    def new(self) -> int:
        self.made += 1
        return self.made

    def event(self, kind: str, reward: float) -> Event:
        """The next row. "life" and "cut" end nothing but the window; after "stall" a filler row comes unprovoked."""
        obs, action, filler = self.now, reward / 2 - 1, self.filler_due
        ends = kind in ("terminate", "truncate", "lose", "forget") and not filler
        waits = kind == "stall" and not filler
        final = self.new()
        after = final if not ends or self.next_step or kind in ("lose", "forget") else self.new()
        self.now, self.filler_due = after, waits or (ends and self.next_step)
        if filler:  # some simulators repeat the flag there, and pay anything
            return Event(obs, action, -999.0, False, kind == "truncate", True, True, False, after, after)
        return Event(
            obs, action, reward, kind in ("terminate", "forget", "life"), kind in ("truncate", "lose", "cut"),
            kind == "restart" or (ends and not self.next_step), kind not in ("lose", "forget", "restart"), True,
            after, final,
        )  # fmt: skip


def picture(numbers):
    """Observation numbers as observation groups."""
    x = torch.tensor(numbers)
    return {
        "policy": torch.stack((x, -x), 1).float(),
        "frame": torch.stack((x % 251, x // 251 % 251, x // 63001), 1).unsqueeze(1).to(torch.uint8),
    }


def stack(events):
    """Events of different environments as (action, Step)."""
    fields = [torch.tensor(column) for column in zip(*events, strict=True)]
    action, reward, terminated, truncated, first, final_ok, valid = fields[1:8]
    after, final = picture([e.after for e in events]), picture([e.final for e in events])
    return action.unsqueeze(1), Step(after, reward, terminated, truncated, first, final, final_ok, valid, {})


class Recorded:
    """A ring, a sealed cursor, and the whole history of every column."""

    def __init__(self, num_envs, rows, horizon, limit, next_step=False, obs_only=False):
        self.replay = Replay(SPECS, 1, num_envs, rows, horizon, limit, CPU, obs_only=obs_only)
        self.sims = [Column(i, next_step) for i in range(num_envs)]
        self.events = [[] for _ in range(num_envs)]
        self.replay.begin(picture([s.now for s in self.sims]))
        self.cursor = Cursor(num_envs, CPU)

    def insert(self, kinds, columns=None):
        columns = list(range(len(self.sims))) if columns is None else columns
        # Rewards are eighths and stay small, so that sums are nearly exact.
        new = [self.sims[i].event(k, len(self.events[i]) % 64 / 8) for i, k in zip(columns, kinds, strict=True)]
        for i, event in zip(columns, new, strict=True):
            self.events[i].append(event)
        self.replay.insert(*stack(new), torch.tensor(columns))

    def restart(self):
        """What a resumed run does where the simulator could not be restored."""
        for sim, events in zip(self.sims, self.events, strict=True):
            sim.now, sim.filler_due = sim.new(), False
            if events:
                events[-1] = events[-1]._replace(first=True)
        self.replay.restart(picture([s.now for s in self.sims]))

    def seal(self):
        for t, s in zip(self.cursor.tensors(), self.replay.live.tensors(), strict=True):
            t.copy_(s)

    def oldest(self, head):
        """The oldest row that the writer cannot reach before the next seal."""
        return max(0, head - (self.replay.rows - self.replay.horizon - 1))

    def everything(self, n, gamma):
        """All windows that a reader may draw."""
        heads = self.cursor.head.tolist()
        pairs = [(row, i) for i, head in enumerate(heads) for row in range(self.oldest(head), head)]
        row, column = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return self.replay.windows(self.cursor, row, column, self.cursor.head[column], n, gamma)

    def check(self, batch: Batch, lost: int, n: int, gamma: float) -> Tally:
        """Hold every window of ``batch`` against the oracle. Returns how many there were of each kind."""
        kinds: Tally = Tally()
        for k, cell in enumerate(batch.index.tolist()):
            row, i = divmod(cell, len(self.sims))
            head = int(self.cursor.head[i])
            if head == 0:
                assert batch.mask[k] == 0
                continue
            row = head - 1 - (head - 1 - row) % self.replay.rows  # the newest row in this place below the head
            assert row >= self.oldest(head)
            kinds[self.check_window(batch, k, self.events[i][:head], row, n, gamma)] += 1
        assert lost == kinds["lost"]
        return kinds

    def check_window(self, batch, k, events, row, n, gamma) -> str:
        kept = self.replay.finals - self.replay.horizon
        want = n_step(events, row, n, gamma, kept)
        assert batch.mask[k].item() == float(want.mask)
        assert batch.weight[k].item() == 1.0
        start = events[row]
        assert_shows(batch.obs, k, start.obs)
        assert batch.action[k].item() == start.action
        if not want.mask:
            return "lost" if want.lost else "dropped" if start.valid else "filler"
        assert batch.reward[k].item() == pytest.approx(want.reward, rel=1e-6, abs=1e-5)
        assert batch.discount[k].item() == pytest.approx(want.discount, rel=1e-6)
        if want.next_obs is None:
            return "terminated"
        assert_shows(batch.next_obs, k, want.next_obs)
        return "final" if any(e.truncated and e.final == want.next_obs for e in events[row : row + n]) else "plain"


def assert_shows(obs, k, number):
    for name, value in picture([number]).items():
        assert torch.equal(obs[name][k], value[0]), name


def assert_same(one: Batch, two: Batch):
    """Bit for bit; only where masked may the next observation be a row that the writer has taken since."""
    for name in ("action", "reward", "discount", "mask", "weight", "index"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    kept = one.mask > 0
    for name in one.obs:
        assert torch.equal(one.obs[name], two.obs[name])
        assert torch.equal(one.next_obs[name][kept], two.next_obs[name][kept])
