"""The slot table under random operations of actors and collector, against a plain list of slots."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machines import effort

from pql.remote.protocol import ACT, BYE, RESET, ActorRows, Layout, unpack
from pql.remote.slot_table import DUE, EMPTY, FLYING, NOBODY, READY, FullError, RemoteActor, SlotTable, TooManyError


def test_after_the_end_nothing_is_sent_and_nothing_is_taken():
    posted = []
    facts = {"num_envs": 1, "log": [], "obs": {"policy": ((1,), "float32", 1)}, "action": {"size": 1}}
    table, peers = SlotTable(2), [RemoteActor(7, Layout(facts), posted.append) for _ in range(2)]
    table.reset(0)
    for peer in peers:
        table.admit(peer)
    table.answered(peers[0], ActorRows({}))
    table.reset(1)  # the second has not answered yet: it will be reset then
    table.answered(peers[0], ActorRows({}))
    table.end("done")
    assert table.take_all(0.0) == table.take(0) == []  # not one answer alone
    table.answered(peers[1], ActorRows({}))
    assert [unpack(message).kind for message in posted] == [RESET, RESET, RESET, BYE, BYE]


class Actor:
    """An actor as the model sees it: its requests, and the state of each of its slots."""

    def __init__(self, number, peer, posted):
        self.number, self.peer, self.posted, self.read = number, peer, posted, 0
        self.gone = self.reset_due = self.busy = False  # busy: a request waits for its answer
        self.answers = 0
        self.given = {}  # place -> action that has come for the next request

    def requests(self):
        """Kinds of the messages since the last call, with the actions that they carry."""
        new = [unpack(message) for message in self.posted[self.read :]]
        assert [frame.seq for frame in new] == list(range(self.read + 1, len(self.posted) + 1))
        self.read = len(self.posted)
        return [(f.kind, np.frombuffer(f.body, "<f4").tolist() if f.kind == ACT else None) for f in new]


class SlotTableMachine(RuleBasedStateMachine):
    """``state`` and ``holder`` are the truth about each slot: its state, and (actor, place)."""

    @initialize(groups=st.integers(1, 3), each=st.integers(1, 3), seeded=st.booleans())
    def start(self, groups, each, seeded):
        self.size, self.groups, self.each = groups * each, groups, each
        self.table = SlotTable(self.size, groups, wait=0.0, patience=0.0)
        self.state, self.holder = [EMPTY] * self.size, [None] * self.size
        self.actors, self.admitted, self.seeded, self.closed = [], 0, False, False
        if seeded:
            self.reset(0)

    def slots_of(self, actor):
        return [s for s in range(self.size) if self.holder[s] and self.holder[s][0] is actor]

    def set(self, slots, state):
        for s in slots:
            self.state[s] = state
            if state == EMPTY:
                self.holder[s] = None

    def began(self, actor):
        """Check that the actor was asked to reset."""
        assert [kind for kind, _ in actor.requests()] == [RESET]
        actor.busy, actor.reset_due, actor.given = True, False, {}
        self.set(self.slots_of(actor), FLYING)

    @rule(count=st.integers(1, 4))
    def admit(self, count):
        posted = []
        facts = {"num_envs": count, "log": [], "obs": {"policy": ((1,), "float32", 1)}, "action": {"size": 1}}
        peer = RemoteActor(7, Layout(facts), posted.append)
        free = [s for s in range(self.size) if self.state[s] == EMPTY]
        if count > self.size:
            with pytest.raises(TooManyError, match=f"at most {self.size}, its number of slots"):
                self.table.admit(peer)
        elif self.closed:
            with pytest.raises(FullError, match="the run is ending"):
                self.table.admit(peer)
        elif len(free) < count:
            said = f"{count} environments, but {len(free)} of {self.size} slots are free"
            with pytest.raises(FullError, match=said):
                self.table.admit(peer)
        else:
            self.table.admit(peer)
            actor = Actor(self.admitted, peer, posted)
            self.actors.append(actor)
            self.admitted += 1
            slots = peer.slots.tolist()
            assert len({*slots} & {*free}) == count
            assert slots == sorted(slots)
            rooms = [sum(s // self.each == g for s in free) for g in range(self.groups)]
            assert max(rooms) < count or len({s // self.each for s in slots}) == 1
            for place, s in enumerate(slots):
                self.holder[s], self.state[s] = (actor, place), DUE
            if self.seeded:
                self.began(actor)
            return
        assert posted == []

    def waiting(self):
        return [a for a in self.actors if a.busy and not a.gone]

    @precondition(waiting)
    @rule(data=st.data())
    def answer(self, data):
        self.answer_of(data.draw(st.sampled_from(self.waiting())))

    @precondition(waiting)
    @rule()
    def everybody_answers(self):
        for actor in self.waiting():
            self.answer_of(actor)
        self.take_all()

    def answer_of(self, actor):
        actor.answers += 1
        values = np.arange(actor.peer.layout.count) + 100.0 * actor.answers + 10_000 * actor.number
        self.table.answered(actor.peer, ActorRows({"policy": values}))
        if self.closed:
            return
        actor.busy = False
        if actor.reset_due:
            self.began(actor)
        else:
            self.set(self.slots_of(actor), READY)

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def leave(self, data):
        actor = data.draw(st.sampled_from(self.actors))
        self.table.leave(actor.peer)  # twice is no error
        if not actor.gone:
            actor.gone = True
            self.set([s for s in self.slots_of(actor) if self.state[s] != READY], EMPTY)

    @precondition(lambda self: not self.closed)
    @rule(seed=st.none() | st.integers(0, 2**31))
    def reset(self, seed):
        self.table.reset(seed)
        self.seeded = True
        for actor in self.actors:
            slots = self.slots_of(actor)
            if actor.gone:
                self.set(slots, EMPTY)
            elif actor.busy:
                actor.reset_due = True
            else:
                self.began(actor)

    @precondition(lambda self: self.seeded and DUE in self.state and not self.closed)
    @rule(data=st.data(), value=st.integers(1, 100), every=st.booleans())
    def act(self, data, value, every):
        """For all or some slots, among them some whose actor has left meanwhile."""
        known = [s for s in range(self.size) if self.state[s] in (DUE, EMPTY)]
        chosen = known if every else data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
        self.table.act(np.array(chosen), np.array([[float(value + s)] for s in chosen], dtype=np.float32))
        for s in chosen:
            if self.state[s] == DUE:
                actor, place = self.holder[s]
                actor.given[place] = float(value + s)
                self.state[s] = FLYING
        for actor in {self.holder[s][0] for s in chosen if self.holder[s]}:
            if len(actor.given) == actor.peer.layout.count:
                assert actor.requests() == [(ACT, [v for _, v in sorted(actor.given.items())])]
                actor.busy, actor.given = True, {}
            else:
                assert actor.requests() == []

    def check_taken(self, taken, slots):
        """The answers taken are the newest ones of the actors that hold ``slots``, which are then due."""
        found = {}
        for rows, places, where in taken:
            for place, s in zip(places.tolist(), where.tolist(), strict=True):
                found[s] = rows.obs["policy"][place]
        assert found == {
            s: place + 100.0 * actor.answers + 10_000 * actor.number for s in slots for actor, place in [self.holder[s]]
        }
        for s in slots:
            self.set([s], EMPTY if self.holder[s][0].gone else DUE)

    @precondition(lambda self: READY in self.state)
    @rule(group=st.integers(0, 2))
    def take(self, group):
        group %= self.groups
        part = range(group * self.each, (group + 1) * self.each)
        ready = [s for s in part if self.state[s] == READY and not self.closed]
        self.check_taken(self.table.take(group), ready)

    @precondition(lambda self: READY in self.state)
    @rule()
    def take_all(self):
        ready = [s for s in range(self.size) if self.state[s] == READY]
        waits = FLYING in self.state or self.closed  # at most 0 seconds: nothing then
        self.check_taken(self.table.take_all(0.0), [] if waits else ready)

    @precondition(lambda self: self.admitted > 3 and not self.closed)
    @rule()
    def end(self):
        self.closed = True
        self.table.end("done")
        for actor in self.actors:
            if not actor.gone:
                assert [unpack(m).kind for m in actor.posted[actor.read :]] == [BYE]

    @invariant()
    def the_table_is_as_the_model(self):
        if not hasattr(self, "table"):
            return
        table = self.table
        assert table.status.tolist() == self.state
        assert table.owner.tolist() == [NOBODY if h is None else h[0].number for h in self.holder]
        assert [table.place[s] for s in range(self.size) if self.holder[s]] == [h[1] for h in self.holder if h]
        assert table.live == sum(not a.gone for a in self.actors)
        assert sorted(table.actors) == [a.number for a in self.actors if not a.gone or self.slots_of(a)]
        assert table.measures() == {
            "remote/actors": table.live,
            "remote/envs": self.size - self.state.count(EMPTY),
            "remote/admitted": self.admitted,
        }


TestSlotTableMachine = SlotTableMachine.TestCase
TestSlotTableMachine.settings = effort(30)
