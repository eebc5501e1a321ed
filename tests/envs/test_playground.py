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
    assert conforms(env, 30) == {"filler_flags", "stack", "groups", "describe", "capturable"}
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
    with pytest.raises(ConfigError, match=r"env=Countr: expected one of Counter, Plain \(did you mean Counter\?\)"):
        PlaygroundVec(4, "cpu", "Countr")
    install(monkeypatch, backend="gpu")
    with pytest.raises(ConfigError, match="device=cpu: expected a device of the kind that JAX uses: gpu"):
        make()


@pytest.mark.parametrize("full_reset", [False, True])
def test_single_environments_restart_in_new_states(full_reset):
    env = make(full_reset=full_reset)
    env.reset(0)
    before = env.step(torch.zeros(4, 3)).obs["policy"]
    obs = env.reset_where(torch.tensor([False, True, False, True]))["policy"]
    assert torch.equal(obs[0::2], before[0::2])
    assert obs[1::2, 1].tolist() == [0.0, 0.0]
    assert (obs[1::2, 0] != before[1::2, 0]).all()
    assert torch.equal(env.reset_where(torch.zeros(4, dtype=torch.bool))["policy"], obs)
    steps = [env.step(torch.zeros(4, 3)) for _ in range(4)]
    assert [s.first.tolist() for s in steps[2:]] == [[False, True, False, False], [True, False, True, False]]
    assert steps[2].terminated[1]  # in its third step, counted from the restart
    assert (steps[2].obs["policy"][1, 0] == obs[1, 0]) != full_reset  # a cached first state is the restart's


def test_its_state_repeats_in_another_simulator():
    one, other = make(), make()
    one.reset(3)
    for _ in range(4):
        one.step(torch.zeros(4, 3))
    saved = one.state_dict()
    assert all(isinstance(t, torch.Tensor) for t in saved["arrays"])
    other.reset(5)
    other.load_state_dict(saved)
    for _ in range(9):
        a, b = one.step(torch.ones(4, 3)), other.step(torch.ones(4, 3))
        assert torch.equal(a.obs["policy"], b.obs["policy"])
        assert torch.equal(a.first, b.first)
    assert torch.equal(one.reset()["policy"], other.reset()["policy"])


def test_images_show_one_environment():
    env = make()
    env.reset(0)
    env.step(torch.zeros(4, 3))
    parts = dict.fromkeys(("qpos", "qvel", "mocap_pos", "mocap_quat", "xfrc_applied"), env._state.data)
    env._state = env._state.replace(data=types.SimpleNamespace(**parts))
    assert (env.render(1).shape, env.render(1, 64, 48).shape, env.render().max()) == ((240, 320, 3), (48, 64, 3), 1)


def test_the_engine_is_jax_on_a_cpu_and_models_can_be_drawn(capsys, monkeypatch):
    make()
    make(settings={"impl": "warp"})
    assert fake_playground.LOADED[-2:] == ["jax", "warp"]
    firsts = [make(num_envs=64, randomize=draw).reset(0)["policy"][:, 1].unique().tolist() for draw in (False, True, 2)]
    assert firsts == [[0.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    with pytest.raises(
        ConfigError, match="randomize=true: expected false: the registry has no domain randomiser for Pl"
    ):
        PlaygroundVec(4, "cpu", "Plain", randomize=True)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PQL_VERBOSE", "1")
    make()
    assert capsys.readouterr().out == "loading Counter\n"


def test_a_download_that_fails_says_what_to_place_where(capsys):
    with pytest.raises(ConfigError) as caught:
        make(settings={"impl": "offline"})
    assert str(caught.value) == (
        "env=Counter: expected the models of mujoco_menagerie, whose download failed (Command '['git', 'clone']' "
        "returned non-zero exit status 128.): "
        "git clone https://github.com/google-deepmind/mujoco_menagerie /none/menagerie "
        "&& git -C /none/menagerie checkout 1b86ece"
    )
    assert capsys.readouterr() == ("", "loading Counter\n")  # what was hidden follows a failure
