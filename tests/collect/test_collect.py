"""The collector: episode statistics, and continuing with a simulator that cannot be restored."""

from dataclasses import replace

import pytest
import torch
from conftest import small_config, start
from late import Late
from ppo_runs import config_of as ppo_config
from r2d2_runs import config_of as r2d2_config

from pql.algos.registry import seeds
from pql.collect.episodes import EpisodeStats
from pql.contract.env import Discrete
from pql.contract.grouped import Grouped
from pql.engine.executors import Inline
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.run.build import build
from pql.run.episodes import run_episodes
from pql.run.store.checkpoint import flatten
from pql.types import Step


def test_episode_statistics_are_means_over_finished_episodes():
    stats = EpisodeStats(3, {"speed": "sum", "error": "step", "level": "episode"}, torch.device("cpu"))
    no = torch.zeros(3, dtype=torch.bool)

    def step(reward, ended=(), first=(), invalid=()):
        def at(ids):
            return torch.tensor([i in ids for i in range(3)])

        r = torch.tensor(reward)
        log = {"speed": 10 * r, "error": 2 * r, "level": 3.0 * at(ended)}
        stats.update(Step({}, r, at(ended), no, at(first), {}, ~no, ~at(invalid), log))

    step([1.0, 2.0, 3.0])
    step([1.0, 2.0, 3.0], ended=(0, 1), first=(0, 1))
    step([5.0, 100.0, 3.0], invalid=(1,))  # a filler row: not counted
    step([5.0, 1.0, 3.0], first=(2,))  # an unannounced restart: that episode is not one
    step([5.0, 1.0, 4.0], ended=(0, 2), first=(0, 2))
    out = {k: float(v) for k, v in stats.drain().items()}
    # episodes: env 0: 2 and 15 (2 and 3 rows), env 1: 4 (2 rows), env 2: 4 (1 row)
    assert out == {
        "train/return_mean": 25 / 4,
        "train/length_mean": 8 / 4,
        "episode/speed": 250 / 4,
        "step/error": 50 / 8,
        "episode/level": 3.0,
        "train/episodes": 4,
    }
    assert float(stats.drain()["train/episodes"]) == 0
    assert stats.running[0].tolist() == [0.0, 2.0, 0.0]


def test_an_episode_counts_once_another_begins():
    """A lost life ends no episode; under next-step autoreset the filler row, whose reward is ignored, shows the end."""
    no, on = torch.zeros(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)

    def drained(rows):
        stats = EpisodeStats(1, {}, torch.device("cpu"))
        for reward, ended, first, valid in rows:
            stats.update(Step({}, torch.tensor([reward]), on & ended, no, on & first, {}, on, on & valid, {}))
        out = stats.drain()
        return [float(out[f"train/{k}"]) for k in ("return_mean", "length_mean", "episodes")]

    life, row = (1.0, True, False, True), (2.0, False, False, True)
    end, filler = (4.0, True, False, True), (99.0, False, True, False)
    assert drained([row, life, row, (4.0, True, True, True), row]) == [9.0, 4.0, 1.0]
    assert drained([row, life, row, end, filler, row, end]) == [9.0, 4.0, 1.0]
    assert drained([row, life, row, end, filler, row, end, filler]) == [7.5, 3.0, 2.0]
    assert drained([row, life, row, (2.0, False, True, True), row]) == [0.0, 0.0, 0.0]  # restarted, unannounced


def test_a_simulator_without_state_goes_on_in_new_episodes_that_no_window_crosses_into(monkeypatch):
    monkeypatch.delattr(Counter, "state_dict")
    config = small_config(task={"name": "counter", "kwargs": {"terminate_every": 0}}, algo={"normalize_reward": True})
    parts = start(config, Inline())
    for _ in range(17):  # the middle of an episode of seven rows
        parts.schedule.tick()
    saved = {k: v.clone() for k, v in flatten(parts.state_dict()).items()}
    assert not [k for k in saved if k.startswith("collector/env")]

    again = build(config, executor=Inline())
    again.collector.start(seeds(config.seed)["env"])
    first = again.collector.obs["policy"].clone()
    again.load_state_dict(parts.state_dict(), 17)
    assert torch.equal(again.collector.obs["policy"], first)
    ring, head = again.collector.replays[0], int(parts.collector.replays[0].live.head[0])
    again.schedule.tick()
    columns = torch.arange(8)
    batch = ring.windows(ring.live, torch.full((8,), head - 1), columns, ring.live.head, 3, 0.9)
    assert batch.mask.tolist() == [1.0] * 8  # the row before the restart keeps its successor, in a filler row
    assert torch.equal(batch.discount, torch.full((8,), 0.9))
    assert torch.equal(batch.next_obs["policy"], parts.collector.obs["policy"])
    batch = ring.windows(ring.live, torch.full((8,), head + 1), columns, ring.live.head, 3, 0.9)
    assert batch.mask.tolist() == [1.0] * 8
    assert torch.equal(batch.obs["policy"], first)
    assert again.collector.episodes.running[1].tolist() == [1.0] * 8


@pytest.mark.parametrize(("autoreset", "rows"), [("next_step", 15), ("same_step", 16)])
def test_a_lost_final_observation_is_no_frame(autoreset, rows):
    """Counter shows -1 where it lost a final observation: no statistic may see it, nor a filler row's reward."""
    kwargs = {"autoreset": autoreset, "final_obs": "never", "terminate_every": 0}
    parts = start(small_config(task={"name": "counter", "kwargs": kwargs}, algo={"normalize_reward": True}), Inline())
    norm = parts.collector.normalizer
    # 16 warm-up steps and the first observation; next-step: two episodes ended, and each lost one frame
    assert norm.moments["policy"].count.item() == 8 * (rows if autoreset == "next_step" else rows + 1)
    valid = 14 if autoreset == "next_step" else 16  # two filler rows
    assert norm.returns.count.item() == 8 * valid
    assert norm.moments["policy"].mean[1] > 2  # of steps 0..6
    assert float(norm.running_return.min()) > -100


# -- answers that the specification does not foresee ----------------------------------------------------------------


def observing(change):
    return lambda step: step._replace(obs=change(step.obs))


SLIPS = {
    "column": (lambda s: s._replace(reward=s.reward[:, None]), r"reward has shape \[(\d), 1\], expected \[\1\]"),
    "float64": (lambda s: s._replace(reward=s.reward.double()), "reward is torch.float64, expected torch.float32"),
    "int64": (lambda s: s._replace(truncated=s.truncated.long()), "truncated is torch.int64, expected torch.bool"),
    "uint8": (lambda s: s._replace(first=s.first.byte()), "first is torch.uint8, expected torch.bool"),
    "array": (lambda s: s._replace(reward=s.reward.numpy()), "reward is a ndarray, not a tensor"),
    "list": (lambda s: s._replace(valid=s.valid.tolist()), "valid is a list, not a tensor"),
    "no log": (lambda s: s._replace(log={}), r"log has keys \[\], spec.log says \['rows'\]"),
    "final": (lambda s: s._replace(final_obs={}), r"final_obs has groups \[\], expected \['policy'\]"),
    "wide": (
        observing(lambda obs: {k: v.repeat(1, 2) for k, v in obs.items()}),
        r"obs\[policy\] has shape \[(\d), 4\], expected \[\1, 2\]",
    ),
    "double": (observing(lambda obs: {k: v.double() for k, v in obs.items()}), r"obs\[policy\] is torch.float64"),
    "missing": (observing(lambda obs: {}), r"obs has groups \[\], expected \['policy'\]"),
    "extra": (observing(lambda obs: {**obs, "more": obs["policy"]}), r"obs has groups \['more', 'policy'\]"),
}
OF_A_RESET = ("wide", "double", "missing", "extra")


class Slips(Counter):
    """The counter, with a slip in what ``reset``, ``reset_where`` or ``step`` returns."""

    def __init__(self, num_envs, slip, where="step", discrete=False):
        super().__init__(num_envs)
        self.change, self.where = SLIPS[slip][0], where
        self.spec = replace(self.spec, action=Discrete(4)) if discrete else self.spec

    def altered(self, obs, where):
        return self.change(Step(obs, *[None] * 8)).obs if where == self.where else obs

    def reset(self, seed=None):
        return self.altered(super().reset(seed), "reset")

    def reset_where(self, mask):
        return self.altered(super().reset(), "reset_where")

    def step(self, action):
        step = super().step(action)
        return self.change(step) if self.where == "step" else step


class LateSlips(Late):
    def answers(self, group):
        ids, step = super().answers(group)
        return ids, SLIPS["column"][0](step)


WAYS = {
    "off policy": lambda *slip: build(small_config(num_envs=6), Slips(6, *slip)),
    "concurrent": lambda *slip: build(small_config(num_envs=6, algo={"schedule": "concurrent"}), Slips(6, *slip)),
    "on policy": lambda *slip: build(ppo_config({"num_envs": 4}), Slips(4, *slip)),
    "groups": lambda *slip: build(small_config(num_envs=6), Grouped([Slips(3, *slip), Slips(3, *slip)])),
    "last action": lambda *slip: build(r2d2_config({"num_envs": 4}), Slips(4, *slip, discrete=True)),
}


def refused(slip, method="step"):
    said = rf"{method}\(\) to return what its spec says, but {SLIPS[slip][1]}.*: pql doctor --env NAME tests it"
    return pytest.raises(ConfigError, match=f"task=counter: expected {said}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_first_step_that_is_not_as_the_specification_says_is_named(slip, way):
    parts = WAYS[way](slip, "step")
    parts.start()
    with refused(slip):
        parts.warm_up(8)
    parts.schedule.executor.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slip", OF_A_RESET)
def test_so_is_a_reset(slip, way):
    parts = WAYS[way](slip, "reset")
    with refused(slip, "reset"):
        parts.start()
    parts.schedule.executor.close()


def test_so_are_late_answers_and_restarts():
    parts = build(small_config(num_envs=8), LateSlips(8))
    parts.start()
    with refused("column"):
        parts.warm_up(8)
    parts = build(small_config(num_envs=6), Slips(6, "wide", "reset_where"))
    parts.start()
    parts.warm_up(8)
    with refused("wide", "reset_where"):
        parts.collector.state.restart(torch.ones(6, dtype=torch.bool))


@pytest.mark.parametrize(("slip", "where"), [("wide", "reset"), ("column", "step"), ("array", "step")])
def test_so_is_an_evaluation(slip, where):
    with refused(slip, where):
        run_episodes(Slips(6, slip, where), lambda obs: torch.zeros(6, 2), seed=1)
