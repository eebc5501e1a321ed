"""Non-finite observations, rewards and actions: their rows are dropped and counted; other rows do not change."""

import functools
import random
from dataclasses import replace

import impala_runs
import pytest
import torch
from breaking import INF, NAN, Breaking
from conftest import bits, configured, differences, small_config, ticks
from families import FAMILIES
from late import Late
from run_files import points, resume, rows, run, words
from torch import Generator, nn

from pql.collect import nonfinite as quarantine
from pql.collect.actors import NoisyActor
from pql.collect.collector import Collector
from pql.collect.exploration import Exploration
from pql.collect.nonfinite import LAG, Quarantine
from pql.collect.recorder import STEPS
from pql.config.groups import ExploreConfig
from pql.contract.env import make_env
from pql.contract.grouped import Grouped
from pql.data.flags import NEXT_FIRST, TERMINATED, VALID
from pql.data.normalize import Normalizer
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.engine.executors import Inline
from pql.envs.classic import Pendulum
from pql.envs.toy import Counter
from pql.errors import ConfigError, PqlWarning, RunError
from pql.run import flight_recorder as blackbox
from pql.run.build import build
from pql.run.flight_recorder import replay
from pql.run.guard import NonFiniteMonitor
from pql.run.store import checkpoint
from pql.types import Step

N, WARM, STEPS_MADE = 64, 5, 30
CPU = torch.device("cpu")


# -- one environment among many ---------------------------------------------------------------------------------------


class Wild(NoisyActor):
    """Its action is NaN where ``fault`` says so: (number of the act, environment)."""

    fault: tuple[int, int] | None = None
    acts = 0

    def act(self, obs, gen):
        super().act(obs, gen)
        if self.fault is not None and self.acts == self.fault[0]:
            self.action[self.fault[1]] = NAN
        self.acts += 1


def collected(env, fault=None, steps=STEPS_MADE):
    """A ring of ``steps`` steps, of which WARM are random, by a policy that acts on raw observations."""
    spec, size = env.spec, env.spec.num_envs
    ring = Replay(ReplayLayout(spec.obs, 2, size, STEPS_MADE + 10, 1, False), CPU)  # one row per step
    torch.manual_seed(0)
    noise = Exploration(ExploreConfig("mixed", 0.1, 0.6), size, 2, CPU)
    actor = Wild(nn.Linear(2, 2), lambda net, obs, gen: net(obs["policy"] / 10).tanh(), noise, spec)
    actor.fault = fault
    norm = Normalizer(spec.obs, size, CPU, normalize_obs=False, reward_gamma=0.9)
    collector = Collector(env, actor, norm, [ring], Generator().manual_seed(1))
    collector.start(0)
    collector.warm_up(WARM)
    for _ in range(steps - WARM):
        collector.run(1)
    return collector


def content(collector):
    """The ring's tensors as [rows, N, ...]."""
    (ring,) = collector.replays
    state = {f"obs.{k}": v for k, v in ring.obs.items()}
    state |= {k: getattr(ring, k) for k in ("flags", "action", "reward")}
    return {k: v.unflatten(0, (-1, ring.num_envs)) for k, v in state.items()}


@functools.cache
def clean():
    return content(collected(Counter(N, stagger=True)))


def one_fault(seed):
    """One fault of any kind, anywhere, against a run without."""
    draw = random.Random(seed)
    kind, i = ("state", "reward", "action", "large")[seed % 4], draw.randrange(N)
    t = draw.randrange(WARM if kind == "action" else 0, STEPS_MADE - 1)
    if kind == "state":  # a termination stays
        while clean()["flags"][t, i] & TERMINATED:
            t = draw.randrange(STEPS_MADE - 1)
    env = Breaking(Counter(N, stagger=True), {} if kind == "action" else {t: [(kind, [i])]})
    collector = collected(env, (t - WARM, i) if kind == "action" else None)
    expected, found = clean(), content(collector)
    others = torch.arange(N) != i
    for name, value in found.items():
        assert torch.equal(value[:, others], expected[name][:, others]), name
        assert value.isfinite().all(), name
        if name != "obs.policy":
            assert torch.equal(value[:t, i], expected[name][:t, i]), name
    flags, obs = found["flags"][:STEPS_MADE, i], found["obs.policy"]
    assert torch.equal(obs[: t + 1], expected["obs.policy"][: t + 1])
    assert flags[t] == NEXT_FIRST
    assert (flags & VALID > 0).sum() == STEPS_MADE - 1
    begun = bool(expected["flags"][t, i] & NEXT_FIRST)  # the simulator began an episode in this row itself
    episode = expected["obs.policy"][t, i, 0]
    assert obs[t + 1, i].tolist() == [episode + 1, 0]
    assert env.asked == ([] if begun else [[i]])
    assert (int(collector.quarantine.dropped), int(collector.quarantine.restarted)) == (1, len(env.asked))
    assert not collector.quarantine.out.any()
    assert collector.normalizer.running_return.isfinite().all()
    assert collector.normalizer.returns.count == N * STEPS_MADE - 1
    assert all(v.isfinite().all() for v in collector.episodes.state_dict().values())


@pytest.mark.fault(1, 2, count=100)
@pytest.mark.parametrize("kind", range(4), ids=("state", "reward", "action", "large"))
def test_a_fault_costs_its_environment_a_row_and_the_others_nothing(kind, trial):
    one_fault(4 * trial + kind)


@pytest.mark.fault(1)
@pytest.mark.parametrize("late", [False, True], ids=("at once", "as on a GPU"))
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_a_termination_and_its_reward_stay_without_a_finite_observation(monkeypatch, autoreset, late):
    def env():
        return Counter(N, stagger=True, autoreset=autoreset)

    if late:  # every step the long way
        monkeypatch.setattr(quarantine, "all_finite", lambda tensors: False)
    expected = content(collected(env()))
    row, col = (expected["flags"][: STEPS_MADE - 2] & TERMINATED > 0).nonzero()[::3].unbind(1)
    assert len(row) > 20
    faults = {t: [("state", col[row == t].tolist())] for t in row.unique().tolist()}
    collector = collected(breaks := Breaking(env(), faults))
    found = content(collector)
    assert (int(collector.quarantine.dropped), int(collector.quarantine.restarted), breaks.asked) == (0, 0, [])
    assert all(v.isfinite().all() for v in found.values())
    assert torch.equal(found["reward"], expected["reward"])
    flags = expected["flags"].clone()
    flags[row, col] |= NEXT_FIRST  # the next row is no successor
    assert torch.equal(found["flags"], flags)
    shown, wanted = (c["obs.policy"][: STEPS_MADE + 1] for c in (found, expected))
    wanted = wanted.clone()
    if autoreset == "next_step":  # there the final observation is in the ring
        wanted[row + 1, col] = 0
    assert torch.equal(shown, wanted)
    assert not collector.quarantine.out.any()


class Diverges(Counter):
    """Terminations leave a final observation of NaN."""

    def step(self, action):
        step = super().step(action)
        return step._replace(final_obs={"policy": step.final_obs["policy"].masked_fill(step.terminated[:, None], NAN)})


class Forgets(Counter):
    """Terminations leave no final observation, and say so."""

    def step(self, action):
        step = super().step(action)
        return step._replace(final_ok=step.final_ok & ~step.terminated)


@pytest.mark.fault(1)
@pytest.mark.parametrize("family", ["pql", "sac", "ppo", "impala, lstm", "reppo"])
def test_learning_does_not_depend_on_the_final_observation_of_a_termination(family):
    config = replace(FAMILIES[family], graphs="off")
    whole, broken = (ticks(begun(config, kind(8)), 3) for kind in (Forgets, Diverges))
    assert differences(bits(whole), bits(broken)) == []
    assert int(broken.collector.quarantine.dropped) == 0
    assert unsound(broken) == []


NONE, OBS, FINAL, BOTH = (), ("obs",), ("final",), ("obs", "final")
AFTER_ROWS = {  # (end, where NaN is): same-step autoreset: (recorded, out); next-step: (recorded, out)
    ("none", BOTH): ((False, True), (False, True)),
    ("none", FINAL): ((False, True), (False, True)),
    ("truncated", FINAL): ((False, False), (False, True)),
    ("truncated", BOTH): ((False, True), (False, True)),
    ("terminated", NONE): ((True, False), (True, False)),
    ("terminated", FINAL): ((True, False), (True, False)),
    ("terminated", OBS): ((True, True), (True, False)),
    ("terminated", BOTH): ((True, True), (True, False)),
    ("terminated", ("reward",)): ((False, False), (False, True)),
    ("terminated", ("reward", "final")): ((False, False), (False, True)),
}


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("next_step", [False, True], ids=("same_step", "next_step"))
@pytest.mark.parametrize(("end", "bad"), AFTER_ROWS)
def test_which_rows_are_recorded_and_who_is_out(end, bad, next_step):
    """Row 1 has the fault; row 0 is as it should be, and so is the restart of row 1's environment, if it has one."""
    no, ends = torch.zeros(2, dtype=torch.bool), torch.tensor([False, True])
    obs, final, held = torch.full((2, 1), 5.0), torch.full((2, 1), 4.0), torch.full((2, 1), 3.0)
    reward = torch.tensor([1.0, 2.0])
    for name in bad:
        {"obs": obs, "final": final, "reward": reward}[name][1] = NAN
    flags = {k: ends if k == end else no for k in ("terminated", "truncated")}
    first = ends if end != "none" and not next_step else no
    step = Step(
        {"policy": obs}, reward, **flags, first=first, final_obs={"policy": final}, final_ok=~no, valid=~no, log={}
    )
    for restart in (None, lambda mask: {"policy": torch.full((2, 1), 7.0)}):
        watch = Quarantine(2, CPU, True, restart, next_step)
        out, shown = watch(step, {"policy": held})
        recorded, left = AFTER_ROWS[end, bad][next_step]
        assert out.valid.tolist() == [True, recorded]
        assert (int(watch.dropped), watch.out.tolist()) == (not recorded, [False, left and restart is None])
        assert out.reward.tolist() == [1.0, 2.0 if recorded else 0.0]
        assert out.terminated.tolist() == [False, recorded]
        now = 7.0 if left and restart else 3.0 if left else 5.0 if "obs" not in bad else 0.0
        assert out.obs["policy"][:, 0].tolist() == [5.0, now]
        assert (out.final_obs["policy"][1, 0] == 0) == (recorded and "final" in bad)
        assert out.first.tolist() == [False, not recorded or bool(first[1]) or (left and restart is not None)]
        seen = now in (5.0, 7.0)
        assert shown is None or shown.tolist() == [True, seen]


@pytest.mark.fault(1)
@pytest.mark.parametrize("kind", ["state", "reward"])
def test_windows_end_before_the_row_with_the_value_of_what_it_was_acted_on(kind):
    t, i = 12, 2
    env = Breaking(Counter(4, terminate_every=0, episode_length=50), {t: [(kind, [i])]})
    (ring,) = collected(env).replays
    start = torch.arange(t - 4, t + 2)
    batch = ring.windows(ring.live, start, torch.full_like(start, i), ring.live.head[torch.full_like(start, i)], 3, 0.5)
    assert batch.mask.tolist() == [1, 1, 1, 1, 0, 1]
    assert batch.discount[:4].tolist() == [0.125, 0.125, 0.25, 0.5]
    assert batch.next_obs["policy"][:4].tolist() == [[0, t - 1], [0, t], [0, t], [0, t]]
    paid = [i + s / 8 for s in range(t)]
    assert batch.reward[:4].tolist() == [
        paid[8] + 0.5 * paid[9] + 0.25 * paid[10],
        paid[9] + 0.5 * paid[10] + 0.25 * paid[11],
        paid[10] + 0.5 * paid[11],
        paid[11],
    ]
    assert batch.obs["policy"][5].tolist() == [1, 0]


@pytest.mark.fault(1)
def test_a_simulator_that_restarts_no_single_environment_is_waited_for():
    """Counter's episodes are of seven rows: what breaks in row 2 of one is out for five, its own end included."""
    env = Breaking(Counter(8, terminate_every=0), {9: [("state", [3])]}, restarts=False)
    collector = collected(env)
    found = content(collector)
    lost = found["flags"][:STEPS_MADE] & VALID == 0
    assert lost.nonzero().tolist() == [[t, 3] for t in range(9, 14)]
    assert all(v.isfinite().all() for v in found.values())
    assert found["obs.policy"][9:15, 3].tolist() == 5 * [[1.0, 2.0]] + [[2.0, 0.0]]  # held, then a new episode
    assert (int(collector.quarantine.dropped), int(collector.quarantine.restarted)) == (5, 0)
    episodes = collector.episodes.drain()
    assert (float(episodes["train/episodes"]), float(episodes["train/length_mean"])) == (8 * 4 - 1, 7.0)


@pytest.mark.fault(1)
def test_who_is_broken_from_the_start_is_restarted_with_the_first_row():
    env = Breaking(Counter(8, terminate_every=0), {}, born=[1, 6])
    collector = collected(env)
    found = content(collector)
    assert env.asked == [[1, 6]]
    assert (found["flags"][:STEPS_MADE] & VALID == 0).nonzero().tolist() == [[0, 1], [0, 6]]
    assert found["obs.policy"][:2, 1].tolist() == [[0, 0], [1, 0]]
    assert all(v.isfinite().all() for v in found.values())


@pytest.mark.fault(1)
def test_groups_are_mended_between_ticks():
    broken = Breaking(Pendulum(4), {20: [("state", [1])], 25: [("reward", [0, 3])]})
    parts = begun(small_config(algo={"normalize_reward": True}), Grouped([broken, Breaking(Pendulum(4), {})]))
    ticks(parts, 20)
    assert broken.asked == [[1], [0, 3]]
    found = content(parts.collector)
    lost = (found["flags"][:36] & VALID == 0).nonzero().tolist()
    assert lost == [[20, 1], [21, 1], [25, 0], [25, 3], [26, 0], [26, 3]]  # and the row with an unobserved beginning
    assert unsound(parts) == []
    parts.env.close()


# -- every family -----------------------------------------------------------------------------------------------------


def begun(config, env):
    """Built around ``env``; the next thing is tick 0."""
    parts = build(config, env, executor=Inline())
    parts.prepare()
    parts.start()
    parts.warm_up(config.algo.warmup_steps)
    parts.begin()
    return parts


def unsound(parts):
    """Names of what is not finite: of all that the next tick depends on, and of the log's numbers."""
    unknown = ("/q", "/value", ".q", ".value")  # NaN: no network valued this row
    stores = [s.storage() for s in parts.collector.stores if hasattr(s, "storage")]
    found = {**bits(parts), **parts.drain(), **{k: v for store in stores for k, v in store.items()}}
    return [k for k, v in found.items() if not v.isfinite().all() and not k.endswith(unknown)]


def spoil(parts, faults):
    """The actor's outputs and recurrent state are NaN or infinite according to ``faults`` {step: environments}."""
    (one,) = parts.collector.slices
    actor, act = one.state.actor, one.state.actor.act

    def acting(obs, gen):
        act(obs, gen)
        now = parts.env.time
        if now in faults:
            for tensor in one.made:
                tensor[faults[now]] = (NAN, INF)[now % 2]

    actor.act = acting


@pytest.mark.fault(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_is_not_finite_reaches_anything(family):
    config, draw, rows_made = replace(FAMILIES[family], graphs="off"), random.Random(family), 60
    where = {t: draw.sample(range(8), 2) for t in draw.sample(range(rows_made), 16)}
    faults = {t: [(draw.choice(("state", "reward", "large")), ids)] for t, ids in where.items()}
    hit = {(t, i) for t, ids in where.items() for i in ids}
    parts = begun(config, Breaking(make_env(config.task.name, 8, **config.task.kwargs), faults))
    watch, now = parts.collector.quarantine, int(parts.collector.steps)
    assert int(watch.dropped) == sum(t < now for t, _ in hit)
    wild = {t: draw.sample(range(8), 1) for t in draw.sample(range(now, rows_made), 12)}
    spoil(parts, wild)
    if parts.collector.slices[0].made:  # else it makes no floats
        hit |= {(t, i) for t, ids in wild.items() for i in ids}
    while parts.collector.steps < rows_made:
        ticks(parts, 1)
    assert all(float(v) == 0 for k, v in parts.drain().items() if k.startswith("skipped/"))
    assert unsound(parts) == []
    assert int(watch.dropped) == sum(t < parts.collector.steps for t, _ in hit)
    assert not watch.out.any()


class Lame(Late):
    """Its environment 3 is NaN from row 30 on, until it begins an episode by itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.end = 30 + int(self.steps.first[30:, 3].int().argmax())
        obs, final = ({k: v.clone() for k, v in o.items()} for o in (self.steps.obs, self.steps.final_obs))
        obs["policy"][30 : self.end, 3] = NAN
        final["policy"][30 : self.end + 1, 3] = NAN
        self.steps = self.steps._replace(obs=obs, final_obs=final)


@pytest.mark.fault(1)
@pytest.mark.parametrize("family", ["pql", "impala"])
def test_environments_that_answer_late_are_waited_for(family):
    task = {"task": {"name": "counter", "kwargs": {}}, "num_envs": 8, "replay": {"capacity": 8 * 4096}}
    config = configured(task, {"v_per_step": 0.25, "p_per_v": 1, "normalize_reward": True})
    if family == "impala":
        config = impala_runs.config_of(task, {"lstm": 8, "normalize_reward": True})
    env = Lame(late=0.3, terminate_every=0)
    parts = begun(config, env)
    watch = parts.collector.quarantine
    while env.time.min() < 45:
        ticks(parts, 1)
    assert env.end > 30
    assert (int(watch.dropped), int(watch.restarted)) == (env.end + 1 - 30, 0)
    assert not watch.out.any()
    assert unsound(parts) == []


# -- a run in which nothing breaks ------------------------------------------------------------------------------------


def bits_of(parts):
    return {k: v for k, v in bits(parts).items() if "/quarantine/" not in k}


@pytest.mark.parametrize(("family", "count"), [("pql", 12), ("r2d2", 9), ("ppo, lstm", 2)])
def test_a_clean_run_is_the_same_to_a_bit_watched_or_not(monkeypatch, family, count):
    config = FAMILIES[family]

    def made():
        return ticks(begun(config, make_env(config.task.name, 8, **config.task.kwargs)), count)

    watched = made()
    assert int(watched.collector.quarantine.dropped) == 0
    with monkeypatch.context() as patch:  # every step the long way, as on a GPU
        patch.setattr(quarantine, "all_finite", lambda tensors: False)
        assert differences(bits_of(watched), bits_of(made())) == []
    monkeypatch.setattr(Quarantine, "__call__", lambda self, step, held, arrived=None: (step, None))
    monkeypatch.setattr(Quarantine, "act", lambda self, made, mask=None: None)
    assert differences(bits_of(watched), bits_of(made())) == []


@pytest.mark.fault(1, 14)
def test_a_run_that_was_resumed_while_an_environment_was_out_is_the_one_that_was_not():
    config = configured({}, {"normalize_reward": True})

    def env():
        return Breaking(make_env("pendulum", 8, max_episode_steps=30), {18: [("state", [2, 5])]}, restarts=False)

    whole = ticks(begun(config, env()), 8)
    assert whole.collector.quarantine.out.sum() == 2
    halves = begun(config, env())
    halves.load_state_dict(whole.state_dict(), 8)
    for parts in (whole, halves):
        ticks(parts, 12)
    assert int(whole.collector.quarantine.dropped) == 24
    assert differences(bits(whole), bits(halves)) == []


def test_a_checkpoint_from_before_there_was_a_quarantine_is_read():
    parts = begun(small_config(), make_env("pendulum", 8))
    saved = {k: v for k, v in checkpoint.flatten(parts.state_dict()).items() if "quarantine" not in k}
    again = begun(small_config(), make_env("pendulum", 8))
    again.load_state_dict(checkpoint.unflatten(saved, again.state_dict()), 0)
    assert differences(bits(parts), bits(again)) == []


# -- where the host reads late ----------------------------------------------------------------------------------------


class Passed:
    """A CUDA stream whose events have passed."""

    def record_event(self):
        return self

    def query(self):
        return True


@pytest.mark.fault(1)
def test_a_gpu_is_asked_late_and_its_environments_are_restarted_between_ticks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Passed())
    parts = begun(small_config(), env := Breaking(Pendulum(8), {20: [("state", [4])]}))
    watch = parts.collector.quarantine
    watch.host = watch.together = False
    watch.restart = None
    ticks(parts, 4 + LAG)  # rows 16 to 19, the broken one and the rest of LAG
    assert env.asked == []
    assert watch.out.tolist() == [i == 4 for i in range(8)]
    saved = checkpoint.unflatten(bits(parts), parts.state_dict())
    ticks(parts, 2)
    assert env.asked[0] == [4]
    assert not watch.out.any()
    assert int(watch.dropped) == LAG + 2  # until it is reported, and the row with an unobserved beginning
    assert unsound(parts) == []
    after = bits(parts)
    parts.load_state_dict(saved, 4 + LAG)
    ticks(parts, 2)
    assert differences(bits(parts), after) == []


# -- all of them ------------------------------------------------------------------------------------------------------


def broken_off(run_dir, at, *more):
    """A run that ended since all environments broke in step ``at``; returns its error and its dump."""
    name = ["task=env", "task.name=breaking", f"task.kwargs.at={at}", *more]
    run(*words(run_dir, *name, "budget.env_steps=160"))
    before = {p: (p / "tensors.safetensors").read_bytes() for p in points(run_dir)}
    with pytest.raises(RunError, match=r"no environment gives finite .*; what led to it: ") as error:
        resume(run_dir, "budget.env_steps=1000000")
    assert {p: (p / "tensors.safetensors").read_bytes() for p in points(run_dir)} == before
    (tensors, _, _) = checkpoint.newest_checkpoint(run_dir / "checkpoints")
    assert all(v.isfinite().all() for v in tensors.values())
    (dump,) = (run_dir / "dumps").iterdir()
    assert str(dump) in str(error.value)
    return dump


def check_dump(dump, at, num_envs=16):
    tensors, manifest = checkpoint.load(dump)
    assert (manifest["kind"], manifest["seed"], manifest["config"]["task"]["kwargs"]) == ("dump", 1, {"at": at})
    again = list(replay(dump))
    assert len(again) <= at + 1 <= len(again) + 10  # all of it, or from the resume point on
    action, last = again[-1]
    assert torch.equal(action, tensors["last/action"])
    assert torch.equal(again[-2][1].obs["policy"], tensors["last/obs/policy"])
    assert all(step.obs["policy"].isfinite().all() for _, step in again[:-1])
    assert last.obs["policy"].isnan().all()
    assert torch.equal(last.reward, tensors["returned/0/reward"])
    assert tensors["returned/0/obs.policy"].isnan().all()
    assert num_envs == len(last.reward)


@pytest.mark.fault(3, count=10)
@pytest.mark.parametrize("schedule", ["lockstep", "concurrent"])
def test_a_run_without_a_finite_environment_ends_with_what_led_to_it(tmp_path, schedule, trial):
    at = random.Random(trial).randrange(12, 60)
    check_dump(broken_off(tmp_path, at, "seed=1", f"algo.schedule={schedule}"), at)


@pytest.mark.fault(3)
def test_it_may_end_in_the_warm_up(tmp_path):
    with pytest.raises(RunError, match="what led to it"):
        run(*words(tmp_path, "task=env", "task.name=breaking", "task.kwargs.at=3", "seed=1"))
    (dump,) = (tmp_path / "dumps").iterdir()
    check_dump(dump, 3)


def test_the_black_box_goes_back_far_enough_and_no_further():
    env = Breaking(Pendulum(4), {70: [("state", [2])], 150: [("state", [1])]})
    collector = begun(small_config(num_envs=4), env).collector
    for _ in range(200):
        collector.run(1)
    told = collector.recorder.state_dict()
    assert STEPS <= len(told["actions"]) <= 2 * STEPS
    assert told["restarts"]["mask"].tolist() == [[False, True, False, False]]
    env.load_state_dict(told["state"])
    start = env.time
    for count, action in enumerate(told["actions"]):
        for step, mask in zip(told["restarts"]["step"].tolist(), told["restarts"]["mask"], strict=True):
            if step == count:
                env.reset_where(mask)
        step = env.step(action)
    assert start + len(told["actions"]) == 216
    assert torch.equal(step.obs["policy"], collector.obs["policy"])


def test_a_run_tells_once_of_rows_that_were_left_out(tmp_path):
    env = Breaking(make_env("pendulum", 16), {30: [("state", [3])], 40: [("reward", [1, 2])]})
    with pytest.warns(PqlWarning, match="rows left out: an observation, reward or action was not finite") as told:
        run(*words(tmp_path, "budget.env_steps=1600", "logger.every_seconds=0.01"), env=env)
    assert len([w for w in told if "rows left out" in str(w.message)]) == 1
    assert [rows(tmp_path)[-1][f"env/{k}"] for k in ("dropped", "restarted")] == [3, 3]


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_a_run_tells_once_of_truncations_without_a_final_observation(tmp_path, algo):
    env = Counter(8, final_obs="never")
    change = ("replay.capacity=4096",) if algo == "sac" else ("algo.horizon=4", "algo.minibatches=2")
    base = ("device=cpu", "scale=cpu", "num_envs=8", "budget.env_steps=1600", "eval.final=false", f"run_dir={tmp_path}")
    with pytest.warns(PqlWarning, match="did not return the final observation") as told:
        run(f"algo={algo}", *base, "algo.warmup_steps=16", "logger.every_seconds=0.01", *change, env=env)
    assert len([w for w in told if "windows left out" in str(w.message)]) == 1
    name = {"sac": "replay", "ppo": "rollout"}[algo]
    assert rows(tmp_path)[-1][f"{name}/bootstrap_lost"] > 0


def test_who_restarts_them_is_said():
    for restarts, then in ((True, "was restarted"), (False, "stays out until its simulator")):
        said = []
        guard = NonFiniteMonitor(said.append, {"v": 0, "p": 0}, restarts)
        for count in (0, 3, 5):
            guard.look({"updates/v": 1, "updates/p": 1, "env/dropped": count})
        assert len(said) == 1
        assert said[0].startswith("3 rows left out")
        assert then in said[0]


def test_what_cannot_be_replayed_is_said(tmp_path):
    parts = begun(small_config(), Pendulum(8))
    parts.collector.recorder.forget()
    blackbox.dump(tmp_path / "one", small_config(), parts.collector, parts.counters())
    with pytest.raises(ConfigError, match="one of a simulator that saves its state"):
        next(replay(tmp_path / "one"))


def test_one_bad_number_is_enough():
    good = torch.ones(6, dtype=torch.bool)
    values, more = torch.full((6, 2, 3), 9.9e17), torch.zeros(6)
    values[1, 1, 2], values[2, 0, 0], values[3, 1, 0], more[4] = NAN, INF, -INF, NAN
    assert quarantine.finite_rows((values, more), good).tolist() == [True, False, False, False, False, True]
    assert quarantine.finite_rows((), good).all()
    assert quarantine.finite_rows((torch.zeros(len(good), 0), values, more), good).sum() == 2  # no memory
    assert quarantine.all_finite((torch.ones(3), more[:4], values[:1], torch.zeros(0)))
    for large in (1.1e18, -3e38, NAN, INF, -INF):  # their sum may be small
        pair = torch.tensor([large, -large, 0.0])
        assert not quarantine.all_finite((torch.ones(3), pair))
        assert quarantine.finite_rows((pair,), good[:3]).tolist() == [False, False, True]
    assert not quarantine.all_finite((torch.tensor([1e300], dtype=torch.float64),))
    seen = torch.zeros(2)
    nested = ({"a": seen, "b": (seen, torch.ones(2, dtype=torch.uint8))}, None)
    assert [t is seen for t in quarantine.floats(nested)] == [True]
