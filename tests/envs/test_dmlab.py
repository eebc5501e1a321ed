"""The DeepMind Lab adapter against a stand-in for its Python module; not run with the simulator itself."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pql.contract.conformance import check_env
from pql.contract.env import make_env
from pql.envs.adapters import dmlab
from pql.errors import ConfigError
from pql.remote.actor.sims import make_sim

LENGTH = 20  # frames of an episode
LEVEL = "contributed/dmlab30/rooms_watermaze"


class Lab:
    """``deepmind_lab.Lab`` as its C module has it: actions of np.intc [7], observations and steps only while an episode
    runs, episodes that begin when asked."""

    made: list["Lab"]

    def __init__(self, level, observations, config=None, renderer="software", level_cache=None):
        if level == "nowhere":
            raise RuntimeError("Failed to init environment - no such level")
        assert observations == ["RGB_INTERLEAVED"]
        assert all(isinstance(v, str) for v in config.values())
        self.level, self.config, self.renderer, self.level_cache = level, config, renderer, level_cache
        self.frame, self.seeds, self.actions, self.open = LENGTH, [], [], True
        Lab.made.append(self)

    def fps(self):
        return 60

    def reset(self, episode=-1, seed=None):
        self.frame, self.facing = 0, 0
        self.seeds.append(seed)

    def is_running(self):
        return self.frame < LENGTH

    def observations(self):
        if not self.is_running():
            raise RuntimeError("Environment in wrong status for call to observations()")
        height, width = int(self.config["height"]), int(self.config["width"])
        picture = np.zeros((height, width, 3), np.uint8)
        picture[0, 0] = self.frame, self.facing % 256, self.seeds[-1] % 256
        picture[-1, 0, 0] = 7  # the lowest row
        return {"RGB_INTERLEAVED": picture}

    def step(self, action, num_steps=1):
        assert action.dtype == np.intc
        assert action.shape == (7,)
        if not self.is_running():
            raise RuntimeError("Environment in wrong status to advance.")
        self.actions.append(action.tolist())
        frames = min(num_steps, LENGTH - self.frame)
        self.frame += frames
        self.facing += int(action[0])
        return float(frames)  # one each: a reward of the last frames counts

    def close(self):
        self.open = False


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    Lab.made = []
    monkeypatch.setitem(sys.modules, "deepmind_lab", SimpleNamespace(Lab=Lab))


def make_lab(num_envs, **kwargs):
    return make_env("dmlab", num_envs, level=LEVEL, **kwargs)


def test_it_conforms():
    report = check_env(make_lab(3, width=8, height=6), 30)
    assert report.ok, report
    untested = {r.name for r in report.results if r.ok is None}
    assert untested == {
        "final_obs_kept",
        "filler_flags",
        "time_limit",
        "stack",
        "action_range",
        "state_dict",
        "groups",
        "describe",
        "capturable",
    }


def test_what_is_seen_done_and_paid():
    env = make_lab(2, width=8, height=6, repeat=3, settings={"mixerSeed": 5})
    assert (env.spec.obs["policy"].shape, env.spec.action.n, env.spec.info["dt"]) == ((3, 6, 8), 9, 0.05)
    obs = env.reset(3)["policy"]
    assert obs.dtype == torch.uint8
    assert obs[:, 0, 0, 0].tolist() == [0, 0]  # channels first, rows from the top
    assert obs[:, 0, 5, 0].tolist() == [7, 7]
    rewards, ends = [], []
    for t in range(9):
        step = env.step(torch.tensor([4, 8]))
        rewards.append(step.reward.tolist())
        ends.append(step.terminated.tolist())
        assert step.obs["policy"][:, 0, 0, 0].tolist() == [3 * (t % 7 + 1) % 21] * 2
        assert torch.equal(step.first, step.terminated)
        assert not step.truncated.any()
    assert rewards == [[3.0, 3.0]] * 6 + [[2.0, 2.0]] + [[3.0, 3.0]] * 2  # the seventh holds the last two frames
    assert ends == [[i == 6] * 2 for i in range(9)]
    turning, firing = Lab.made
    assert turning.actions[0] == [-20, 0, 0, 0, 0, 0, 0]
    assert firing.actions[0] == [0, 0, 0, 0, 1, 0, 0]
    assert turning.config == {"width": "8", "height": "6", "logLevel": "WARN", "mixerSeed": "5"}
    assert len({*turning.seeds, *firing.seeds}) == 4  # every episode of every environment has its own
    before = list(turning.seeds)
    env.reset(3)
    assert turning.seeds[2:] == before[:1]
    env.close()
    assert not turning.open


@pytest.mark.parametrize(("count", "look"), [(9, {-20, 0, 20}), (15, {-60, -10, 0, 10, 60})])
def test_action_sets(count, look):
    table = np.array(dmlab.ACTIONS[count])
    assert table.shape == (count, 7)
    assert {*table[:, 0]} == look
    assert len({tuple(row) for row in table}) == count
    assert table[-1].tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert not table[:, 5:].any()  # no jumps or crouches
    assert make_lab(1, actions=count).spec.action.n == count


def test_an_actor_has_it_as_arrays():
    sim = make_sim("dmlab", 2, {"level": LEVEL, "width": 8, "height": 6})
    obs = sim.reset(1)["policy"]
    step = sim.step(np.array([0, 1]))
    assert obs.shape == step.obs["policy"].shape == (2, 3, 6, 8)
    assert obs.dtype == np.uint8
    assert step.reward.tolist() == [4.0, 4.0]


def test_compiled_maps_are_kept(tmp_path):
    make_lab(1, cache=str(tmp_path / "maps"))
    cache, made, wanted = Lab.made[-1].level_cache, tmp_path / "made.pk3", tmp_path / "wanted.pk3"
    assert not cache.fetch("a key/of theirs", str(wanted))
    made.write_bytes(b"a map")
    cache.write("a key/of theirs", str(made))
    assert cache.fetch("a key/of theirs", str(wanted))
    assert wanted.read_bytes() == b"a map"
    assert len([*(tmp_path / "maps").iterdir()]) == 1


def test_mistakes_are_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"level=nowhere: expected a level and settings that DeepMind Lab takes"):
        make_env("dmlab", 1, level="nowhere")
    with pytest.raises(ConfigError, match="actions=7: expected 9 or 15"):
        make_lab(1, actions=7)
    with pytest.raises(ConfigError, match="repeat=0: expected a whole number"):
        make_lab(1, repeat=0)
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    with pytest.raises(ConfigError, match=r"github.com.google-deepmind.lab .* bazel build .*: task.process.python"):
        make_lab(1)
