"""The wrappers against raw steps of the same environment; rejected input; and the documentation's examples."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

from gymnasium.vector import AutoresetMode
from wrapped import Groups, N

import pql
from pql.contract.env import Box
from pql.envs.adapters.gymnasium import GymnasiumVec
from pql.envs.ball_balance import BallBalance
from pql.envs.toy import LQR, Counter
from pql.errors import ConfigError

# -- common form of the three wrappers' output ---------------------------------------------------------------------


def as_rsl_rl(env, actions, seed=3):
    pytest.importorskip("rsl_rl")
    wrapped = pql.wrap.rsl_rl(env, seed)
    yield wrapped.get_observations()["policy"]
    for action in actions:
        obs, reward, done, extras = wrapped.step(action)
        assert torch.equal(wrapped.get_observations()["policy"], obs["policy"])
        final = extras["final_obs"]["policy"]
        yield obs["policy"], reward, done, extras["time_outs"], final, extras["final_lost"]


def as_sb3(env, actions, seed=3):
    pytest.importorskip("stable_baselines3")
    wrapped = pql.wrap.sb3(env)
    wrapped.seed(seed)
    yield torch.from_numpy(wrapped.reset())
    for action in actions:
        obs, reward, done, infos = wrapped.step(action.numpy())
        assert all(("terminal_observation" in info) == d for info, d in zip(infos, done, strict=True))
        final = np.stack([info.get("terminal_observation", obs[i]) for i, info in enumerate(infos)])
        time_out = np.array([info["TimeLimit.truncated"] for info in infos])
        lost = np.array([info.get("final_lost", False) for info in infos])
        yield tuple(map(torch.from_numpy, (obs, reward, done, time_out, final, lost)))


def as_gymnasium(env, actions, seed=3):
    wrapped = pql.wrap.gymnasium(env)
    assert wrapped.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    yield torch.from_numpy(wrapped.reset(seed=seed)[0])
    for action in actions:
        obs, reward, terminated, truncated, infos = wrapped.step(action.numpy())
        done, final, lost = terminated | truncated, obs.copy(), np.zeros(len(obs), bool)
        assert ("final_obs" in infos) == done.any()
        if done.any():
            assert (infos["_final_obs"] == done).all()
            assert [row is None for row in infos["final_obs"]] == (~done).tolist()
            final[done] = np.stack(list(infos["final_obs"][done]))
            lost = infos["final_info"].get("final_lost", lost)
        yield tuple(map(torch.from_numpy, (obs, reward.astype(np.float32), done, truncated, final, lost)))


SAYS = {"rsl_rl": as_rsl_rl, "sb3": as_sb3, "gymnasium": as_gymnasium}
everywhere = pytest.mark.parametrize("library", SAYS)


def draws(count, size, scale=1.0):
    gen = torch.Generator().manual_seed(0)
    return [(torch.rand(N, size, generator=gen) * 2 - 1) * scale for _ in range(count)]


ENVS = {
    "pendulum": (lambda: pql.make_env("pendulum", num_envs=N, max_episode_steps=7), 1),
    "staggered": (lambda: BallBalance(N, stagger=True, max_episode_steps=9), 3),
    "counter": (lambda: Counter(N), 2),
    "lost": (lambda: Counter(N, final_obs="never"), 2),
    "restarts": (lambda: Counter(N, restart_every=2), 2),
}


@everywhere
@pytest.mark.parametrize("name", ENVS)
def test_same_state_and_action_give_the_same_row_and_the_true_final_observation(name, library):
    make, size = ENVS[name]
    raw, actions = make(), draws(40, size)
    obs = raw.reset(3)["policy"]
    said = SAYS[library](make(), actions)
    assert torch.equal(next(said), obs)
    ends = lost_rows = 0
    for action, (new, reward, done, time_out, final, lost) in zip(actions, said, strict=True):
        step = raw.step(action)
        assert torch.equal(new, step.obs["policy"])
        assert torch.equal(reward, step.reward)
        assert torch.equal(done, step.first)  # same-step: all that begins an episode ended one
        assert torch.equal(time_out, step.first & ~step.terminated)
        assert torch.equal(lost, step.first & ~step.final_ok)
        known, gone = done & ~lost, lost
        assert torch.equal(final[known], step.final_obs["policy"][known])
        assert torch.equal(final[gone], obs[gone])  # the observation acted in stands in
        obs, ends, lost_rows = new, ends + int(known.sum()), lost_rows + int(gone.sum())
    assert (lost_rows > 5) == (name in ("lost", "restarts"))
    assert (ends > 5) == (name != "lost")


@pytest.mark.parametrize("library", ["rsl_rl", "sb3"])
@pytest.mark.parametrize("kwargs", [{}, {"final_obs": "never"}, {"restart_every": 3}])
def test_next_step_autoreset_tells_the_same_story_without_filler_rows(kwargs, library):
    actions = draws(60, 2)
    one, other = (
        list(SAYS[library](Counter(N, autoreset=mode, **kwargs), actions)) for mode in ("same_step", "next_step")
    )
    assert torch.equal(one[0], other[0])
    for a, b in zip(one[1:], other[1:], strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


@everywhere
def test_actions_are_clamped_copies(library):
    wild = draws(20, 1, scale=3.0)
    kept = [a.clone() for a in wild]
    make = ENVS["pendulum"][0]
    one, other = (list(SAYS[library](make(), a)) for a in (wild, [a.clamp(-1, 1) for a in wild]))
    assert all(torch.equal(x, y) for a, b in zip(one[1:], other[1:], strict=True) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(wild, kept, strict=True))


@everywhere
def test_what_was_returned_is_not_rewritten(library):
    said = SAYS[library](Counter(N), draws(9, 2))
    rows = [next(said), next(said)]
    copies = [rows[0].clone(), *(t.clone() for t in rows[1])]
    list(said)
    assert all(torch.equal(a, b) for a, b in zip([rows[0], *rows[1]], copies, strict=True))


# -- refusals ------------------------------------------------------------------------------------------------------


class Fixed:
    """An environment that cannot restart single environments."""

    def __init__(self, **change):
        self._env = Counter(2, autoreset="next_step")
        self.spec = replace(self._env.spec, **change)
        self.reset, self.step, self.close = self._env.reset, self._env.step, self._env.close


def lives():
    env = Counter(2, autoreset="next_step")
    env.spec.info["lost_life"] = True
    return env


REFUSED = [
    ("rsl_rl", lambda: Fixed(), r"^env.spec.autoreset=next_step: expected same_step"),
    ("sb3", lambda: Fixed(), r"^env.spec.autoreset=next_step: expected same_step"),
    ("sb3", lives, r"^env.spec.autoreset=next_step"),
    ("gymnasium", lives, r"^env.spec.info\[lost_life\]"),
    ("gymnasium", lambda: Counter(2, autoreset="next_step", restart_every=3), r"^env.spec.info\[restarts\]"),
    ("rsl_rl", lambda: Groups(2), r"^env.spec.action=Discrete"),
]


@pytest.mark.parametrize(("library", "make", "message"), REFUSED)
def test_what_cannot_be_translated_is_refused(library, make, message):
    if library != "gymnasium":
        pytest.importorskip({"sb3": "stable_baselines3"}.get(library, library))
    with pytest.raises(ConfigError, match=message):
        getattr(pql.wrap, library)(make())


def test_resets_that_cannot_be_done_are_refused():
    env = pql.wrap.gymnasium(Counter(2))
    for options in ({"mass": 1}, {"reset_mask": np.ones(3, bool)}, {"reset_mask": np.ones(2)}):
        with pytest.raises(ConfigError, match=r"^options=.*only reset_mask, an array of 2 bool"):
            env.reset(options=options)
    mask = {"reset_mask": np.ones(2, bool)}
    with pytest.raises(ConfigError, match=r"^options\.reset_mask"):
        env.reset(seed=1, options=mask)
    with pytest.raises(ConfigError, match=r"^options\.reset_mask"):
        pql.wrap.gymnasium(Fixed()).reset(options=mask)
    pytest.importorskip("rsl_rl")
    fixed = pql.wrap.rsl_rl(Fixed(autoreset="same_step", action=Box(2)))
    with pytest.raises(ConfigError, match=r"^episode_length_buf.*init_at_random_ep_len=False"):
        fixed.episode_length_buf = torch.zeros(2)


@pytest.mark.parametrize(
    ("library", "module", "package"),
    [
        ("rsl_rl", "rsl_rl.env", "rsl-rl-lib"),
        ("sb3", "stable_baselines3.common.vec_env", "stable-baselines3"),
        ("gymnasium", "gymnasium", "gymnasium"),
    ],
)
def test_a_missing_library_is_one_line_with_the_command(library, module, package, monkeypatch):
    for name in [m for m in sys.modules if m.startswith("pql.wrap.to_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    extra = "gymnasium" if library == "gymnasium" else "peers"
    with pytest.raises(ConfigError, match=rf"^pql\.wrap\.{library}={package}: .*pip install 'pql-rl\[{extra}\]'$"):
        getattr(pql.wrap, library)(Counter(2))


# -- restarting single environments --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: LQR(4), lambda: Counter(4), lambda: GymnasiumVec(4, id="PqlClock-v0")])
def test_reset_where_restarts_only_the_masked(make):
    env = make()
    env.reset(0)
    action = torch.ones(4, env.spec.action.size)
    before = env.step(action).obs["policy"]
    mask = torch.tensor([True, False, False, True])
    same = env.reset_where(torch.zeros(4, dtype=torch.bool))["policy"]
    assert torch.equal(same, before)
    after = env.reset_where(mask)["policy"]
    assert torch.equal(after[~mask], before[~mask])
    assert (after[mask] != before[mask]).any(1).all()
    limits = [int(env.step(action).truncated.logical_or(torch.zeros(4, dtype=torch.bool)).sum()) for _ in range(50)]
    if isinstance(env, LQR):  # the clock of the masked starts again: they end one step later
        assert limits[48:] == [2, 2]


# -- the documentation ---------------------------------------------------------------------------------------------

SMALLER = {  # the examples as printed, except for their size
    "rsl_rl": [("num_envs=256", "num_envs=8"), ("learn(100,", "learn(2,")],
    "sb3": [("num_envs=64", "num_envs=8"), ("500_000", "1024"), ("verbose=1", "verbose=0")],
    "gymnasium": [("range(20)", "range(2)"), ("num_envs=64)", "num_envs=64, max_episode_steps=20)")],
}


@everywhere
def test_the_documented_examples_run(library, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mujoco")
    pytest.importorskip({"sb3": "stable_baselines3"}.get(library, library))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/wrappers.md").read_text(), re.S)
    (code,) = [b for b in blocks if f"pql.wrap.{library}(" in b]
    assert len(code.strip().splitlines()) <= 16
    for old, new in SMALLER[library]:
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    exec(code, names)
    if library == "rsl_rl":
        names["runner"].logger.writer.close()  # its thread would continue writing during the next test
    left = {"rsl_rl": "runs/rsl_rl/model_1.pt", "sb3": "halfcheetah_statistics.pkl", "gymnasium": "."}[library]
    assert (tmp_path / left).exists()
