"""Demonstrations: exact shares, a ring that nothing overwrites, resume, refusals."""

import pytest
import torch
from conftest import bits, differences, go_on, start, ticks
from safetensors.torch import load_file, save_file

from pql.cli.main import main
from pql.config.compose import compose
from pql.errors import ConfigError

M, MARK = 60, 1234.0


@pytest.fixture
def demos(tmp_path):
    """M transitions of pendulum in three episodes, whose rewards are MARK + their number."""
    obs = torch.randn(M + 1, 3, generator=torch.Generator().manual_seed(5))
    rows = torch.arange(M)
    columns = {"obs.policy": obs[:-1], "next_obs.policy": obs[1:].clone(), "action": torch.zeros(M, 1)}
    ends = {"terminated": rows % 40 == 39, "truncated": rows % 20 == 19}
    save_file({**columns, **ends, "reward": MARK + rows.float()}, tmp_path / "demos.safetensors")
    return tmp_path / "demos.safetensors"


def run(*words, algo="pql2"):
    small = ["task=pendulum", "num_envs=4", "device=cpu", "placement.executor=inline", f"algo={algo}", "seed=1"]
    return compose([*small, "algo.batch_size=20", "algo.n_step=1", "algo.normalize_reward=false", *words])


def batches(parts, name="v", count=3):
    learner = parts.learners[name]
    return list(learner.draw(count, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(("share", "rows"), [(0.5, 10), (0.25, 5), (0.0, 0), (1.0, 20)])
def test_every_batch_has_the_exact_share(demos, share, rows):
    parts = go_on(start(run(f"replay.demos={demos}", f"replay.demo_share={share}", "algo.reward_scale=1")), 2)
    scale = parts.learners["v"].draw.norm.reward_scale
    seen = set()
    for batch in batches(parts):
        assert batch.reward.shape == (20,)
        marks = (batch.reward / scale)[batch.reward / scale > MARK / 2]
        assert len(marks) <= rows  # without filler rows, which are masked
        assert int((batch.reward / scale > MARK / 2).sum() + (batch.mask[:rows] == 0).sum()) == rows
        seen |= {round(float(mark - MARK)) for mark in marks}
    assert len(seen) >= rows
    assert batches(parts, "p")[0].obs["policy"].shape == (20, 3)
    parts.close_envs()


def test_transitions_are_those_of_the_file(demos):
    parts = start(run(f"replay.demos={demos}", "replay.demo_share=1", "algo.normalize_obs=false"))
    obs = torch.randn(M + 1, 3, generator=torch.Generator().manual_seed(5))
    scale = parts.learners["v"].draw.norm.reward_scale
    batch = batches(parts, count=30)
    for one in batch:
        for i in one.mask.nonzero().flatten():
            row = round(float(one.reward[i] / scale - MARK))
            assert one.obs["policy"][i].equal(obs[row])
            assert one.discount[i] == (0.0 if row % 40 == 39 else torch.tensor(0.99))
            if one.discount[i]:
                assert one.next_obs["policy"][i].equal(obs[row + 1])
    rows = torch.cat([(one.reward / scale - MARK)[one.mask > 0] for one in batch]).round().unique()
    assert len(rows) == M
    parts.close_envs()


def test_nothing_overwrites_them_and_a_resumed_run_is_the_same(demos):
    words = [f"replay.demos={demos}", "replay.capacity=400", "algo.warmup_steps=8"]
    parts = start(run(*words))
    ring = parts.learners["v"].draw.demos.ring
    before = {k: v.clone() for k, v in ring.state_dict().items()}
    ticks(parts, 60)
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in parts.state_dict().items()}
    again = start(run(*words))
    again.load_state_dict(state, ticks=60)
    go_on(parts, 3)
    go_on(again, 3)
    assert differences(bits(parts), bits(again)) == []
    assert all(v.equal(before[k]) for k, v in ring.state_dict().items())
    parts.close_envs()
    again.close_envs()


def test_a_share_of_zero_changes_no_bit(demos):
    plain = ["algo.normalize_obs=false"]
    one = go_on(start(run(*plain)), 3)
    two = go_on(start(run(*plain, f"replay.demos={demos}", "replay.demo_share=0")), 3)
    assert differences(bits(one), bits(two)) == []
    one.close_envs()
    two.close_envs()


def test_the_share_changes_linearly_with_env_steps(demos):
    words = ["replay.demo_share=0.8", "replay.demo_share_end=0.2", "replay.demo_steps=1000"]
    parts = start(run(f"replay.demos={demos}", *words, "algo.warmup_steps=8", "algo.reward_scale=1"))
    draw = parts.learners["v"].draw
    for steps, rows in ((0, 16), (500, 10), (1000, 4), (5000, 4)):
        draw.cursor.env_steps.fill_(steps)
        for batch in batches(parts):
            counted = batch.reward > MARK * float(draw.norm.reward_scale) / 2
            assert int(counted.sum() + (batch.mask[:rows] == 0).sum()) == rows
            assert not counted[rows:].any()
    parts.close_envs()


@pytest.mark.parametrize("more", [[], ["replay.prefill={demos}"]])
@pytest.mark.parametrize("algo", ["pql2", "sac"])  # concurrent, lockstep
def test_env_steps_are_counted_from_the_beginning_of_the_run(demos, algo, more):
    words = ["replay.demo_share_end=0.2", "algo.warmup_steps=8", "task.kwargs.max_episode_steps=5", "algo.v_per_step=1"]
    words += [f"replay.demos={demos}", *(word.format(demos=demos) for word in more)]
    parts = start(run(*words, algo=algo))
    for learner in parts.learners.values():
        assert learner.draw.cursor.env_steps == 0
    horizon = parts.counts.horizon
    ticks(parts, 3)
    boundary = 2 + (algo == "sac")  # the last one that learners have seen
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in parts.state_dict().items()}
    for learner in parts.learners.values():
        assert learner.draw.cursor.env_steps == 4 * (8 + boundary * horizon)
    again = start(run(*words, algo=algo))
    again.load_counters(parts.counters())
    again.load_state_dict(state, ticks=3)
    for one in (parts, again):
        go_on(one, 1)
        assert all(v.draw.cursor.env_steps == 4 * (8 + (boundary + 1) * horizon) for v in one.learners.values())
    assert differences(bits(parts), bits(again)) == []
    parts.close_envs()
    again.close_envs()


def test_observation_statistics_count_them(demos):
    parts = start(run(f"replay.demos={demos}"))
    assert int(parts.collector.normalizer.moments["policy"].count) == M + 4 + 4 * parts.collector.steps
    parts.close_envs()


def test_a_moved_file_is_given_to_a_resumed_run(demos, tmp_path, capsys):
    small = ["task=pendulum", "num_envs=4", "device=cpu", "placement.executor=inline", "algo=pql2", "eval.final=false"]
    small += ["algo.batch_size=16", "algo.warmup_steps=4", "budget.seconds=null", f"run_dir={tmp_path / 'run'}"]
    assert main(["train", *small, f"replay.demos={demos}", "budget.env_steps=100"]) == 0
    moved = demos.rename(tmp_path / "moved.safetensors")
    assert main(["resume", str(tmp_path / "run"), "budget.env_steps=200", "--trust"]) == 2
    assert main(["resume", str(tmp_path / "run"), "budget.env_steps=200", "replay.demos=null"]) == 2
    assert main(["resume", str(tmp_path / "run"), "budget.env_steps=200", f"replay.demos={moved}"]) == 0
    other = load_file(moved)
    other["reward"][0] += 1
    save_file(other, moved)
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run"), "budget.env_steps=300", f"replay.demos={moved}"]) == 2
    assert f"replay.demos={moved}: expected the content that it had when the run began" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("algo", "words", "message"),
    [
        ("ppo", ["replay.demos=x"], "replay.demos=x: expected null: for off-policy actor-critics .* not algo=ppo"),
        ("pql2", ["replay.demo_share=0.2"], "replay.demo_share"),
        ("pql2", ["replay.demos=x", "replay.demo_share=1.5"], "replay.demo_share=1.5: expected"),
    ],
)
def test_refusals(algo, words, message):
    with pytest.raises(ConfigError, match=message):
        compose(["task=pendulum", f"algo={algo}", *words])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"replay\.demos=.*none\.safetensors"):
        start(run(f"replay.demos={tmp_path / 'none.safetensors'}"))
