"""The MuJoCo Playground adapter against a stand-in for its wrappers; ``make test-adapters`` runs the real one."""

import sys
import types

import fake_playground
import pytest
import torch

from pql.envs.adapters.playground import PlaygroundVec
from pql.errors import ConfigError


@pytest.fixture(autouse=True)
def _packages(monkeypatch):
    install(monkeypatch)


def install(monkeypatch, backend="cpu"):
    for name, content in fake_playground.modules(backend).items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def make(num_envs=4, **kwargs):
    return PlaygroundVec(num_envs, "cpu", "Counter", **kwargs)


@pytest.mark.parametrize("full_reset", [False, True])
def test_it_conforms(full_reset, conforms):
    env = make(full_reset=full_reset)
    assert conforms(env, 30) == {"filler_flags", "stack", "state_dict", "groups", "describe", "capturable"}
    assert {k: v.shape for k, v in env.spec.obs.items()} == {"policy": (2,), "critic": (3,)}
    assert (env.spec.max_episode_steps, env.spec.info["dt"]) == (5, 0.02)


@pytest.mark.parametrize("full_reset", [False, True])
def test_rows_are_what_really_happened(full_reset):
    """A full reset replaces what is known of the step, the time limit's flag included: it must be read before."""
    env = make(full_reset=full_reset)
    obs, ended = env.reset(0), [0, 0]
    for _ in range(30):
        step = env.step(torch.zeros(4, 3))
        for name in ("policy", "critic"):
            assert torch.equal(step.final_obs[name][:, :2], obs[name][:, :2] + torch.tensor([0.0, 1.0]))
        assert torch.equal(step.reward, step.final_obs["policy"][:, 1])
        assert torch.equal(step.log["reward/steps"], step.reward)  # of the step, before the reset
        last = step.final_obs["policy"][:, 1]
        assert torch.equal(step.terminated, (last == 3) & (torch.arange(4) == 1))
        assert torch.equal(step.truncated, last == 5)
        assert torch.equal(step.first, step.terminated | step.truncated)
        assert torch.equal(step.obs["policy"][:, 1] == 0, step.first)
        same = step.obs["policy"][:, 0] == obs["policy"][:, 0]
        assert same[~step.first].all()
        assert (same[step.first] != full_reset).all()
        obs, ended = step.obs, [ended[0] + int(step.truncated.sum()), ended[1] + int(step.terminated.sum())]
    assert ended == [18, 10]


def test_what_is_returned_is_ours_and_the_action_is_clamped():
    env = make()
    env.reset(0)
    one = env.step(torch.full((4, 3), 5.0))
    assert fake_playground.GIVEN[-1].eq(1).all()
    seen = one.obs["policy"].clone()
    for _ in range(6):
        env.step(torch.zeros(4, 3))
    assert torch.equal(one.obs["policy"], seen)


def test_settings_are_the_tasks_own_and_mistakes_are_named(monkeypatch):
    assert make(settings={"episode_length": 3, "noise.level": 0.5}).spec.max_episode_steps == 3
    assert make(settings={"episode_length": 3}, episode_length=4).spec.max_episode_steps == 4
    for kwargs, message in (
        ({"settings": {"imp": "jax"}}, r"imp=jax: expected a name in the task's configuration \(did you mean impl\?\)"),
        ({"episode_length": 0}, "episode_length=0: expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(**kwargs)
    with pytest.raises(ConfigError, match=r"env=Countr: expected one of Counter \(did you mean Counter\?\)"):
        PlaygroundVec(4, "cpu", "Countr")
    install(monkeypatch, backend="gpu")
    with pytest.raises(ConfigError, match="device=cpu: expected a device of the kind that JAX uses: gpu"):
        make()
