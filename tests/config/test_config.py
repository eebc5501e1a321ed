"""Checks of the schema and the command line: every error names the setting and what is allowed, in one line."""

import dataclasses
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_files import mutate, words

from pql.algos.registry import family_of
from pql.algos.value import target_updates, value_counts
from pql.config import Config, DdpgConfig, SacConfig, from_dict, leaves, to_dict
from pql.config.algorithms import RECORDS
from pql.config.compose import compose, known_settings, parse_override, parse_word
from pql.config.fields import KEY, condition_text, like, settings
from pql.config.files import read_yaml
from pql.config.layers import GROUPS, MOVED, Presets
from pql.config.validate import resolve_device, validate
from pql.errors import ConfigError, PqlWarning, nearest
from pql.run.resume import resume_config
from pql.run.store.run_dir import create_run_dir


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(["device=cpu", *overrides])
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_budget_replaces_the_scales_own():
    assert compose(["device=cpu"]).budget.seconds == 240
    assert compose(["device=cpu", "budget.env_steps=5_000_000"]).budget.seconds is None
    both = compose(["device=cpu", "budget.env_steps=5_000_000", "budget.seconds=60"]).budget
    assert (both.seconds, both.env_steps) == (60, 5_000_000)


@pytest.mark.parametrize("name", ["smoothing", "smoothing_clip", "policy.tau", "policy.saturation_penalty"])
def test_sac_refuses_what_only_a_deterministic_policy_reads(name):
    word = f"algo.{name}=0.2"
    assert refusal("algo=sac", word) == f"{word}: expected no such setting: algo=sac does not read it; ddpg would"


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("algo.policy.tau=0.1", "algo.policy.target=true"),
        ("task.process.step_seconds=5.0", "task.process.python"),
        ("task.process.start_seconds=5.0", "task.process.python"),
    ],
)
def test_what_another_setting_switches_off_is_refused(word, wanted):
    assert refusal("algo=pql", word) == f"{word}: expected {wanted} with it; nothing else reads it"
    compose(["device=cpu", "algo=pql", "algo.policy.target=true", "task.process.python=/usr/bin/python3", word])


def test_pql_refuses_a_temperature():
    wanted = "algo.alpha=0.1: expected no such setting: algo=pql does not read it; sac, reppo would"
    assert refusal("algo=pql", "algo.alpha=0.1") == wanted


def test_the_policy_that_sees_the_ball_is_kept_from_saturating():
    def penalty(*words):
        return compose(["device=cpu", "algo=pql", *words]).algo.policy.saturation_penalty

    assert [penalty("task=ballbalance_pixels", f"algo={a}") for a in ("pql", "pql_d", "ddpg", "td3")] == 4 * [0.01]
    assert penalty("task=ballbalance_pixels", "algo.policy.saturation_penalty=0") == 0
    assert penalty("task=ballbalance") == 0
    compose(["device=cpu", "task=ballbalance_pixels", "algo=sac"])


def test_robots_that_follow_commands_have_presets_of_their_own():
    """Small penalties against saturation."""
    for task, penalty in (("go1_velocity", 0.01), ("anymal", 0.005)):
        config = compose(["device=cpu", "algo=pql", f"task={task}"])
        algo = config.algo
        assert (algo.policy.saturation_penalty, algo.n_step, algo.gamma) == (penalty, 3, 0.97)
        assert (algo.explore.high, algo.explore.repeat) == (0.3, True)
        compose(["device=cpu", f"task={task}", "algo=sac"])
    sizes = [
        (c.num_envs, c.algo.batch_size)
        for c in (compose(["device=cpu", "algo=pql", "task=anymal", f"scale={s}"]) for s in ("cpu", "gpu"))
    ]
    assert sizes == [(128, 512), (4096, 8192)]  # of the task's file, at only one scale


def test_a_schedule_of_learning_rates_ends_within_what_optimisers_count():
    """AdamW counts its steps in float32."""
    assert torch.tensor(2.0**24) + 1 == 2**24
    assert compose(["device=cpu", "algo=flashsac", f"algo.lr_updates={2**24}"]).algo.lr_updates == 2**24
    assert "algo.lr_updates=16777217: expected" in refusal("algo=flashsac", f"algo.lr_updates={2**24 + 1}")
    why = refusal("algo=flashsac", f"algo.lr_updates={2**23 + 1}", "algo.p_per_v=2")
    assert "algo.lr_updates=8388609: expected at most 8388608 with algo.p_per_v=2" in why


def test_a_task_may_have_sizes_of_its_own_at_a_scale():
    for scale, sizes in (("cpu", (128, 512, 4)), ("gpu", (4096, 8192, 8))):
        config = compose(["device=cpu", "algo=pql", "task=anymal", f"scale={scale}"])
        assert (config.num_envs, config.algo.batch_size, config.algo.v_per_step) == sizes
        assert config.algo.critic.layer_norm


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_td3_is_as_published_at_every_scale(scale):
    algo = compose(["device=cpu", "algo=td3", f"scale={scale}"]).algo
    assert (algo.critic.tau, algo.policy.tau, algo.policy.target) == (0.005, 0.005, True)
    assert (algo.p_per_v, algo.critic.target_every) == (0.5, 2)
    assert (algo.n_step, algo.smoothing, algo.smoothing_clip, algo.policy.reduce) == (1, 0.2, 0.5, "first")
    assert (algo.explore.kind, algo.explore.low, algo.critic.ensemble) == ("fixed", 0.1, 2)


@pytest.mark.parametrize("algo", ["ppo", "dqn", "r2d2", "pqn"])
def test_a_target_that_an_algorithm_has_not_is_not_delayed(algo):
    task = "task=hopper" if algo == "ppo" else "task=cartpole"
    assert f"algo={algo} does not read it" in refusal(f"algo={algo}", task, "algo.critic.target_every=2")


def test_the_categorical_support_holds_good_returns_of_the_mujoco_tasks():
    """A mean reward of 10 a step (HalfCheetah near 10,000) must stay inside the support."""
    config = compose(["device=cpu", "algo=pql_d", "task=halfcheetah"])
    scale = config.task.reward_scale * config.algo.reward_scale
    assert 10 * scale / (1 - config.algo.gamma) <= config.algo.critic.v_max + 1e-6


# -- rejected settings and their messages ---------------------------------------------------------------------------

MALFORMED = "expected a value such as 3, 0.5, true, null, [64,64], or text in quotes"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        # unknown names, with the nearest known one
        ("algo=pqll", "algo=pqll: expected one of a2c, a3c, apex, appo, appo_replicas, btr, c51, "),
        ("algo=pqll", "td3, xqc (did you mean pql?)"),
        ("task=halfchetah", "(did you mean halfcheetah?)"),
        ("algo=SAC", "(did you mean sac?)"),
        ("algo.lr=1", "algo.lr=1: expected a known setting (did you mean algo.critic.lr or algo.policy.lr?)"),
        ("algo.buffer_size=1", "a known setting (did you mean replay.capacity?)"),
        ("total_steps=1", "a known setting (did you mean budget.env_steps?)"),
        ("logger=tensorbord", "expected one of none, swanlab, tensorboard, trackio, wandb (did you mean tensorboard?)"),
        ("scale=huge", "scale=huge: expected one of cpu, gpu, samples"),
        ("algo.gama=0.9", "algo.gama=0.9: expected a known setting (did you mean algo.gamma?)"),
        ("gamma=0.9", "gamma=0.9: expected a known setting (did you mean algo.gamma?)"),
        ("algo.critic.hiden=[64]", "expected a known setting (did you mean algo.critic.hidden?)"),
        ("buget.seconds=3", "buget.seconds=3: expected a known setting (did you mean budget.seconds?)"),
        ("algo.critic=3", "algo.critic=3: expected a known setting"),
        ("+foo=1", "foo=1: expected a known setting"),
        ("algo.explore.kind=fixd", "expected one of mixed, fixed, redrawn, none, scaled (did you mean fixed?)"),
        # wrong types
        ("num_envs=abc", "num_envs=abc: expected a whole number"),
        ("num_envs=1.5", "num_envs=1.5: expected a whole number"),
        ("num_envs=true", "num_envs=true: expected a whole number"),
        ("num_envs=1e400", "num_envs=inf: expected a whole number"),
        ("seed=null", "seed=null: expected a whole number"),
        ("algo.gamma=high", "algo.gamma=high: expected a number"),
        ("algo.critic.hidden=64", "algo.critic.hidden=64: expected a list of whole numbers such as [128,128]"),
        ("algo.critic.hidden=[64,a]", "algo.critic.hidden=[64, 'a']: expected a list of whole numbers"),
        ("algo.critic.atoms=many", "algo.critic.atoms=many: expected a whole number or null"),
        ("algo.normalize_obs=1", "algo.normalize_obs=1: expected true or false"),
        ("task.kwargs.=1", "expected a known setting"),
        # out of range
        ("seed=-1", "seed=-1: expected a number from 0 up to 4611686018427387904"),
        ("num_envs=0", "num_envs=0: expected a number from 1 up to 1000000"),
        ("algo.gamma=2", "algo.gamma=2.0: expected a number from 0 up to 1"),
        ("algo.critic.lr=0", "algo.critic.lr=0.0: expected a number above 0 up to 1"),
        ("algo.gamma=nan", "algo.gamma=nan: expected a finite number"),
        ("task.reward_scale=inf", "task.reward_scale=inf: expected a finite number"),
        ("algo.policy.hidden=[64,0]", "algo.policy.hidden=[64, 0]: expected a list of layer widths, each from 1 to"),
        ("algo.encoder.channels=[]", "algo.encoder.channels=[]: expected a list of layer widths"),
        ("algo.encoder.kind=natur", "expected one of small, squint, nature, resnet, hadamax (did you mean nature?)"),
        ("algo.policy.eps=0", "algo.policy.eps=0.0: expected a number above 0 up to 1"),
        ("graphs=maybe", "graphs=maybe: expected one of auto, on, off"),
        # devices
        ("device=cuda:7", "device=cuda:7: expected a device of this machine: auto, cpu"),
        ("device=gpu", "device=gpu: expected a device of this machine: auto, cpu"),
        ("placement.v_learner=cuda:7", "placement.v_learner=cuda:7: expected a device of this machine: auto, cpu"),
        # settings that must be consistent
        ("replay.capacity=100", ": expected at most replay.capacity=100"),
        ("algo.critic.v_min=20", "algo.critic.v_min=20.0: expected below algo.critic.v_max=10"),
        ("algo.explore.kind=scaled", "another kind with algo=pql: its policy has no noise of its own to scale"),
        ("algo.critic.subset=3", "algo.critic.subset=3: expected at most algo.critic.ensemble=2"),
        ("budget.env_steps=9600", "budget.env_steps=9600: expected more than the warm-up's 9600"),
        ("budget.seconds=null", "budget=null: expected at least one of budget.seconds, budget.env_steps"),
        # malformed
        ("seed", "override=seed: expected the form key=value"),
        ("~algo", "override=~algo: expected the form key=value"),
        ("=3", "override==3: expected the form key=value"),
        ("", "override=: expected the form key=value"),
        ("seed=", "seed=: expected a value (null for none)"),
        ("run_dir=", "run_dir=: expected a value (null for none)"),
        ("seed==3", f"seed==3: {MALFORMED}"),
        ("algo.critic.hidden=[64,", f"algo.critic.hidden=[64,: {MALFORMED}"),
        ("seed=${x", f"seed=${{x: {MALFORMED}"),
        ("seed=1,2", "seed=1,2: expected a single value"),
        ("seed=range(1,3)", "seed=range(1,3): expected a single value"),
        ("run_dir=${nowhere}", "run_dir=${nowhere}: expected a value (Interpolation key 'nowhere' not found)"),
        ("task=env", "task=env: expected task.name=NAME or task.name=module:Class with it"),
        ("task=points:Points", "(did you mean task=env task.name=points:Points?)"),
    ],
)
def test_a_wrong_word_is_named_with_what_is_allowed(word, message):
    assert message in refusal("algo=pql", word)


@pytest.mark.parametrize("kind", ["mixed", "redrawn", "scaled"])
def test_the_range_of_noise_is_in_order(kind):
    text = refusal("algo=pql2" if kind == "scaled" else "algo=pql", f"algo.explore.kind={kind}", "algo.explore.low=5")
    assert text.startswith("algo.explore.low=5.0: expected at most algo.explore.high=")


def test_a_target_return_needs_evaluations():
    text = refusal("budget.target_return=5", "eval.every_seconds=null")
    assert text == "budget.target_return=5.0: expected evaluations: eval.every_seconds is null"


def test_multi_line_messages_become_one_line():
    assert str(ConfigError("a", "1\n2", "x,\n y")) == "a=1 2: expected x, y"


def test_nearest_prefers_the_setting_that_ends_in_the_name():
    assert nearest("tau", ["tax", "algo.policy.tau"]) == " (did you mean algo.policy.tau?)"
    assert nearest("zzz", ["tax"]) == ""


# -- accepted settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run_dir=~/a b(1)=c,d", "~/a b(1)=c,d"),
        ("run_dir='quoted, text'", "quoted, text"),
        ("run_dir=5", "5"),
        ("run_dir=null", None),
    ],
)
def test_text_needs_no_quotes(word, value):
    assert compose(["device=cpu", word]).run_dir == value


def test_numbers_lists_and_keywords():
    config = compose(
        [
            "device=cpu",
            "num_envs=1e3",
            "algo.critic.hidden=[64,32]",
            "budget.env_steps=1e6",
            "task.kwargs.a={b: [1, 2]}",
            "+task.kwargs.c=yes",
            "algo.critic.grad_clip=null",
            "algo.gamma=1",
        ]
    )
    assert (config.num_envs, config.algo.critic.hidden, config.budget.env_steps) == (1000, [64, 32], 1_000_000)
    assert config.task.kwargs == {"a": {"b": [1, 2]}, "c": "yes"}
    assert config.algo.critic.grad_clip is None
    assert isinstance(config.algo.gamma, float)


def test_of_two_words_for_one_thing_the_later_wins():
    config = compose(["device=cpu", "algo=td3", "seed=1", "algo=pql_d", "seed=2"])
    assert (config.algo.name, config.algo.critic.atoms, config.seed) == ("pql_d", 51, 2)


def test_words_win_over_presets():
    assert compose(["device=cpu", "algo.critic.atoms=11", "algo=pql_d"]).algo.critic.atoms == 11


def test_the_scale_follows_the_device(monkeypatch):
    monkeypatch.setattr("pql.config.compose.resolve_device", lambda name, setting="device": "cuda")
    large, small = compose(["device=auto"]), compose(["device=auto", "scale=cpu"])
    assert (large.num_envs, large.algo.batch_size, large.algo.v_per_step) == (4096, 2048, 36.0)
    assert small.num_envs < 1000
    assert None not in (large.budget.seconds, small.budget.seconds)  # every scale ends by itself


def test_few_environments_with_many_updates_are_a_scale_of_pql2():
    few, cpu = (compose(["device=cpu", "algo=pql2", f"scale={scale}"]) for scale in ("samples", "cpu"))
    assert (few.num_envs, few.budget.env_steps, few.budget.seconds) == (32, 1_000_000, None)
    assert (few.algo.batch_size, few.algo.v_per_step) == (512, 8)
    assert [part.hidden for part in (few.algo.critic, few.algo.policy)] == [[256, 256]] * 2
    networks = {part: replace(getattr(few.algo, part), hidden=[128, 128]) for part in ("critic", "policy")}
    assert replace(few.algo, batch_size=256, v_per_step=2, **networks) == cpu.algo
    message = "scale=samples: expected one of cpu, gpu: algo=ppo has no settings for another"
    assert refusal("algo=ppo", "scale=samples") == message


ON_POLICY = ("a2c", "a3c", "appo", "appo_replicas", "impala", "ppo", "pqn", "reppo")


@pytest.mark.parametrize("algo", Presets().names("algo"))
def test_every_algorithm_composes_at_every_scale(algo):
    scales = [s for s in Presets().names("scale") if [*Presets().tuned([s], algo, s)]]
    assert scales == ["cpu", "gpu", *(["samples"] if algo == "pql2" else [])]
    for scale in scales:
        config = compose(["device=cpu", f"algo={algo}", f"scale={scale}"])
        assert config.algo.name == algo
        assert (config.algo.data == "rollout") == (algo in ON_POLICY)


@pytest.mark.parametrize("algo", Presets().names("algo"))
def test_every_algorithm_has_thousands_of_environments_at_the_scale_of_a_gpu(algo):
    """It learns within a second or two: a step of all takes milliseconds."""
    config = compose(["device=cpu", f"algo={algo}", "scale=gpu", "task.name=cartpole"])
    counts = family_of(config).counts(config)
    assert config.num_envs >= 1024
    assert config.algo.warmup_steps <= 100  # before the first tick
    assert counts.horizon + counts.ahead <= 128  # before the first update
    assert min(counts.updates.values()) >= 1
    assert config.budget.seconds is not None


@pytest.mark.parametrize(("task", "num_envs"), [("catch", 64), ("cartpole", 32), ("pong", 128), ("atari", 128)])
def test_tasks_with_sizes_of_their_own_keep_them_on_a_gpu(task, num_envs):
    """Presets of single tasks (``tuned/TASK``) win."""
    more = ["task.game=pong"] * (task == "atari")
    assert compose(["device=cpu", "algo=pqn", "scale=gpu", f"task={task}", *more]).num_envs == num_envs


@pytest.mark.parametrize("algo", MOVED)
def test_a_former_preset_is_refused_with_what_has_its_settings_now(algo):
    message = refusal(f"algo={algo}", "scale=gpu")
    assert message == f"algo={algo}: expected {MOVED[algo]}, whose settings for scale=gpu these are"
    words = MOVED[algo].split(" or ")[0].split()
    assert compose(["device=cpu", "scale=gpu", *words]).budget.seconds >= 3600


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
@pytest.mark.parametrize(("algo", "eps"), [("dqn", None), ("c51", 0.01), ("eps_rainbow", 0.005), ("rainbow", 0.005)])
def test_larger_batches_are_scaled_by_the_papers_rules(algo, eps, scale):
    """Stooke & Abbeel 2018: rows are used equally often, targets are equally old, Adam's epsilon falls."""
    words = ["device=cpu", f"scale={scale}", "task=atari", "task.game=pong"]
    small, large = (compose([*words, f"algo={name}"]) for name in (algo, f"{algo}_512"))
    one, two = small.algo, large.algo
    assert (one.batch_size, two.batch_size) == (32, 512)
    assert one.v_per_step * 32 == two.v_per_step * 512 == 8 * small.num_envs
    assert two.critic.lr == 3 * one.critic.lr
    assert eps is None or (one.critic.eps, two.critic.eps) == (eps / 32, eps / 512)
    assert abs(two.target_period - one.target_period) <= 32
    target_updates(large, value_counts(large))  # whole
    same = replace(two.critic, lr=one.critic.lr, eps=one.critic.eps)
    changed = {"batch_size": 32, "v_per_step": 8, "target_period": one.target_period, "critic": same}
    assert replace(large, algo=replace(two, name=algo, **changed)) == small


@pytest.mark.parametrize("algo", ON_POLICY)
def test_an_on_policy_algorithm_acts_randomly_no_longer_than_statistics_need(algo):
    """The off-policy warm-up fills a replay, which these have not."""
    for scale in ("cpu", "gpu"):
        config = compose(["device=cpu", f"algo={algo}", f"scale={scale}"])
        assert config.algo.warmup_steps == (0 if algo == "pqn" else 16)
    words = ["task=cartpole"] if algo == "pqn" else ["task=halfcheetah"]
    config = compose(["device=cpu", f"algo={algo}", *words, "budget.env_steps=20000"])
    assert config.algo.warmup_steps * config.num_envs <= 4096


def test_off_policy_algorithms_keep_the_random_steps_that_fill_their_replay():
    for algo in ("pql", "ddpg", "td3", "sac", "pql_d", "pql_sac"):
        for scale, steps in (("cpu", 300), ("gpu", 32)):
            assert compose(["device=cpu", f"algo={algo}", f"scale={scale}"]).algo.warmup_steps == steps


@pytest.mark.parametrize("task", [t for t in Presets().names("task") if t != "env"])
def test_every_task_composes(task):
    from pql.contract.registry import env_names
    from pql.envs import CHOOSES

    keyword, example = CHOOSES.get(task, ("", ""))
    field = keyword if keyword in ("id", "game") else f"kwargs.{keyword}"
    chosen = [f"task.{field}={example}"] if keyword else []
    assert compose(["device=cpu", f"task={task}", *chosen]).task.name in env_names()


def test_parse_word_reads_hydras_grammar():
    assert parse_word("a.b=[1,x]") == ("a.b", [1, "x"])
    assert parse_word("device=cuda:0", ("device",)) == ("device", "cuda:0")


# -- the schema itself ----------------------------------------------------------------------------------------------


def every_setting():
    """Of all built-in algorithms."""
    return [one for record in RECORDS.values() for one in settings(Config(algo=record()))]


def test_the_defaults_pass():
    budget = dataclasses.replace(Config().budget, seconds=1.0)
    assert validate(dataclasses.replace(Config(), budget=budget)).num_envs == 4096


def test_every_number_has_a_range_and_every_setting_a_comment():
    free = {"task.reward_scale", "budget.target_return", "algo.critic.v_min", "algo.critic.v_max"}
    free |= {"algo.target_entropy", "algo.reward_scale"}
    numeric = {name for name, kind in known_settings().items() if kind in (int, float, int | None, float | None)}
    assert {one.name for one in every_setting() if one.name in numeric and one.declaration.range is None} == free
    assert [one.name for one in every_setting() if not one.declaration.doc] == []


def test_every_condition_is_of_a_setting():
    found = [one for one in every_setting() if one.declaration.when]
    assert len(found) > 30
    for one in found:
        assert condition_text(one).split("=")[0].split(" ")[0] in known_settings(), one.name


def test_a_config_survives_its_dicts():
    config = compose(["device=cpu", "algo=pql_sac", "task.kwargs.x=1"])
    assert from_dict(to_dict(config)) == config


def older(family, **algo):
    """A configuration as it was when the settings of all algorithms stood side by side."""
    rollouts = {"horizon": 24, "minibatches": 3, "lstm": None, "optimizer": "adam"}
    groups = {
        "critic": {"hidden": [32], "lr": 1e-3, "ensemble": 2, "atoms": None, "tau": 0.02},
        "policy": {"hidden": [48], "lr": 2e-3, "target": False, "tau": 0.03, "reduce": "min"},
        "explore": {"kind": "fixed", "low": 0.1, "high": 0.8, "repeat": False},
        "sac": {"alpha": 0.5, "auto_alpha": False, "alpha_lr": 1e-3, "target_entropy": -2.0},
        "ppo": {**rollouts, "epochs": 7, "vtrace": True},
        "impala": {**rollouts, "horizon": 12, "reduce": "mean"},
        "vtrace": {"rho_bar": 2.0, "c_bar": 1.5, "pg_rho_bar": 1.0},
        "dqn": {"dueling": True, "target_period": 640, "epsilon": {"kind": "ladder"}, "priority": {"alpha": 0.6}},
        "r2d2": {"lstm": 16, "length": 8},
        "pqn": {"horizon": 48, "q_lambda": 0.8, "epsilon": {"kind": "fixed", "end": 0.2}},
        "central": {"order": "turns", "ticks": 2, "chunk": 64},
    }
    common = {"batch_size": 64, "n_step": 2, "v_per_step": 4.0, "p_per_v": 0.25, "replicas": 1, "policy_lag": 0}
    return {"algo": {"name": family, "family": family, "gamma": 0.9, **common, **groups, **algo}, "num_envs": 12}


OLDER = {
    "ddpg": {"policy.tau": 0.03, "critic.ensemble": 2, "explore.kind": "fixed", "batch_size": 64, "p_per_v": 0.25},
    "sac": {"alpha": 0.5, "auto_alpha": False, "target_entropy": -2.0, "explore.low": 0.1, "n_step": 2},
    "dqn": {"dueling": True, "target_period": 640, "epsilon.kind": "ladder", "priority.alpha": 0.6, "v_per_step": 4},
    "r2d2": {"lstm": 16, "length": 8, "dueling": True, "target_period": 640, "priority.alpha": 0.6},
    "ppo": {"horizon": 24, "epochs": 7, "vtrace.enabled": True, "vtrace.c_bar": 1.5, "central.order": "turns"},
    "impala": {"horizon": 12, "reduce": "mean", "vtrace.rho_bar": 2.0, "policy.hidden": [48]},
    "pqn": {"horizon": 48, "q_lambda": 0.8, "epsilon.end": 0.2, "critic.hidden": [32]},
}


@pytest.mark.parametrize("family", OLDER)  # other families are newer
@pytest.mark.fault(15)
def test_an_older_config_gives_the_algorithm_its_own_settings(family):
    config = from_dict(older(family))
    assert type(config.algo) is RECORDS[family]
    assert (config.num_envs, config.algo.gamma) == (12, 0.9)
    values = dict(leaves(config, ""))
    assert {k: values[f"algo.{k}"] for k in OLDER[family]} == OLDER[family]
    assert from_dict(to_dict(config)) == config


@pytest.mark.fault(15)
def test_a_published_run_of_an_older_release_loads():
    file = Path(__file__).parents[2] / "docs" / "results" / "pong" / "config.yaml"
    algo = from_dict(read_yaml(file)).algo
    assert (algo.horizon, algo.minibatches, algo.epochs, algo.clip) == (128, 8, 4, 0.1)
    assert (algo.vtrace.enabled, algo.encoder.channels, algo.anneal_steps) == (False, [16, 32], 5_000_000)


def test_a_damaged_older_config_is_refused_or_read():
    rng, refused = random.Random(0), 0
    for n in range(400):
        data = older([*RECORDS][n % len(RECORDS)])
        mutate(data, rng)
        try:
            from_dict(data)
        except ConfigError:
            refused += 1
    assert 40 < refused < 360


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algo": {"gama": 1}}, "algo.gama=1: expected a known setting (did you mean gamma?)"),
        ({"algo": 3}, "algo=3: expected a group of settings"),
        ({"algo": {"critic": {"hidden": "64"}}}, "algo.critic.hidden=64: expected a list of whole numbers"),
    ],
)
def test_a_damaged_saved_config_is_refused_by_name(change, message):
    with pytest.raises(ConfigError) as error:
        from_dict(change)
    assert message in str(error.value)


def test_auto_is_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert resolve_device("auto") == "cuda"
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(ConfigError, match=r"cuda:2: expected a device of this machine: auto, cpu, cuda:0, cuda:1"):
        resolve_device("cuda:2")


# -- resuming -------------------------------------------------------------------------------------------------------


def test_a_resumed_config_is_the_saved_one_with_another_budget(tmp_path):
    config = compose(words(tmp_path, "seed=9"))
    create_run_dir(tmp_path, config, [])
    resumed = resume_config(tmp_path, ["budget.env_steps=999", "logger=tensorboard", "checkpoint.keep=5"])
    assert resumed.budget.env_steps == 999
    assert (resumed.logger.kind, resumed.checkpoint.keep, resumed.seed) == ("tensorboard", 5, 9)
    assert resumed.algo == config.algo


MAY_CHANGE = (
    "budget.*, eval.*, logger.*, checkpoint.*, replay.save, replay.demos, algo.teacher, "
    "algo.gamma, algo.critic.lr, algo.critic.weight_decay, algo.critic.tau, algo.policy.lr, "
    "algo.policy.weight_decay, algo.policy.saturation_penalty, algo.smoothing, algo.smoothing_clip"
)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seed=3", f"seed=3: expected one of {MAY_CHANGE}: the rest stays as it was"),
        ("algo=td3", "algo=td3: expected one of budget.*"),
        ("buget.seconds=3", "(did you mean budget.seconds?)"),
        ("budget.seconds=-3", "budget.seconds=-3.0: expected a number above 0"),
        ("budget.seconds=long", "budget.seconds=long: expected a number or null"),
    ],
)
def test_what_a_resumed_run_may_not_change(tmp_path, word, message):
    create_run_dir(tmp_path, compose(words(tmp_path)), [])
    with pytest.raises(ConfigError) as error:
        resume_config(tmp_path, [word])
    assert message in str(error.value)


def test_a_resumed_run_uploads_where_that_is_typed_or_trusted(tmp_path):
    create_run_dir(tmp_path, compose(words(tmp_path, "logger=wandb", "logger.mode=online", "logger.project=x")), [])
    with pytest.warns(PqlWarning, match="wandb stays offline: .* logger.mode=online says so"):
        logger = resume_config(tmp_path, []).logger
    assert (logger.kind, logger.mode, logger.project) == ("wandb", "offline", "x")
    assert resume_config(tmp_path, ["logger.mode=online"]).logger.mode == "online"
    assert resume_config(tmp_path, [], trust=True).logger.mode == "online"


@pytest.mark.parametrize("text", [None, "a: [", "- 1", ""])
def test_resuming_where_no_run_is(tmp_path, text):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run=.*: expected a run directory, with a readable config.yaml"):
        resume_config(tmp_path, [])


def test_the_groups_are_those_with_presets():
    assert all(Presets().names(group) for group in GROUPS)


def test_the_family_follows_the_preset():
    assert refusal("algo.family=sac") == "algo.family=sac: expected a preset instead: algo=NAME chooses the family, too"


def test_another_simulator_has_nothing_of_the_default_tasks_preset():
    config = compose(["task.name=pendulum", "device=cpu"])
    assert (config.task.name, config.task.reward_scale) == ("pendulum", 1.0)
    assert compose(["device=cpu"]).task.reward_scale == 0.1


@pytest.mark.parametrize("words", [(), ("task=cartpole", "algo=dqn"), ("task=tmaze", "algo=r2d2")], ids=str)
def test_networks_of_the_user_have_no_bfloat16(words):
    message = refusal("algo.amp=true", "algo.critic.net=nets:Critic", *words)
    assert message.startswith("algo.amp=true: expected false with the custom network algo.critic.net=nets:Critic")


@pytest.mark.parametrize("algo", ["dqn", "r2d2"])
def test_learning_rates_fall_with_adam_alone(algo):
    message = refusal("task=cartpole", f"algo={algo}", "algo.lr_schedule=linear", "algo.optimizer=rmsprop")
    assert message == "algo.lr_schedule=linear: expected constant, or algo.optimizer=adam with it"


def test_weights_of_fixed_norm_have_no_small_head():
    message = refusal("algo.critic.unit_weights=all", "algo.critic.head=zero")
    assert message.startswith("algo.critic.head=zero: expected algo.critic.unit_weights=none with it"), message


def test_residual_blocks_have_one_width():
    message = refusal("algo.policy.trunk=residual", "algo.policy.hidden=[64,32]")
    assert message.startswith("algo.policy.hidden=[64, 32]: expected one width for all residual blocks")


@pytest.mark.parametrize(
    ("scale", "num_envs", "updates", "batch", "warmup", "alpha", "width", "amp"),
    [("cpu", 32, 2, 256, 100, 0.1, 128, False), ("gpu", 4096, 36, 2048, 8, 0.01, 256, True)],
)
def test_pql2_is_the_default_at_both_scales(scale, num_envs, updates, batch, warmup, alpha, width, amp):
    config = compose(["device=cpu", f"scale={scale}"])
    algo = config.algo
    assert (algo.name, config.num_envs) == ("pql2", num_envs)
    assert (algo.v_per_step, algo.batch_size, algo.warmup_steps, algo.alpha) == (updates, batch, warmup, alpha)
    assert (algo.critic.hidden, algo.policy.hidden, algo.amp) == ([width, width], [width, width], amp)
    assert compose(["device=cpu", f"scale={scale}", "algo=sac"]).algo.name == "sac"
    assert compose(["device=cpu"]).algo.name == "pql2"


WORDS = "0 1 -1 -0 007 1_000 +5 true false null True NULL nan inf a _b a1 1a a.b truex nullable infx on yes"


@pytest.mark.parametrize("text", WORDS.split())
def test_plain_values_are_read_as_by_the_grammar(text):
    (_, read), meant = parse_word(f"k={text}"), parse_override("k", text).value()
    assert type(read) is type(meant)
    assert repr(read) == repr(meant)


def test_groups_of_settings_have_few_ancestors_and_share_declarations():
    kinds = {type(one.record) for record in RECORDS.values() for one in settings(record()) if "." in one.name}
    assert max(len(kind.__mro__) - 2 for kind in kinds) <= 3
    again = like(SacConfig, "alpha", 2.0, doc="Another.")
    declared = next(one.declaration for one in settings(SacConfig()) if one.name == "alpha")
    assert (again.default, again.metadata[KEY]) == (2.0, dataclasses.replace(declared, doc="Another."))
    assert like(SacConfig, "alpha").default == SacConfig().alpha


def test_a_record_of_another_family_is_refused():
    with pytest.raises(TypeError, match="algo=pql has DdpgConfig, not SacConfig"):
        family_of(Config(algo=DdpgConfig(name="pql", family="sac")))
