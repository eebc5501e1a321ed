"""Atari: frames, lives and episode ends, seeds, groups, raw scores, and the two evaluation protocols."""

from collections import deque

import pytest
import torch
from conftest import start
from ppo_runs import config_of
from run_files import rows
from sampling import sample

pytest.importorskip("ale_py")

from pql import train
from pql.cli.main import main
from pql.config.compose import compose
from pql.config.layers import Presets
from pql.contract.env import Discrete, ObsSpec, find_factory, make_env
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.errors import ConfigError
from pql.run.environment import build_env
from pql.run.session import Session

MODES = pytest.mark.parametrize("autoreset", sample(["same_step", "next_step"], keep=["next_step"]))
CPU = torch.device("cpu")


@pytest.fixture
def atari():
    made = []

    def make(num_envs, **kwargs):
        made.append(make_env("atari", num_envs, **{"game": "breakout", "threads": 1, **kwargs}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def actions(env, steps, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(env.spec.action.n, (env.spec.num_envs,), generator=gen) for _ in range(steps)]


def history(env, steps, seed=0):
    """Every tensor of ``steps`` steps of the same random actions."""
    out = [env.reset(seed)["policy"]]
    for action in actions(env, steps):
        step = env.step(action)
        out += [step.obs["policy"], step.final_obs["policy"], torch.stack(step[1:5]), torch.stack(step[6:8])]
    return out


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_specification_needs_no_simulator():
    describe = find_factory("atari").describe
    spec = describe(8, "cpu", game="breakout", life_loss=True)
    assert spec.obs == {"policy": ObsSpec((4, 84, 84), torch.uint8, stack=4)}
    assert (spec.name, spec.action, spec.max_episode_steps, spec.log) == ("breakout", Discrete(4), 27_000, ("score",))
    assert spec.info["lost_life"]
    assert describe(8, "cpu", game="breakout", full_actions=True).action == Discrete(18)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_episode_steps": 60},
        pytest.param({"max_episode_steps": 60, "autoreset": "next_step"}, marks=pytest.mark.slow),
        pytest.param({"max_episode_steps": 100, "life_loss": True}, marks=pytest.mark.slow),
        {"max_episode_steps": 100, "life_loss": True, "autoreset": "next_step"},
        {"max_episode_steps": 40, "game": "pong", "noop_max": 0, "sticky": 0.25, "full_actions": True, "groups": 2},
    ],
)
def test_conforms(atari, kwargs, conforms):
    env, life_loss = atari(2, **kwargs), kwargs.get("life_loss", False)
    kwargs = {"game": "breakout", **kwargs}
    described = find_factory("atari").describe(2, "cpu", **kwargs)
    untested = conforms(env, 130 if life_loss else 90, described=described)
    assert untested <= {"filler_flags", "final_obs_kept", "action_range", "state_dict", "groups", "capturable"}


@MODES
def test_stacks_from_the_replay_are_those_acted_on(atari, autoreset):
    """5,000 steps, 2,500 rows of two games, which wrap a ring of 400: every row's stack, and its true successor's."""
    env = atari(2, autoreset=autoreset, life_loss=True, noop_max=30, max_episode_steps=300)
    n, rows_kept, seen = 2, 400, {"life": 0, "end": 0, "cut": 0, "filler": 0, "blank": 0}
    ring = Replay(ReplayLayout(env.spec.obs, None, n, rows_kept, 3, env.spec.autoreset == "same_step"), CPU)
    obs = env.reset(0)
    ring.begin(obs)
    acted: deque = deque(maxlen=rows_kept)
    for t, action in enumerate(actions(env, 2500)):
        step = env.step(action)
        ring.insert(action, step)
        acted.append((obs["policy"], step.final_obs["policy"], action))
        over, obs = step.first if autoreset == "same_step" else ~step.valid, step.obs
        seen["life"] += int((step.terminated & (env._groups[0].sim.lives > 0) & ~step.first).sum())
        seen["end"] += int(over.sum())
        seen["cut"] += int(step.truncated.sum())
        seen["filler"] += int((~step.valid).sum())
        if (t + 1) % 250 == 0:
            age = torch.arange(1, min(t + 1, rows_kept - ring.guard) + 1)
            age, column = age.repeat_interleave(n), torch.arange(n).repeat(len(age))
            head = ring.live.head[column]
            batch = ring.windows(ring.live, head - age, column, head, 1, 0.99)
            stacks, finals, taken = (torch.stack([row[i] for row in acted]) for i in range(3))
            assert torch.equal(batch.obs["policy"], stacks[-age, column])
            assert torch.equal(batch.action, taken[-age, column])
            used = (batch.mask * batch.discount) > 0
            assert used.sum() > 300
            assert torch.equal(batch.next_obs["policy"][used], finals[-age, column][used])
            seen["blank"] += int((batch.obs["policy"][:, 0].flatten(1) == 0).all(1).sum())
    assert seen["life"] > 50
    assert seen["end"] > 12
    assert seen["cut"] > 0
    assert seen["blank"] > 12
    assert (seen["filler"] > 0) == (autoreset == "next_step")


@MODES
def test_a_lost_life_terminates_and_the_game_goes_on(atari, autoreset):
    """Breakout has five lives; with them, all but flags is as without."""
    plain, lives = (atari(2, autoreset=autoreset, life_loss=on) for on in (False, True))
    plain.reset(3)
    lives.reset(3)
    lost = torch.zeros(2, dtype=torch.int64)
    games = []
    for action in actions(plain, 600):
        one, two = plain.step(action), lives.step(action)
        assert same(one.obs.values(), two.obs.values())
        assert same(one.final_obs.values(), two.final_obs.values())
        assert all(torch.equal(getattr(one, f), getattr(two, f)) for f in ("reward", "first", "valid", "truncated"))
        assert not (one.terminated & ~two.terminated).any()
        lost += two.terminated
        games += lost[one.terminated].tolist()
        lost[one.terminated] = 0
    assert len(games) >= 3
    assert set(games) == {5}


def test_only_no_ops_and_sticky_actions_are_random(atari):
    action = torch.arange(40) % 6

    def games(**kwargs):
        env = atari(2, game="pong", **kwargs)
        env.reset(0)
        return torch.stack([env.step(a.expand(2).contiguous()).obs["policy"] for a in action])

    bare = games(noop_max=0)
    assert torch.equal(bare[:, 0], bare[:, 1])
    for kwargs in ({"noop_max": 30}, {"noop_max": 0, "sticky": 0.25}):
        drawn = games(**kwargs)
        assert not torch.equal(drawn[:, 0], drawn[:, 1])


@pytest.mark.slow
def test_no_ops_are_drawn_up_to_the_largest_number(atari):
    def frames(noop_max):
        vec = atari(4, noop_max=noop_max)._groups[0].sim.vec
        vec.reset(seed=0)
        return {int(i) for _ in range(8) for i in vec.reset()[1]["episode_frame_number"]}

    (start,) = frames(0)
    assert frames(3) == {start, start + 1, start + 2, start + 3}


def test_fire_is_pressed_at_the_start_only_where_it_is_asked_for():
    """In Breakout the ball waits for it: until then nothing but the paddle moves."""

    def moves(fire_reset):
        env = make_env("atari", 1, game="breakout", noop_max=0, threads=1, fire_reset=fire_reset)
        env.reset(0)
        shown = torch.cat([env.step(torch.zeros(1, dtype=torch.int64)).obs["policy"][:, -1] for _ in range(20)])
        env.close()
        return not torch.equal(shown[10:], shown[9:-1])

    assert moves(True)
    assert not moves(False)


@MODES
def test_groups_change_no_bit_and_answer_in_turn(atari, autoreset):
    one, two = (atari(4, autoreset=autoreset, max_episode_steps=70, groups=g) for g in (1, 2))
    want = history(one, 90)
    assert same(want, history(two, 90))
    two.reset(0)
    ids = torch.arange(4).chunk(2)
    for t, action in enumerate(actions(one, 90)):
        for i in (0, 1):
            two.send(action[ids[i]], ids[i])
        for i in (0, 1):
            got, step = two.recv()
            assert torch.equal(got, ids[i])
            assert torch.equal(step.obs["policy"], want[1 + 4 * t][ids[i]])
            assert torch.equal(torch.stack(step[1:5]), want[3 + 4 * t][:, ids[i]])


def test_single_games_restart(atari):
    env = atari(4, autoreset="next_step", max_episode_steps=10, groups=2)
    env.reset(0)
    for action in actions(env, 10):
        step = env.step(action)
    assert step.truncated.all()
    mask = torch.tensor([True, False, False, False])
    obs = env.reset_where(mask)["policy"]
    blank = (obs[:, :3].flatten(1) == 0).all(1)
    assert torch.equal(blank, mask)
    assert torch.equal(obs[1:], step.obs["policy"][1:])
    step = env.step(actions(env, 1)[0])
    assert step.valid.tolist() == [True, False, False, False]  # no filler row is due where the game was restarted
    assert torch.equal(env.reset_where(~mask & False)["policy"], step.obs["policy"])


def test_rewards_are_raw_scores(atari):
    env = atari(4, game="ms_pacman")
    env.reset(0)
    steps = [env.step(action) for action in actions(env, 100)]
    reward = torch.stack([s.reward for s in steps])
    assert reward.dtype == torch.float32
    assert reward.max() >= 10
    assert torch.equal(reward, torch.stack([s.log["score"] for s in steps]))


def test_a_picture_is_the_newest_frame(atari):
    env = atari(4, groups=2)
    obs = env.reset(0)["policy"]
    picture = env.render(3)
    assert picture.shape == (420, 320, 3)
    assert torch.equal(torch.from_numpy(env.render(3, 84, 84)[:, :, 0]), obs[3, -1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"game": "brekout"}, "game=brekout: .*did you mean breakout?"),
        ({"game": "MsPacman"}, "did you mean ms_pacman?"),
        ({"sticky": 1.5}, "sticky=1.5: expected a probability"),
        ({"noop_max": -1}, "noop_max=-1: expected a whole number"),
        ({"life_loss": "maybe"}, "life_loss=maybe: expected true or false"),
        ({"autoreset": "never"}, "autoreset=never: expected next_step or same_step"),
        ({"groups": 3}, "groups=3: expected a divisor of num_envs=4"),
        ({"max_episode_steps": 0}, "max_episode_steps=0: expected a whole number"),
        ({"nop_max": 3}, "nop_max=3: .*did you mean noop_max?"),
    ],
)
def test_what_is_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make_env("atari", 4, **{"game": "pong", **kwargs})


# --- as a task ---


def test_the_games_are_listed(capsys):
    assert main(["list", "games"]) == 0
    games = capsys.readouterr().out.split()
    assert len(games) > 50
    assert {"pong", "breakout", "ms_pacman"} <= {*games}


def test_protocols_are_presets():
    chosen = (["task.game=pong"], ["atari=sticky", "task.game=qbert"])
    paper, sticky = (compose(["task=atari", "device=cpu", *more]) for more in chosen)
    assert paper.task.kwargs == {"noop_max": 30, "sticky": 0.0, "full_actions": False, "life_loss": True}
    assert sticky.task.kwargs == {"noop_max": 0, "sticky": 0.25, "full_actions": True, "life_loss": False}
    assert (paper.task.game, sticky.task.game) == ("pong", "qbert")
    assert paper.task.reward_clip == sticky.task.reward_clip == 1.0
    assert compose(["task=atari", "task.game=pong", "task.kwargs.life_loss=false"]).task.kwargs["life_loss"] is False
    assert compose(["device=cpu"]).task.reward_clip is None
    with pytest.raises(ConfigError, match="atari=paper: expected task=atari with it"):
        compose(["task=pendulum", "atari=paper"])
    with pytest.raises(ConfigError, match=r"atari=stiky: expected one of nature, paper, sticky \(did you mean"):
        compose(["task=atari", "atari=stiky"])


def test_what_has_settings_for_atari_has_them_for_task_pong_too():
    presets = Presets()
    algos = [a for a in presets.names("algo") if [*presets.tuned(["atari"], a, "cpu")]]
    assert {"dqn", "ppo", "a3c", "pqn", "rainbow"} <= {*algos}
    assert [a for a in algos if not [*presets.tuned(["pong", "atari"], a, "cpu")]] == []
    pong, papers = (compose(["device=cpu", "algo=c51", *t]) for t in (["task=pong"], ["task=atari", "task.game=pong"]))
    assert pong == papers


def test_an_unknown_game_is_refused_as_it_was_written(tmp_path):
    with pytest.raises(ConfigError, match=r"^task\.game=pnog: expected .*did you mean pong\?"):
        Session(compose(["task=atari", "task.game=pnog", "algo=ppo", "device=cpu", f"run_dir={tmp_path}"]))


def test_a_game_that_is_said_twice_is_refused():
    with pytest.raises(ConfigError, match=r"task\.kwargs\.game=pong: expected task\.game=breakout alone to say it"):
        build_env(compose(["task=atari", "task.game=breakout", "task.kwargs.game=pong", "device=cpu"]))


@pytest.mark.slow
def test_random_steps_draw_the_games_apart_as_the_seed_says():
    """Without no-ops all consoles begin alike; the actions of the warm-up are each one's own."""

    def begun(seed, steps):
        kwargs = {"game": "pong", "noop_max": 0, "threads": 1}
        encoder = {"kind": "nature", "channels": [2, 2, 2], "features": 4}
        task = {"name": "atari", "reward_clip": 1.0, "kwargs": kwargs}
        parts = start(
            config_of(
                {"task": task, "num_envs": 4, "algo": {"warmup_steps": steps, "encoder": encoder}} | {"seed": seed}
            )
        )
        parts.env.close()
        return parts.collector.obs["policy"]

    alike, apart = begun(1, 0), begun(1, 40)
    assert torch.equal(alike, alike[:1].expand_as(alike))
    assert len({row.numpy().tobytes() for row in apart}) == 4
    assert torch.equal(apart, begun(1, 40))
    assert not torch.equal(apart, begun(2, 40))


def test_threads_come_from_the_placement():
    config = compose(["task=atari", "task.game=pong", "device=cpu", "num_envs=2", "placement.threads.simulator=1"])
    env = build_env(config)
    assert env.spec.name == "pong"
    env.close()


def test_scores_of_whole_games_are_reported_where_lives_end_episodes_for_learning(tmp_path):
    """PPO on Breakout, rewards clipped: games last for 64 rows, lives about 25, in training and in evaluation."""
    run = train(
        "task=atari",
        "task.game=breakout",
        "algo=ppo",
        "scale=cpu",
        "device=cpu",
        "num_envs=2",
        "seed=1",
        "task.kwargs.max_episode_steps=64",
        "task.kwargs.threads=1",
        "algo.warmup_steps=2",
        "algo.horizon=16",
        "algo.minibatches=1",
        "algo.epochs=1",
        "algo.encoder.channels=[4,4,4]",
        "algo.encoder.features=16",
        "budget.seconds=null",
        "budget.env_steps=270",
        "eval.num_envs=2",
        "eval.every_seconds=null",
        "logger.every_seconds=1000",
        f"run_dir={tmp_path / 'run'}",
        quiet=True,
    )
    (row,) = (r for r in rows(tmp_path / "run") if "train/length_mean" in r)
    assert (row["train/length_mean"], row["train/episodes"]) == (64, 4)
    assert row["train/return_mean"] == row["episode/score"]
    assert run.length_mean == 64
