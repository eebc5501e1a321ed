"""Groups of environments that step in turn: the same bits as sequential stepping, and truly concurrent."""

import threading
from dataclasses import replace

import pytest
import torch
from conftest import bits, differences, merge, small_config, start
from ppo_runs import config_of
from run_files import WORDS, whole_and_resumed
from sampling import sample

from pql.collect.actors import NoisyActor
from pql.collect.episodes import EpisodeStats
from pql.collect.exploration import Exploration
from pql.config.groups import ExploreConfig
from pql.config.validate import validate
from pql.contract.conformance import check_env
from pql.contract.env import make_env
from pql.contract.grouped import Grouped
from pql.contract.registry import register
from pql.engine.executors import Inline, Threads
from pql.envs.classic import Pendulum
from pql.envs.toy import Counter
from pql.errors import ConfigError, RunError
from pql.run.build import build

STEPS = 120
NEXT_STEP = {"task": {"name": "counter", "kwargs": {"autoreset": "next_step", "final_obs": "never", "stagger": True}}}
OFF_POLICY = {
    "pql": {},
    "held noise, scaled rewards, filler rows": {
        "algo": {"normalize_reward": True, "explore": {"kind": "redrawn", "repeat": True}},
        **NEXT_STEP,
    },
    "sac, several steps a tick": {
        "algo": {"family": "sac", "v_per_step": 0.25, "p_per_v": 1.0, "explore": {"kind": "none"}, "n_step": 3},
        "task": {"name": "counter", "kwargs": {"restart_every": 4}},
    },
}
ON_POLICY = {
    "ppo": {"algo": {"normalize_reward": True}},
    "lstm, filler rows": {**NEXT_STEP, "algo": {"lstm": 8, "normalize_reward": True}},
    "categorical": {"task": {"name": "cartpole"}},
    "values": {"task": {"name": "cartpole"}, "algo": {"family": "pqn", "horizon": 8, "minibatches": 4}},
    "reppo": {"algo": {"family": "reppo", "horizon": 8, "epochs": 2, "minibatches": 4, "critic": {"atoms": 21}}},
}


def grouped(groups=2, **more):
    return {"placement": {"groups": groups, **more}}


def run(config, steps=STEPS, executor=None):
    parts = start(config, executor or Inline())
    try:
        for _ in range(steps // parts.counts.horizon):
            parts.schedule.tick()
    finally:
        parts.schedule.executor.close()
        parts.env.close()
    return parts


# -- the collector ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OFF_POLICY)
@pytest.mark.parametrize(("schedule", "groups"), sample([("concurrent", 2), ("lockstep", 4)], keep=[("concurrent", 2)]))
def test_alternating_groups_give_the_bits_of_one_after_the_other(kind, schedule, groups):
    change = merge(OFF_POLICY[kind], {"algo": {"schedule": schedule}})
    serial = bits(run(small_config(**merge(change, grouped(groups, overlap=False)))))
    config = small_config(**merge(change, grouped(groups)))
    assert differences(serial, bits(run(config))) == []
    if schedule == "concurrent":
        assert differences(serial, bits(run(config, executor=Threads(("collector", "v", "p"))))) == []


@pytest.mark.parametrize("kind", sample(ON_POLICY, keep=["lstm, filler rows", "values"]))
def test_alternating_groups_fill_a_rollout_with_the_same_bits(kind):
    serial, turns = (run(config_of(ON_POLICY[kind], grouped(overlap=overlap))) for overlap in (False, True))
    assert differences(bits(serial), bits(turns)) == []
    ours, theirs = (parts.collector.stores[0].segment() for parts in (serial, turns))
    for name, one, other in zip(ours._fields, ours, theirs, strict=True):
        pairs = zip(one.values(), other.values(), strict=True) if isinstance(one, dict) else [(one, other)]
        assert all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs), name
    assert ours.obs["policy"][:, 4:].std() > 0  # the second group wrote too


@pytest.mark.slow
def test_alternating_halves_play_atari_with_the_same_bits():
    pytest.importorskip("ale_py")
    from pql.envs.atari import AtariVec

    change = {
        "num_envs": 4,
        "task": {"name": "atari", "game": "breakout", "reward_clip": 1.0, "kwargs": {"threads": 1, "life_loss": True}},
        "algo": {"encoder": {"kind": "nature", "channels": [4, 8], "features": 16}},
    }
    serial, turns = (run(config_of(change, grouped(overlap=overlap)), 64) for overlap in (False, True))
    assert type(turns.env) is AtariVec
    assert len(turns.collector.slices) == 2
    assert differences(bits(serial), bits(turns)) == []
    frames = [parts.collector.stores[0].obs["policy"] for parts in (serial, turns)]
    assert torch.equal(*frames)
    assert frames[0].unique().numel() > 2


def test_each_group_writes_its_own_columns():
    """Counter pays by environment, episode and step, whatever is done: both halves of the ring are what one group of
    as many environments gives alone."""
    task = {"task": {"name": "counter", "kwargs": {"restart_every": 4, "stagger": True}}}
    both = run(small_config(**merge(task, grouped())), 40).collector
    alone = run(small_config(num_envs=4, **task), 40).collector
    ring, one = both.replays[0], alone.replays[0]
    assert torch.equal(ring.live.head, one.live.head.repeat(2))
    rows = int(one.live.head.min())
    assert rows > 56  # steps, and filler rows
    for name in ("reward", "flags"):
        stored, expected = (getattr(r, name).view(r.rows, -1)[:rows] for r in (ring, one))
        assert torch.equal(stored[:, :4], expected)
        assert torch.equal(stored[:, 4:], expected)
    frames = ring.obs["policy"].view(-1, 8, 2)[: rows + 1]
    assert torch.equal(frames[:, 4:], one.obs["policy"].view(-1, 4, 2)[: rows + 1])
    assert torch.equal(frames[:, :4], frames[:, 4:])
    sums = both.episodes.drain(), alone.episodes.drain()
    assert {k: float(v) for k, v in sums[0].items()} == {
        k: pytest.approx(float(v) * (2 if k == "train/episodes" else 1)) for k, v in sums[1].items()
    }


class Logged:
    """An environment of two groups that records its calls."""

    def __init__(self, env, log):
        self.env, self.log, self.spec = env, log, env.spec

    def reset(self, seed=None):
        return self.env.reset(seed)

    def send(self, action, ids):
        self.log.append(f"send {'AB'[int(ids[0]) // 4]}")
        self.env.send(action, ids)

    def recv(self):
        ids, step = self.env.recv()
        self.log.append(f"recv {'AB'[int(ids[0]) // 4]}")
        return ids, step

    def step(self, action):
        raise AssertionError("a group was not asked for")

    def close(self):
        self.env.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_one_half_is_under_way_while_the_other_acts(overlap):
    log = []
    env = Logged(Grouped([Pendulum(4), Pendulum(4)]), log)
    config = small_config(algo={"schedule": "lockstep", "v_per_step": 0.25, "p_per_v": 1}, **grouped(overlap=overlap))
    parts = build(config, env)
    assert parts.counts.horizon == 4
    act = parts.collector.actor._act
    for one in parts.collector.slices:
        one.state.actor._act = lambda *args: (log.append("act"), act(*args))[1]
    parts.collector.start(0)
    parts.collector.run(3)
    if overlap:
        first = ["act", "send A", "act", "send B"]
        later = ["recv A", "act", "send A", "recv B", "act", "send B"]
        assert log == first + 2 * later + ["recv A", "recv B"]
    else:
        assert log == 3 * ["act", "send A", "recv A", "act", "send B", "recv B"]
    assert parts.collector.steps == 3
    env.close()


class Meets(Pendulum):
    """Every step waits until the other group's has begun too."""

    barrier = threading.Barrier(2)

    def step(self, action):
        self.barrier.wait(timeout=20)
        return super().step(action)


@pytest.mark.parametrize("warm_up", [True, False])
def test_groups_step_at_the_same_time(warm_up):
    env = Grouped([Meets(4), Meets(4)])
    collector = build(small_config(), env).collector
    collector.start(0)
    (collector.warm_up if warm_up else collector.run)(20)
    env.close()


def test_the_parts_of_an_actor_are_views_with_the_rungs_of_the_whole():
    spec = replace(Counter.describe(8), groups=2)
    noise = Exploration(ExploreConfig("mixed", 0.1, 0.8), 8, 2, torch.device("cpu"))
    whole = NoisyActor(torch.nn.Linear(2, 2), lambda policy, obs, gen: obs["policy"], noise, spec)
    part = whole.part(slice(4, 8))
    torch.testing.assert_close(part.explore.sigma, torch.tensor([[0.5], [0.6], [0.7], [0.8]]))
    assert part.policy is whole.policy
    part.act({"policy": torch.zeros(4, 2)}, torch.Generator().manual_seed(0))
    assert whole.action[:4].eq(0).all()
    assert torch.equal(whole.action[4:], part.action)
    assert part.action.ne(0).all()
    noise.fresh.zero_()
    part.observe(torch.tensor([False, True, False, True]))
    assert whole.explore.fresh.tolist() == [False] * 4 + [False, True, False, True]
    stats = EpisodeStats(8, {}, torch.device("cpu"))
    stats.part(slice(0, 4)).running.fill_(3.0)
    assert stats.running[:, :4].eq(3).all()
    assert stats.running[:, 4:].eq(0).all()


@pytest.mark.fault(14)
@pytest.mark.parametrize("case", [(), ("algo.lstm=8", "algo.normalize_reward=true", "graphs=off")], ids=["pql", "ppo"])
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, case):
    if case:
        case += ("algo=ppo", "algo.horizon=4", "algo.minibatches=4")
    unread = ("algo.batch", "placement.threads.p", "replay.capacity") if case else ()
    own = [w for w in (*WORDS, "placement.groups=2", *case) if not w.startswith(unread)]
    _, tensors, _ = whole_and_resumed(tmp_path, own, *(16 * (8 + 4 * n) for n in (5, 10)))
    assert {"collector/env/0", "collector/env/1"} <= {"/".join(k.split("/")[:3]) for k in tensors}


# -- grouped simulators -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"autoreset": "next_step", "restart_every": 4}])
def test_grouped_simulators_conform(kwargs):
    env = Grouped.make(lambda: Counter(3, **kwargs), 2)
    report = check_env(env, 60)
    assert report.ok, report
    assert next(r for r in report.results if r.name == "groups").ok
    env.close()


def test_groups_draw_from_seeds_of_their_own(threads_left):
    env = Grouped([Pendulum(4), Pendulum(4)])
    obs = env.reset(5)["policy"]
    assert len({tuple(row) for row in obs.tolist()}) == 8
    assert torch.equal(env.reset(5)["policy"], obs)
    assert not torch.equal(env.reset(6)["policy"], obs)
    assert not torch.equal(env.reset(None)["policy"], obs)
    env.close()
    assert not threads_left()


def test_step_is_every_groups_step_in_order():
    env, apart = Grouped([Counter(3), Counter(3)]), Counter(3)
    assert env.spec == replace(Counter.describe(6), groups=2)
    env.reset(0)
    apart.reset()
    for _ in range(20):
        step, one = env.step(torch.zeros(6, 2)), apart.step(torch.zeros(3, 2))
        assert torch.equal(step.reward, one.reward.repeat(2))
        assert torch.equal(step.final_obs["policy"], one.final_obs["policy"].repeat(2, 1))
        assert torch.equal(step.log["rows"], one.log["rows"].repeat(2))
    env.close()


class Falls(Pendulum):
    def step(self, action):
        raise ZeroDivisionError("the simulator fell over")


@pytest.mark.fault(6)
def test_a_group_that_fails_ends_the_run_with_its_error():
    parts = build(small_config(), Grouped([Pendulum(4), Falls(4)]), executor=Inline())
    parts.collector.start(0)
    parts.begin()
    with pytest.raises(RunError, match="worker collector failed: ZeroDivisionError: the simulator fell over"):
        parts.schedule.tick()
    parts.env.close()


def test_simulators_made_before_one_that_fails_are_closed():
    made = []

    def make():
        if made:
            raise ValueError("no more")
        made.append(Pendulum(4))
        made[0].close = lambda: made.append("closed")
        return made[0]

    with pytest.raises(ValueError, match="no more"):
        Grouped.make(make, 2)
    assert made[1:] == ["closed"]


# -- settings ---------------------------------------------------------------------------------------------------------


class Several:
    """Forms its groups itself."""

    def __init__(self, num_envs=8, device="cpu", groups=1):
        self.env = Counter(num_envs, device)
        self.reset, self.step = self.env.reset, self.env.step
        self.spec = self.describe(num_envs, device, groups)

    @classmethod
    def describe(cls, num_envs=8, device="cpu", groups=1):
        return replace(Counter.describe(num_envs, device), groups=groups)

    def close(self):
        pass


def single(num_envs, device):
    env = Counter(num_envs, device)
    env.spec = replace(env.spec, single_instance=True)
    return env


@pytest.fixture
def _registered(monkeypatch):
    monkeypatch.setattr("pql.contract.registry._registered", {})
    register("several", Several)
    register("single", single)


@pytest.mark.usefixtures("_registered")
def test_groups_are_the_simulators_own_where_it_takes_the_keyword():
    from pql.run.environment import build_env, describe_env

    config = small_config(task={"name": "several"}, **grouped(4))
    assert build_env(config).spec.groups == describe_env(config).groups == 4
    assert type(build_env(config)) is Several
    assert build_env(config, num_envs=3).spec.groups == 1  # an evaluation's
    own = small_config(task={"name": "several", "kwargs": {"groups": 2}})
    assert build_env(own).spec.groups == 2
    other = small_config(**grouped(4))
    env = build_env(other)
    assert type(env) is Grouped
    assert env.spec == describe_env(other)
    assert (env.spec.groups, env.spec.num_envs) == (4, 8)
    env.close()
    assert type(build_env(other, num_envs=3)) is Pendulum


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 9, **grouped()}, r"placement\.groups=2.*divisor of num_envs=9"),
        (grouped(0), r"placement\.groups=0.*from 1"),
        ({"task": {"name": "single"}, **grouped()}, r"placement\.groups=2.*a process can hold only one counter"),
        ({"task": {"name": "several", "kwargs": {"groups": 2}}, **grouped(4)}, r"placement\.groups=4.*null or 2"),
        ({"num_envs": 9, "task": {"name": "several", "kwargs": {"groups": 2}}}, "num_envs=9.*multiple of the 2 groups"),
    ],
)
def test_groups_that_cannot_be_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(validate(small_config(**changes)))


def test_a_live_environment_has_the_groups_it_has():
    with pytest.raises(ConfigError, match=r"placement\.groups=2.*null or 1, as pendulum has"):
        build(small_config(**grouped()), Pendulum(8))
    assert len(build(small_config(), make_env("pendulum", 8)).collector.slices) == 1
