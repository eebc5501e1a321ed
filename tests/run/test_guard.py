"""Non-finite gradients: the step is skipped and counted, and a run with no other steps ends."""

import copy
import random

import pytest
import torch
from run_files import points, resume, rows, run, words
from torch import nn

from pql.algos import critics
from pql.collect import saturation
from pql.engine.central import Central, CentralOptimizer
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, RAdam, RMSProp, RMSPropTF
from pql.errors import PqlWarning, RunError
from pql.nets.mlp import DeterministicPolicy, Layers, mlp
from pql.run import guard
from pql.run.guard import FROZEN_UPDATES, LIMIT, FrozenPolicy, NonFiniteMonitor
from pql.run.store import checkpoint

NAN, INF = float("nan"), float("inf")


def central(flat, lr, clip):
    own = AdamW(flat, lr, clip)
    return CentralOptimizer(own, Central(own, chunk=8))


@pytest.mark.fault(4, count=2)
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])  # the last one: finite, but not its norm
@pytest.mark.parametrize("make", [AdamW, RAdam, RMSProp, RMSPropTF, central])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_along_a_gradient_that_is_not_finite_is_no_step(make, bad, clip, trial):
    torch.manual_seed(trial)
    net = mlp(3, Layers((5,)), 2)
    ours, clean = (make(Flat(copy.deepcopy(net), trained=True), 1e-2, clip) for _ in range(2))
    gen = torch.Generator().manual_seed(1 + trial)
    for i in range(12):
        grad = torch.randn(ours.flat.data.numel(), generator=gen)
        if i in (0, 5, 6):
            ours.flat.data.grad.copy_(grad)[torch.tensor([3, 7])] = bad
            assert not ours.step().isfinite()
            assert ours.broken == 1
        else:
            for optimizer in (ours, clean):
                optimizer.flat.data.grad.copy_(grad)
                assert optimizer.step().isfinite()
                assert optimizer.broken == 0
    assert torch.equal(ours.flat.data, clean.flat.data)
    mine, theirs = ours.state_dict(), clean.state_dict()
    assert all(torch.equal(mine[k], theirs[k]) for k in theirs)


def test_what_is_to_be_skipped_anyhow_stays_so():
    optimizer = AdamW(Flat(nn.Linear(2, 1), trained=True), 1e-2)
    before = optimizer.flat.data.detach().clone()
    for value, skip in ((1.0, 1.0), (NAN, 0.0), (NAN, 1.0)):
        optimizer.flat.data.grad.fill_(value)
        optimizer.step(torch.tensor(skip))
        assert torch.equal(optimizer.flat.data, before)
        assert optimizer.broken == float(value != value)


def spoil(monkeypatch, which):
    """Losses of the critic's updates for whose number ``which`` is true are NaN."""
    calls, loss_of = [0], critics.scalar_loss

    def loss(*args):
        calls[0] += 1
        loss, q = loss_of(*args)
        return (loss * NAN if which(calls[0]) else loss), q

    monkeypatch.setattr(critics, "scalar_loss", loss)


def weights(run_dir):
    return {k: v for k, v in checkpoint.load(points(run_dir)[-1])[0].items() if v.is_floating_point()}


@pytest.mark.fault(4, count=10)
@pytest.mark.parametrize("schedule", ["lockstep", "concurrent"])
def test_a_run_goes_on_after_updates_that_are_not_finite_and_counts_them(tmp_path, monkeypatch, schedule, trial):
    bad = random.Random(trial).sample(range(1, 100), 3) if trial else (3, 4, 40)
    spoil(monkeypatch, lambda number: number in bad)
    with pytest.warns(PqlWarning, match="updates of v left out: gradient not finite"):
        run(
            *words(
                tmp_path / "run",
                f"algo.schedule={schedule}",
                "budget.env_steps=3200",
                "logger.every_seconds=1e6",
                "graphs=off",
            )
        )
    (row,) = rows(tmp_path / "run")
    assert row["updates/v"] > 100
    assert row["skipped/v"] * row["updates/v"] == pytest.approx(3)
    assert row["skipped/p"] == 0
    networks = {k: v for k, v in weights(tmp_path / "run").items() if not k.startswith("collector")}
    assert len(networks) > 8
    assert all(v.isfinite().all() for v in networks.values())


@pytest.mark.fault(4, count=10)
def test_a_run_of_nothing_else_ends_and_its_weights_are_those_from_before(tmp_path, monkeypatch, trial):
    run_dir, more = tmp_path / "run", ["algo.schedule=lockstep", "algo.v_per_step=4", f"seed={trial}"]
    run(*words(run_dir, *more))
    before = weights(run_dir)
    spoil(monkeypatch, lambda number: True)
    with pytest.warns(PqlWarning), pytest.raises(RunError, match="updates of v in a row had gradients that are not"):
        resume(run_dir, "budget.env_steps=1000000")
    assert all(torch.equal(v, before[k]) for k, v in weights(run_dir).items())
    monkeypatch.undo()
    assert resume(run_dir, "budget.env_steps=640").env_steps >= 640


# -- a frozen policy --------------------------------------------------------------------------------------------------


def test_a_policy_that_stays_frozen_is_warned_of_once_and_with_what_helps():
    said, half = [], FROZEN_UPDATES // 2
    monitor = FrozenPolicy(said.append, 10, penalized=True)
    for i, frozen in enumerate([0.8, 0.4, 0.5], 1):  # not in a row; a bang-bang policy has none at all
        monitor.look({"updates/p": 10 + i * half, "policy/frozen": frozen, "policy/saturated": 0.9})
    monitor.look({"eval/return_mean": 3.0})
    assert said == []
    for i in (4, 5, 6):
        monitor.look({"updates/p": 10 + i * half, "policy/frozen": 0.75, "policy/saturated": 0.9})
    assert len(said) == 1
    assert said[0].startswith("75% of all action components stayed at one end of their range for 5,000 policy updates")
    for remedy in ("algo.policy.saturation_penalty=0.01", "algo.policy.lr", "action scale"):
        assert remedy in said[0]
    FrozenPolicy(said.append, 0, penalized=False).look({"updates/p": FROZEN_UPDATES, "policy/frozen": 1.0})
    assert "saturation_penalty" not in said[1]  # SAC and PPO do not read it


@pytest.mark.parametrize("algo", ["pql", "td3", "sac", "ppo"])
def test_the_log_of_every_policy_with_a_tanh_has_its_saturation(tmp_path, algo):
    squash = ["algo.squash=true", "algo.minibatches=2"] if algo == "ppo" else []
    common = [w for w in words(tmp_path / "run") if algo != "ppo" or not w.startswith(("replay.", "algo.batch"))]
    run(*common, f"algo={algo}", *squash, "budget.env_steps=1200")
    logged = [row for row in rows(tmp_path / "run") if "loss/policy" in row]
    assert any(row["policy/saturated"] > 0 for row in logged) == (algo in ("sac", "ppo"))  # fresh weights, and noise
    assert all(0 <= row["policy/frozen"] <= 1 for row in logged)
    assert all(0 <= row["policy/saturated"] <= 1 for row in logged)


def test_a_run_whose_policy_freezes_warns(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "FROZEN_UPDATES", 4)
    monkeypatch.setattr(saturation, "WINDOW", 2)
    forward = DeterministicPolicy.before_tanh
    monkeypatch.setattr(DeterministicPolicy, "before_tanh", lambda self, obs: forward(self, obs) + 30)
    with pytest.warns(PqlWarning, match="100% of all action components stayed at one end"):
        run(*words(tmp_path / "run"))
    assert rows(tmp_path / "run")[-1]["policy/saturated"] == 1


def test_only_updates_in_a_row_end_a_run():
    said = []
    watch = NonFiniteMonitor(said.append, {"v": 10, "p": 5})
    half = LIMIT // 2
    for i, (v, p) in enumerate([(0.5, 0.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.9, 1.0)], 1):
        watch.look({"updates/v": 10 + i * half, "updates/p": 5 + i * half / 5, "skipped/v": v, "skipped/p": p})
    assert said == [
        f"{half / 2:.0f} of {half} updates of v left out: gradient not finite",
        f"{half / 5:.0f} of {half / 5:.0f} updates of p left out: gradient not finite",
    ]
    watch.look({"eval/return_mean": 3.0})  # an evaluation's row: nothing was updated
    watch.look({"updates/v": 10 + 6 * half, "updates/p": 5 + 6 * half / 5, "skipped/v": 1.0, "skipped/p": 0.0})
    with pytest.raises(RunError, match=rf"^{2 * half} updates of v in a row"):
        watch.look({"updates/v": 10 + 7 * half, "updates/p": 5 + 7 * half / 5, "skipped/v": 1.0, "skipped/p": 0.0})
