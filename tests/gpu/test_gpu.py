"""Tests on a CUDA device: captured graphs, concurrent streams, and ticks without host syncs.

``python tools/gpu/check.py`` runs these tests on one. Without a device most run on a stand-in (``stand_in.py``) with
smaller networks, so that their code is exercised; the others are skipped.
"""

import gc
import itertools
import os
from dataclasses import replace
from functools import partial

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first CUDA call, as `pql train` does

import pytest
import torch
from breaking import Breaking
from conftest import (
    FLASH,
    HERE_TOO,
    MODERN,
    bits,
    differences,
    everywhere,
    fit,
    learners,
    merge,
    never_waiting,
    small_config,
    start,
    traces,
)
from dial import PIXELS, RECIPES
from stand_in import NoWaiting
from torch import Generator

from pql.algos.registry import seeds
from pql.contract.grouped import joined
from pql.engine.executors import Inline
from pql.engine.graph import Execution, Graph
from pql.envs.classic import CartpoleSwingup
from pql.errors import ConfigError, PqlWarning
from pql.run.build import build
from pql.run.environment import build_env
from pql.run.episodes import EpisodeRules, run_episodes
from pql.run.evaluator import CapturedEnv
from pql.run.policy import fresh_policy
from tools.gpu.runs import Ordered

DEVICE = "cuda"
TICKS = 20
CYCLES = 200_000_000  # of the device's clock: about a tenth of a second
ORDERS = list(itertools.permutations(("collector", "v", "p")))
BASE = {
    "task": {"name": "cartpole_swingup", "kwargs": {"max_episode_steps": 7, "stagger": True}},
    "graphs": "auto",
    "device": DEVICE,
    "num_envs": 256,
    "replay": {"capacity": 65536},
    "placement": {"executor": "auto"},
    "algo": {"batch_size": 512, "v_per_step": 4, "critic": {"hidden": [64, 32]}, "policy": {"hidden": [64, 32]}},
}
HELD = "reward scale, target policy, held noise"
ALGOS = {
    "pql": {},
    "pql_d": {"critic": {"atoms": 51, "v_min": 0.0, "v_max": 50.0}},
    "pql_sac": {"family": "sac", "explore": {"kind": "none"}},
    "modern": MODERN,
    "batch norm": FLASH,
    HELD: {"normalize_reward": True, "policy": {"target": True}, "explore": {"kind": "redrawn", "repeat": True}},
}
ROLLOUT = {"schedule": "lockstep", "horizon": 8, "epochs": 2, "minibatches": 4}
PPO = {**ROLLOUT, "family": "ppo", "normalize_reward": True, "entropy_coef": 0.01}
A2C = {"horizon": 5, "epochs": 1, "minibatches": 1, "clip": None, "optimizer": "rmsprop"}
ON_POLICY = {
    "ppo": {**PPO, "squash": True, "value_clip": 0.2, "kl_stop": 0.02},
    "ppo, bfloat16": {**PPO, "amp": True, "shared": True},
    "ppo, lstm": {**PPO, "lstm": 32},
    "a2c": {**PPO, **A2C, "lr_schedule": "linear", "anneal_steps": 100_000},
}
REPPO = {**ROLLOUT, "family": "reppo", "kl_samples": 16, "anneal_steps": 100_000, "critic": {"atoms": 51}}
BOTH = {**ALGOS, **ON_POLICY, "reppo": REPPO, "reppo, bfloat16": {**REPPO, "amp": True, "kl_samples": None}}
FEW = ("pql", "pql_sac", "ppo", "a2c", "reppo")


SMALLER = {
    "device": "cpu",
    "num_envs": 16,
    "replay": {"capacity": 4096},
    "algo": {"batch_size": 32, "warmup_steps": 6, "critic": {"hidden": [8, 8]}, "policy": {"hidden": [8, 8]}},
}


@pytest.fixture(autouse=True)
def _place(machine, monkeypatch):
    """PyTorch reuses its 32 streams: graphs captured on them must be gone before others are."""
    if machine == "stand-in":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")
        monkeypatch.setitem(globals(), "TICKS", 3)
        monkeypatch.setitem(globals(), "never_waiting", NoWaiting)
    yield
    if machine == "cuda":
        gc.collect()
        torch.cuda.synchronize()


def gpu_config(**changes):
    return small_config(**fit(merge(BASE, SMALLER if DEVICE == "cpu" else {}), changes))


def settle(parts):
    """Everything the next tick depends on, on the host."""
    with parts.schedule.executor.exclusive():
        out = {k: v.cpu() for k, v in bits(parts).items()}
    torch.cuda.synchronize()
    return out


def run(config, ticks, executor=None, env=None, delay=None):
    """``ticks`` ticks from the start, settled. ``delay(parts)`` may hold the device up before the first."""
    parts = build(config, env, executor=executor)
    parts.prepare()
    parts.collector.start(seeds(config.seed)["env"])
    parts.collector.warm_up(config.algo.warmup_steps)
    if delay is None:
        parts.begin()
        torch.cuda.synchronize()
    else:
        delay(parts)
        parts.begin()
    for _ in range(ticks):
        parts.schedule.tick()
    out = settle(parts)
    del parts
    gc.collect()
    return out


# -- graphs -----------------------------------------------------------------------------------------------------------


@everywhere(ALGOS, ("pql", "pql_d", "batch norm"), slowly=ALGOS)
@pytest.mark.fault(26)
def test_captured_updates_equal_eager_ones_on_fresh_batches(algo):
    captured, eager = (start(gpu_config(algo=algo, graphs=g)) for g in ("on", "off"))
    assert all(job.graph.graph is not None for job in captured.jobs.values())
    assert all(job.graph.graph is None for job in eager.jobs.values())
    ours, theirs = (parts.collector.replays[0] for parts in (captured, eager))
    untouched = learners(settle(captured))
    for _ in range(5):
        for store in (ours.obs["policy"], ours.action, ours.reward):
            store.copy_(torch.randn_like(store))
        theirs.load_state_dict(ours.state_dict())
        for name in ("v", "p"):
            for parts in (captured, eager):
                parts.workers[name].run(1)
    after = learners(settle(captured))
    assert differences(after, learners(settle(eager))) == []
    assert "learners/v/state/critic/net.0.weight" in differences(after, untouched)
    for name in ("v", "p"):
        one, other = (parts.jobs[name].metrics.drain() for parts in (captured, eager))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one)


@everywhere(BOTH, ("pql", "modern", "ppo", "reppo"), slowly=BOTH)
@pytest.mark.fault(26)
def test_a_captured_run_equals_an_eager_one(algo):
    captured, eager = (run(gpu_config(algo=algo, graphs=g), ticks=TICKS) for g in ("on", "off"))
    assert differences(captured, eager) == []


RANDOM = {"mass": [0.8, 1.2], "obs_noise": 0.01, "obs_delay": [0, 2], "push": 0.5, "push_interval": 0.1}


@HERE_TOO
@pytest.mark.parametrize("how", ["graph", "regions", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_step_of_mujoco_on_warp_is_one_graph(how, monkeypatch):
    """With restarts, randomisation and a curriculum. On a GPU Warp's sums have no fixed order."""
    pytest.importorskip("mujoco_warp")
    compile = "off" if how == "graph" else "on"
    if how == "regions":
        monkeypatch.setattr("pql.engine.compiled.inductor", lambda module, example, text: lambda given: module(*given))
    kwargs = {"engine": "warp", "max_episode_steps": 5, "randomize": RANDOM, "curriculum": {"kind": "survive"}}
    config = gpu_config(task={"name": "halfcheetah", "kwargs": kwargs}, placement={"compile": compile})
    parts = build(config)
    parts.prepare()
    assert parts.collector.slices[0].whole
    assert parts.collector.slices[0].compiled == (compile == "on")
    captured, eager = (run(replace(config, graphs=g), ticks=2 * TICKS) for g in ("on", "off"))
    assert captured["collector/env/steps"].max() < 5
    assert captured["collector/env/levels/level"].unique().numel() > 1
    if DEVICE == "cpu" and how != "compiled":
        assert differences(captured, eager) == []
    else:
        assert [k for k, v in captured.items() if not v.isfinite().all()] == []


class Reads(CartpoleSwingup):
    """Reads a value on the host, which a capture refuses."""

    capturable = True

    def step(self, action):
        float(action[0].sum())
        return super().step(action)


class Counts(CartpoleSwingup):
    """Counts its steps on the host: a capture repeats the same one."""

    capturable, count = True, 0

    def step(self, action):
        self.count += 1
        step = super().step(action)
        return step._replace(reward=step.reward + self.count)


@HERE_TOO
@pytest.mark.parametrize(("kind", "why"), [(Reads, "captur"), (Counts, "100% of reward differ")])
def test_a_step_that_cannot_be_captured_runs_between_two_graphs(kind, why, machine):
    config = gpu_config(algo=ALGOS["pql"])
    parts = build(config, kind(config.num_envs, torch.device(DEVICE)))
    with pytest.warns(PqlWarning, match=f"the simulator's step is not captured, .*{why}"):
        parts.prepare()
    one = parts.collector.slices[0]
    assert not one.whole
    assert one._act.graph is not None
    assert one._record.graph is not None
    parts = build(replace(config, graphs="on"), kind(config.num_envs, torch.device(DEVICE)))
    with pytest.raises(ConfigError, match=f"graphs=on: expected auto or off: the simulator's step cannot .*{why}"):
        parts.prepare()


@HERE_TOO
@pytest.mark.parametrize("task", ["cartpole_swingup", "halfcheetah"])
def test_an_evaluation_with_a_captured_step_has_the_same_episodes(task):
    kwargs = {"max_episode_steps": 6}
    if task == "halfcheetah":
        pytest.importorskip("mujoco_warp")
        kwargs["engine"] = "warp"
    config = gpu_config(task={"name": task, "kwargs": kwargs})
    found = []
    for choice in ("off", "on"):
        env = build_env(config, 4)
        policy = fresh_policy(replace(config, seed=3), env.spec, DEVICE)
        captured = CapturedEnv(env, choice)
        captured.prepare()
        assert (captured._graph.graph is not None) == (choice == "on")
        found.append(run_episodes(captured, policy, 5, EpisodeRules(episodes=8)))
    assert found[0].lengths == found[1].lengths == [6] * 8
    assert len(set(found[0].returns)) == 8
    same = {"cartpole_swingup": 0.0, "halfcheetah": 0.0 if DEVICE == "cpu" else 1e-2}[task]
    assert found[0].returns == pytest.approx(found[1].returns, rel=same, abs=same)


class Turns:
    """Two groups of environments on the device that answer by turns."""

    def __init__(self, config):
        self.envs = [build_env(config, config.num_envs // 2) for _ in range(2)]
        self.spec = replace(self.envs[0].spec, num_envs=config.num_envs, groups=2)
        self.sent = []

    def reset(self, seed=None):
        return joined([env.reset(seed + g) for g, env in enumerate(self.envs)])

    def send(self, action, ids):
        self.sent.append((ids, action))

    def recv(self):
        ids, action = self.sent.pop(0)
        return ids, self.envs[0 if ids[0] == 0 else 1].step(action)

    def close(self):
        pass


@everywhere({k: BOTH[k] for k in (HELD, "ppo, lstm")}, [HELD])
def test_groups_by_turns_are_captured_each(algo):
    config = gpu_config(algo=algo)
    serial = run(gpu_config(algo=algo, graphs="off", placement={"overlap": False}), TICKS, env=Turns(config))
    for graphs in ("on", "off"):
        assert differences(serial, run(replace(config, graphs=graphs), TICKS, env=Turns(config))) == [], graphs


@everywhere(BOTH, ("pql_sac", "ppo"), slowly=FEW)
def test_what_is_not_finite_is_left_out_by_a_graph_too(algo):
    config = gpu_config(algo=algo, task={"kwargs": {"max_episode_steps": 1000}})
    late, ticks = (config.num_envs * 200) // 256, 2 * TICKS
    faults = {config.algo.warmup_steps + 1: [("state", [5, late])], config.algo.warmup_steps + 3: [("reward", [7])]}
    captured, eager = (
        run(replace(config, graphs=g), ticks, env=Breaking(build_env(config), faults)) for g in ("on", "off")
    )
    assert differences(captured, eager) == []
    assert 0 < int(captured["collector/quarantine/restarted"]) <= 3  # or its pole ends the episode first
    assert int(captured["collector/quarantine/dropped"]) >= 3
    assert [k for k, v in captured.items() if not v.isfinite().all()] == []


@everywhere(BOTH, FEW)
def test_warm_up_and_capture_leave_no_trace(algo):
    parts = build(gpu_config(algo=algo, graphs="on"))
    before, generator = settle(parts), torch.cuda.get_rng_state()
    parts.prepare()
    assert traces(before, settle(parts)) == []
    assert torch.equal(generator, torch.cuda.get_rng_state())
    assert parts.collector.steps == 0
    for job in parts.jobs.values():
        assert job.updates == 0
        if job.metrics.count is not None:
            assert [float(v) for v in (job.metrics.count, *job.metrics.sums)] == [0.0] * (1 + len(job.metrics.sums))


DISCRETE = {
    "ppo": {**PPO, "normalize_reward": False},
    "ppo, resnet": {**PPO, "encoder": {"kind": "resnet", "channels": [8, 8]}},
    "pqn": {
        "family": "pqn",
        "schedule": "lockstep",
        "horizon": 8,
        "minibatches": 4,
        "anneal_steps": 100_000,
        "encoder": {"channels": [16], "features": 32, "layer_norm": True},
    },
}


@everywhere(
    {f"{k}, {task}": (v, task) for k, v in DISCRETE.items() for task in ("cartpole", "catch")},
    ["ppo, catch", "pqn, cartpole"],
    "case",
)
def test_discrete_actions_are_captured(case):
    algo, task = case
    config = gpu_config(task={"name": task, "kwargs": {"stagger": True} if task == "cartpole" else {}}, algo=algo)
    captured, eager = (run(replace(config, graphs=g), ticks=TICKS) for g in ("on", "off"))
    assert differences(captured, eager) == []


@everywhere(ON_POLICY, ["ppo"])
def test_the_first_minibatch_on_the_device_is_on_policy(algo):
    from pql.algos import ppo

    parts = start(gpu_config(algo=algo, placement={"matmul": "exact"}))
    parts.schedule.tick()
    parts.workers["collector"].run(parts.counts.horizon)
    learner = parts.learners["learner"]
    (batch, *_) = learner.draw(parts.counts.updates["learner"], learner.gen)
    with torch.no_grad():
        params, _ = ppo.evaluate_minibatch(learner.state.net, batch)
    ratio = torch.exp(learner.state.net.policy.dist.log_prob(params, batch.action) - batch.log_prob)
    assert (ratio - 1).abs().max() < (1e-2 if algo.get("amp") else 2e-6)


class Draws:
    """A body that draws both kinds of number that updates draw."""

    def __init__(self, capture):
        self.gen = Generator(DEVICE).manual_seed(11)
        self.normal = torch.zeros(1000, device=DEVICE)
        self.whole = torch.zeros(1000, dtype=torch.int64, device=DEVICE)
        self.graph = Graph(self.body, torch.device(DEVICE, 0), [self.gen], self, Execution("on" if capture else "off"))
        self.graph.prepare()

    def body(self):
        self.normal.copy_(torch.randn(1000, generator=self.gen, device=DEVICE))
        self.whole.copy_(torch.randint(2**62, (1000,), generator=self.gen, device=DEVICE))

    def state_dict(self):
        return {"gen": self.gen.get_state()}

    def load_state_dict(self, state):
        self.gen.set_state(state["gen"])

    def __call__(self):
        self.graph()
        return self.normal.tolist(), self.whole.tolist()


@HERE_TOO
@pytest.mark.fault(26)
def test_replays_draw_new_numbers_and_repeat_them_after_reseeding():
    captured, eager = Draws(True), Draws(False)
    first, second = captured(), captured()
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert (first, second) == (eager(), eager())  # the capture has used none up, and draws what eager code draws
    captured.gen.manual_seed(11)
    assert (captured(), captured()) == (first, second)
    middle = captured.gen.get_state()
    third = captured()
    captured.gen.set_state(middle)
    assert captured() == third


class Product:
    """Products with a long inner dimension, which cuBLAS splits over its workspace; the input changes every time."""

    def __init__(self, seed):
        gen = Generator(DEVICE).manual_seed(seed)
        self.left = torch.randn(64, 16384, generator=gen, device=DEVICE)
        self.right = torch.randn(16384, 64, generator=gen, device=DEVICE)
        self.total = torch.zeros(64, 64, device=DEVICE)
        self.graph = Graph(self.body, torch.device(DEVICE, 0), [], self, Execution("on"))
        self.graph.prepare()

    def body(self):
        for _ in range(2):
            self.total.mul_(0.9).add_(torch.mm(self.left, self.right))
            self.left.copy_(self.left.roll(1, 1))

    def state_dict(self):
        return {"left": self.left, "total": self.total}

    def load_state_dict(self, state):
        self.left.copy_(state["left"])
        self.total.copy_(state["total"])


@pytest.mark.fault(26, 27)
def test_three_graphs_replayed_together_equal_three_replayed_one_after_another():
    products = [Product(seed) for seed in range(3)]
    saved = [{k: v.clone() for k, v in p.state_dict().items()} for p in products]
    for product in products:
        for _ in range(1000):
            product.graph()
        torch.cuda.synchronize()
    serial = [p.total.clone() for p in products]
    for product, state in zip(products, saved, strict=True):
        product.load_state_dict(state)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in products]
    for _ in range(1000):
        for product, stream in zip(products, streams, strict=True):
            with torch.cuda.stream(stream):
                product.graph()
    torch.cuda.synchronize()
    for product, total in zip(products, serial, strict=True):
        assert total.abs().sum() > 0
        assert torch.equal(product.total, total)


# -- the tick ---------------------------------------------------------------------------------------------------------


@everywhere({f"{k}, {g}": (v, g) for k, v in BOTH.items() for g in ("on", "off")}, [f"{k}, off" for k in FEW], "case")
def test_a_tick_never_waits_for_the_device(case):
    algo, graphs = case
    parts = start(gpu_config(algo=algo, graphs=graphs))
    parts.schedule.tick()  # objects that are created on first use are created here
    with never_waiting():
        for _ in range(4):
            parts.schedule.tick()


@everywhere(RECIPES, ["squint"])
def test_shared_encoders_and_augmented_images_are_captured(algo):
    """The same bits as eager, in any order; no tick waits for the device."""
    change = fit(PIXELS, {"algo": algo})
    config = gpu_config(**change)
    reference = run(gpu_config(**change, graphs="off"), TICKS)
    assert differences(reference, run(config, TICKS)) == []
    assert differences(reference, run(config, TICKS, Ordered(config, ORDERS[-1]))) == []
    parts = start(gpu_config(**change, graphs="on"))
    parts.schedule.tick()
    with never_waiting():
        for _ in range(4):
            parts.schedule.tick()


@everywhere({k: ALGOS[k] for k in ("pql", "pql_sac")}, ["pql"])
@pytest.mark.fault(27)
def test_every_order_on_three_streams_gives_the_same_bits(algo):
    config = gpu_config(algo=algo)
    reference = run(config, TICKS, Inline())
    for order in ORDERS:
        assert differences(reference, run(config, TICKS, Ordered(config, order))) == [], order


@everywhere({**{k: ALGOS[k] for k in ("pql", "pql_sac", "modern")}, "ppo": ON_POLICY["ppo"]})
def test_compiled_runs_give_the_same_bits_in_every_order(algo):
    config = gpu_config(algo=algo, placement={"compile": "on"})
    reference = run(config, TICKS, Inline())
    for order in ORDERS if algo.get("family") != "ppo" else ():
        assert differences(reference, run(config, TICKS, Ordered(config, order))) == [], order
    assert differences(reference, run(config, TICKS, Inline())) == []


@pytest.mark.fault(27, cases=(1, 10))
@HERE_TOO
def test_random_delays_on_the_streams_change_nothing(cases):
    config = gpu_config()
    reference = run(config, TICKS, Inline())
    for seed in range(cases):
        generator = torch.Generator().manual_seed(seed)

        def hold_up(parts, generator=generator):
            torch.cuda.synchronize()
            for worker in parts.workers.values():
                cycles = iter((torch.rand(20, generator=generator) * CYCLES / 10).long().tolist())

                def job(count, job=worker.job, cycles=cycles):
                    torch.cuda._sleep(next(cycles))
                    job(count)

                worker.job = job

        assert differences(reference, run(config, TICKS, delay=hold_up)) == []


@HERE_TOO
def test_the_first_tick_waits_for_what_was_set_up():
    config = gpu_config()
    reference = run(config, 3, Inline())
    assert differences(reference, run(config, 3, delay=lambda parts: torch.cuda._sleep(CYCLES))) == []


@HERE_TOO
def test_a_simulator_on_the_default_stream_is_waited_for():
    config = gpu_config()
    env = build_env(config)
    env.spec = replace(env.spec, stream="default")
    step = env.step

    def slow_step(action):
        torch.cuda._sleep(CYCLES // 100)
        return step(action)

    env.step = slow_step
    assert differences(run(config, 10, Inline()), run(config, 10, env=env)) == []


@HERE_TOO
def test_reading_between_ticks_is_ordered_with_them():
    parts = start(gpu_config())
    torch.cuda.synchronize()
    counts = []
    for _ in range(5):
        parts.schedule.tick()
        with parts.schedule.executor.exclusive():
            torch.cuda._sleep(CYCLES // 100)
            counts.append(parts.collector.replays[0].live.head[0].clone())
    # Row by row; with a filler row after the episode of seven steps that ends in one of these steps or in the warm-up.
    assert sorted(int(after - before) for before, after in itertools.pairwise(counts)) in ([1, 1, 1, 1], [1, 1, 1, 2])
    warm_up = parts.config.algo.warmup_steps
    assert int(counts[0]) - warm_up - 1 in (warm_up // 7, -(-warm_up // 7))  # filler rows after the episodes so far


@pytest.mark.parametrize("worker", ["collector", "v_learner", "p_learner"])
def test_a_worker_on_a_second_device_learns_the_same(worker):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    one = run(gpu_config(), TICKS)
    two = run(gpu_config(placement={worker: "cuda:1"}), TICKS)
    assert differences(learners(one), learners(two)) == []


@HERE_TOO
def test_the_host_runs_ahead_by_two_ticks_at_most():
    parts = start(gpu_config())
    torch.cuda.synchronize()
    executor = parts.schedule.executor
    with executor.exclusive():
        torch.cuda._sleep(CYCLES)
    for _ in range(2):
        parts.schedule.tick()
    first = [event for events in executor.flight[0].values() for event in events]
    assert len(first) == 6
    assert not any(event.query() for event in first)  # two ticks are launched, and the device has begun neither
    parts.schedule.tick()  # the third returns once the first has ended
    assert all(event.query() for event in first)
    torch.cuda.synchronize()


def test_the_rsl_rl_wrapper_never_waits_for_the_device():
    pytest.importorskip("rsl_rl")
    import pql

    env = pql.wrap.rsl_rl(pql.make_env("pendulum", num_envs=64, device=DEVICE, max_episode_steps=5), seed=0)
    action = torch.zeros(64, 1, device=DEVICE)
    env.episode_length_buf = torch.arange(64, device=DEVICE) % 5
    env.step(action)
    with never_waiting():
        for _ in range(12):
            obs, reward, done, extras = env.step(action)
    assert obs["policy"].device.type == reward.device.type == extras["time_outs"].device.type == "cuda"
    assert done.dtype == torch.bool


# -- replicas ---------------------------------------------------------------------------------------------------------


def replicas(count, order="turns", **placement):
    central = {"chunk": 512, "ticks": 3, "order": order}
    algo = {**ON_POLICY["ppo"], "schedule": "replicas", "replicas": count, "central": central}
    return gpu_config(algo=algo, placement=placement)


def run_replicas(config, ticks, late=None):
    """``late``: the replica whose device work is held up before every update."""
    parts = start(config)
    if late is not None:
        worker = parts.replicas[late].workers["learner"]
        worker.job = partial(held_up, worker.job)
    for _ in range(ticks):
        parts.schedule.tick()
    parts.schedule.executor.close()
    return settle(parts), parts


def held_up(job, count):
    if DEVICE == "cuda":
        torch.cuda._sleep(CYCLES // 10)
    job(count)


def test_one_replica_is_lockstep_bit_for_bit():
    eager = run(gpu_config(algo=ON_POLICY["ppo"], graphs="off"), 6)
    for order in ("turns", "free"):
        assert differences(eager, run_replicas(replicas(1, order), 2)[0]) == []


def test_replicas_in_turns_have_the_same_bits_however_late_the_device_is():
    reference, parts = run_replicas(replicas(2), 3)
    assert all(one.streams for one in parts.schedule.members) == (DEVICE == "cuda")
    for late in (0, 1):
        assert differences(reference, run_replicas(replicas(2), 3, late)[0]) == []


def test_free_replicas_lose_no_push():
    """Beyond ``kl_stop`` a push changes nothing, and Adam's count is then less; but the same in every chunk."""
    state, parts = run_replicas(replicas(4, "free"), 3)
    central = parts.schedule.central
    assert central.pushes == parts.updates()["v"] == 3 * 3 * 4 * 8
    assert len({int(chunk.state["count"]) for chunk in central.chunks}) == 1
    assert all(torch.isfinite(v).all() for v in learners(state).values() if v.is_floating_point())


def test_a_replica_on_a_second_device_learns_the_same():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    one = run_replicas(replicas(2, replicas=["cuda:0", "cuda:0"]), 3)[0]
    two = run_replicas(replicas(2, replicas=["cuda:0", "cuda:1"]), 3)[0]
    assert differences(one, two) == []
