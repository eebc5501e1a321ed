"""The rules for large batches: values, and agreement of presets and command line."""

import pytest

from pql.algos.value import target_updates, value_counts
from pql.config.compose import compose
from pql.config.large_batch import RECIPES, large_batch


@pytest.mark.parametrize(
    ("batch", "envs", "per_step", "period", "warmup"),
    [
        (32, 32, 8, 10_000, 1563),
        (64, 32, 4, 10_000, 1563),
        (128, 32, 2, 10_000, 1563),
        (256, 32, 1, 9_984, 1563),
        (512, 32, 0.5, 9_984, 1563),
        (1024, 32, 0.25, 9_984, 1563),
        (2048, 64, 0.25, 9_984, 782),
    ],
)
def test_the_rules_numbers(batch, envs, per_step, period, warmup):
    got = large_batch("c51", batch)
    assert (got["num_envs"], got["algo.v_per_step"], got["algo.target_period"]) == (envs, per_step, period)
    assert (got["algo.batch_size"], got["algo.warmup_steps"]) == (batch, warmup)
    assert got["algo.critic.eps"] == 0.01 / batch
    assert got["algo.v_per_step"] * batch / envs == 8  # training intensity
    assert period % (batch // 8) == 0  # a whole number of updates
    assert abs(period - 10_000) <= batch / 16
    rainbow = large_batch("rainbow", batch)
    assert rainbow["algo.critic.eps"] == 0.005 / batch
    assert abs(rainbow["algo.target_period"] - 8_000) <= batch / 16
    assert "algo.critic.eps" not in large_batch("dqn", batch)


def test_learning_rates_grow_with_the_root_of_the_batch_up_to_three_times():
    rates = [large_batch("dqn", b)["algo.critic.lr"] / 2.5e-4 for b in (32, 64, 128, 512, 2048)]
    assert rates == pytest.approx([1, 2**0.5, 2, 3, 3])


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
@pytest.mark.parametrize("algo", RECIPES)
def test_batch_32_is_what_the_presets_for_atari_say(algo, scale):
    words = ["device=cpu", f"scale={scale}", "task=atari", "task.game=pong", f"algo={algo}"]
    assert compose(words) == compose([*words, "batch=32"])


def test_a_batch_on_the_command_line_sets_all_of_them_and_words_win():
    config = compose(["device=cpu", "task=cartpole", "algo=c51", "batch=512", "algo.critic.lr=1e-3"])
    assert (config.num_envs, config.algo.batch_size, config.algo.v_per_step) == (32, 512, 0.5)
    assert (config.algo.target_period, config.algo.critic.eps, config.algo.critic.lr) == (9984, 0.01 / 512, 1e-3)
    target_updates(config, value_counts(config))  # whole
