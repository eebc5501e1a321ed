"""Distillation: a linear teacher, a student with a history, images, resume, a run's policy as teacher, refusals."""

import types

import pytest
import torch
from conftest import bits, differences, go_on, start, ticks
from sampling import sample

import pql
from pql.cli.main import main
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.errors import ConfigError
from pql.run import build
from pql.run.policy import fresh_policy, snapshot
from pql.types import Step


class Mass:
    """A mass on a line, pushed by the action; ``policy`` is its position and velocity, ``place`` its position, ``past``
    the last 8 positions, ``picture`` its position as a bright column of an image. It begins at rest; 50 steps."""

    def __init__(self, num_envs, device):
        groups = {"policy": ObsSpec((2,)), "picture": ObsSpec((1, 16, 16), torch.uint8)}
        groups |= {"past": ObsSpec((8,), stack=8, fill="first"), "place": ObsSpec((1,))}
        self.spec = EnvSpec("mass", num_envs, groups, Box(1), device, 50)
        self.gen = torch.Generator()

    def reset(self, seed=None):
        if seed is not None:
            self.gen.manual_seed(seed)
        n = self.spec.num_envs
        self.x, self.v = torch.rand(n, generator=self.gen) * 4 - 2, torch.zeros(n)
        self.past, self.t = self.x[:, None].repeat(1, 8), 0
        return self.obs()

    def obs(self):
        picture = torch.zeros(len(self.x), 1, 16, 16, dtype=torch.uint8)
        picture[torch.arange(len(self.x)), :, :, ((self.x.clamp(-2, 2) + 2) * 3.75).long()] = 255
        state, place = torch.stack((self.x, self.v), 1), self.x[:, None].clone()
        return {"policy": state, "place": place, "past": self.past.clone(), "picture": picture}

    def step(self, action):
        self.v = 0.95 * self.v + 0.1 * action[:, 0]
        self.x = self.x + 0.1 * self.v
        self.past, self.t = torch.cat((self.past[:, 1:], self.x[:, None]), 1), self.t + 1
        final, over = self.obs(), torch.full((len(self.x),), self.t == 50)
        obs = self.reset() if self.t == 50 else final
        yes = torch.ones_like(over)
        return Step(obs, -self.x.abs(), ~yes, over, over, final, yes, yes, {})

    def state_dict(self):
        return {"x": self.x, "v": self.v, "past": self.past, "t": self.t, "gen": self.gen.get_state()}

    def load_state_dict(self, state):
        self.x, self.v, self.past, self.t = (state[k] for k in ("x", "v", "past", "t"))
        self.gen.set_state(state["gen"])

    def close(self):
        pass


def wanted(obs):
    x, v = obs["policy"].unbind(1)
    return torch.tanh(-1.5 * x - 2.0 * v)[:, None]


def teacher(groups=("policy",), action=1, obs=None, states=()):
    spec = EnvSpec("mass", 1, obs or {"policy": ObsSpec((2,))}, Box(action), torch.device("cpu"))
    facts = {"groups": groups, "spec": spec, "state_shapes": dict(states), "digest": lambda: "stub"}
    return types.SimpleNamespace(act=lambda o, s: (wanted(o), {}), **facts)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(build, "load_policy", lambda path, device: teacher())


def config(*words):
    small = [f"task.name={__name__}:Mass", "num_envs=16", "device=cpu", "placement.executor=inline", "seed=1"]
    return compose([*small, "algo=distill", "algo.teacher=there", "placement.matmul=exact", *words])


def errors(parts, count=512):
    """Root mean squared error of the student on states of its own rollouts."""
    draw = parts.learners["v"].draw
    batch = draw.replay.sample_obs(draw.cursor, count, torch.Generator().manual_seed(0))
    with torch.no_grad():
        action = parts.policy.module.mean_action(draw.norm(batch.obs))
    apart = (action - wanted(batch.obs)).square().mean(1)[batch.mask > 0]
    return float(apart.mean().sqrt())


def test_a_linear_teacher_is_recovered(stub):
    words = ["algo.policy.hidden=[]", "algo.normalize_obs=false", "algo.policy.lr=0.1"]
    parts = go_on(start(config(*words, "algo.lr_schedule=linear", "algo.lr_updates=2000", "algo.lr_final=0")), 1000)
    assert errors(parts) < 1e-3
    parts.close_envs()


@pytest.mark.parametrize(("groups", "bound", "count"), [("[past]", 0.05, 1500), ("[past,picture]", 0.05, 150)])
def test_a_student_with_a_history_recovers_the_velocity(stub, groups, bound, count):
    words = ["algo.policy.hidden=[64,64]", "algo.batch_size=128", "algo.encoder.features=8"]
    parts = start(config(f"algo.policy.obs={groups}", *words))
    before = errors(ticks(parts, 1))
    go_on(parts, count)
    assert before > 0.4
    assert errors(parts) < (bound if count > 1000 else 0.3 * before)
    parts.close_envs()


def test_a_student_without_velocity_does_not(stub):
    parts = go_on(start(config("algo.policy.obs=[picture]", "algo.batch_size=128")), 150)
    assert errors(parts) > 0.15
    parts.close_envs()


RECURRENT = ["algo.policy.obs=[place]", "algo.lstm=32", "algo.warmup_steps=32", "algo.policy.hidden=[64,64]"]


def acting_errors(parts):
    """Root mean squared error of the student while it acts, from the third step of its episodes on."""
    env, found = Mass(64, torch.device("cpu")), []
    policy = fresh_policy(parts.config, env.spec, "cpu")
    policy.load_state_dict(snapshot(parts))
    obs, state = env.reset(3), {k: torch.zeros(64, *shape) for k, shape in policy.state_shapes.items()}
    for _ in range(49):
        with torch.no_grad():
            action, state = policy.act({k: obs[k] for k in policy.groups}, state)
        found.append((action - wanted(obs)).square().mean())
        obs = env.step(action).obs
    return float(torch.stack(found[2:]).mean().sqrt())


@pytest.mark.parametrize("cell", sample(["lstm", "gru"], keep=["gru"]))
def test_a_student_with_a_memory_recovers_the_velocity(stub, cell):
    parts = start(config(*RECURRENT, f"algo.cell={cell}", "algo.lr_schedule=linear", "algo.lr_updates=1200"))
    before = acting_errors(ticks(parts, 1))
    go_on(parts, 600)
    assert before > 0.4
    assert acting_errors(parts) < 0.05
    parts.close_envs()


def test_a_lesson_of_sequences_has_the_teachers_actions(stub):
    parts = ticks(start(config(*RECURRENT, "algo.normalize_obs=false")), 40)
    (lesson,) = parts.learners["v"].draw(1, torch.Generator().manual_seed(3))
    rows, used = slice(8, 24), lesson.seq.mask.flatten() > 0
    state = lesson.seq.obs["policy"][rows].flatten(0, 1)
    assert used.sum() > 64
    torch.testing.assert_close(lesson.action[used], wanted({"policy": state})[used])
    parts.close_envs()


@pytest.mark.parametrize("words", [[], RECURRENT], ids=["no memory", "memory"])
def test_a_resumed_run_is_the_same(stub, words):
    before = 40 if words else 5
    parts, again = (start(config(*words)) for _ in range(2))
    go_on(parts, before)
    ticks(again, 1)
    again.load_state_dict(parts.state_dict(), ticks=before)
    for one in (parts, again):
        go_on(one, 5)
    assert differences(bits(parts), bits(again)) == []
    parts.close_envs()
    again.close_envs()


def test_the_loss_is_that_of_the_labels(stub):
    parts = ticks(start(config("algo.loss=huber")), 1)
    (batch,) = parts.learners["v"].draw(1, torch.Generator().manual_seed(3))
    apart = batch.action - parts.policy.module.mean_action(batch.obs)
    loss = (0.5 * apart.square().squeeze(1) * batch.mask).sum() / batch.mask.sum()
    learner = parts.learners["v"]
    metrics = learner.update(learner.state, batch, learner.settings, torch.Generator())
    torch.testing.assert_close(metrics["loss/policy"], loss.detach())
    parts.close_envs()


def test_a_run_is_the_teacher_and_the_student_begins_another_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    small = ["device=cpu", "placement.executor=inline", "num_envs=8", "algo.batch_size=32", "budget.seconds=null"]
    small += ["task=pendulum", "eval.final=false", "eval.every_seconds=null", "algo.policy.hidden=[16]"]
    one, two, three = (tmp_path / name for name in ("teacher", "student", "tuned"))
    net = ["algo.critic.hidden=[16]", "algo.warmup_steps=4"]
    assert main(["train", *small, *net, "algo=pql2", "budget.env_steps=400", f"run_dir={one}"]) == 0
    policy = pql.load_policy(one)
    before = {k: v.clone() for k, v in policy.net.state_dict().items()}
    words = ["algo=distill", f"algo.teacher={one}", "budget.env_steps=20000", f"run_dir={two}"]
    assert main(["train", *small, *words]) == 0
    obs = torch.nn.functional.normalize(torch.randn(64, 2), dim=1)
    obs = torch.cat((obs, torch.randn(64, 1)), 1)
    assert (pql.load_policy(two)(obs) - policy(obs)).abs().mean() < 0.03
    assert all(v.equal(pql.load_policy(one).net.state_dict()[k]) for k, v in before.items())
    assert (
        main(["train", *small, *net, "algo=pql2", "budget.env_steps=200", f"init_from={two}", f"run_dir={three}"]) == 0
    )
    assert main(["resume", str(two), "budget.env_steps=20400"]) == 0  # the user's own
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert main(["resume", str(two), "budget.env_steps=20800"]) == 2  # it names a file


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"states": {"carry": (4,)}}, "algo.teacher=there: expected a policy without memory"),
        ({"action": 2}, "a policy with actions Box"),
        ({"groups": ("state",), "obs": {"state": ObsSpec((3,))}}, "'state' is None here, not (3,)"),
        ({"obs": {"policy": ObsSpec((5,))}}, "'policy' is (2,) here, not (5,)"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(monkeypatch, given, message):
    monkeypatch.setattr(build, "load_policy", lambda path, device: teacher(**given))
    with pytest.raises(ConfigError) as caught:
        start(config())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("replay.prefill=x", "null: a student learns where it acts itself"),
        ("algo.policy.average=0.01", "null: the student itself is evaluated"),
        ("algo.normalize_reward=true", "false: rewards are not read"),
    ],
)
def test_settings_without_effect_are_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        config(word)


def test_a_teacher_of_whole_images_cannot_read_reduced_ones(monkeypatch):
    shapes = {"policy": ObsSpec((2,)), "picture": ObsSpec((1, 16, 16), torch.uint8)}
    monkeypatch.setattr(build, "load_policy", lambda path, device: teacher(("policy", "picture"), obs=shapes))
    with pytest.raises(ConfigError, match=r"algo\.encoder\.size=8: expected null: the teacher reads whole images"):
        start(config("algo.encoder.size=8", "algo.policy.obs=[past]"))


def test_a_teacher_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"algo\.teacher=there: expected a run directory"):
        start(config())


def test_a_resumed_run_needs_the_same_teacher(stub):
    parts = start(config())
    parts.check_sources({})  # a checkpoint of an older release
    parts.check_sources({"algo.teacher": "stub"})
    with pytest.raises(ConfigError, match=r"algo\.teacher=there: expected the content that it had when the run began"):
        parts.check_sources({"algo.teacher": "another"})
    parts.close_envs()
    one, same, other = (fresh_policy(config(), parts.env.spec, "cpu") for _ in range(3))
    next(other.net.parameters()).data[0] += 1
    assert len(one.digest()) == 64
    assert (one.digest() == same.digest(), one.digest() == other.digest()) == (True, False)


def test_a_teacher_is_needed():
    with pytest.raises(ConfigError, match=r"algo\.teacher=null: expected a run directory"):
        start(compose(["task=pendulum", "num_envs=4", "device=cpu", "algo=distill"]))
