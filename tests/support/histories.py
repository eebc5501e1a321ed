"""Scripted environments, and a replay ring with the complete history of its rows."""

import random
from collections import Counter as Tally

import torch
from oracles import Event, n_step

from pql.contract.env import ObsSpec
from pql.data.replay import Cursor, Replay
from pql.data.sizes import ReplayLayout
from pql.types import Batch, Step

CPU = torch.device("cpu")
SPECS = {"policy": ObsSpec((2,)), "frame": ObsSpec((1, 3), torch.uint8)}


def specs(depth=1):
    """Return observation groups; with ``depth`` above 1, stacks of ``depth`` images of bytes, of two vectors, and flat
    histories: of one term, with zeros before the episode, and of two, with its first frame."""
    stacked = {"stack": ObsSpec((depth, 1, 3), torch.uint8, depth), "pair": ObsSpec((2, 2), torch.float32, 2)}
    stacked["past"] = ObsSpec((2 * depth,), stack=depth)
    stacked["terms"] = ObsSpec((3 * depth,), stack=depth, terms=(1, 2), fill="first")
    return SPECS if depth == 1 else {**SPECS, **stacked}


class Column:
    """One scripted environment; each of its observations has a unique number.

    ``shown``: observation number -> numbers of the ``depth`` frames in it, oldest first; 0 before the episode.
    """

    def __init__(self, index: int, next_step: bool, depth: int = 1, shown: dict[int, tuple[int, ...]] | None = None):
        self.next_step, self.filler_due, self.made = next_step, False, 100_000 * index
        self.depth = depth
        self.shown = {} if shown is None else shown
        self.now = self.new(True)

    def new(self, begins: bool) -> int:
        self.made += 1
        before = (0,) * self.depth if begins else self.shown[self.now]
        self.shown[self.made] = (*before[1:], self.made)
        return self.made

    def event(self, kind: str, reward: float) -> Event:
        """Return the next row. "life" and "cut" end only the window; "stall" inserts an unprovoked filler row."""
        obs, action, filler = self.now, reward / 2 - 1, self.filler_due
        ends = kind in ("terminate", "truncate", "lose", "forget") and not filler
        waits = kind == "stall" and not filler
        first = kind == "restart" or (ends and not self.next_step)
        final = self.new(filler or (first and kind in ("lose", "forget", "restart")))
        after = self.new(True) if ends and not self.next_step and kind not in ("lose", "forget") else final
        self.now, self.filler_due = after, waits or (ends and self.next_step)
        if filler:  # some simulators repeat the flag there, with an arbitrary reward
            return Event(obs, action, -999.0, False, kind == "truncate", True, True, False, after, after)
        terminated, truncated = kind in ("terminate", "forget", "life"), kind in ("truncate", "lose", "cut")
        final_ok = kind not in ("lose", "forget", "restart")
        return Event(obs, action, reward, terminated, truncated, first, final_ok, True, after, final)


def picture(numbers, shown=None):
    """Convert observation numbers to observation groups, including stacks if their frames are known."""
    x = torch.tensor(numbers)
    out = {
        "policy": torch.stack((x, -x), -1).float(),
        "frame": torch.stack((x % 251, x // 251 % 251, x // 63001), -1).unsqueeze(-2).to(torch.uint8),
    }
    if shown:
        frames = picture([shown[i] for i in numbers])
        begun = torch.tensor([[j or next(filter(None, shown[i]), 0) for j in shown[i]] for i in numbers])
        two = [torch.stack((-row, row % 7), 1).flatten() for row in begun]
        out |= {"stack": frames["frame"], "pair": frames["policy"][:, -2:], "past": frames["policy"].flatten(1)}
        out["terms"] = torch.cat((begun, torch.stack(two)), 1).float()
    return out


def stack(events, shown=None):
    """Convert events of different environments to (action, Step)."""
    fields = [torch.tensor(column) for column in zip(*events, strict=True)]
    action, reward, terminated, truncated, first, final_ok, valid = fields[1:8]
    after, final = picture([e.after for e in events], shown), picture([e.final for e in events], shown)
    return action.unsqueeze(1), Step(after, reward, terminated, truncated, first, final, final_ok, valid, {})


def stored(event: Event) -> list[Event]:
    """Return the rows that a ring stores for an event: with same-step autoreset a filler row follows an end."""
    over = (event.terminated or event.truncated) and event.valid
    if not (over and event.first and event.final_ok):
        return [event._replace(first=event.first or not event.final_ok)]
    return [event._replace(first=False), filler_of(event.final, event.after)]


def filler_of(obs: int, after: int) -> Event:
    """Return a filler row that a ring inserts."""
    return Event(obs, 0.0, 0.0, False, False, True, True, False, after, after)


class Recorded:
    """A ring, a sealed cursor, and the complete history of every column, row by row.

    Args:
        horizon: most steps of an environment between two seals.
    """

    def __init__(self, num_envs, rows, horizon, next_step=False, obs_only=False, depth=1):
        layout = ReplayLayout(specs(depth), 1, num_envs, rows, (2 - next_step) * horizon + 1, not next_step)
        self.replay = Replay(layout, CPU, obs_only=obs_only)
        self.horizon, self.depth = horizon, depth
        self.seen: dict[int, tuple[int, ...]] = {}
        self.sims = [Column(i, next_step, depth, self.seen) for i in range(num_envs)]
        self.events = [[] for _ in range(num_envs)]
        self.newest: list[Event] = []  # as inserted last
        self.replay.begin(self.picture([s.now for s in self.sims]))
        self.cursor = Cursor(num_envs, CPU)

    def shown(self):
        """Return the frames of every observation so far; None without stacks."""
        return self.seen if self.depth > 1 else None

    def picture(self, numbers):
        return picture(numbers, self.shown())

    def insert(self, kinds, columns=None):
        columns = list(range(len(self.sims))) if columns is None else columns
        # Rewards are eighths and stay small, so that sums are nearly exact.
        new = [self.sims[i].event(k, len(self.events[i]) % 64 / 8) for i, k in zip(columns, kinds, strict=True)]
        for i, event in zip(columns, new, strict=True):
            self.events[i] += stored(event)
        self.newest = new
        self.replay.insert(*stack(new, self.shown()), torch.tensor(columns))

    def restart(self):
        """Restart as a resumed run does whose simulator could not be restored."""
        for sim, events in zip(self.sims, self.events, strict=True):
            before, sim.now, sim.filler_due = sim.now, sim.new(True), False
            events.append(filler_of(before, sim.now))
        self.replay.restart(self.picture([s.now for s in self.sims]))

    def seal(self):
        for t, s in zip(self.cursor.tensors(), self.replay.live.tensors(), strict=True):
            t.copy_(s)

    def oldest(self, head):
        """Return the oldest row that the writer cannot overwrite before the next seal, including its stack's frames."""
        return max(0, head - (self.replay.rows - self.replay.horizon - self.depth))

    def everything(self, n, gamma):
        """Return all windows that a reader may draw."""
        heads = self.cursor.head.tolist()
        pairs = [(row, i) for i, head in enumerate(heads) for row in range(self.oldest(head), head)]
        row, column = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return self.replay.windows(self.cursor, row, column, self.cursor.head[column], n, gamma)

    def check(self, batch: Batch, lost: int, n: int, gamma: float) -> Tally:
        """Compare every window of ``batch`` with the oracle. Returns the number of windows of each kind."""
        kinds, starts, nexts = Tally(), Shown(self), Shown(self)
        mask, reward, discount = (x.tolist() for x in (batch.mask, batch.reward, batch.discount))
        action, followed = batch.action[:, 0].tolist(), batch.followed.tolist()
        assert batch.weight.eq(1).all()
        for k, cell in enumerate(batch.index.tolist()):
            row, i = divmod(cell, len(self.sims))
            head = int(self.cursor.head[i])
            if head == 0:
                assert mask[k] == 0
                continue
            row = head - 1 - (head - 1 - row) % self.replay.rows  # the newest row in this cell below the head
            assert row >= self.oldest(head)
            events = self.events[i][:head]
            want, start = n_step(events, row, n, gamma), events[row]
            assert mask[k] == float(want.mask)
            assert followed[k] == float(want.next_obs is not None)
            if start.valid:  # a filler row is read as a successor only
                assert action[k] == start.action
                starts.add(k, start.obs)
            if want.mask:
                assert near(reward[k], want.reward, 1e-5)
                assert near(discount[k], want.discount, 0.0)
                if want.next_obs is not None:
                    nexts.add(k, want.next_obs)
            kinds[kind(want, events[row : row + n])] += 1
        starts.check(batch.obs)
        nexts.check(batch.next_obs)
        assert lost == kinds["lost"]
        return kinds


def near(got: float, want: float, gap: float) -> bool:
    """Return True if two numbers differ by at most a millionth or ``gap``: ``pytest.approx`` takes too long here."""
    return abs(got - want) <= max(1e-6 * abs(want), gap)


def kind(want, events) -> str:
    """Classify a window that begins with the first of ``events`` and whose target by the oracle is ``want``."""
    if not want.mask:
        return "lost" if want.lost else "dropped" if events[0].valid else "filler"
    if want.discount == 0:
        return "terminated"
    return "final" if any(e.truncated and e.final == want.next_obs for e in events) else "plain"


class Shown:
    """Observations by position in a batch and by number, collected to be compared with the batch at once."""

    def __init__(self, ring: Recorded):
        self.ring, self.places, self.numbers = ring, list[int](), list[int]()

    def add(self, place: int, number: int) -> None:
        self.places.append(place)
        self.numbers.append(number)

    def check(self, obs) -> None:
        if self.places:
            for name, value in self.ring.picture(self.numbers).items():
                assert torch.equal(obs[name][self.places], value), name


def assert_shows(obs, k, number, shown=None):
    for name, value in picture([number], shown).items():
        assert torch.equal(obs[name][k], value[0]), name


def assert_same(one: Batch, two: Batch):
    """Compare bit for bit. Masked rows may differ in what filler rows do not have, and in the next observation."""
    for name in ("mask", "followed", "weight", "index"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    kept = one.mask > 0
    for name in ("action", "reward", "discount"):
        assert torch.equal(getattr(one, name)[kept], getattr(two, name)[kept]), name
    for name in one.obs:
        assert torch.equal(one.obs[name], two.obs[name])
        assert torch.equal(one.next_obs[name][kept], two.next_obs[name][kept])


# --- histories drawn at random ---

SCENARIOS = {  # rates of events per row; kinds of windows that must then occur
    "endless": ({}, {"plain"}),
    "terminations": ({"terminate": 0.15}, {"plain", "terminated"}),
    "truncations": ({"terminate": 0.05, "limit": 5}, {"plain", "terminated", "final"}),
    "lost": ({"lose": 0.1, "truncate": 0.05, "forget": 0.05, "limit": 8}, {"plain", "terminated", "final", "lost"}),
    "restarts": ({"restart": 0.15, "terminate": 0.05}, {"plain", "terminated", "dropped"}),
    "lives": ({"life": 0.15, "limit": 9}, {"plain", "terminated", "final"}),
    "cuts": ({"cut": 0.15, "life": 0.05}, {"plain", "terminated", "final"}),
    "stalls": ({"stall": 0.2, "terminate": 0.1}, {"plain", "terminated", "filler"}),
    "short": ({"truncate": 0.5}, {"plain", "final", "filler"}),
    "everything": (
        {"terminate": 0.1, "truncate": 0.1, "lose": 0.05, "forget": 0.03, "restart": 0.05, "life": 0.05}
        | {"stall": 0.05, "limit": 6},
        {"plain", "terminated", "final", "lost", "dropped", "filler"},
    ),
}
ENDS = ("terminate", "truncate", "lose", "forget", "restart")


class Fate:
    """Draws the events of each column, the time limit included."""

    def __init__(self, rng, rates, num_envs):
        self.rng, self.rates, self.age = rng, {k: v for k, v in rates.items() if k != "limit"}, [0] * num_envs
        self.limit = rates.get("limit")

    def kinds(self, sims, columns):
        out = []
        for i in columns:
            kind = self.rng.choices(["step", *self.rates], [1 - sum(self.rates.values()), *self.rates.values()])[0]
            if sims[i].filler_due:
                self.age[i] = 0
            else:
                self.age[i] += 1
                if self.limit and self.age[i] >= self.limit and kind not in ENDS:
                    kind = "truncate"
                self.age[i] = 0 if kind in ENDS else self.age[i]
            out.append(kind)
        return out


def run_history(rates, seed, next_step, unequal, depth=1) -> Tally:
    """Write three times the ring's rows; at every seal, sample before and after the writer runs ahead."""
    rng = random.Random(seed)
    num_envs, horizon, n = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 5)
    rows, gamma = 2 * horizon + rng.randint(8, 40) + depth - 1, rng.choice((0.9, 0.99, 1.0))
    ring = Recorded(num_envs, rows, horizon, next_step, depth=depth)
    fate, kinds = Fate(rng, rates, num_envs), Tally()
    for tick in range(3 * rows // horizon):
        ring.seal()
        before = int(ring.cursor.lost)
        batch = ring.replay.sample(ring.cursor, 16, n, gamma, torch.Generator().manual_seed(tick))
        lost = int(ring.cursor.lost) - before
        for _ in range(horizon):
            columns = [i for i in range(num_envs) if not unequal or rng.random() < (i + 1) / num_envs]
            rng.shuffle(columns)
            if columns:
                ring.insert(fate.kinds(ring.sims, columns), columns)
        again = ring.replay.sample(ring.cursor, 16, n, gamma, torch.Generator().manual_seed(tick))
        assert_same(batch, again)
        assert int(ring.cursor.lost) - before == 2 * lost
        kinds += ring.check(batch, lost, n, gamma)
    return kinds
