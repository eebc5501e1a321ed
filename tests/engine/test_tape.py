"""The stand-in for CUDA graphs: replays on the same memory, and refuses what a capture refuses."""

import pytest
import torch
from conftest import flatten, small_config, start
from stand_in import NoWaiting
from torch import Generator

from pql.engine import compiled
from pql.engine.tape import Count, Tape
from pql.envs.classic import Pendulum
from pql.errors import PqlWarning, RunError
from pql.run.build import build


def test_a_replay_reads_and_writes_the_memory_of_the_recording():
    x, total, gen = torch.ones(3), torch.zeros(3), Generator().manual_seed(0)
    with Tape([gen]) as tape:
        drawn = torch.rand(3, generator=gen)
        y = (x * 2)[:2]  # a view of something new
        total += x
    first = drawn.clone()
    x.copy_(torch.tensor([1.0, 5.0, 7.0]))
    tape.replay()
    assert y.tolist() == [2.0, 10.0]
    assert total.tolist() == [2.0, 6.0, 8.0]
    same = Generator().manual_seed(0)
    assert torch.equal(first, torch.rand(3, generator=same))
    assert torch.equal(drawn, torch.rand(3, generator=same))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
    ],
)
def test_reading_a_value_back_is_refused(read):
    x = torch.ones(3)
    for refusing in (Tape(), NoWaiting()):
        with pytest.raises(RunError, match="the host would wait for the device"), refusing:
            read(x)


def test_an_unregistered_generator_is_refused():
    with pytest.raises(RunError, match="not among the registered"), Tape([Generator()]):
        torch.zeros(3).normal_(generator=Generator())


def test_views_and_room_count_as_nothing():
    x = torch.ones(4, 4)
    with Count() as count:
        torch.empty(3)
        (x.view(2, 8)[0] + 1).unsqueeze(0).mul_(2)
    assert count.names == {"add": 1, "mul_": 1}
    assert count.total == 2


class Counted(Pendulum):
    capturable = True
    calls = 0

    def step(self, action):
        self.calls += 1
        return super().step(action)


SMALL = {"graphs": "auto", "task": {"kwargs": {"max_episode_steps": 9, "stagger": True}}}


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
@pytest.mark.parametrize(("graphs", "compiles"), [("auto", "off"), ("auto", "on"), ("off", "on")])
def test_a_declared_step_is_in_the_collectors_graph(machine, monkeypatch, graphs, compiles):
    monkeypatch.setattr(compiled, "inductor", lambda module, example, text: lambda given: module(*given))
    config = small_config(**SMALL | {"graphs": graphs, "placement": {"compile": compiles}})
    env = Counted(config.num_envs, max_episode_steps=9, stagger=True)
    parts = build(config, env)
    parts.prepare()
    (one,) = parts.collector.slices
    assert one.whole
    assert (one._step.graph is None, one._step.program is None) == (graphs == "off", compiles == "off")
    assert (one._act.graph, one._record.graph) == (None, None)
    parts.start()
    parts.warm_up(config.algo.warmup_steps)
    parts.begin()
    called = env.calls
    for _ in range(3):
        parts.schedule.tick()
    assert env.calls == called  # the graph is all that runs
    assert parts.collector.steps == config.algo.warmup_steps + 3
    sent = parts.collector.recorder.recordings[-1].actions
    assert len(sent) >= 3  # actions are still remembered
    assert not torch.equal(sent[-1], sent[-2])
    assert torch.equal(one.returned()["obs.policy"], env.observe(env._state))  # and what came back last


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
@pytest.mark.parametrize("why", ["undeclared", "off"])
def test_other_steps_stay_outside(machine, why):
    config = small_config(**SMALL | {"graphs": "off" if why == "off" else "auto"})
    env = Counted(config.num_envs)
    env.capturable = why != "undeclared"
    parts = build(config, env)
    parts.prepare()
    (one,) = parts.collector.slices
    assert not one.whole
    assert (one._act.graph is not None) == (one._record.graph is not None) == (why == "undeclared")


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
def test_acting_and_recording_are_compiled_without_graphs(machine, monkeypatch):
    """Up to rounding: biases are added after products."""
    monkeypatch.setattr(compiled, "inductor", lambda module, example, text: lambda given: module(*given))
    after = []
    for compiles in ("on", "off"):
        config = small_config(**SMALL | {"graphs": "off", "placement": {"compile": compiles}})
        env = Counted(config.num_envs, max_episode_steps=9, stagger=True)
        env.capturable = False
        parts = build(config, env)
        parts.prepare()
        (one,) = parts.collector.slices
        assert [body.fixed for body in one.bodies] == [False, compiles == "on", compiles == "on"]
        parts.start()
        parts.collector.run(12)
        after.append(parts.collector.state_dict())
    torch.testing.assert_close(*map(flatten, after), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
def test_a_subclass_with_a_step_of_its_own_stays_outside(machine):
    """Its Python code would run only while the graph is captured."""

    class Counts(Pendulum):
        calls = 0

        def step(self, action):
            self.calls += 1
            return super().step(action)

    config = small_config(**SMALL)
    env = Counts(config.num_envs, max_episode_steps=9, stagger=True)
    with pytest.warns(PqlWarning, match=r"Counts overrides step of a capturable environment: .* capturable = True"):
        parts = build(config, env)
    parts.prepare()
    assert not parts.collector.slices[0].whole
    parts.start()
    parts.warm_up(config.algo.warmup_steps)
    parts.begin()
    before = env.calls
    parts.schedule.tick()
    assert env.calls > before


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
def test_a_captured_step_goes_on_from_a_restored_state(machine):
    """Restoring writes in place, so a graph continues from there."""
    config = small_config(**SMALL)
    one, two = start(config), start(config)
    for _ in range(2):
        one.schedule.tick()
    two.load_counters({**one.counters(), "ticks": 2})
    two.load_state_dict(one.state_dict(), 2)
    for parts in (one, two):
        parts.schedule.tick()
    a, b = (parts.env.state_dict() for parts in (one, two))
    assert torch.equal(a["state"], b["state"])
    assert torch.equal(one.collector.obs["policy"], two.collector.obs["policy"])


def test_prepare_is_asked_once_before_the_first_reset():
    asked = []

    class Slow(Pendulum):
        def prepare(self):
            asked.append("prepare")

        def reset(self, seed=None):
            asked.append("reset")
            return super().reset(seed)

    start_order = build(small_config(), Slow(8))
    start_order.prepare()
    start_order.start()
    assert asked == ["prepare", "reset"]
