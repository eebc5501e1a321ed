"""Random network distillation: the bonus by hand, its decline, resume, and a corridor that noise does not cross."""

import pytest
import torch
from conftest import bits, differences, go_on, start, ticks

from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.errors import ConfigError
from pql.types import Step

SMALL = ["num_envs=8", "device=cpu", "placement.executor=inline", "seed=1"]
REPLAY = ["algo.batch_size=32", "algo.warmup_steps=4"]
ROLLOUT = ["algo.horizon=16", "algo.minibatches=2", "algo.epochs=2"]


def built(*words, algo="pql2"):
    return start(compose(["task=pendulum", *SMALL, f"algo={algo}", *(ROLLOUT if algo == "ppo" else REPLAY), *words]))


def novelty_of(parts):
    return next(learner.state.own()["rnd"] for learner in parts.learners.values() if "rnd" in learner.state.own())


def test_the_bonus_is_the_distance_of_both_networks_over_its_deviation():
    parts = built("algo.rnd.weight=0.5", "algo.rnd.outputs=4", "algo.rnd.hidden=[]")
    one, obs = novelty_of(parts), {"policy": torch.randn(200, 3, generator=torch.Generator().manual_seed(0))}
    (w, b), (v, c) = ([p.detach() for p in flat.parameters] for flat in (one.target, one.predictor))
    error = (obs["policy"] @ (w - v).T + b - c).norm(dim=1)
    torch.testing.assert_close(one.bonus(obs), 0.5 * error)  # before the first statistics
    mask = (torch.arange(200) < 150).float()
    metrics = one.train(obs, mask)
    torch.testing.assert_close(metrics["loss/rnd"], error[:150].square().mean())
    torch.testing.assert_close(one.errors.variance().float(), error[:150].var(correction=0))
    (v, c) = (p.detach() for p in one.predictor.parameters)
    error = (obs["policy"] @ (w - v).T + b - c).norm(dim=1) / one.errors.variance().sqrt().float()
    torch.testing.assert_close(one.bonus(obs), 0.5 * error)
    parts.close_envs()


def test_the_bonus_falls_on_repeated_states_alone_and_its_weight_as_set():
    parts = built("algo.rnd.weight=1", "algo.rnd.normalize=false", "algo.rnd.final=0.25", "algo.rnd.updates=400")
    one, gen = novelty_of(parts), torch.Generator().manual_seed(0)
    seen, other = ({"policy": torch.randn(64, 3, generator=gen) + shift} for shift in (0, 4))
    before = one.bonus(seen).mean(), one.bonus(other).mean()
    for _ in range(200):
        one.train(seen, torch.ones(64))
    weight = 1 - 0.75 * 200 / 400
    left = [float(one.bonus(obs).mean() / weight / old) for obs, old in zip((seen, other), before, strict=True)]
    assert left[0] < 0.1
    assert left[1] > 2 * left[0]
    for _ in range(300):
        one.train(seen, torch.ones(64))
    torch.testing.assert_close(one.bonus(other), 0.25 * one.error(other).detach())
    parts.close_envs()


@pytest.mark.parametrize("algo", ["pql2", "pql", "ppo"])
def test_a_run_logs_it_and_a_resumed_one_is_the_same(algo):
    parts, again, plain = (built(f"algo.rnd.weight={weight}", algo=algo) for weight in (1, 1, 0))
    ticks(parts, 3)
    again.load_state_dict(parts.state_dict(), ticks=3)
    for one in (parts, again):
        go_on(one, 3)
    go_on(plain, 6)
    assert differences(bits(parts), bits(again)) == []
    names = parts.drain()
    assert names["loss/rnd"] > 0
    assert ("reward/bonus" in names) == (algo != "ppo")
    assert "loss/rnd" not in plain.drain()
    assert not any("rnd" in name for name in bits(plain))
    assert differences(bits(plain), {k: v for k, v in bits(parts).items() if "rnd" not in k})
    for one in (parts, again, plain):
        one.close_envs()


def test_with_memory_bonuses_are_of_whole_sequences():
    parts = go_on(built("algo.rnd.weight=1", "algo.lstm=8", algo="ppo"), 2)
    assert int(novelty_of(parts).errors.count) == 2 * 2 * 8 * 16  # ticks, epochs, environments, steps
    assert parts.drain()["loss/rnd"] > 0
    parts.close_envs()


def test_unknown_groups_are_refused():
    with pytest.raises(ConfigError, match=r"algo\.rnd\.obs=polcy: expected groups of vectors .*policy .did you mean"):
        built("algo.rnd.weight=1", "algo.rnd.obs=[polcy]")
    with pytest.raises(ConfigError, match=r"algo\.rnd\.outputs"):
        compose(["task=pendulum", "algo=pql2", "algo.rnd.outputs=4"])


class Corridor:
    """A point on a line from 0 to 10, which moves by at most .4; a reward of 1 at 9 and beyond. 60 steps."""

    def __init__(self, num_envs, device):
        self.spec = EnvSpec("corridor", num_envs, {"policy": ObsSpec((1,))}, Box(1), device, 60, log=("success",))
        self.x = torch.zeros(num_envs)
        self.t = 0

    def reset(self, seed=None):
        self.x.zero_()
        self.t = 0
        return {"policy": self.x[:, None].clone()}

    def step(self, action):
        self.x = (self.x + 0.4 * action[:, 0].clamp(-1, 1)).clamp(0, 10)
        self.t += 1
        reward, final = (self.x >= 9).float(), {"policy": self.x[:, None].clone()}
        over = torch.full_like(reward, self.t == 60, dtype=torch.bool)
        if self.t == 60:
            self.reset()
        yes = torch.ones_like(over)
        obs = {"policy": self.x[:, None].clone()}
        return Step(obs, reward, ~yes, over, over, final, yes, yes, {"success": reward})

    def close(self):
        pass


def best_return(seed, weight):
    words = [f"task.name={__name__}:Corridor", "num_envs=16", "device=cpu", "placement.executor=inline", f"seed={seed}"]
    words += ["algo=pql2", "algo.warmup_steps=20", "algo.batch_size=128", f"algo.rnd.weight={weight}"]
    words += ["algo.critic.hidden=[32,32]", "algo.policy.hidden=[32,32]", "algo.alpha=0.01"]
    parts, best = start(compose(words)), 0.0
    for _ in range(10):  # 600 steps of each environment
        ticks(parts, 60)
        best = max(best, float(parts.drain()["train/return_mean"]))
    parts.schedule.executor.close()
    parts.close_envs()
    return best


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))])
def test_a_corridor_is_crossed_with_the_bonus_alone(seed):
    assert best_return(seed, 0.0) == 0.0
    assert best_return(seed, 0.3) > 20  # of at most 37
