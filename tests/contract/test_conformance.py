"""``check_env`` passes conforming environments, and names the one rule that another environment breaks."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from pql.contract.conformance import RULES, check_env
from pql.contract.env import Discrete, capturable, find_factory, make_env
from pql.contract.grouped import Grouped
from pql.contract.last_action import LastAction
from pql.envs.catch import Catch
from pql.envs.classic import Cartpole, Pendulum
from pql.envs.toy import Counter

SHIPPED = [
    ("counter", {}),
    ("counter", {"autoreset": "next_step", "restart_every": 4, "stagger": True}),
    ("counter", {"final_obs": "never", "restart_every": 4}),
    ("counter", {"autoreset": "next_step", "final_obs": "never"}),
    ("counter", {"final_obs": "on_done", "terminate_every": 0}),
    ("lqr", {"max_episode_steps": 15, "stagger": True}),
    ("pendulum", {"max_episode_steps": 20}),
    ("cartpole_swingup", {"max_episode_steps": 60}),
    ("ball_balance", {"max_episode_steps": 60}),
    ("catch", {"max_episode_steps": 5}),
    ("tmaze", {"length": 2}),
    ("cartpole", {"max_episode_steps": 20}),
    ("recall", {}),
    ("gymnasium", {"id": "Pendulum-v1", "kwargs": {"max_episode_steps": 20}}),
    ("gymnasium", {"id": "Pendulum-v1", "kwargs": {"max_episode_steps": 20}, "autoreset": "same_step"}),
]


@pytest.mark.parametrize(("name", "kwargs"), SHIPPED)
def test_shipped_environments_conform(name, kwargs, conforms):
    if name == "gymnasium":
        pytest.importorskip("gymnasium")
    env = make_env(name, 6, **kwargs)
    untested = conforms(env, 90, described=find_factory(name).describe(6, "cpu", **kwargs))
    env.close()
    idle = {"filler_flags", "final_obs_kept", "state_dict", "groups"}
    idle |= {"action_range"} if isinstance(env.spec.action, Discrete) else set()
    idle |= set() if capturable(env) else {"capturable"}
    idle |= {"stack"} if all(part.stack == 1 for part in env.spec.obs.values()) else set()
    assert untested <= idle
    assert capturable(env) == (name != "gymnasium")


class Altered:
    """An environment with one thing changed: ``change(env, action, step) -> step`` and fields of its spec."""

    def __init__(self, env, change=None, **spec):
        self.env, self.change, self.resets, self.store = env, change, 0, {}
        self.spec = replace(env.spec, **spec)

    def reset(self, seed=None):
        self.resets += 1
        return self.env.reset(seed)

    def step(self, action):
        step = self.env.step(action)
        return self.change(self, action, step) if self.change else step

    def close(self):
        self.env.close()

    def state_dict(self):
        return self.env.state_dict()

    def load_state_dict(self, state):
        self.env.load_state_dict(state)


class ForgetsSteps(Altered):
    def load_state_dict(self, state):
        self.env.load_state_dict({**state, "step": torch.zeros_like(state["step"])})


class AnotherStep(Altered):
    def send(self, action, ids):
        self.env.send(action, ids)

    def recv(self):
        return self.env.recv()


class LastFirst(list):
    popleft = list.pop


class WrongReset(Altered):
    def reset(self, seed=None):
        return {"policy": self.env.reset(seed)["policy"].double()}


def ended(step):
    return step.terminated | step.truncated


def nan_reward(env, action, step):
    return step._replace(reward=step.reward.masked_fill(ended(step), torch.nan))


def shifted_final(env, action, step):
    final = torch.where(ended(step)[:, None], step.final_obs["policy"], step.obs["policy"] + 1)
    return step._replace(final_obs={"policy": final})


def live_reward(env, action, step):
    return step._replace(reward=env.store.setdefault("reward", step.reward.clone()).copy_(step.reward))


def live_obs(env, action, step):
    buffer = env.store.setdefault("obs", step.obs["policy"].clone())
    return step._replace(obs={"policy": buffer.copy_(step.obs["policy"])})


def writes_action(env, action, step):
    action.mul_(0.5)
    return step


def repeats_end(env, action, step):
    """Raw flags of a simulator that still shows the end on the filler row."""
    last = env.store.get("last", torch.zeros_like(step.valid))
    env.store["last"] = ended(step)
    return step._replace(truncated=step.truncated | (~step.valid & last))


def gap_row(env, action, step):
    """A row left out in mid-episode."""
    return step._replace(valid=step.valid & ((step.obs["policy"][:, 1] != 3) | ended(step)))


same, following = {}, {"autoreset": "next_step"}
BROKEN = {
    "reward dtype": ("shapes", same, lambda e, a, s: s._replace(reward=s.reward.double()), {}),
    "missing axis": ("shapes", same, lambda e, a, s: s._replace(valid=s.valid[:, None]), {}),
    "not a Step": ("shapes", same, lambda e, a, s: tuple(s), {}),
    "missing group": ("shapes", same, lambda e, a, s: s._replace(final_obs={}), {}),
    "undeclared log": ("log", same, lambda e, a, s: s._replace(log={**s.log, "x": s.reward}), {}),
    "log dtype": ("log", same, lambda e, a, s: s._replace(log={"rows": s.valid}), {}),
    "NaN reward": ("finite", same, nan_reward, {}),
    "both flags": ("disjoint", same, lambda e, a, s: s._replace(truncated=ended(s)), {}),
    "final_obs in mid-episode": ("final_obs", same, shifted_final, {}),
    "final_obs of a next_step end": (
        "final_obs",
        following,
        lambda e, a, s: s._replace(final_obs={"policy": s.obs["policy"] + ended(s)[:, None]}),
        {},
    ),
    "next episode as final_obs": ("final_obs_kept", same, lambda e, a, s: s._replace(final_obs=dict(s.obs)), {}),
    "final_ok off": ("final_ok", same, lambda e, a, s: s._replace(final_ok=~ended(s)), {}),
    "final_ok on": ("final_ok", {"final_obs": "never"}, lambda e, a, s: s._replace(final_ok=s.valid), {}),
    "first missing": ("first", same, lambda e, a, s: s._replace(first=s.first & False), {}),
    "first everywhere": ("first", same, lambda e, a, s: s._replace(first=s.first | True), {}),
    "first on the end": ("first", following, lambda e, a, s: s._replace(first=s.first | ended(s)), {}),
    "undeclared restarts": ("first", {"restart_every": 4}, None, {"info": {}}),
    "fillers called valid": ("filler", following, lambda e, a, s: s._replace(valid=s.valid | True), {}),
    "filler in mid-episode": ("filler", following, gap_row, {}),
    "filler with same_step": ("filler", same, gap_row, {}),
    "flags on fillers": ("filler_flags", following, repeats_end, {}),
    "longer than its limit": ("time_limit", same, None, {"max_episode_steps": 5}),
    "live reward": ("buffers", same, live_reward, {}),
    "live obs": ("buffers", {"terminate_every": 0}, live_obs, {}),
    "action rewritten": ("action_kept", same, writes_action, {}),
    "action not clamped": ("action_range", same, lambda e, a, s: s._replace(reward=s.reward + a[:, 0]), {}),
    "NaN out of range": (
        "action_range",
        same,
        lambda e, a, s: s._replace(reward=s.reward + (1 - a[:, 0].abs()).sqrt()),
        {},
    ),
    "unseeded": ("determinism", same, lambda e, a, s: s._replace(reward=s.reward + e.resets), {}),
    "policy group missing": ("protocol", same, None, {"obs": {}}),
    "groups without send": ("protocol", same, None, {"groups": 2}),
    "unequal groups": ("protocol", same, None, {"groups": 4}),
    "unknown mode": ("protocol", same, None, {"autoreset": "sometimes"}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_environment_fails_exactly_its_rule(case):
    rule, kwargs, change, spec = BROKEN[case]
    report = check_env(Altered(Counter(6, **kwargs), change, **spec), 60)
    assert report.failed == [rule], report
    assert not report.ok
    assert f"FAIL {rule}" in str(report)


def test_broken_methods_fail_exactly_their_rule():
    assert check_env(ForgetsSteps(Counter(6)), 60).failed == ["state_dict"]
    assert check_env(WrongReset(Counter(6)), 60).failed == ["shapes"]
    incomplete = Altered(Counter(6))
    incomplete.recv = lambda: None
    assert check_env(incomplete, 60).failed == ["protocol"]
    other = Counter.describe(6, episode_length=8)
    assert check_env(Counter(6), 60, described=other).failed == ["describe"]
    assert check_env(object()).failed == ["protocol"]
    with closing(Grouped([Counter(3), Counter(3)])) as groups:
        pays = AnotherStep(groups, lambda e, a, s: s._replace(reward=s.reward + 1))
        assert check_env(pays, 60).failed == ["groups"]
        groups._sent = LastFirst()
        assert check_env(groups, 60).failed == ["groups"]


class Frames(Altered):
    """Catch with other stacks of frames, [N, 2, 8, 8]: ``frames(env, observation, begins)``."""

    def __init__(self, frames):
        super().__init__(Catch(6))
        self.frames = frames

    def reset(self, seed=None):
        obs = super().reset(seed)["policy"]
        return {"policy": self.frames(self, obs, torch.ones(6, dtype=torch.bool))}

    def step(self, action):
        step = super().step(action)
        none = torch.zeros_like(step.first)
        final = self.frames(self, step.final_obs["policy"], none)
        obs = torch.where(step.first.view(-1, 1, 1, 1), self.frames(self, step.obs["policy"], step.first), final)
        return step._replace(obs={"policy": obs}, final_obs={"policy": final})


def newest_first(env, obs, begins):
    return obs.flip(1)


def first_frame_repeated(env, obs, begins):
    """As some wrappers begin an episode."""
    return torch.where(begins.view(-1, 1, 1, 1), obs[:, 1:].expand_as(obs), obs)


def forgets_frames(env, obs, begins):
    return torch.cat((torch.zeros_like(obs[:, :1]), obs[:, 1:]), 1)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (newest_first, "not zeros where an episode begins"),
        (first_frame_repeated, "not zeros where an episode begins"),
        (forgets_frames, "not the newest of the observation before"),
    ],
)
def test_broken_stacks_fail_exactly_their_rule(frames, words):
    report = check_env(Frames(frames), 40)
    assert report.failed == ["stack"], report
    assert words in next(r.message for r in report.results if r.name == "stack")
    assert check_env(Frames(lambda env, obs, begins: obs), 40).ok


class NewState(Pendulum):
    """Puts a new tensor in the place of its state."""

    capturable = True

    def step(self, action):
        self._state = self._state.clone()
        return super().step(action)


class CountsInPython(Pendulum):
    """Pays more on every tenth step."""

    capturable = True
    calls = 0

    def reset(self, seed=None):
        self.calls = 0
        return super().reset(seed)

    def step(self, action):
        self.calls += 1
        step = super().step(action)
        return step._replace(reward=step.reward + (self.calls % 10 == 0))


class Looks(Pendulum):
    capturable = True

    def step(self, action):
        step = super().step(action)
        return step._replace(reward=step.reward * 2) if step.truncated.any() else step


class HidesGenerator(Pendulum):
    generators = ()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (NewState, "obs[policy] differs after a step that was recorded once, step 1"),
        (CountsInPython, "reward differs after a step that was recorded once, step 9"),
        (Looks, "the host would wait for the device"),
        (HidesGenerator, "draws from a generator that is not among the registered"),
    ],
)
def test_what_cannot_be_captured_fails_exactly_its_rule(broken, words):
    report = check_env(broken(4, max_episode_steps=12), 30)
    said = next(r.message for r in report.results if r.name == "capturable")
    assert words in said
    assert report.failed == ["capturable"], report
    undeclared = type("Undeclared", (broken,), {"capturable": False})
    assert {r.name: r.ok for r in check_env(undeclared(4), 20).results}["capturable"] is None


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("step", {"step": lambda self, action: Pendulum.step(self, action)}),
        ("reset", {"reset": lambda self, seed=None: Pendulum.reset(self, seed)}),
        ("advance", {"advance": lambda self, state, action: Pendulum.advance(self, state, action)}),
    ],
)
def test_a_subclass_does_not_inherit_that_its_step_can_be_captured(name, own, recwarn):
    kind = type("Own", (Pendulum,), own)
    below = type("Below", (kind,), {})
    assert [capturable(kind(2)), capturable(kind(2)), capturable(below(2))] == [False] * 3
    assert [str(w.message).partition(" of a capturable")[0] for w in recwarn] == [  # once for each class
        f"Own overrides {name}",
        f"Below overrides {name}",
    ]
    said = next(r for r in check_env(kind(4), 10).results if r.name == "capturable")
    assert (said.ok, said.message) == (None, f"not tested: not declared by Own, which overrides {name}")
    assert capturable(type("Anew", (Pendulum,), {**own, "capturable": True})(2))
    assert capturable(type("Shown", (Pendulum,), {"render": lambda self: None, "close": lambda self: None})(2))
    env = Pendulum(2)
    env.step = lambda action: Pendulum.step(env, action)
    assert not capturable(env)
    assert [capturable(LastAction(one(2))) for one in (Cartpole, type("Slow", (Cartpole,), own))] == [True, False]


def test_an_environment_that_is_captured_must_save_its_state():
    env = Altered(Counter(4))
    env.capturable = True
    message = next(r.message for r in check_env(env, 10).results if r.name == "protocol")
    assert message == "capturable needs generators, state_dict and load_state_dict"


def test_every_rule_has_a_broken_environment():
    tested = {case[0] for case in BROKEN.values()} | {"state_dict", "describe", "stack", "groups", "capturable"}
    assert {*RULES, "protocol"} == tested


def test_a_fault_names_step_and_environments():
    report = check_env(Altered(Counter(6), nan_reward), 60)
    message = next(r.message for r in report.results if r.name == "finite")
    assert message == "reward holds NaN or infinity (environments 0), step 0"  # the first end: length 1 + 0


def test_rules_without_an_occasion_do_not_count_as_passed():
    report = check_env(Pendulum(4), 30)  # ends after 200 steps
    outcome = {r.name: r.ok for r in report.results}
    assert report.ok
    assert [outcome[name] for name in ("first", "filler", "final_obs_kept", "time_limit")] == [None] * 4
    assert outcome["finite"] is True
    unseeded = check_env(Altered(Counter(6), BROKEN["unseeded"][2], deterministic=False), 60)
    assert unseeded.ok
    assert {r.name: r.ok for r in unseeded.results}["determinism"] is None


def lose_life(env, action, step):
    """Terminates on step 3 of an episode, but continues it."""
    return step._replace(terminated=step.terminated | ((step.obs["policy"][:, 1] == 3) & ~ended(step)))


def test_lost_lives_must_be_declared():
    assert check_env(Altered(Counter(6), lose_life), 60).failed == ["first"]
    assert check_env(Altered(Counter(6), lose_life, info={"lost_life": True}), 60).failed == []
    declared = {"info": {"lost_life": True}, "max_episode_steps": 5}  # a lost life does not restart the clock
    assert check_env(Altered(Counter(6), lose_life, **declared), 60).failed == ["time_limit"]


def test_under_next_step_a_life_is_lost_where_no_filler_row_follows():
    def env(**spec):
        return Altered(Counter(6, autoreset="next_step"), lose_life, **spec)

    assert check_env(env(), 60).failed == ["first", "filler"]
    assert check_env(env(info={"lost_life": True}), 60).failed == []
    assert check_env(env(info={"lost_life": True}, max_episode_steps=5), 60).failed == ["time_limit"]


def test_the_environment_is_left_freshly_reset():
    env = Counter(6)
    check_env(env, 60)
    assert env.step(torch.zeros(6, 2)).final_obs["policy"].tolist() == [[0.0, 1.0]] * 6
