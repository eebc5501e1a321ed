"""Weight slots: versions, and that publishing never modifies a version that is being pulled."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from machines import effort

from pql.engine.worker import WeightSlot


def make():
    owner = [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    return owner, WeightSlot("policy", owner), [torch.full((3,), -1.0), torch.full((2,), -1)]


def write(owner, value):
    for t in owner:
        t.fill_(value)


def holds(tensors, value):
    return all((t == value).all() for t in tensors)


def test_as_many_tensors_as_published_must_be_given():
    _, slot, mine = make()
    with pytest.raises(ValueError, match="zip"):
        slot.pull(mine[:1], 0)


def test_tensors_with_gradients_are_copied_as_values():
    weight = torch.nn.Parameter(torch.ones(2))
    slot, mine = WeightSlot("critic", [weight]), [torch.zeros(2)]
    with torch.no_grad():
        weight.fill_(3)
    slot.publish()
    slot.pull(mine, 1)
    assert holds(mine, 3)
    assert not mine[0].requires_grad


class SlotMachine(RuleBasedStateMachine):
    """A slot and the list of everything that was published; the owner writes at any time."""

    @initialize()
    def start(self):
        (self.owner, self.slot, self.mine), self.value, self.first = make(), 0, 0
        self.published = [0]  # the value of version ``first`` + i
        self.addresses = [t.data_ptr() for t in self.mine]

    def newest(self):
        return self.first + len(self.published) - 1

    @rule()
    def write(self):
        self.value += 1
        write(self.owner, self.value)

    @rule()
    def publish(self):
        self.published.append(self.value)
        in_use = self.slot.buffers[self.slot.version % 2]
        before = [t.clone() for t in in_use]
        assert self.slot.publish() == self.newest() == self.slot.version
        assert all(map(torch.equal, before, in_use))

    @rule(back=st.integers(0, 1))
    def pull(self, back):
        asked = self.newest() - back
        if asked < self.first:
            return
        assert self.slot.pull(self.mine, asked) == asked
        assert holds(self.mine, self.published[asked - self.first])
        assert [t.data_ptr() for t in self.mine] == self.addresses  # in place

    @rule(step=st.sampled_from([-3, -2, 1, 2]))
    def others_are_refused(self, step):
        write(self.mine, -1)
        with pytest.raises(AssertionError, match=rf"slot policy: {self.newest() + step} of {self.newest()}"):
            self.slot.pull(self.mine, self.newest() + step)
        assert holds(self.mine, -1)

    @rule()
    def a_pulled_copy_is_private(self):
        write(self.mine, 10**6)
        assert holds(self.owner, self.value)

    @rule(version=st.integers(0, 1000), anew=st.booleans())
    def reload(self, version, anew):
        """Versions before are gone."""
        if anew:
            self.slot = WeightSlot("policy", self.owner)
        self.slot.reload(version)
        self.published, self.first = [self.value], version


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = effort(30)
