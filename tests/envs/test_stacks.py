"""Stacks that adapters declare, and what a replay rebuilds from them."""

import fake_isaaclab
import pytest
import torch
from fake_isaaclab import Config, FakeLabEnv, FakeMjlabEnv

from pql.contract.env import ObsSpec
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.envs.adapters.gymnasium import GymnasiumVec
from pql.envs.adapters.isaaclab import IsaacLabVec
from pql.envs.adapters.mjlab import MjlabVec
from pql.errors import ConfigError


class Histories:
    """Histories of three as both observation managers keep them, one for each of two terms: episode and step. The first
    observation fills them. ``lags``: ages of their entries."""

    lags, repeats = (2, 1, 0), True

    def observe(self):
        step = self.episode_length_buf[:, None] - torch.tensor(self.lags)
        known = (step >= 0) | self.repeats
        terms = ((1 + self.episode[:, None]) * known, (1 + step.clamp(min=0)) * known)
        return {**super().observe(), self.names[0]: torch.cat(terms, 1).float()}


def managed(monkeypatch, mjlab, histories=(3, 3), **changes):
    monkeypatch.setattr(fake_isaaclab, "ALIVE", [])
    monkeypatch.setattr(fake_isaaclab, "LAUNCHED", [True])
    inner = type("Managed", (Histories, FakeMjlabEnv if mjlab else FakeLabEnv), changes)(Config(auto_reset=not mjlab))
    terms = [(name, len, None, None, count, 1) for name, count in zip("ab", histories, strict=True)]
    fake_isaaclab.add_managers(inner, {}, {inner.names[0]: terms})
    return (MjlabVec if mjlab else IsaacLabVec)(inner, "Fake")


def assert_rebuilt(env, steps=60):
    """A ring of the declared stacks gives what one of whole observations gives."""
    spec, once, gen = env.spec, env.spec.obs["policy"], torch.Generator().manual_seed(0)
    n, obs, fillers = spec.num_envs, env.reset(1), spec.autoreset == "same_step"
    layouts = [ReplayLayout({"policy": s}, None, n, 200, 3, fillers) for s in (once, ObsSpec(once.shape))]
    rings = [Replay(layout, spec.device) for layout in layouts]
    for ring in rings:
        ring.begin(obs)
    for step in (env.step(spec.action.random(n, gen)) for _ in range(steps)):
        for ring in rings:
            ring.insert(torch.zeros(n, dtype=torch.int64), step)
    assert rings[0].obs["policy"][0].numel() * once.stack == rings[1].obs["policy"][0].numel()
    head = rings[0].live.head
    row, column = torch.tensor([(row, i) for i in range(n) for row in range(head[i])]).unbind(1)
    one, two = (ring.windows(ring.live, row, column, head[column], 3, 0.9) for ring in rings)
    assert one.mask.sum() > steps
    for name in ("obs", "next_obs"):
        assert torch.equal(*(getattr(part, name)["policy"][one.mask > 0] for part in (one, two)))


@pytest.mark.parametrize("mjlab", [False, True], ids=["isaaclab", "mjlab"])
def test_histories_of_managers_are_declared_and_come_back(monkeypatch, mjlab):
    env = managed(monkeypatch, mjlab)
    assert env.spec.obs == {"policy": ObsSpec((6,), stack=3, terms=(1, 1), fill="first"), "critic": ObsSpec((3,))}
    assert_rebuilt(env)


@pytest.mark.parametrize(
    "change", [{"repeats": False}, {"lags": (1, 0, 0)}, {"histories": (3, 0)}, {"histories": (2, 4)}]
)
def test_other_histories_are_not_declared(monkeypatch, change):
    assert managed(monkeypatch, True, **change).spec.obs["policy"] == ObsSpec((6,))


STACK, FLAT = {"name": "FrameStackObservation", "stack_size": 3}, "FlattenObservation"


@pytest.mark.parametrize(
    ("wrappers", "spec"),
    [
        ([STACK], ObsSpec((3, 4), stack=3, fill="first")),
        ([STACK, FLAT], ObsSpec((12,), stack=3, fill="first")),
        ([{**STACK, "padding_type": "zero"}, FLAT], ObsSpec((12,), stack=3)),
        ([STACK, FLAT, {"name": "ClipReward", "max_reward": 5.0}], ObsSpec((12,))),  # others may change stacks
    ],
)
def test_gymnasiums_stacks_are_declared_and_come_back(wrappers, spec):
    env = GymnasiumVec(3, id="CartPole-v1", wrappers=wrappers)
    assert env.spec.obs["policy"] == spec
    assert_rebuilt(env)
    env.close()


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ((12,), (5,), "ObsSpec.stack=5: expected a divisor of 12"),
        ((4, 3), (3,), "ObsSpec.stack=3: expected 4, the first axis of shape, or 1"),
        ((12,), (3, (1, 2)), "of which stack=3 times the sum is 12, the size of the history"),
        ((3, 4), (3, (1, 3)), r"none: only a flat history, shape \(S \* D,\), has terms"),
        ((12,), (3, (), "frist"), r"one of zeros, first \(did you mean first\?\)"),
    ],
)
def test_specifications_that_contradict_themselves_are_refused(shape, fields, message):
    with pytest.raises(ConfigError, match=message):
        ObsSpec(shape, torch.float32, *fields)
