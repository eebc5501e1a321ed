"""Statistics over runs, in closed form and manually; reading and reporting of run directories."""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import write_run

from pql.errors import ConfigError

pytest.importorskip("scipy")
from scipy.stats import mannwhitneyu

from pql.reports import numbers, references, runs, stats
from pql.reports.words import subtitle, title

# -- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "want"),
    [
        ([[8, 1, 7, 2, 6, 3, 5, 4]], 4.5),  # 3 4 5 6 are left
        ([[0, 1, 2, 100]], 1.5),
        ([[0, 1, 5]], 2.0),  # a quarter of three is none
        ([[0, 1, 2], [3, 4, 5, 6, 100]], 3.5),  # of all eight runs: 2 3 4 5
    ],
)
def test_the_interquartile_mean_by_hand(tasks, want):
    assert stats.measured(tasks, stats.iqm) == pytest.approx(want)


def test_mean_and_median_by_hand():
    assert stats.measured([[1, 2, 9]], stats.median) == 2
    assert stats.measured([[1, 2, 9]], stats.mean) == 4
    tasks = [[0, 2], [10, 10, 40], [5]]  # means 1, 20, 5
    assert stats.measured(tasks, stats.median) == 5
    assert stats.measured(tasks, stats.mean) == pytest.approx(26 / 3)


def test_a_performance_profile_by_hand():
    """Above, not at; tasks weigh alike, however many runs they have."""
    tasks = [[0.0, 0.5, 1.0], [0.2, 0.2]]
    got = stats.measured(tasks, stats.profile([-1, 0, 0.2, 0.5, 1]))
    assert got == pytest.approx([1, (2 / 3 + 1) / 2, (2 / 3 + 0) / 2, (1 / 3 + 0) / 2, 0])


@pytest.mark.parametrize(("confidence", "low", "high"), [(0.5, 2 / 3, 4 / 3), (0.8, 1 / 3, 5 / 3), (0.95, 0, 2)])
def test_the_bootstrap_interval_of_three_runs_is_that_of_all_27_draws(confidence, low, high):
    """Means of draws from 0, 1, 2: sums 0 to 6 in 1, 3, 6, 7, 6, 3, 1 of 27 draws, hence these quantiles."""
    got = stats.interval([[0, 1, 2]], stats.mean, draws=20_000, confidence=confidence)
    assert np.array(got) == pytest.approx([low, high])


@pytest.mark.parametrize(("count", "holds"), [(2, 1 / 2), (3, 3 / 4)])
def test_what_the_bootstrap_of_a_few_runs_is_worth(count, holds):
    """It is all but [smallest, largest], which hold the median of any distribution with probability 1 - 2^(1 - n)."""
    rng, inside = np.random.default_rng(count), []
    for _ in range(1000):
        low, high = stats.interval([rng.normal(size=count)], stats.iqm, draws=500)
        inside.append(low <= 0 <= high)
    assert np.mean(inside) == pytest.approx(holds, abs=0.05)


def test_the_bootstrap_interval_of_many_runs_is_the_normal_one():
    x = np.random.default_rng(5).normal(3, 2, size=500)
    low, high = stats.interval([x], stats.mean, draws=10_000)
    half = 1.96 * x.std() / math.sqrt(500)
    assert low == pytest.approx(x.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(x.mean() + half, abs=0.05 * half)


def test_the_bootstrap_draws_within_each_task():
    """Runs within a task are alike here: drawing over all of them would spread the mean."""
    low, high = stats.interval([[0, 0, 0], [10, 10, 10]], stats.iqm)
    assert (low, high) == (5, 5)
    low, high = stats.interval([[0, 1, 2]], stats.iqm)
    assert low < 1 < high


def test_one_run_has_no_interval_and_the_same_runs_have_the_same():
    assert np.isnan(stats.interval([[3.0], [4.0]], stats.iqm)).all()
    assert np.isnan(stats.interval([[[3.0, 4.0]]], stats.iqm)[0]).tolist() == [True, True]
    assert stats.interval([[1, 2, 5]], stats.iqm) == stats.interval([[1, 2, 5]], stats.iqm)


def test_the_bands_of_a_curve_belong_to_whole_runs():
    """Two runs that cross: whichever are drawn, what one point gains the other loses."""
    drawn: list[Any] = []

    def keep(strata):
        drawn.append(stats.iqm(strata))
        return drawn[-1]

    stats.interval([[[0.0, 1.0], [1.0, 0.0]]], keep)
    assert drawn[-1].shape == (stats.DRAWS, 2)
    assert drawn[-1].sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize(("threshold", "want"), [(5, 15), (10, 20), (0, 10), (-3, 10), (10.5, math.inf), (7.5, 17.5)])
def test_the_time_to_a_threshold_by_hand(threshold, want):
    assert stats.time_to([10, 20, 30], [0, 10, 5], threshold) == want


def test_the_time_to_a_threshold_after_a_dip():
    assert stats.time_to([0, 1, 2, 4], [3, 1, 2, 6], 4) == 3
    assert stats.time_to([0, 1, 1], [0, 0, 6], 4) == 1  # two evaluations at one time


def test_the_probability_of_improvement_by_hand():
    assert stats.improvement([[2, 3]], [[1, 3]]) == (1 + 0 + 1 + 0.5) / 4
    assert stats.improvement([[2, 3], [0]], [[1, 3], [1, 1, 1]]) == 0.625 / 2
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 6, 9), rng.integers(1, 7, 7)
    u = mannwhitneyu(a, b).statistic  # the paper's definition is U / (N M)
    assert stats.improvement([a], [b]) == pytest.approx(u / 63)


def test_the_interval_of_the_probability_of_improvement_is_that_of_all_draws():
    """Both algorithms are drawn, independently and within each task: 4 x 27 draws of (2 runs, 3 runs), two tasks."""
    first, second = [[1.0, 5.0], [2.0, 2.0]], [[0.0, 3.0, 6.0], [1.0, 2.0, 9.0]]

    def chance(a, b):
        return np.mean([(x > y) + 0.5 * (x == y) for x in a for y in b])

    each = [
        [chance(a, b) for a in itertools.product(one, repeat=2) for b in itertools.product(two, repeat=3)]
        for one, two in zip(first, second, strict=True)
    ]
    every = [(x + y) / 2 for x in each[0] for y in each[1]]
    want = np.percentile(every, [2.5, 97.5])
    got = stats.improvement_interval(first, second, draws=40_000)
    assert got == pytest.approx(want, abs=0.021)  # neighbouring values differ by 1 / 24
    assert np.isnan(stats.improvement_interval([[1.0]], [[0.0, 3.0]])).all()


def test_what_the_interval_of_the_probability_of_improvement_is_worth():
    """Of equal algorithms with ten runs each, it contains one half about 95 times in a hundred."""
    rng = np.random.default_rng(5)
    found = [stats.improvement_interval([rng.normal(size=10)], [rng.normal(size=10)], 300, i) for i in range(300)]
    assert 0.88 < np.mean([low <= 0.5 <= high for low, high in found]) < 0.97


# -- reading --------------------------------------------------------------------------------------------------------

LINE = [(10.0, 1000, 0.0), (20.0, 2000, 100.0)]


def test_runs_are_found_in_folders_and_once_each(tmp_path):
    a, b = write_run(tmp_path / "sweep" / "x" / "1", LINE), write_run(tmp_path / "sweep" / "x" / "0", LINE)
    write_run(tmp_path / "sweep" / "empty", LINE).joinpath("metrics.jsonl").write_text("")
    write_run(tmp_path / "sweep" / "foreign", LINE).joinpath("config.yaml").unlink()
    found, notes = runs.find([str(a), str(tmp_path / "sweep"), str(a)])
    assert found == [a, b]
    assert [note.split(":")[0] for note in notes] == ["sweep/empty", "sweep/foreign"]
    assert runs.short_names([a, b]) == ["1", "0"]
    assert runs.short_names([a]) == ["1"]


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = '{"time/seconds": 2, "steps/env": 5}\n{"time/seconds": 1, "steps/env": 4, "x": "text", "y": null}\n'
    path.write_text(good + '{"time/seconds": 3, "ste')
    rows, notes = runs.read_rows(path)
    assert rows == [{"time/seconds": 1, "steps/env": 4}, {"time/seconds": 2, "steps/env": 5}]
    assert notes == ["the last line of metrics.jsonl was cut off"]
    path.write_text(f'noise\n[1]\n{{"time/seconds": 1{"0" * 400}, "steps/env": 4}}\n' + good)
    assert runs.read_rows(path) == (rows, ["3 unreadable lines in metrics.jsonl"])
    assert runs.read_rows(tmp_path / "none") == ([], [])


def test_evaluations_take_their_updates_from_the_training_around_them(tmp_path):
    between = [{"time/seconds": 15.0, "steps/env": 1500, "eval/return_mean": 7.0, "eval/success": 0.5}]
    run = runs.read([write_run(tmp_path / "r", LINE, rows=between)])[0]
    assert run.evals["seconds"].tolist() == [10, 15, 20]
    assert run.evals["updates"].tolist() == [150, 225, 300]
    assert run.evals["success"].tolist()[1] == 0.5
    assert math.isnan(run.evals["success"][0])
    assert (run.complete, run.reached, run.end("updates"), run.notes) == (True, False, 300, [])


def config(**settings: Any) -> dict[str, Any]:
    return runs.flat({"task": {"name": "pendulum", "kwargs": {}}, "seed": 1, "algo": {"name": "pql"}, **settings})


def test_labels_tell_what_differs_and_nothing_else():
    same = [config(seed=s, run_dir=f"r{s}", budget={"seconds": s}, logger={"kind": str(s)}) for s in (1, 2)]
    assert runs.label(same) == ["pql", "pql"]
    other = config(num_envs=64, algo={"name": "pql", "critic": {"hidden": [64, 64], "tau": 0.05}})
    one = config(num_envs=32, algo={"name": "pql", "critic": {"hidden": [32], "tau": 0.05}})
    sac = config(num_envs=32, algo={"name": "sac"})
    assert runs.label([one, other, sac]) == [
        "pql critic.hidden=[32] num_envs=32",
        "pql critic.hidden=[64,64] num_envs=64",
        "sac",
    ]
    saving = [config(replay={"save": s, "capacity": 9}) for s in (True, False)]
    assert runs.label(saving) == ["pql", "pql"]
    elsewhere = config(num_envs=64, task={"name": "hopper"})
    assert runs.label([one, elsewhere]) == ["pql", "pql"]  # a task's own settings are no other algorithm
    older = config(algo={"name": "pql"})  # a version that had no such setting
    assert runs.label([one, older]) == ["pql", "pql"]


def test_many_differing_settings_are_counted():
    def many(x: int, last: int) -> dict[str, Any]:
        return config(algo={"name": "pql", **{f"s{i}": x for i in range(5)}, "last": last})

    got = runs.label([many(1, 1), many(2, 1), many(1, 2), many(1, 1)])
    assert got == ["pql s0=1 s1=1 s2=1 +3 #1", "pql s0=2 s1=2 s2=2 +3", "pql s0=1 s1=1 s2=1 +3 #2", got[0]]


def test_tasks_are_told_apart_by_what_makes_them():
    assert runs.task_of(config(task={"name": "gymnasium", "id": "Pendulum-v1", "kwargs": {}})) == "Pendulum-v1"
    assert runs.task_of(config(task={"name": "lqr", "id": None, "kwargs": {"n": 3, "b": True}})) == "lqr (n=3, b=true)"
    fast, plain = (config(task={"name": "hopper", "model": model, "kwargs": {}}) for model in ("fast", None))
    assert [runs.task_of(s) for s in (fast, plain)] == ["hopper (model=fast)", "hopper"]
    assert runs.label([fast, plain]) == ["pql", "pql"]


# -- reported values ------------------------------------------------------------------------------------------------


def numbers_of(folder: Path, x: str = "seconds", **more: Any) -> dict[str, Any]:
    paths, notes = runs.find([str(folder)])
    return numbers.analyse(runs.read(paths), x, notes=notes, **more)


def group(page: dict[str, Any], label: str, task: int = 0) -> dict[str, Any]:
    return next(g for g in page["tasks"][task]["groups"] if g["label"] == label)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """pql: straight to 100 and 200 in 20 s, 2,000 steps; slow: to 50 and 60 in 40 s, 8,000 steps."""
    for seed, top in ((1, 100.0), (2, 200.0)):
        write_run(tmp_path / f"pql{seed}", [(10.0, 1000, 0.0), (20.0, 2000, top)], seed=seed)
    for seed, top in ((1, 50.0), (2, 60.0)):
        write_run(tmp_path / f"slow{seed}", [(10.0, 1000, 0.0), (40.0, 8000, top)], seed=seed, algo="slow")
    return tmp_path


def test_scores_are_taken_where_all_have_come(two):
    by_time, by_steps = numbers_of(two), numbers_of(two, "env_steps")
    assert by_time["labels"] == ["pql", "slow"]
    assert by_time["tasks"][0]["end"] == {"seconds": 20.0, "env_steps": 2000, "updates": 300}
    assert group(by_time, "pql")["scores"] == [100, 200]
    assert group(by_time, "slow")["scores"] == pytest.approx([50 / 3, 20])
    assert group(by_steps, "slow")["scores"] == pytest.approx([50 / 7, 60 / 7])
    score = group(by_time, "pql")["score"]["iqm"]
    assert (score["value"], score["low"], score["high"]) == (150, 100, 200)
    assert (
        "Continued beyond the common end on pendulum, which does not affect the scores: slow1, slow2."
        in by_time["notes"]
    )


def test_a_run_that_was_cut_off_does_not_shorten_the_others(two):
    write_run(two / "pql3", [(5.0, 500, 0.0), (8.0, 800, 20.0)], seed=3, finished=False)
    page = numbers_of(two)
    assert page["tasks"][0]["end"]["seconds"] == 20
    assert group(page, "pql")["scores"] == [100, 200, 20]
    assert "Ended before the common end on pendulum; the last evaluation counts: pql3." in page["notes"]
    assert "pql3: no summary.json: it is still running, or was cut off" in page["notes"]
    assert group(page, "pql")["curves"]["seconds"]["x"][-1] == 20


def test_an_interrupted_run_does_not_shorten_the_others(two):
    path = write_run(two / "pql3", [(5.0, 500, 0.0), (8.0, 800, 20.0)], seed=3)
    summary = path / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "interrupted": True}))
    page = numbers_of(two)
    assert page["tasks"][0]["end"]["seconds"] == 20
    assert "pql3: interrupted before its budget's end" in page["notes"]


@pytest.mark.parametrize("after", [[], [(8.5, 850, 290.0)]], ids=["at its end", "and fell back"])
def test_a_run_that_reached_its_target_does_not_shorten_the_others(two, after):
    path = write_run(two / "pql3", [(5.0, 500, 0.0), (8.0, 800, 300.0), *after], seed=3)
    data = json.loads((path / "config.yaml").read_text()) | {"budget": {"target_return": 300.0}}
    (path / "config.yaml").write_text(json.dumps(data))
    page = numbers_of(two)
    assert page["tasks"][0]["end"]["seconds"] == 20
    assert group(page, "pql")["scores"] == [100, 200, 290 if after else 300]


def test_curves_go_from_where_all_are_evaluated_to_where_they_end(two):
    write_run(two / "pql3", [(12.0, 1200, 40.0), (30.0, 3000, 400.0)], seed=3)
    curve = group(numbers_of(two), "pql")["curves"]["seconds"]
    assert (curve["x"][0], curve["x"][-1], len(curve["x"])) == (12, 20, numbers.GRID)
    assert curve["iqm"][0] == pytest.approx((20 + 40 + 40) / 3)  # three runs: nothing is cut off
    assert curve["iqm"][-1] == pytest.approx((100 + 200 + 200) / 3)
    assert (curve["low"][-1], curve["high"][-1]) == (100, 200)


def test_the_time_to_thresholds_of_a_group(two):
    page = numbers_of(two, thresholds=[50.0, 150.0])
    assert page["tasks"][0]["thresholds"] == [{"value": 50.0, "share": None}, {"value": 150.0, "share": None}]
    half, most = group(page, "pql")["time_to"]
    assert half == {
        "of": 2,
        "reached": 2,
        "seconds": {"median": 13.75, "min": 12.5, "max": 15},
        "env_steps": {"median": 1375, "min": 1250, "max": 1500},
        "updates": {"median": 206.25, "min": 187.5, "max": 225},
    }
    assert (most["reached"], most["seconds"]) == (1, {"median": None, "min": 17.5, "max": None})
    slow = group(page, "slow")["time_to"]
    assert (slow[0]["reached"], slow[0]["seconds"]["max"], slow[1]["reached"]) == (2, 40, 0)
    assert [level["value"] for level in numbers_of(two)["tasks"][0]["thresholds"]] == [
        100,
        150,
        180,
    ]  # 0 lowest, 200 highest


def test_returns_at_chosen_points_are_interpolated_and_never_extrapolated(two):
    """pql is evaluated at 10 and 20 s, slow at 10 and 40 s."""
    page = numbers_of(two, points=[5, 15, 20, 30])
    assert page["tasks"][0]["points"] == [5, 15, 20, 30]
    assert group(page, "pql")["returns_at"] == [
        {"returns": [None, None], "median": None},
        {"returns": [50, 100], "median": 75},
        {"returns": [100, 200], "median": 150},
        {"returns": [None, None], "median": None},
    ]
    write_run(two / "pql3", [(10.0, 1000, 0.0), (30.0, 3000, 400.0)], seed=3)
    after, end = group(numbers_of(two, points=[2000, 3000], x="env_steps"), "pql")["returns_at"]
    assert after == {"returns": [100, 200, 200], "median": 200}
    assert end == {"returns": [None, None, 400], "median": 400}
    write_run(two / "pql0", [], seed=0, rows=[{"time/seconds": 5.0, "steps/env": 500}])  # no evaluation
    page = numbers_of(two, points=[2000], x="env_steps")
    assert group(page, "pql")["seeds"] == [0, 1, 2, 3]
    assert group(page, "pql")["returns_at"] == [{"returns": [None, 100, 200, 200], "median": 200}]


def test_over_all_tasks_scores_are_normalised_by_task(two):
    write_run(two / "h1", [(10.0, 1000, -100.0), (20.0, 2000, 300.0)], task="hopper")
    write_run(two / "h2", [(10.0, 1000, -100.0), (20.0, 2000, 0.0)], task="hopper", algo="slow")
    write_run(two / "h3", [(10.0, 1000, 0.0), (20.0, 2000, 0.0)], task="hopper", algo="there only")
    page = numbers_of(two)
    assert page["overall"]["tasks"] == ["hopper", "pendulum"]
    assert page["labels"] == ["pql", "slow", "there only"]  # on all tasks first, then by score
    pql, slow = page["overall"]["groups"]
    assert (pql["label"], pql["runs"]) == ("pql", 3)
    assert pql["score"]["iqm"]["value"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert pql["score"]["mean"]["value"] == pytest.approx((1 + 0.75) / 2)
    assert slow["score"]["mean"]["value"] == pytest.approx((0.25 + (50 / 3 + 20) / 400) / 2)
    assert pql["beats"] == {"slow": {"value": 1.0, "low": 1.0, "high": 1.0}}
    assert slow["beats"] == {"pql": {"value": 0.0, "low": 0.0, "high": 0.0}}
    tau, share = np.array(page["overall"]["tau"]), np.array(pql["profile"]["value"])
    assert set(share[tau < 0.49]) == {1.0}
    assert set(share[(tau > 0.51) & (tau < 0.99)]) == {0.75}
    assert set(share[tau > 1]) == {0.0}
    assert any("One run only, hence no interval: pql on hopper" in note for note in page["notes"])
    left_out = "Not scored on every task, hence left out of the results over all tasks: there only."
    assert left_out in page["notes"]


def test_scores_are_normalised_by_references_where_every_task_has_one(two):
    def normalised(**more):
        page = numbers_of(two, **more)
        return page["tasks"][0]["scale"], group(page, "pql")["normalised"]

    scale, scores = normalised()  # pendulum has no reference of the library: the range of the evaluations, 0 to 200
    assert (scale["zero"], scale["one"], scale["source"], scores) == (0, 200, "", [0.5, 1])
    ours = references.Scale(-100.0, 300.0, "a random policy", "the best known", "a paper")
    scale, scores = normalised(references={"pendulum": ours})
    assert (scale, scores) == (ours.as_dict(), [0.5, 0.75])
    write_run(two / "h1", [(10.0, 1000, 0.0), (20.0, 2000, 60.0)], task="other")
    page = numbers_of(two, references={"pendulum": ours})
    assert [t["scale"]["source"] for t in page["tasks"]] == ["", ""]  # one kind of scale for all tasks
    assert group(page, "pql", 1)["normalised"] == [0.5, 1]


def test_the_library_s_references_name_their_sources(tmp_path):
    known = references.known()
    assert (known["pong"].zero, known["pong"].one, known["pong"].one_is) == (-20.7, 14.6, "a human")
    assert "dqn_zoo" in known["pong"].source
    assert len([s for s in known.values() if "dqn_zoo" in s.source]) == 57
    assert references.reference_of("hopper (model=fast)", known)(3234.3) == 1
    assert "D4RL" in known["hopper"].source
    assert references.reference_of("hopper2", known) is None
    mine = tmp_path / "mine.yaml"
    mine.write_text("- {zero: standing, one: our best, source: us, tasks: {hopper: [0, 1000], ant: [-5, 5.5]}}\n")
    added = references.known(mine)
    assert (added["hopper"], len(added)) == (references.Scale(0, 1000, "standing", "our best", "us"), len(known) + 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "no list"),
        ("[{tasks: {}}]", "an entry without exactly one, source, tasks, zero"),
        ("[{zero: a, one: b, source: c, tasks: {hopper: [5, 1]}}]", r"hopper: \[5, 1\] is no pair of returns"),
        ("[{zero: a, one: b, source: c, tasks: {hopper: [0, .inf]}}]", "is no pair of returns"),
        ("[{zero: a, one: b, source: c, tasks: {hopper: 5}}]", "is no pair of returns"),
    ],
)
def test_a_file_of_references_in_another_form_is_refused(tmp_path, text, said):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"references=.*expected a YAML list .*{said}"):
        references.known(tmp_path / "r.yaml")


def test_sample_efficiency_stands_beside_wall_clock(two):
    """slow needs four times the steps a second: the same runs at 20 s and at 2,000 env steps."""
    page = numbers_of(two)
    slow = group(page, "slow")
    assert slow["at"]["seconds"]["value"] == pytest.approx((50 / 3 + 20) / 2)
    assert slow["at"]["env_steps"]["value"] == pytest.approx((50 / 7 + 60 / 7) / 2)
    assert group(page, "pql")["at"]["seconds"] == group(page, "pql")["score"]["iqm"]


def test_curves_over_all_tasks_are_iqms_of_normalised_returns(two):
    """On pendulum (0 to 200) pql rises to 100 and 200, on hopper (-100 to 300) to 300, from 10 s to 20 s."""
    write_run(two / "h1", [(10.0, 1000, -100.0), (20.0, 2000, 300.0)], task="hopper")
    write_run(two / "h2", [(10.0, 1000, -100.0), (20.0, 2000, 0.0)], task="hopper", algo="slow")
    whole = numbers_of(two)["overall"]
    pql = next(g for g in whole["groups"] if g["label"] == "pql")["curves"]
    for axis, scale in (("seconds", 1), ("env_steps", 100)):
        x = np.array(whole["x"][axis])
        assert (x[0], x[-1]) == (10 * scale, 20 * scale)
        part = (x / scale - 10) / 10
        np.testing.assert_allclose(pql[axis]["iqm"], (0.5 * part + part + part) / 3, atol=1e-12)
    assert pql["seconds"]["low"][-1] == pytest.approx(2 / 3)  # twice the run that ends at 100, and hopper's one
    assert pql["seconds"]["high"][-1] == 1


def test_seeds_that_repeat_are_no_independent_runs(two):
    write_run(two / "again", [(10.0, 1000, 0.0), (20.0, 2000, 200.0)], seed=2)
    write_run(two / "unknown", [(10.0, 1000, 0.0), (20.0, 2000, 200.0)], seed=None)
    assert (group(numbers_of(two), "pql")["independent"], len(group(numbers_of(two), "pql")["scores"])) == (3, 4)


def test_speed_is_counted_from_the_first_row_to_the_last(tmp_path):
    def rows(rate: int, host: float) -> list[dict[str, float]]:
        common = {"ratio/v_per_step": 2.0, "lag/policy_ticks": 1, "memory/host_gib": host}
        return [
            {"time/seconds": 2.0, "steps/env": 1000, "updates/v": 0, "updates/p": 0, "busy/v": 1.0, **common},
            {
                "time/seconds": 8.0,
                "steps/env": 1000 + 6 * rate,
                "updates/v": 60,
                "updates/p": 30,
                "busy/v": 0.6,
                **common,
            },
        ]

    for seed, rate in ((1, 100), (2, 300), (3, 900)):
        write_run(tmp_path / str(seed), [], seed=seed, rows=rows(rate, seed), finished=False, v_per_step=2)
    page = numbers_of(tmp_path)
    speed = group(page, "pql")["speed"]
    assert (speed["env_steps_per_s"], speed["updates_per_s"]) == (300, 15)
    assert speed["busy/v"] == pytest.approx((2 * 1.0 + 6 * 0.6) / 8)
    assert (speed["memory/host_gib"], speed["lag/policy_ticks"]) == (3, 1)
    assert (speed["ratio/v_per_step"], speed["configured"]) == (2, {"ratio/v_per_step": 2})
    assert page["tasks"][0]["end"] is None
    assert "3: no evaluation: it has no score" in page["notes"]
    assert page["overall"]["groups"] == []


@pytest.mark.parametrize(
    ("family", "older"), [("ppo", False), ("ppo", True), ("pqn", False), ("pqn", True), ("reppo", False)]
)
def test_one_learners_updates_count_once_and_its_ratios_are_those_of_its_sizes(tmp_path, family, older):
    """5 epochs of 4 minibatches every 32 steps; older runs: their off-policy settings are not read."""
    rows = [
        {
            "time/seconds": 1.0 + 9 * i,
            "steps/env": 100 + i,
            "updates/v": 90 * i,
            "updates/p": 90 * i,
            "ratio/v_per_step": 0.625,
            "ratio/p_per_v": 1.0,
            "eval/return_mean": 7.0 + i,
        }
        for i in (0, 1)
    ]
    sizes = {"epochs": 5, "minibatches": 4, "horizon": 32}
    if older:
        others = {"ppo": {"horizon": 16}, "dqn": {"double": True}, "sac": {"alpha": 1.0}}
        sizes = {"v_per_step": 8.0, "p_per_v": 0.5, **others, family: sizes}
    write_run(tmp_path / "a", [], algo=family, rows=rows, family=family, **sizes)
    page = numbers_of(tmp_path, x="updates")
    speed = group(page, family)["speed"]
    assert speed["updates_per_s"] == 10
    assert speed["configured"] == {"ratio/v_per_step": 0.625, "ratio/p_per_v": 1.0}
    assert page["tasks"][0]["end"]["updates"] == 90
    values = {"algo.family": "dqn", "algo.v_per_step": 4.0}
    assert runs.configured(values) == {"ratio/v_per_step": 4.0}
    values = {"algo.family": "ppo", "algo.epochs": 2, "algo.minibatches": 4, "algo.horizon": 4}
    assert runs.configured({**values, "algo.replicas": 2})["ratio/v_per_step"] == 4.0  # updates of both
    values = {"algo.family": "impala", "algo.minibatches": 2, "algo.horizon": 20}
    assert runs.configured(values) == {"ratio/v_per_step": 0.1, "ratio/p_per_v": 1.0}


def test_a_task_where_nothing_happens(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / str(seed), [(10.0, 1000, 7.0)], seed=seed)
    page = numbers_of(tmp_path)
    assert group(page, "pql")["score"]["iqm"] == {"value": 7, "low": 7, "high": 7}
    assert page["notes"][0].startswith("An interval over fewer than 5 runs is too narrow: with two runs it contains")
    assert page["notes"][1] == "The IQM of two or three runs is their mean: nothing is cut off."
    assert page["overall"]["groups"][0]["score"]["iqm"]["value"] == 1
    assert group(page, "pql")["curves"]["seconds"]["x"] == [10]
    json.dumps(page, allow_nan=False)


def test_a_seed_that_counts_twice_is_told(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, LINE, seed=4)
    assert "pql on pendulum: seed 4 more than once." in numbers_of(tmp_path)["notes"]


def test_how_and_on_what_runs_were_made_is_told(tmp_path):
    """In a word where it is the same for all, else as something to be careful about."""
    for name, others in (("same", (16, 2)), ("other", (8, 64))):
        for seed, (episodes, cores) in enumerate([(16, 2), others]):
            path = write_run(tmp_path / name / str(seed), LINE, seed=seed)
            settings = json.loads((path / "config.yaml").read_text()) | {"eval": {"num_envs": episodes, "epsilon": 0.0}}
            (path / "config.yaml").write_text(json.dumps(settings))
            (path / "env.json").write_text(json.dumps({"cpu": "Z80", "cores": cores, "gpu": None, "torch": "2.13.0"}))
    same, other = numbers_of(tmp_path / "same"), numbers_of(tmp_path / "other")
    ends = "compared at equal wall-clock time"
    assert subtitle(same).endswith(f"{ends} · 16 episodes an evaluation · Z80, 2 cores, torch 2.13.0")
    assert subtitle(other).endswith(ends)
    z80 = ("Z80, 2 cores, torch 2.13.0", "Z80, 64 cores, torch 2.13.0")
    assert [note for note in other["notes"] if note not in same["notes"]] == [
        f"Seconds of different machines cannot be compared: {'; '.join(z80)}.",
        "Not evaluated alike on pendulum: eval.num_envs=8, 16.",
    ]


def test_a_long_series_is_thinned_by_means(tmp_path):
    rows = [{"time/seconds": float(i), "steps/env": i, "loss/v": float(i % 2)} for i in range(1000)]
    run = runs.read([write_run(tmp_path / "r", [], rows=rows, finished=False)])[0]
    part = numbers.series(run, points=100)["loss/v"]
    assert len(part["x"]) == 100
    assert part["y"] == [0.5] * 100
    assert part["x"][:2] == [4.5, 14.5]


def test_metrics_that_are_a_pipe_or_too_large_are_not_read(tmp_path, monkeypatch):
    path = write_run(tmp_path / "r", LINE)
    size = (path / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(runs, "METRICS_BYTES", size)
    assert len(runs.read([path])[0].rows) == 2 * len(LINE)
    monkeypatch.setattr(runs, "METRICS_BYTES", size - 1)
    with pytest.raises(ConfigError, match=f"metrics.jsonl is larger than {size - 1:,} bytes"):
        runs.read([path])
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=f"run={path}: expected a run with metrics .* is no ordinary file"):
        runs.read([path])


@pytest.mark.parametrize("damage", ["no config", "no metrics", "no rows"])
def test_a_run_that_cannot_be_read_is_named(tmp_path, damage):
    path = write_run(tmp_path / "r", LINE)
    if damage == "no config":
        (path / "config.yaml").write_text("[")
    elif damage == "no metrics":
        (path / "metrics.jsonl").unlink()
    else:
        (path / "metrics.jsonl").write_text('{"time/seco')
    with pytest.raises(ConfigError, match=f"run={path}: expected a run"):
        runs.read([path])


def test_a_title_names_the_algorithms_unless_that_is_too_long():
    tasks = [{"task": "ant"}]
    assert title({"tasks": tasks, "labels": ["pql", "ppo"]}) == "pql and ppo on ant"
    long = [f"pql2 reward_scale={i} critic.hidden=[128,128] critic.atoms=51" for i in (1, 2)]
    assert title({"tasks": tasks, "labels": long}) == "2 algorithms on ant"
    assert title({"tasks": tasks, "labels": long[:1]}) == f"{long[0]} on ant"
