"""Collectives, and updates of two processes on half batches against one process on the full batch."""

from contextlib import contextmanager
from datetime import timedelta

import dqn_runs
import pytest
import torch
from conftest import differences, small_config, start
from pairs import Pair, pair
from ppo_runs import config_of
from torch import Tensor

from pql.algos import ppo, pqn
from pql.data.normalize import Moments, Normalizer, pack_moments, pooled
from pql.engine.collectives import ALONE, Group, Order, PeerError
from pql.engine.executors import Inline
from pql.engine.world import World, world
from pql.errors import ConfigError
from pql.run.build import build
from pql.run.store.checkpoint import flatten
from pql.types import Batch, ObsBatch

B = 24  # rows of the whole batch


@pytest.fixture(scope="module")
def both():
    with pair() as two:
        two(join)
        yield two


def join() -> None:
    """Meet, as a run does."""
    from pql.run.ranks import Ranks

    Ranks(small_config())


def group() -> Group:
    from torch import distributed as dist

    return Group(dist.group.WORLD)


def rank() -> int:
    return world().rank


def half(x: Tensor, dim: int = 0) -> Tensor:
    """This process's half."""
    return x.chunk(2, dim)[rank()]


# -- ranks ----------------------------------------------------------------------------------------------------------


def test_the_place_is_what_torchrun_says(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert world() == World(0, 1, 0, 1)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert world().size == 1  # no other process
    for name, value in {"RANK": "5", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert world() == World(5, 8, 5, 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert world() == World(5, 8, 1, 4)
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(ConfigError, match="RANK=five: expected a whole number, as torchrun sets it"):
        world()


# -- collectives ----------------------------------------------------------------------------------------------------


def collectives() -> dict[str, list[float]]:
    all_, mine = group(), float(rank())
    mean = torch.tensor([1.0 + mine, 4.0, 0.0])
    all_.mean_(mean)
    rows = torch.ones(3) if rank() else torch.tensor([1.0, 0.0, 0.0])  # one row counts here, three there
    weighted = torch.tensor([8.0 * mine, 0.0])
    all_.mean_(weighted, rows)
    nothing = torch.tensor([0.0, 5.0])
    all_.mean_(nothing, torch.zeros(3))
    reported = torch.tensor([7.0 + mine])
    all_.broadcast_(reported)
    return {
        "sum": all_.sum_(torch.tensor([1.0, mine])).tolist(),
        "mean": mean[:2].tolist(),
        "weighted": weighted[:1].tolist(),
        "nothing": nothing[:1].tolist(),
        "number": [all_.mean(torch.tensor(8.0 * mine), rows).item()],
        "gather": all_.gather(torch.tensor([[mine, 2.0]])).flatten().tolist(),
        "reported": reported.tolist(),
    }


def test_collectives(both: Pair):
    want = {"sum": [2.0, 1.0], "mean": [1.5, 4.0], "weighted": [6.0], "nothing": [0.0], "number": [6.0]}
    want |= {"gather": [0.0, 2.0, 1.0, 2.0], "reported": [7.0]}
    assert both(collectives) == [want, want]


def test_alone_everything_is_what_it_was():
    x = torch.tensor([1.0, 2.0])
    ALONE.mean_(x, torch.ones(5))
    ALONE.broadcast_(x)
    assert x.tolist() == [1.0, 2.0]
    assert ALONE.sum_(x) is x
    assert ALONE.mean(x) is x
    assert ALONE.gather(x).tolist() == [[1.0, 2.0]]


class Stream:
    """Of a device: notes what it waits for and records."""

    def __init__(self, name: str, notes: list[str]):
        self.name, self.notes = name, notes

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.notes.append(f"{self.name} ends")
        return f"{self.name}'s end"


def test_bursts_on_a_device_follow_one_another(monkeypatch):
    notes: list[str] = []
    streams = iter([Stream(name, notes) for name in ("v", "p", "collector")])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    order = Order()
    for name in ("v", "p", "collector"):
        with Group(order=order).turn():
            notes.append(f"{name} works")
    assert notes[:2] == ["v works", "v ends"]
    assert notes[2:5] == ["p waits for v's end", "p works", "p ends"]
    assert notes[5:] == ["collector waits for p's end", "collector works", "collector ends"]


def test_a_learners_burst_takes_its_turn():
    parts = start(small_config(algo={"schedule": "lockstep"}), Inline())
    notes: list[str] = []

    class Noting:
        def __init__(self, name: str):
            self.name = name

        @contextmanager
        def turn(self, device):
            notes.append(self.name)
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        for name, job in parts.jobs.items():
            job.connect(Group(order=Noting(name)))
        parts.schedule.tick()
    assert notes == ["v", "p"] * parts.counts.rounds


def late() -> str:
    """Rank 0 waits for rank 1, which does not come."""
    from torch import distributed as dist

    short = Group(dist.new_group(backend="gloo", timeout=timedelta(seconds=0.5)))
    if rank() == 0:
        with pytest.raises(PeerError, match=r"(?i)timed out"):
            short.sum_(torch.zeros(1))
    return "out"


def test_who_does_not_come_is_not_waited_for(both: Pair):
    assert both(late) == ["out", "out"]


# -- updates of DDPG, C51, TD3 and SAC ------------------------------------------------------------------------------

SETTINGS = {
    "ddpg": {"family": "ddpg"},
    "c51": {"family": "ddpg", "critic": {"atoms": 11, "hidden": [16]}},
    "td3": {"family": "ddpg", "policy": {"target": True, "hidden": [16]}},
    "sac": {"family": "sac"},
}


def learners(setting: str):
    """Equal V- and P-learners wherever this is called; clipping is at work, and no row is drawn from a replay."""
    algo = {"critic": {"hidden": [16], "grad_clip": 0.01}, "policy": {"hidden": [16], "grad_clip": 0.01}}
    algo = {**algo, "schedule": "lockstep", **({} if setting == "sac" else {"smoothing": 0.0})}
    for k, v in SETTINGS[setting].items():
        algo[k] = {**algo[k], **v} if isinstance(v, dict) else v
    return build(small_config(algo=algo), executor=Inline()).learners


def batches() -> tuple[Batch, ObsBatch]:
    """The whole of it; the halves differ in how many rows count."""
    gen = torch.Generator().manual_seed(5)
    obs, after = ({"policy": torch.randn(B, 3, generator=gen)} for _ in range(2))
    mask = torch.ones(B)
    mask[[1, 2, 3, 5, 7, 8, 20]] = 0
    reward, weight = torch.randn(B, generator=gen), 0.5 + torch.rand(B, generator=gen)
    action = torch.rand(B, 1, generator=gen) * 2 - 1
    batch = Batch(obs, action, reward, torch.full((B,), 0.9), after, mask, weight, torch.arange(B), mask)
    return batch, ObsBatch(obs, mask, weight)


def cut(batch):
    return type(batch)(*({k: half(v) for k, v in x.items()} if isinstance(x, dict) else half(x) for x in batch))


def update(learner, batch, noise: Tensor) -> None:
    """One update; what it would draw are rows of ``noise``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, **kw: noise[: batch.mask.shape[0]])
        learner.update(learner.state, batch, learner.settings, learner.gen)


def off_policy(setting: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """By learner: its state after three updates in one process, and by both on halves."""
    whole, shared = learners(setting), learners(setting)
    noise = torch.randn(B, 1, generator=torch.Generator().manual_seed(6))
    out = {}
    for name, batch in zip(("v", "p"), batches(), strict=True):
        shared[name].state.connect(group())
        for _ in range(3):
            update(whole[name], batch, noise)
            update(shared[name], cut(batch), half(noise))
        out[name] = (flatten(whole[name].state.state_dict()), flatten(shared[name].state.state_dict()))
    return out


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_halves_of_a_batch_are_the_batch(both: Pair, setting):
    results = both(off_policy, setting)
    for name in ("v", "p"):
        fresh = flatten(learners(setting)[name].state.state_dict())
        whole, first = results[0][name]
        assert differences(first, results[1][name][1]) == []  # to the last bit on both ranks
        moved = [k for k in whole if not torch.equal(fresh[k], whole[k])]
        assert any("critic" in k or "policy" in k for k in moved)
        for k in whole:
            torch.testing.assert_close(first[k], whole[k], rtol=2e-4, atol=2e-6, msg=lambda m, k=k: f"{k}: {m}")
    half_only = both(off_policy_apart, setting)
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(*half_only, strict=True))  # the test would see it


def off_policy_apart(setting: str) -> list[Tensor]:
    """Each on its half, without a word to the other."""
    one = learners(setting)["v"]
    update(one, cut(batches()[0]), half(torch.randn(B, 1)))
    return [one.state.critic.data.detach().clone()]


# -- updates of DQN and PQN --------------------------------------------------------------------------------------------


PQN = {"family": "pqn", "schedule": "lockstep", "horizon": 4, "critic": {"hidden": [16], "grad_clip": 0.01}}


def value_learner(variant: str):
    if variant == "pqn":
        config = small_config(task={"name": "cartpole"}, algo=PQN)
        return build(config, executor=Inline()).learners["learner"]
    change = {"critic": {"hidden": [16], "grad_clip": 0.01}, "target_period": 8}
    return build(dqn_runs.config_of(dqn_runs.VARIANTS[variant], change), executor=Inline()).learners["v"]


def value_batch(variant: str) -> Batch | pqn.ValueMinibatch:
    gen = torch.Generator().manual_seed(5)
    obs, after = ({"policy": torch.randn(B, 4, generator=gen)} for _ in range(2))
    whole = batches()[0]._replace(obs=obs, next_obs=after, action=torch.randint(2, (B,), generator=gen))
    return pqn.ValueMinibatch(obs, whole.action, whole.reward, whole.mask) if variant == "pqn" else whole


def value_based(variant: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The learner's state after three updates in one process, and by both on halves; DQN's target is copied twice."""
    whole, shared, batch = value_learner(variant), value_learner(variant), value_batch(variant)
    shared.state.connect(group())
    for _ in range(3):
        for learner, rows in ((whole, batch), (shared, cut(batch))):
            learner.update(learner.state, rows, learner.settings, learner.gen)
    return flatten(whole.state.state_dict()), flatten(shared.state.state_dict())


@pytest.mark.parametrize("variant", ["dqn", "c51", "prioritized", "pqn"])
def test_two_halves_of_a_batch_are_the_batch_for_values_too(both: Pair, variant):
    (whole, first), (_, second) = both(value_based, variant)
    own = [k for k in first if k.startswith("priorities")]  # each has different rows
    assert set(differences(first, second)) <= set(own)
    fresh, name = flatten(value_learner(variant).state.state_dict()), "policy" if variant == "pqn" else "target"
    assert not torch.equal(fresh[f"{name}/advantage.0.weight"], whole[f"{name}/advantage.0.weight"])
    for k in whole.keys() - set(own):
        torch.testing.assert_close(first[k], whole[k], rtol=2e-4, atol=2e-6, msg=lambda m, k=k: f"{k}: {m}")


# -- PPO --------------------------------------------------------------------------------------------------------------


def segment_half(segment):
    """A rollout's columns are environments."""
    split = {
        k: half(v, 0 if k in ("carry", "fresh") else 1)
        for k, v in segment._asdict().items()
        if k not in ("obs", "lost")
    }
    return segment._replace(obs={k: half(v, 1) for k, v in segment.obs.items()}, **split)


PPO = {
    "stopped": {"kl_stop": 5e-4, "lr_schedule": "fixed"},
    "adaptive": {"kl_target": 0.002, "lr_schedule": "adaptive"},
    "plain": {"normalize_value": False, "normalize_advantage": False, "lr_schedule": "fixed", "optimizer": "rmsprop"},
}


def on_policy(setting: str) -> dict[str, dict[str, Tensor]]:
    """Three ticks' worth of updates on one segment: by one process on all, by both on halves."""
    algo = {"normalize_reward": True, "policy": {"lr": 3e-3, "grad_clip": 0.05}, "minibatches": 1, "epochs": 4}
    task = {"kwargs": {"max_episode_steps": 5, "stagger": True}}
    config = config_of({"task": task, "algo": {**algo, **PPO[setting]}})
    parts = start(config, Inline())
    parts.workers["collector"].run(8)
    learner = parts.learners["learner"]
    segment = parts.collector.stores[0].segment()
    mask = segment.mask.clone()
    mask[:3, :2] = 0
    segment = segment._replace(mask=mask)
    other = start(config, Inline()).learners["learner"].state  # the same weights
    other.progress.carry = half(other.progress.carry)
    out = {}
    for name, state, part in (("whole", learner.state, segment), ("shared", other, segment_half(segment))):
        if name == "shared":
            state.connect(group())
        reported = []
        for _ in range(3):
            for batch in ppo.draw_ppo(state, part, learner.settings, torch.Generator().manual_seed(1)):
                metrics = ppo.ppo_update(state, batch, learner.settings, torch.Generator())
                reported.append([metrics[f"policy/{k}"].clone() for k in ("lr", "updates_kept", "kl")])
        lrs, kept, kls = (torch.stack(column) for column in zip(*reported, strict=True))
        out[name] = flatten(state.state_dict()) | {"lrs": lrs, "kept": kept, "kls": kls}
    return out


@pytest.mark.parametrize("setting", PPO)
def test_two_halves_of_a_rollout_are_the_rollout(both: Pair, setting):
    results = both(on_policy, setting)
    whole, first = results[0]["whole"], results[0]["shared"]
    apart = ["kls"] if setting == "plain" else []  # there the KL decides nothing, and is each rank's own
    assert differences(first, results[1]["shared"]) == apart
    same = [k for k in whole if not k.startswith(("progress/", "kls"))]
    for k in same:
        torch.testing.assert_close(first[k], whole[k], rtol=1e-3, atol=1e-5, msg=lambda m, k=k: f"{k}: {m}")
    if not apart:
        torch.testing.assert_close(first["kls"], whole["kls"], rtol=1e-3, atol=1e-7)
    if setting == "stopped":
        assert 0 < whole["kept"].sum() < len(whole["kept"])
    if setting == "adaptive":
        assert len(whole["lrs"].unique()) > 1


# -- statistics -----------------------------------------------------------------------------------------------------


def test_pooled_moments_are_those_of_all_samples():
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(40, 2, 3, generator=gen, dtype=torch.float64) * 5 + 1e4
    parts = []
    for piece in (x[:7], x[7:7], x[7:]):
        moments = Moments((2, 3), torch.device("cpu"))
        if len(piece):
            moments.update(piece)
        parts.append(pack_moments(moments.count, moments.mean, moments.m2))
    count, mean, squares = pooled(torch.stack(parts), (2, 3))
    assert count == 40
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(squares / 40, x.var(0, correction=0), rtol=1e-9, atol=0)


def observe(norm: Normalizer, take) -> None:
    """Five ticks of three steps of 6 environments; a third of the rows are fillers."""
    gen = torch.Generator().manual_seed(9)
    for _ in range(5):
        for _ in range(3):
            obs = {"policy": torch.randn(6, 3, generator=gen) * 4 + 100, "image": torch.zeros(6, 2, dtype=torch.uint8)}
            keep, over = torch.rand(6, generator=gen) > 0.3, torch.rand(6, generator=gen) > 0.7
            norm.observe({k: take(v) for k, v in obs.items()}, take(keep))
            norm.observe_reward(take(torch.randn(6, generator=gen)), take(over), take(keep))
        norm.freeze()


def statistics(connected: bool) -> dict[str, Tensor]:
    from pql.contract.env import ObsSpec

    spec = {"policy": ObsSpec((3,)), "image": ObsSpec((2,), torch.uint8)}
    norm = Normalizer(spec, 3 if connected else 6, torch.device("cpu"), reward_scale=0.5, reward_gamma=0.9)
    if connected:
        norm.connect(group())
    observe(norm, half if connected else lambda x: x)
    state = {k: v for k, v in norm.state_dict().items() if k != "running_return"}
    return state | {str(i): v for i, v in enumerate(norm.frozen())}


def test_statistics_of_two_processes_are_those_of_one_that_sees_both_halves(both: Pair):
    first, second = both(statistics, True)
    assert differences(first, second) == []
    want = statistics(False)
    assert first.keys() == want.keys()  # so that a checkpoint does not depend on the rank that wrote it
    assert want["moments.policy.count"] > 30
    for k, v in want.items():
        torch.testing.assert_close(first[k], v, rtol=1e-5 if v.dtype == torch.float32 else 1e-11, atol=1e-12)


def restored() -> list[float]:
    """Values since the last merge do not survive the loading of a state."""
    from pql.contract.env import ObsSpec

    norm = Normalizer({"policy": ObsSpec((1,))}, 2, torch.device("cpu"))
    norm.connect(group())
    saved = {k: v.clone() for k, v in norm.state_dict().items()}
    norm.observe({"policy": torch.full((2, 1), 5.0)})
    norm.load_state_dict(saved)
    norm.freeze()
    return [norm.moments["policy"].count.item(), norm.moments["policy"].mean.item()]


def test_a_restored_state_forgets_what_was_not_merged(both: Pair):
    assert both(restored) == [[0.0, 0.0]] * 2
