"""``pql sweep --pbt``: decisions of Ray Tune's scheduler, exchanges, interruptions, and real runs."""

import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from run_files import QUICK, manifest, points, rows

from pql.cli import population
from pql.cli.main import main
from pql.cli.sweep_plan import make_plan
from pql.errors import ConfigError

LR = "algo.critic.lr=tag(log,interval(1e-5,1e-1))"
BASE = ["device=cpu", "task=lqr", "budget.env_steps=160000", "every=40_000", LR]


def in_its_place(plan, number, params, scores):
    """In place of Ray Tune: the worst member takes over half the only setting of the best one."""
    (key,) = plan.spaces
    members = [population.Trial(i, dict(one)) for i, one in enumerate(params)]
    if not scores:
        for one in members:
            one.config = {key: 10.0 ** -(2 + one.checkpoint[0])}
    else:
        best, worst = (scores.index(pick(scores)) for pick in (max, min))
        taken = type("Result", (), {"checkpoint": (best,)})
        members[worst].run_metadata.checkpoint_manager._latest_checkpoint_result = taken
        members[worst].config = {key: params[best][key] / 2}
    return members


@pytest.fixture(params=["stand-in", "ray"])
def engine(request, monkeypatch):
    """Ray Tune where it is installed, and a stand-in, with which everything but its decisions is tested."""
    if request.param == "ray":
        pytest.importorskip("ray.tune")
    else:
        for name in ("ray", "ray.tune"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(population, "decide", in_its_place)
    return request.param


class LostError(Exception):
    """The process is gone."""


def descend(x: float, lr: float, done: int, end: int) -> float:
    """Return the distance from the minimum of a parabola after gradient descent at env steps ``done`` to ``end``."""
    for _ in range(done, end, 1000):
        x *= abs(1 - 2 * lr)
    return x


def score(x: float, lr: float, end: int) -> float:
    """Return the return: in the second half of the budget the noise of large learning rates counts."""
    return -x - (100 * lr if end > 80_000 else 0)


class Valley(population.Runner):
    """In place of runs: gradient descent. Member 3 fails in its first round."""

    def run(self, words, log=None, enough=None, every=0.0):
        verb, settings = words[0], dict(w.split("=", 1) for w in words if "=" in w)
        run_dir = Path(words[1] if verb == "resume" else settings["run_dir"])
        point, end = run_dir / "checkpoints" / "tick-1", int(settings["budget.env_steps"])
        done, x = json.loads((point / "x").read_text()) if verb == "resume" else (0, 1.0)
        lr = float(settings["algo.critic.lr"])
        x, failed = descend(x, lr, done, end), run_dir.name == "member-3" and done == 0
        point.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text("x: 1")
        (point / "x").write_text(json.dumps([0 if failed else end, x]))
        value = score(x, lr, end)
        summary = {"return_mean": value, "return_iqm": value, "seconds": 1.0, "env_steps": end, "interrupted": failed}
        log.open("a").write("no\n" if failed else f"{verb}\n")
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return int(failed)


def train(folder: Path, *words: str) -> dict[str, Any]:
    assert population.population_command([*BASE, f"sweep_dir={folder}", *words]) == 0
    return json.loads((folder / "population.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trials=3"], "trials=3: expected no such setting with --pbt"),
        (["population=1"], "population=1: expected a whole number, at least 2"),
        (["every=x"], "every=x: expected a number of env steps or seconds"),
        (["every=200_000"], "every=200000: expected a number above 0 up to budget.env_steps=160000"),
        (["budget.seconds=9"], "budget=seconds env_steps: expected budget.env_steps or budget.seconds alone"),
        (["seeds=1,2"], "seeds=1,2: expected one number: member k has the seed seeds + k"),
        (["checkpoint.replay=false"], "checkpoint.replay=false: expected true: members continue"),
        (["algo.n_step=interval(1,5)"], "algo.n_step=interval(1,5): expected one of algo.gamma, algo.critic.lr, "),
        (["algo=pql,sac"], "algo=pql,sac: expected one of algo.gamma"),
        (["algo=ppo", "algo.policy.lr=interval(1e-4,1e-2)"], "expected algo.lr_schedule=fixed with it"),
        (["every=16"], "budget.env_steps=16: expected more than the warm-up's"),
    ],
)
def test_a_mistake_shows_before_anything_starts(words, message):
    given = {w.partition("=")[0] for w in words}
    base = [w for w in BASE if w.partition("=")[0] not in given and (w != LR or "algo=ppo" not in words)]
    with pytest.raises(ConfigError) as error:
        make_plan([*base, *words], pbt=True)
    assert message in str(error.value)


def test_a_search_has_no_population_and_without_ray_it_says_what_to_install(monkeypatch, capsys):
    with pytest.raises(ConfigError, match="every=5: expected no such setting without --pbt"):
        make_plan(["device=cpu", LR, "every=5"])
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    assert main(["sweep", "--pbt", LR]) == 2
    assert "which is not installed: pip install 'pql-rl[pbt]'" in capsys.readouterr().err


def test_what_depends_on_the_budget_is_that_of_the_whole_run():
    """``algo.anneal_steps: ${budget.env_steps}`` of a preset, and not the end of the first round."""
    words = ["device=cpu", "task=cartpole", "algo=impala", "every=5000", "algo.entropy_coef=interval(0.01,0.1)"]
    plan = make_plan([*words, "budget.env_steps=50000"], pbt=True)
    assert plan.words["algo.anneal_steps"] == "50000"
    assert (plan.words["checkpoint.replay"], plan.words["eval.every_seconds"]) == ("true", "null")


def test_members_that_may_change_get_further_than_any_fixed_setting(engine, tmp_path, monkeypatch, capsys):
    """A large learning rate is good first, a small one later: the population beats its own first settings, alone, and
    each of a thousand others."""
    monkeypatch.setattr(population, "Runner", Valley)
    best, base = {}, [w for w in BASE if "every" not in w]
    for name, every in (("alone", 160_000), ("together", 10_000)):
        words = [*base, f"every={every}", "population=6", f"sweep_dir={tmp_path / name}"]
        assert population.population_command(words) == 0
        rows = json.loads((tmp_path / name / "trials.json").read_text())
        best[name] = max(row["value"] for row in rows if row["value"] is not None)
    fixed = max(score(descend(1.0, lr, 0, 160_000), lr, 160_000) for lr in np.geomspace(1e-5, 1e-1, 1000))
    assert fixed == pytest.approx(-0.68, abs=0.01)
    assert best["alone"] <= fixed
    assert best["together"] > -0.4
    rounds = json.loads((tmp_path / "together" / "population.json").read_text())["rounds"]
    for before, after in itertools.pairwise(rounds):
        for i, one in enumerate(before):
            parent = before[one["parent"]]
            if parent is one:
                assert one["params"] == after[i]["params"]
            else:  # its weights are the parent's, whose return was higher
                assert one["value"] is None or parent["value"] >= one["value"]
                rates = (given["params"]["algo.critic.lr"] for given in (after[i], parent))
                assert engine == "ray" or next(rates) == next(rates) / 2
    assert f"return_mean {best['together']:,.1f}\npql eval {tmp_path}/together/member-" in capsys.readouterr().out


def test_a_population_that_is_killed_anywhere_ends_as_another_that_is_not(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "Runner", Valley)
    half = "every=80_000"
    whole = train(tmp_path / "whole", half)
    assert any(one["parent"] != i for past in whole["rounds"] for i, one in enumerate(past))
    left = math.inf

    def mortal(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise LostError
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(Valley, "run", mortal(Valley.run))
    monkeypatch.setattr(population, "write_state", mortal(population.write_state))
    monkeypatch.setattr(shutil, "copyfile", mortal(shutil.copyfile))
    for i in range(50):
        folder, left = tmp_path / str(i), i
        try:
            train(folder, half)
            break
        except LostError:
            left = math.inf
            state = train(folder, half)
        assert {**state, "asked": 0} == {**whole, "asked": 0}
        one, other = ([*(tmp_path / name).glob("*/checkpoints/tick-1/x")] for name in (str(i), "whole"))
        assert sorted(path.read_text() for path in one) == sorted(path.read_text() for path in other)
    assert i > 12  # 8 trainings, 4 writes of the state, and copies


def test_a_failed_member_is_replaced_and_another_population_is_refused(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "Runner", Valley)
    state = train(tmp_path)
    failed, *_, last = (one[3] for one in state["rounds"])
    assert (failed["value"], failed["why"], failed["parent"] == 3) == (None, "status 1: no", False)
    row = json.loads((tmp_path / "trials.json").read_text())[3]
    assert (row["trial"], row["returns"][0], row["returns"][-1]) == (3, None, last["value"])
    assert row["value"] == last["value"] > -1
    with pytest.raises(ConfigError, match="population=3: expected 4, as in this sweep"):
        train(tmp_path, "population=3")
    (tmp_path / "population.json").write_text("{")
    with pytest.raises(ConfigError, match=r"whose population\.json is intact"):
        train(tmp_path)


def test_decisions_of_ray_tune():
    """The lowest quarter gets settings of the highest, times 0.8 or 1.2 or drawn anew, within the range."""
    pytest.importorskip("ray.tune")
    spaces = ["algo.critic.lr=interval(0.001,0.01)", "algo.gamma=choice(0.9,0.95,0.99)"]
    plan = make_plan(["device=cpu", "budget.env_steps=90000", "every=10000", "population=8", *spaces], pbt=True)
    first = [one.config for one in population.decide(plan, 0, [{}] * 8, [])]
    assert len({one["algo.critic.lr"] for one in first}) == 8
    old, factors = [{"algo.critic.lr": 0.009, "algo.gamma": "0.95"} for _ in range(8)], set()
    for number in range(1, 40):
        members, again = (population.decide(plan, number, old, [3.0, 0, 7, 4, 2, 1, 6, 5]) for _ in range(2))
        assert [one.config for one in members] == [one.config for one in again]
        assert [i for i, one in enumerate(members) if one.parent in (2, 6)] == [1, 5]
        assert all(one.parent is None and one.config == old[0] for i, one in enumerate(members) if i not in (1, 5))
        first += [members[i].config for i in (1, 5)]
        factors |= {round(members[i].config["algo.critic.lr"] / 0.009, 3) for i in (1, 5)}
    assert all(0.001 <= one["algo.critic.lr"] <= 0.01 and one["algo.gamma"] in ("0.9", "0.95", "0.99") for one in first)
    assert {0.8, round(0.01 / 0.009, 3)} <= factors
    assert len(factors) > 5  # drawn anew


def test_real_runs_exchange_weights(engine, tmp_path, monkeypatch):
    class Here(population.Runner):
        """Runs the commands in this process."""

        def run(self, words, log=None, enough=None, every=0.0):
            log.open("a").write(" ".join(words) + "\n")
            return main(list(words))

    monkeypatch.setattr(population, "Runner", Here)
    run = ["task=lqr", "algo=ppo", *QUICK[:4], "algo.warmup_steps=0", "algo.lr_schedule=fixed", "eval.num_envs=2"]
    more = ["algo.policy.lr=tag(log,interval(1e-5,1e-2))", "budget.env_steps=1280", "every=640", "population=2"]
    assert main(["sweep", "--pbt", *run, *more, f"sweep_dir={tmp_path}"]) == 0
    state = json.loads((tmp_path / "population.json").read_text())
    first, second = state["rounds"]
    (loser,) = (i for i, one in enumerate(first) if one["parent"] != i)
    for i, one in enumerate(second):
        saved = manifest(points(tmp_path / f"member-{i}")[-1])
        assert saved["config"]["algo"]["policy"]["lr"] == one["params"]["algo.policy.lr"]
        assert saved["config"]["seed"] == 1 - loser
        assert saved["counters"]["ticks"] == 3  # of 512 steps
    logs = [rows(tmp_path / f"member-{i}") for i in (0, 1)]
    curves = [[row["eval/return_mean"] for row in log if "eval/return_mean" in row] for log in logs]
    assert curves[0][0] == curves[1][0] == first[1 - loser]["value"]
    assert [curve[-1] for curve in curves] == [one["value"] for one in second]
