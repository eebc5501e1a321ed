"""Replay files: frame stacks, discrete actions and extra columns."""

import itertools
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from histories import CPU, Recorded, assert_shows, picture, specs
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pql.collect.prefill import prefill
from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.data import transitions
from pql.data.normalize import Normalizer
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.errors import ConfigError
from pql.types import Acted, Step

KINDS = ("step", "step", "step", "step", "terminate", "truncate", "lose", "life", "cut", "stall", "restart")
LIMIT = 9


class FakeCollector:
    """The members of a collector that ``prefill`` needs."""

    def __init__(self, groups, num_envs, rows, action=None, extra=()):
        action = action or Box(1)
        self.env = self
        self.spec, self.device = EnvSpec("lead", num_envs, groups, action, CPU, 50), CPU
        size = None if isinstance(action, Discrete) else action.size
        layout = ReplayLayout(groups, size, num_envs, rows, 3, True, extra=extra)
        self.replays = [Replay(layout, CPU, obs_only=lean) for lean in (False, True)]
        self.normalizer = Normalizer(groups, num_envs, CPU)
        self.obs = {k: torch.zeros(num_envs, *s.shape, dtype=s.dtype) for k, s in groups.items()}
        for ring in self.replays:
            ring.begin(self.obs)


def usable(replay, oldest=0):
    """Every window of one step that may be drawn: first observation's number -> (batch, its place there)."""
    out = {}
    for column in range(replay.num_envs):
        head = int(replay.live.head[column])
        row = torch.arange(max(oldest, head - (replay.rows - replay.guard)), head)
        where = torch.full_like(row, column)
        batch = replay.windows(replay.live, row, where, replay.live.head[where], 1, 0.5)
        for k in batch.mask.nonzero().flatten().tolist():
            number = int(batch.obs["policy"][k, 0])
            assert number not in out
            out[number] = (batch, k)
    return out


def recorded(seed, steps, rows, next_step, depth):
    ring, rng = Recorded(3, rows, 1, next_step=next_step, depth=depth), random.Random(seed)
    for _ in range(steps):
        who = [i for i in range(3) if rng.random() < 0.8]
        if who:
            ring.insert([rng.choice(KINDS) for _ in who], who)
    ring.seal()
    return ring


def test_the_file_holds_each_frame_once(tmp_path):
    ring = recorded(0, 12, 18, False, 4)
    transitions.save_replay(ring.replay, tmp_path / "ring")
    data = load_file(tmp_path / "ring")
    rows = int(data["length"].max())
    assert data["obs.stack"].shape == (rows + 1, 3, 1, 3)
    assert data["obs.pair"].shape == (rows + 1, 3, 2)
    for i, events in enumerate(ring.events):
        newest = picture([e.obs for e in events])["frame"]
        assert torch.equal(data["obs.stack"][: len(events), i], newest)
    assert any(not e.valid for events in ring.events for e in events)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 4), st.integers(1, 5), st.integers(10, 30))
def test_a_saved_ring_prefills_any_number_of_environments(seed, next_step, depth, num_envs, steps):
    ring = recorded(seed, steps, 24, next_step, depth)
    collector = FakeCollector(specs(depth), num_envs, 200)
    with TemporaryDirectory() as folder:
        transitions.save_replay(ring.replay, Path(folder) / "ring")
        taken = prefill(collector, Path(folder) / "ring")
    shown, before = ring.shown(), usable(ring.replay)
    found = usable(collector.replays[0])
    lost = num_envs * (depth - 1) + num_envs + 3 * depth  # where a column begins, and what does not divide
    assert len(before) - lost <= len(found) == taken
    for number, (batch, k) in found.items():
        assert_shows(batch.obs, k, number, shown)
        if number not in before:  # the ring's guard band: not drawn there, but whole
            continue
        old, i = before[number]
        assert (batch.reward[k], batch.discount[k]) == (old.reward[i], old.discount[i])
        if batch.discount[k] > 0:
            assert_shows(batch.next_obs, k, int(old.next_obs["policy"][i, 0]), shown)
    lean = collector.replays[1]
    views = lean.sample_obs(lean.live, 100, torch.Generator().manual_seed(0))
    for k in views.mask.nonzero().flatten().tolist():
        assert_shows(views.obs, k, int(views.obs["policy"][k, 0]), shown)


def flat(order=None):
    """Whole stacks as other software records them: a game of ten rows that loses a life in its fifth, another of five
    that is cut off. Observation i shows frames i + 1, i, i - 1 and i - 2 of its game."""
    shown, numbers, after = {0: (0, 0, 0, 0)}, [], []
    for game, rows in ((100, 10), (200, 5)):
        for i in range(rows + 1):
            shown[game + i] = tuple(game + j if j >= 0 else 0 for j in range(i - 3, i + 1))
        numbers += [game + i for i in range(rows)]
        after += [game + i + 1 for i in range(rows)]
    data = {f"obs.{k}": v for k, v in picture(numbers, shown).items()}
    data |= {f"next_obs.{k}": v for k, v in picture(after, shown).items()}
    data |= {"action": torch.arange(15) % 3, "reward": torch.arange(15) / 8, "extra.q": torch.arange(15.0)}
    data["terminated"] = torch.tensor([i in (4, 9) for i in range(15)])
    data["truncated"] = torch.tensor([i == 14 for i in range(15)])
    return {k: v[order or slice(None)].contiguous() for k, v in data.items()}, shown, numbers


@pytest.mark.parametrize("shuffled", [False, True])
def test_recorded_stacks_come_back_whole(tmp_path, shuffled):
    order = random.Random(1).sample(range(15), 15) if shuffled else None
    data, shown, numbers = flat(order)
    save_file(data, tmp_path / "data")
    collector = FakeCollector(specs(4), 1, 200, Discrete(3), ("q",))
    assert prefill(collector, tmp_path / "data") == 15
    replay = collector.replays[0]
    # A filler row after the end of each game, and shuffled one after each, with histories before.
    rows = 15 + 2 if not shuffled else 15 + 15 + sum(min(i, 3) for i in (*range(10), *range(5)))
    assert int(replay.live.head) == rows + 1 - (shuffled and linked(order))
    found = usable(replay)
    assert sorted(found) == numbers
    for i, number in enumerate(numbers):
        batch, k = found[number]
        assert_shows(batch.obs, k, number, shown)
        assert (batch.action[k], batch.reward[k]) == (i % 3, i / 8)
        assert replay.extra["q"][batch.index[k]] == i
        assert batch.discount[k] == (0 if i in (4, 9) else 0.5)
        if i not in (4, 9):
            assert_shows(batch.next_obs, k, number + 1, shown)
    torch.testing.assert_close(collector.normalizer.moments["terms"].mean.float(), data["obs.terms"].mean(0))
    moments = collector.normalizer.moments["pair"]
    assert moments.count == 15
    assert moments.mean[1, 0].item() == pytest.approx(sum(numbers) / 15)
    assert moments.mean[0, 0].item() == pytest.approx(sum(shown[n][2] for n in numbers) / 15)


def linked(order):
    """Rows that a shuffle saves where it leaves neighbours together: a filler and a history."""
    pairs = [(a, b) for a, b in itertools.pairwise(order) if b == a + 1 and b != 10]
    return sum(min(b if b < 10 else b - 10, 3) + (a != 4) for a, b in pairs)


def test_discrete_actions_and_extras_travel(tmp_path):
    groups, extra = {"policy": ObsSpec((2,))}, ("q", "value")
    one, two = (Replay(ReplayLayout(groups, None, 2, 10, 3, True, extra=extra), CPU) for _ in range(2))
    off, on, obs = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool), {"policy": torch.zeros(2, 2)}
    for t in range(15):
        acted = Acted(torch.tensor([t % 3, 2]), {"q": torch.tensor([t, -t]).float(), "value": torch.rand(2)})
        one.insert(acted, Step(obs, torch.zeros(2), off, off, off, obs, on, on, {}))
    transitions.save_replay(one, tmp_path / "ring")
    transitions.load_replay(two, tmp_path / "ring")
    draws = [r.sample(r.live, 64, 2, 0.9, torch.Generator().manual_seed(1)) for r in (one, two)]
    assert draws[1].action.dtype == torch.int64
    assert torch.equal(draws[0].action, draws[1].action)
    for name in extra:
        assert torch.equal(one.extra[name][draws[0].index], two.extra[name][draws[1].index])
    data = load_file(tmp_path / "ring")
    del data["extra.value"]
    save_file(data, tmp_path / "less")
    transitions.load_replay(two, tmp_path / "less")
    assert two.extra["value"].abs().sum() == 0  # where a file has none


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": torch.full((15,), 3)}, "actions from 0 to 2"),
        ({"action": torch.zeros(15, 1)}, r"column action of int64 \[15\], not float32 \[15, 1\]"),
        ({"obs.stack": torch.zeros(15, 1, 3, dtype=torch.uint8)}, r"column obs.stack of uint8 \[15, 4, 1, 3\]"),
        ({"extra.q": torch.full((15,), torch.nan)}, "finite numbers in column extra.q"),
        ({"obs.pair": torch.full((15, 2, 2), torch.inf)}, "finite numbers in column obs.pair"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    save_file(flat()[0] | change, tmp_path / "data")
    with pytest.raises(ConfigError, match=message):
        prefill(FakeCollector(specs(4), 1, 200, Discrete(3), ("q",)), tmp_path / "data")
