"""pql as an algorithm of rsl_rl's own runner: rows, bits, files, and the end of the program."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("rsl_rl")

from rsl_rl.runners import OnPolicyRunner

import pql
from pql.data.transitions import rows_of
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.lab import Runner, from_rsl_rl

WORDS = ("algo.warmup_steps=4", "replay.capacity=2048", "algo.batch_size=16", "algo.v_per_step=2", "algo.p_per_v=0.5")


class Spy(Counter):
    """Counter that keeps its transitions: (observation, action, step)."""

    def reset(self, seed=None):
        self.before, self.taken = super().reset(seed), []
        return self.before

    def step(self, action):
        step = super().step(action)
        self.taken.append((self.before, action.clone(), step))
        self.before = step.obs
        return step


def config(*words, **more):
    algorithm = {
        "class_name": "pql.lab:Learner",
        "algo": "sac",
        "settings": (*WORDS, *words),
        "gamma": 0.95,
        "lam": 0.9,
    }
    groups = {"actor": ["policy"], "critic": ["policy"]}
    return {"num_steps_per_env": 6, "save_interval": 2, "seed": 3, "obs_groups": groups, "algorithm": algorithm, **more}


def learned(where, env, *words, iterations=5, kind=OnPolicyRunner, **more):
    runner = kind(env, config(*words, **more), log_dir=None if where is None else str(where), device="cpu")
    runner.learn(iterations)
    return runner


@pytest.mark.parametrize("kind", [OnPolicyRunner, Runner])
def test_rows_of_the_replay_are_the_transitions(kind, tmp_path):
    env = Spy(4)
    runner = learned(tmp_path, pql.wrap.rsl_rl(env), kind=kind)
    stored = runner.alg.run.at_pause(lambda session: rows_of(session.parts.collector.replays[0]))
    runner.alg.run.close()
    assert len(env.taken) == 30
    for i in range(4):
        valid, at = stored["valid"][:, i], stored["valid"][:, i].nonzero().flatten()
        assert int(valid.sum()) == 30
        for field in ("reward", "terminated", "truncated"):
            assert torch.equal(stored[field][at, i], torch.stack([getattr(s, field)[i] for _, _, s in env.taken]))
        assert torch.allclose(stored["action"][at, i], torch.stack([a[i] for _, a, _ in env.taken]), atol=1e-6)
        assert torch.equal(stored["obs.policy"][at, i], torch.stack([o["policy"][i] for o, _, _ in env.taken]))
        # The true successor, also at the end of an episode.
        assert torch.equal(
            stored["obs.policy"][at + 1, i], torch.stack([s.final_obs["policy"][i] for *_, s in env.taken])
        )


@pytest.mark.parametrize("algo", ["sac", "pql", "ppo"])
def test_the_bits_are_those_of_train_on_the_same_environment(algo, tmp_path, monkeypatch, threads_left):
    words = {"ppo": ("algo.minibatches=2", "algo.warmup_steps=0")}.get(algo, WORDS)
    algorithm = {"class_name": "pql.lab:Learner", "algo": algo, "settings": words, "gamma": 0.95}
    monkeypatch.setenv("PQL_SETTINGS", f"run_dir={tmp_path / 'stack'}")
    runner = learned(None, pql.wrap.rsl_rl(Counter(4)), algorithm=algorithm)
    runner.alg.run.close()
    more = ["algo.horizon=6"] if algo == "ppo" else []
    own = [f"algo={algo}", "seed=3", "algo.gamma=0.95", *words, *more, "eval.every_seconds=null", "eval.final=false"]
    env = from_rsl_rl(pql.wrap.rsl_rl(Counter(4)))
    pql.train(*own, "budget.env_steps=120", f"run_dir={tmp_path / 'own'}", env=env, quiet=True)
    one, other = (pql.load_policy(tmp_path / name).state_dict() for name in ("stack", "own"))
    assert all(torch.equal(v, other[part][k]) for part in one for k, v in one[part].items())
    assert threads_left() == []


def test_the_runner_logs_and_writes_its_files(tmp_path, capsys):
    runner = learned(tmp_path, pql.wrap.rsl_rl(Counter(4)))
    shown = capsys.readouterr().out
    said = "pql: algo=sac, 4 environments, actions of 2 numbers (action_bound=1.0), final observations: extras"
    assert said in shown
    assert "pql: not used: algorithm.lam\n" in shown
    assert "Mean critic loss:" in shown
    assert "Pql/policy/entropy:" in shown
    assert sorted(p.name for p in tmp_path.glob("model_*")) == ["model_0.pt", "model_2.pt", "model_4.pt"]
    runner.alg.run.close()
    assert (tmp_path / "pql" / "summary.json").exists()


@pytest.mark.parametrize("kind", [OnPolicyRunner, Runner])
def test_a_model_plays_as_it_was_and_its_exports_agree(kind, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    env = pql.wrap.rsl_rl(pql.make_env("pendulum", num_envs=4), seed=1)
    runner = learned(tmp_path, env, "placement.matmul=exact", kind=kind)  # as ONNX Runtime computes
    saved = torch.load(tmp_path / "model_4.pt", weights_only=True)
    assert saved["iter"] == 4
    obs = env.get_observations()
    expected = runner.get_inference_policy()(obs)
    player = kind(env, config(), device="cpu")
    player.load(str(tmp_path / "model_4.pt"), load_cfg={"actor": True}, strict=True, map_location="cpu")
    policy = player.get_inference_policy(device="cpu")
    policy.reset(torch.ones(4))
    assert torch.equal(policy(obs), expected)
    assert player.alg.run is None  # no run directory, no thread
    player.export_policy_to_onnx(str(tmp_path / "exported"))
    session = onnxruntime.InferenceSession(str(tmp_path / "exported" / "policy.onnx"))
    assert [x.name for x in (*session.get_inputs(), *session.get_outputs())] == ["obs", "actions"]
    answers = [session.run(None, {"obs": row[None].numpy()})[0][0] for row in obs["policy"]]
    np.testing.assert_allclose(np.stack(answers), expected, atol=1e-6)
    player.export_policy_to_jit(str(tmp_path / "exported"))
    assert torch.allclose(
        torch.jit.load(tmp_path / "exported" / "policy.pt")(obs["policy"][:1]), expected[:1], atol=1e-6
    )
    runner.alg.run.close()


@pytest.mark.parametrize("kind", [OnPolicyRunner, Runner])
@pytest.mark.parametrize("replay", [True, False])
def test_it_continues_from_a_model(kind, replay, tmp_path):
    words = [f"checkpoint.replay={str(replay).lower()}"]
    first = learned(tmp_path / "one", pql.wrap.rsl_rl(Counter(4)), *words, kind=kind)
    weights = {k: v.clone() for k, v in first.alg.get_policy().state_dict().items()}
    first.alg.run.close()
    second = kind(pql.wrap.rsl_rl(Counter(4)), config(*words), log_dir=str(tmp_path / "two"), device="cpu")
    second.load(str(tmp_path / "one" / "model_4.pt"))
    assert second.current_learning_iteration == 4
    assert all(torch.equal(v, weights[k]) for k, v in second.alg.get_policy().state_dict().items())
    second.learn(2)
    assert second.alg.run.at_pause(lambda session: session.env_steps) == (120 if replay else 0) + 2 * 6 * 4
    second.alg.run.close()


def test_settings_are_checked_when_the_runner_is_made(monkeypatch):
    env = pql.wrap.rsl_rl(Counter(4))
    with pytest.raises(ConfigError, match=r"algo\.gama=0\.9: expected .*algo\.gamma"):
        OnPolicyRunner(env, config("algo.gama=0.9"), device="cpu")
    with pytest.raises(ConfigError, match=r"obs_groups=state: expected groups that the environment has: policy"):
        OnPolicyRunner(env, config(obs_groups={"actor": ["state"]}), device="cpu")
    with pytest.raises(ConfigError, match=r"final_obs=resets: expected auto: its configuration has no auto_reset"):
        OnPolicyRunner(env, config(algorithm={**config()["algorithm"], "final_obs": "resets"}), device="cpu")
    for words, message in (
        (
            ("algo.rnd.weight=1", "algo.rnd.obs=[polic]"),
            r"algo\.rnd\.obs=polic: expected groups of vectors of .*policy",
        ),
        (("replay.demos=none.safetensors",), r"replay\.demos=.*none\.safetensors: expected a safetensors file"),
        (("algo.symmetry.augment=half",), r"algo\.symmetry\.augment=half: expected off: .* declares no symmetry"),
    ):
        with pytest.raises(ConfigError, match=message):
            OnPolicyRunner(env, config(*words), device="cpu")
    monkeypatch.setenv("PQL_SETTINGS", "algo=td3 algo.gamma=0.8")
    text = {**config()["algorithm"], "settings": "algo.batch_size=48 algo.gamma=0.7"}
    runner = OnPolicyRunner(env, config(algorithm=text), device="cpu")
    assert runner.alg.config.algo.batch_size == 48
    assert (runner.alg.config.algo.name, runner.alg.config.algo.gamma, runner.alg.config.seed) == ("td3", 0.8, 3)
    with pytest.raises(ConfigError, match=r"checkpoint=actor_state_dict: expected a file that pql.lab:Learner saved"):
        runner.alg.load({"actor_state_dict": {}}, None)


def test_the_scripts_of_the_guide_run(tmp_path, monkeypatch):
    page = (Path(pql.__file__).parents[1] / "docs" / "guides" / "robot_stacks.md").read_text()
    one, other = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(one.replace("iterations=100", "iterations=2"), scope)
    assert scope["runner"].alg.config.algo.v_per_step == 4
    assert scope["policy"](scope["env"].get_observations()).shape == (16, 1)
    scope["runner"].alg.run.close()
    assert {"model_0.pt", "model_1.pt", "pql"} < {p.name for p in (tmp_path / "logs" / "pendulum").iterdir()}
    exec(other.replace("steps=410", "steps=205").replace("seconds=60", "env_steps=3_200"), scope)
    assert (tmp_path / "runs").exists()


PROGRAM = """
import sys, pql
sys.path[:0] = sys.argv[2:]
from rsl_rl.runners import OnPolicyRunner
from test_learner import config, learned
from pql.envs.toy import Counter
learned(sys.argv[1], pql.wrap.rsl_rl(Counter(4)))
"""


def test_the_program_ends_with_its_runner(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "pql" / "summary.json").exists()
