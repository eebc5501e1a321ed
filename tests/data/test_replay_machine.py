"""Replay rings under random operations, against the history of what was written.

A ring with frame stacks and final observations, and a ring of observations alone beside it, are written to, restarted,
read, stored in checkpoints and files, and continued from them.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from histories import CPU, ENDS, Recorded, assert_same, assert_shows, specs, stack
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from machines import effort

from pql.data import transitions
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout

KINDS = ["step", "step", "life", "cut", "stall", *ENDS]


class RingMachine(RuleBasedStateMachine):
    """The writer never runs more than ``horizon`` rows past a seal."""

    @initialize(
        num_envs=st.integers(1, 3),
        rows=st.integers(12, 16),
        horizon=st.integers(1, 4),
        next_step=st.booleans(),
        depth=st.sampled_from([1, 2, 3]),
    )
    def start(self, num_envs, rows, horizon, next_step, depth):
        self.ring = Recorded(num_envs, rows + depth - 1, horizon, next_step, depth=depth)
        self.lean = self.fresh(obs_only=True)
        self.lean.begin(self.ring.picture([s.now for s in self.ring.sims]))

    def fresh(self, rows=None, obs_only=False):
        """An empty ring of the same layout, perhaps with another number of rows."""
        old = self.ring.replay
        layout = ReplayLayout(specs(self.ring.depth), 1, old.num_envs, rows or old.rows, old.horizon, old.fillers)
        return Replay(layout, CPU, obs_only=obs_only)

    def generator(self, seed):
        return torch.Generator().manual_seed(seed)

    @rule(
        kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=3),
        who=st.sets(st.integers(0, 2), min_size=1),
        times=st.integers(1, 4),
    )
    def insert(self, kinds, who, times):
        ring, old = self.ring, self.ring.replay
        for _ in range(times):
            ahead = (ring.replay.live.head - ring.cursor.head).tolist()
            columns = [i for i in who if i < len(ahead) and ahead[i] + 1 + old.fillers <= old.horizon]
            if columns:
                ring.insert([kinds[i] for i in columns], columns)
                self.lean.insert(*stack(ring.newest, ring.shown()), torch.tensor(columns))

    @rule()
    def seal(self):
        self.ring.seal()

    @rule()
    def restart(self):
        self.ring.restart()
        self.lean.restart(self.ring.picture([s.now for s in self.ring.sims]))
        self.ring.seal()  # between two ticks

    @rule(n=st.integers(1, 5), seed=st.integers(0, 99))
    def sample(self, n, seed):
        before = int(self.ring.cursor.lost)
        batch = self.ring.replay.sample(self.ring.cursor, 4, n, 0.9, self.generator(seed))
        self.ring.check(batch, int(self.ring.cursor.lost) - before, n, 0.9)

    @rule(n=st.integers(1, 5))
    def look_at_everything(self, n):
        before = int(self.ring.cursor.lost)
        batch = self.ring.everything(n, 0.9)
        self.ring.check(batch, int(self.ring.cursor.lost) - before, n, 0.9)

    @rule(seed=st.integers(0, 99))
    def observations_alone(self, seed):
        ring = self.ring
        views = self.lean.sample_obs(ring.cursor, 4, self.generator(seed))
        row, column, head = ring.replay.draw(ring.cursor, 4, self.generator(seed))
        for k, (t, i, count) in enumerate(zip(row.tolist(), column.tolist(), head.tolist(), strict=True)):
            assert views.mask[k] == float(count > 0 and ring.events[i][t].valid)
            if views.mask[k]:
                assert_shows(views.obs, k, ring.events[i][t].obs, ring.shown())

    @rule()
    def resume(self):
        """Continue on new rings with the checkpoints of the old ones, which hold no row that was never written."""
        ring = self.ring
        ring.seal()
        most = max(len(events) for events in ring.events) + 2
        for old in (ring.replay, self.lean):
            state = old.state_dict()
            assert len(state["flags"]) == min(most, old.rows) * old.num_envs
            new = self.fresh(old.rows, old.obs_only)
            new.load_state_dict({k: t.clone() for k, t in state.items()})
            ring.replay, self.lean = (ring.replay, new) if old.obs_only else (new, self.lean)

    @precondition(lambda self: any(self.ring.events))
    @rule(more=st.integers(-3, 6), seed=st.integers(0, 99))
    def go_through_a_file(self, more, seed):
        """Continue on rings loaded from a file, which may have another number of rows."""
        ring, depth = self.ring, self.ring.depth
        ring.seal()
        old, rows = ring.replay, max(ring.replay.rows + more, 11 + depth)
        new, same, self.lean = self.fresh(rows), self.fresh(), self.fresh(rows, obs_only=True)
        with TemporaryDirectory() as folder:
            transitions.save_replay(old, Path(folder) / "ring")
            for one in (new, same, self.lean):
                transitions.load_replay(one, Path(folder) / "ring")
        want, got = (r.sample(r.live, 8, 2, 0.9, self.generator(seed)) for r in (old, same))
        assert_same(want._replace(index=got.index), got)  # the loaded ring's rows begin at 0
        for i, events in enumerate(ring.events):
            kept = events[-(old.rows - 1) :]
            for t in range(depth - 1) if len(kept) < len(events) else ():  # their stacks are incomplete
                kept[t] = kept[t]._replace(valid=False)
            ring.events[i] = kept[-(rows - 1) :]
        ring.replay = new
        ring.seal()
        assert ring.cursor.head.tolist() == [len(events) for events in ring.events]


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = effort(20)
