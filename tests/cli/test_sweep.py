"""``pql sweep``: parsing, sampling, the value of a trial, pruning, failures, continuing."""

import csv
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_files import WORDS

optuna = pytest.importorskip("optuna")

from pql.cli import sweep  # noqa: E402
from pql.cli.main import main  # noqa: E402
from pql.cli.sweep_plan import make_plan  # noqa: E402
from pql.cli.sweep_values import Space  # noqa: E402
from pql.config.compose import compose  # noqa: E402
from pql.errors import ConfigError  # noqa: E402

LR = "algo.critic.lr=tag(log,interval(1e-5,1e-1))"

# In place of pql: a run whose return is known, -(log10(lr) + 3)^2 - seed / 10, reached in a straight line from -100.
# A batch of 7 fails. A run whose return is below the threshold then waits for a request to end, like a long run.
STAND_IN = """
import json, math, os, signal, sys, time
words = dict(w.split("=", 1) for w in sys.argv[3:])
threshold, run_dir = float(sys.argv[1]), words["run_dir"]
final = -(math.log10(float(words["algo.critic.lr"])) + 3) ** 2 - int(words["seed"]) / 10
def end(interrupted):
    value = None if interrupted else final
    summary = {"return_mean": value, "return_iqm": value and 2 * value, "seconds": 3.0, "interrupted": interrupted}
    with open(run_dir + "/summary.json", "w") as f:
        json.dump(summary, f)
    os._exit(130 if interrupted else 0)
if words.get("algo.batch_size") == "7":
    print("pql: worker v failed: no", flush=True)
    os._exit(1)
signal.signal(signal.SIGTERM, lambda *_: end(True))
os.makedirs(run_dir)
open(run_dir + "/config.yaml", "w").write("x: 1")
with open(run_dir + "/metrics.jsonl", "w") as f:
    for i in range(1, 11):
        done = i / 10
        for row in ({"eval/return_mean": -100 + done * (100 + final)}, {"loss/v": 1}):
            f.write(json.dumps({"time/seconds": 240 * done, "steps/env": 1e6 * done, **row}) + "\\n")
if final < threshold:
    time.sleep(600)
end(False)
"""


def program(threshold: float = -1e9) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", STAND_IN, str(threshold)]


def search(folder: Path, *words: str, threshold: float = -1e9) -> int:
    return sweep.sweep_command(["device=cpu", "task=lqr", LR, f"sweep_dir={folder}", *words], program(threshold))


def found(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trials.json").read_text())


# -- the command ----------------------------------------------------------------------------------------------------


def test_a_plan():
    plan = make_plan(
        ["task=lqr", "device=cpu", "algo.n_step=interval(1,5)", "algo=choice(pql,sac)", "seeds=range(1,4)"]
    )
    assert plan.spaces == {
        "algo.n_step": Space("interval(1,5)", (), 1, 5, integer=True),
        "algo": Space("choice(pql,sac)", ("pql", "sac")),
    }
    settings = plan.settings
    assert (settings.trials, settings.seeds, settings.prune, settings.sampler) == (20, (1, 2, 3), "seconds", "tpe")
    assert str(plan.folder) == "runs/sweep-lqr-pql"
    assert plan.words["checkpoint.replay"] == "false"
    assert make_plan(["budget.env_steps=1e6", "device=cpu", LR]).settings.prune == "env_steps"
    assert make_plan(["eval.every_seconds=null", "device=cpu", LR]).settings.prune == "none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo.gamma=0.9"], "sweep=device=cpu algo.gamma=0.9: expected a setting to search, such as"),
        ([LR, "seed=1"], "seed=1: expected seeds=1,2"),
        ([LR, "seeds=1,x"], "seeds=1,x: expected whole numbers"),
        ([LR, "run_dir=x"], "run_dir=x: expected sweep_dir=FOLDER"),
        ([LR, "trials=0"], "trials=0: expected a whole number, at least 1"),
        ([LR, "trials=1,2"], "trials=1,2: expected a single value"),
        ([LR, "trails=3"], "trails=3: expected a known setting (did you mean trials?)"),
        ([LR, "pruner=ashaa"], "pruner=ashaa: expected one of median, asha (did you mean asha?)"),
        ([LR, "sampler=tpee"], "sampler=tpee: expected one of tpe, random (did you mean tpe?)"),
        ([LR, "task=lqr,pendulum"], "task=lqr,pendulum: expected a single value: returns of two tasks"),
        ([LR, "eval.final=false"], "eval.final=false: expected true: a trial's value"),
        ([LR, "prune=env_steps"], "prune=env_steps: expected one of seconds, none, as the budget is counted"),
        ([LR, "prune=seconds", "eval.every_seconds=null"], "expected none: eval.every_seconds is null"),
        ([LR, "budget.target_return=1"], "budget=null: expected budget.seconds or budget.env_steps"),
        (["algo.n_step=interval(1.5,3)"], "algo.n_step=interval(1.5,3): expected whole numbers"),
        (["algo.critic.lr=interval(0.1,2)"], "algo.critic.lr=2.0: expected a number above 0 up to 1"),
        (["algo=choice(pql,sacc)"], "algo=sacc: expected one of a2c, a3c, "),
    ],
)
def test_a_mistake_shows_before_anything_starts(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "device=cpu", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, said.err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])


def test_without_optuna_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", LR]) == 2
    assert "the package 'optuna', which is not installed: pip install 'pql-rl[sweep]'" in capsys.readouterr().err


# -- trials ---------------------------------------------------------------------------------------------------------


def test_what_is_sampled_lies_in_its_space_and_what_is_best_is_known(tmp_path, capsys):
    spaces = ["algo.batch_size=choice(64,128)", "algo.n_step=interval(1,3)", "algo.gamma=range(0.9,1,0.05)"]
    assert search(tmp_path, *spaces, "algo.critic.tau=interval(0.1,0.2)", "trials=8", "seeds=1,3", "prune=none") == 0
    rows = found(tmp_path)
    assert [row["trial"] for row in rows] == list(range(8))
    for row in rows:
        lr = row["params"]["algo.critic.lr"]
        assert 1e-5 <= lr <= 1e-1
        assert row["state"] == "complete"
        assert row["returns"] == pytest.approx([-((math.log10(lr) + 3) ** 2) - s / 10 for s in (1, 3)])
        assert row["value"] == pytest.approx(sum(row["returns"]) / 2)
        assert row["seconds"] == 6.0
        assert 0.1 <= row["params"]["algo.critic.tau"] <= 0.2
        assert {p.name for p in (tmp_path / f"trial-{row['trial']:03d}").iterdir()} == {
            "seed1",
            "seed1.log",
            "seed3",
            "seed3.log",
        }
    drawn = {key: {row["params"][key] for row in rows} for key in rows[0]["params"]}
    assert drawn["algo.batch_size"] == {"64", "128"}
    assert drawn["algo.n_step"] == {1, 2, 3}
    assert drawn["algo.gamma"] == {0.9, 0.95}
    assert sum(lr < 1e-3 for lr in drawn["algo.critic.lr"]) in range(2, 7)  # even by magnitude: about half
    with (tmp_path / "trials.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["algo.critic.lr"]) for row in table] == [row["params"]["algo.critic.lr"] for row in rows]

    best = max(rows, key=lambda row: row["value"])
    said = capsys.readouterr().out.splitlines()
    assert "8 trials: 8 finished, 0 pruned, 0 failed" in said
    assert said[-2] == f"best: trial {best['trial']}, return_mean {best['value']:,.1f}"
    command = said[-1].split()
    assert command[:3] == ["pql", "train", "-m"]
    assert command[-1] == "seed=1,3"
    config = compose(command[3:-1])
    assert config.algo.critic.lr == best["params"]["algo.critic.lr"]
    assert (config.algo.n_step, config.checkpoint.replay) == (best["params"]["algo.n_step"], True)


def test_a_failed_trial_is_recorded_and_the_sweep_goes_on(tmp_path, capsys):
    assert search(tmp_path, "algo.batch_size=choice(7,64)", "trials=4", "objective=return_iqm", "prune=none") == 0
    rows = found(tmp_path)
    states = {("fail" if row["params"]["algo.batch_size"] == "7" else "complete", row["state"]) for row in rows}
    assert states == {("fail", "fail"), ("complete", "complete")}
    failed, good = (next(row for row in rows if row["state"] == s) for s in ("fail", "complete"))
    assert failed["why"] == "status 1: pql: worker v failed: no"
    assert failed["value"] is None
    assert good["value"] == pytest.approx(-2 * (math.log10(good["params"]["algo.critic.lr"]) + 3) ** 2)
    assert f"trial {failed['trial']}: failed: status 1: pql: worker v failed: no" in capsys.readouterr().out


def test_where_every_trial_fails_the_status_is_1(tmp_path, capsys):
    """Among them settings that cannot stand together: no process is started for those."""
    words = [
        "algo=pql",
        "algo.batch_size=choice(7)",
        "algo.explore.low=0.5",
        "algo.explore.high=choice(0.6,0.4,0.7)",
        "trials=4",
    ]
    assert search(tmp_path, *words) == 1
    why = {row["why"] for row in found(tmp_path)}
    assert why == {"status 1: pql: worker v failed: no", "algo.explore.low=0.5: expected at most algo.explore.high=0.4"}
    assert "none finished" in capsys.readouterr().out


# -- pruning --------------------------------------------------------------------------------------------------------


def test_poor_trials_are_ended_early(tmp_path, monkeypatch):
    """Below the median of those before, at any time after a quarter of the budget; never the first five. By itself a
    poor trial would end after ten minutes, and be complete."""
    lrs = [0.001, 0.002, 0.003, 0.0005, 0.0001, 0.1, 0.0012]
    monkeypatch.setattr(sweep, "suggest", lambda trial, key, space: trial.suggest_float(key, *[lrs[trial.number]] * 2))
    assert search(tmp_path, "trials=7", threshold=-1.5) == 0
    rows = found(tmp_path)
    assert [row["state"] for row in rows] == ["complete"] * 5 + ["pruned", "complete"]
    assert [row["value"] is None for row in rows] == [row["state"] == "pruned" for row in rows]
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert study.trials[0].intermediate_values == pytest.approx({2 * i: -100 + 10 * i for i in range(1, 11)})


def test_successive_halving_ends_poor_trials_at_a_tenth_of_the_budget(tmp_path):
    """Of those that have got to 1/10, 3/10 and 9/10 of the budget so far, the best third goes on (ASHA)."""
    plan = make_plan(["device=cpu", "budget.env_steps=100000", LR, "pruner=asha", f"sweep_dir={tmp_path}"])
    study, spent, rungs = sweep.open_study(plan), [], {1: [], 3: [], 9: []}
    for number in range(18):
        final, expected, path = (7 * number) % 18, 10, tmp_path / f"{number}"  # in mixed order
        path.mkdir()
        for rung, before in rungs.items():
            before.append(final * rung)
            if final * rung < sorted(before, reverse=True)[max(len(before) // 3, 1) - 1]:
                expected = rung
                break
        trial = study.ask()
        watch = sweep.TrialWatch(trial, path, "env_steps", compose(["device=cpu", "budget.env_steps=100000"]))
        for tenth in range(1, 11):
            with (path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"steps/env": 1e4 * tenth, "eval/return_mean": final * tenth}) + "\n")
            if watch():
                break
        study.tell(trial, state=optuna.trial.TrialState.PRUNED) if watch.over else study.tell(trial, final * 10)
        assert (tenth, final) == (expected, final)
        spent.append(tenth)
    assert study.best_trial.value == 170
    assert sum(spent) < 18 * 10 / 2


@pytest.mark.parametrize(
    ("axis", "budget", "reported"),
    [
        ("seconds", "budget.seconds=100", {0: 1.0, 2: 2.0, 4: 4.0, 20: 5.0}),
        ("env_steps", "budget.env_steps=4000000", {0: 1.0, 1: 2.0, 5: 4.0, 10: 5.0}),
    ],
)
def test_evaluations_are_told_by_their_share_of_the_budget(tmp_path, axis, budget, reported):
    """The first evaluation of each twentieth; repeated ones are ignored."""
    evals = [(1, 1e5, 1.0), (12, 3e5, 2.0), (14, 3e5, 3.0), (20, 1e6, 4.0), (101, 2e6, 5.0)]
    rows = [{"time/seconds": s, "steps/env": n, "eval/return_mean": v} for s, n, v in evals]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    study = optuna.create_study(direction="maximize")
    trial = study.ask()
    for _ in range(2):
        watch = sweep.TrialWatch(trial, tmp_path, axis, compose(["device=cpu", budget]))
        assert not watch()
    assert study.trials[0].intermediate_values == reported


def test_evaluations_of_a_file_that_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert sweep.evaluations(path) == []
    path.write_text('{"eval/return_mean": 1.0}\n{"loss/v": 1}\n{"eval/return_mean": 2.0}\n{"eval/return_mean": 3')
    assert sweep.evaluations(path) == [{"eval/return_mean": 1.0}, {"eval/return_mean": 2.0}]


# -- going on -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_count_is_the_total_and_going_on_changes_nothing(tmp_path):
    """Four, then eleven trials are the first of sixteen at once. After ten by chance, TPE looks where it pays."""
    for folder, counts in ((tmp_path / "once", [16]), (tmp_path / "twice", [4, 11, 11])):
        for count in counts:
            assert search(folder, f"trials={count}", "prune=none") == 0
    once, twice = found(tmp_path / "once"), found(tmp_path / "twice")
    assert (len(once), len(twice)) == (16, 11)
    assert once[:11] == twice
    values = [row["value"] for row in once]
    assert sum(values[10:]) / 6 > sum(values[:10]) / 10 / 3


def test_another_search_in_the_same_folder_is_refused(tmp_path):
    assert search(tmp_path, "trials=1", "prune=none") == 0
    for words, message in (
        (["prune=none", "algo.gamma=0.9"], "algo.gamma=0.9: expected nothing, as in this sweep"),
        (["prune=none", "seeds=1,2"], "seeds=1,2: expected 0, as in this sweep"),
        (
            ["prune=none", "algo.critic.lr=interval(0.1,0.2)"],
            "lr=interval(0.1,0.2): expected tag(log,interval(1e-5,1e-",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            search(tmp_path, *words)


@pytest.mark.fault(8)
def test_ctrl_c_ends_the_trial_and_the_next_command_takes_it_up_again(tmp_path):
    """With the same settings, and only for the seeds that are missing."""
    script = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(sweep.__file__).parents[2])]!r}\n"
        "from pathlib import Path; from test_sweep import search\n"
        f"sys.exit(search(Path({str(tmp_path)!r}), 'trials=2', 'seeds=1,200', 'prune=none', threshold=-18))"
    )  # the second seed's return is below -18: that run waits
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "trial-000" / "seed200" / "metrics.jsonl").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted: give the same command again to continue" in said
    (left,) = found(tmp_path)
    assert left["state"] == "running"
    first = (tmp_path / "trial-000" / "seed1" / "summary.json").stat().st_mtime_ns

    assert search(tmp_path, "trials=2", "seeds=1,200", "prune=none") == 0
    rows = found(tmp_path)
    assert [row["state"] for row in rows] == ["complete", "complete"]
    assert rows[0]["params"] == left["params"]
    assert len(rows[0]["returns"]) == 2
    assert (tmp_path / "trial-000" / "seed1" / "summary.json").stat().st_mtime_ns == first
    assert len(list((tmp_path / "trial-000" / ".lost").iterdir())) == 1


# -- with real runs -------------------------------------------------------------------------------------------------


def test_real_runs_are_tuned(tmp_path, monkeypatch, capsys):
    class Here(sweep.Runner):
        """Runs the commands in this process."""

        def run(self, words, log=None, enough=None, every=0.0):
            return main(list(words))

    monkeypatch.setattr(sweep, "Runner", Here)
    run = [w for w in WORDS if not w.startswith("eval.")]
    words = ["eval.num_envs=2", "eval.every_seconds=0.05", "task.kwargs.max_episode_steps=5"]
    assert main(["sweep", *run, *words, "algo.policy.lr=interval(1e-4,1e-2)", "trials=2", f"sweep_dir={tmp_path}"]) == 0
    rows = found(tmp_path)
    assert [row["state"] for row in rows] == ["complete", "complete"]
    for row in rows:
        summary = json.loads((tmp_path / f"trial-{row['trial']:03d}" / "seed0" / "summary.json").read_text())
        assert row["value"] == summary["return_mean"]
        assert row["seconds"] == summary["seconds"]
        assert not list((tmp_path / f"trial-{row['trial']:03d}" / "seed0" / "checkpoints").glob("tick-*"))
    assert "2 trials: 2 finished, 0 pruned, 0 failed" in capsys.readouterr().out
