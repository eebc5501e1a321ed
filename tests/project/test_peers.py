"""The benchmark against other libraries: statistics, book-keeping, and that every contender trains."""

import json

import numpy as np
import pytest
from scipy import stats
from test_tools import check

from pql.errors import ConfigError

PEERS = ["rsl_rl:ppo", "sb3:ppo", "sb3:td3"]


@pytest.fixture
def bench(tool):
    return tool("peers.compare")


@pytest.fixture
def report(tool):
    return tool("peers.report")


def test_iqm_by_hand(report):
    assert report.iqm([8, 1, 3, 2, 5, 4, 7, 6]) == pytest.approx((3 + 4 + 5 + 6) / 4)
    # Of five, the middle half holds the third whole and three quarters of its neighbours.
    assert report.iqm([0, 1, 2, 4, 1000]) == pytest.approx((0.75 * 1 + 2 + 0.75 * 4) / 2.5)
    assert report.iqm([7.0]) == 7.0


def test_lead_without_spread_is_exact(report):
    ours = {"a": np.full(5, 120.0), "b": np.full(5, 90.0), "c": np.full(2, 1.0)}
    theirs = {"a": np.full(5, 100.0), "b": np.full(3, 100.0)}
    middle = (1.2 * 0.9) ** 0.5 - 1
    assert report.lead(ours, theirs) == pytest.approx((middle, middle, middle))
    assert report.lead(theirs, ours)[0] == pytest.approx(1 / (1.2 * 0.9) ** 0.5 - 1)  # the inverse
    assert np.isnan(report.lead({**ours, "a": np.full(5, -1.0)}, theirs)[0])
    assert report.lead({"a": np.full(2, -50.0)}, {"a": np.full(2, -100.0)}) == pytest.approx((0.5, 0.5, 0.5))


def test_lead_redraws_the_seeds_of_both_sides(report):
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(120, 20, 12), rng.normal(100, 20, 12)

    def one(a, b, axis=-1):
        return (a.mean(axis) - b.mean(axis)) / b.mean(axis)

    estimate, lower, upper = report.lead({"a": ours}, {"a": theirs})
    found = stats.bootstrap((ours, theirs), one, method="percentile", n_resamples=20_000, rng=2)
    assert estimate == pytest.approx(one(ours, theirs))
    assert (lower, upper) == pytest.approx(tuple(found.confidence_interval), abs=0.01)


def run_of(contender, task, seed, value):
    return {"contender": contender, "task": task, "seed": seed, "return_mean": value}


def test_rows_and_tables(report):
    runs = [run_of("pql:ppo", "hopper", s, 1000.0 + s) for s in (1, 2, 6)]
    runs += [run_of("pql:pql", "hopper", s, 3000.0) for s in (1, 2, 6)]
    runs += [run_of("sb3:ppo", "hopper", s, 500.0) for s in (1, 2)] + [run_of("sb3:ppo", "ant", 1, 10.0)]
    rows = report.rows_of(runs)
    check(rows, ["hopper: sb3:ppo, median", "ant: sb3:ppo, IQM"])
    found = {r["name"]: r for r in rows}
    assert found["hopper: pql:ppo, median"]["value"] == 1002
    assert found["hopper: pql:ppo, mean"]["value"] == 1003
    assert found["hopper: pql:ppo, median"]["runs"] == 3
    assert found["pql:ppo over sb3:ppo, all tasks: lead"]["value"] == pytest.approx(1.006)
    assert found["pql:pql over pql:ppo, hopper: lead"]["value"] == pytest.approx(3000 / 1003 - 1)
    assert not any("over pql:pql" in name or ", ant:" in name for name in found)
    text = report.tables(rows)
    assert "| hopper | pql:ppo | 1,002 | 1,003 | 1,002 | 3 |" in text
    assert "| pql:ppo over sb3:ppo | hopper | +100.6% | +100.2% to +101.2% |" in text


def test_the_zoos_settings_scale_with_the_rollout(tool):
    settings = tool("peers.settings")
    for task, zoo in ((task, found["model"]) for task, found in settings.THEIRS["sb3:ppo"].items()):
        found = settings.theirs("sb3:ppo", task)
        rollout = found["num_envs"] * found["model"]["n_steps"]
        assert rollout / found["model"]["batch_size"] == 512 / zoo["batch_size"]
        assert found["model"]["learning_rate"] / zoo["learning_rate"] == pytest.approx(rollout / 512)
        assert found["model"]["gamma"] == zoo["gamma"]


def test_a_smoke_run_of_every_kind_is_stored_and_skipped_next_time(bench, tmp_path, capsys, monkeypatch):
    pytest.importorskip("rsl_rl")
    pytest.importorskip("stable_baselines3")
    runs, path = tmp_path / "new" / "runs.jsonl", tmp_path / "rows.json"
    command = ["--smoke", "--contenders", "pql:pql", *PEERS, "--runs", str(runs), "--json", str(path)]
    assert bench.main(command) == 0
    rows = json.loads(path.read_text())
    check(rows, [f"pendulum: {name}, median" for name in ("pql:pql", *PEERS)])
    capsys.readouterr()
    stored = [json.loads(line) for line in runs.read_text().splitlines()]
    assert [r["contender"] for r in stored] == ["pql:pql", *PEERS]
    for run in stored:
        assert len(run["returns"]) == 2
        assert np.mean(run["returns"]) == pytest.approx(run["return_mean"])
        assert -2000 < run["return_mean"] < 0
        assert run["env_steps"] > 0
        assert run["seconds"] >= 0.2
        assert run["curve"] == [{k: run[k] for k in run["curve"][0]}]

    def broken(*args):
        raise RuntimeError("ran")

    monkeypatch.setattr(bench, "measure", broken)
    runs.write_text(runs.read_text() + '{"contender": "pql')  # as an interruption would leave it
    assert bench.main([*command[:-2], "--json", str(tmp_path / "again.json")]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == rows
    assert "damaged line" in capsys.readouterr().err
    for r in stored:  # runs of other settings do not count
        r["settings"] = "other"
    runs.write_text("".join(json.dumps(r) + "\n" for r in stored))
    assert bench.main(command) == 1
    assert "failed: sb3:td3 on pendulum, seed 1: ran" in capsys.readouterr().err
    assert bench.main([*command, "--table"]) == 1
    assert "ran" not in capsys.readouterr().err


@pytest.fixture
def compared(bench, tmp_path, monkeypatch):
    """Return a function: (stand-in for a run, words of the command) -> the runs that are stored."""

    def compare(trained, *words):
        monkeypatch.setattr(bench, "measure_apart", trained)
        command = [*words, "--tasks", "pendulum", "--runs", str(tmp_path / "runs.jsonl")]
        assert bench.main(command) == bench.main(command) == 0  # the second time from the file
        return [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]

    return compare


def test_by_steps_a_run_takes_the_steps_of_its_time_at_the_median_rate(compared):
    speeds = {"pql:ppo": iter([100.0, 400.0, 200.0]), "sb3:ppo": iter([10.0, 20.0, 30.0])}

    def trained(job, episodes, python):
        steps = job.budget.env_steps or round(next(speeds[job.contender]) * job.budget.seconds)
        return {**job.facts(), "return_mean": 1.0, "env_steps": steps, "seconds": job.budget.seconds}

    words = ["--by-steps", "--contenders", "pql:ppo", "sb3:ppo", "--seconds", "90", "--seeds", "1", "2"]
    stored = compared(trained, *words)
    # Three short runs of each come first, in turn; a slow one among them makes no run longer.
    assert [(r["kind"], r["contender"]) for r in stored[:6]] == [("rate", "pql:ppo"), ("rate", "sb3:ppo")] * 3
    assert [(r["contender"], r["seed"], r["env_steps"]) for r in stored[6:]] == [
        ("pql:ppo", 1, 18_000),
        ("sb3:ppo", 1, 1_800),
        ("pql:ppo", 2, 18_000),
        ("sb3:ppo", 2, 1_800),
    ]


def test_equal_steps_for_all(compared):
    def trained(job, episodes, python):
        assert python == "other/python"
        curve = curve_of((9.0, job.budget.env_steps, 7, 3.0))
        return {**job.facts(), **curve[-1], "curve": curve}

    words = ["--contenders", "pql:sac", "skrl:sac", "--seeds", "1", "--steps", "500", "--points", "2"]
    stored = compared(trained, *words, "--python", "other/python")
    assert [r["contender"] for r in stored] == ["pql:sac", "skrl:sac"]
    assert [(r["budget"], r["budget_steps"], r["env_steps"]) for r in stored] == [(0.0, 500, 500)] * 2


def test_a_course_evaluates_at_equal_parts_with_the_clock_standing_still(tool, monkeypatch):
    courses, now = tool("peers.course"), [100.0]
    monkeypatch.setattr(courses.time, "perf_counter", lambda: now[0])

    def evaluate(act):
        now[0] += 1000
        return {"return_mean": act(None)}

    course = courses.Course(courses.Budget(8.0), 4, evaluate)
    course.begin()
    over = []
    for step in range(1, 7):  # of 1.5 seconds each
        now[0] += 1.5
        over.append(course.over(10 * step, step, lambda obs, step=step: float(step)))
    assert over == [False] * 5 + [True]
    assert [p["seconds"] for p in course.curve] == [3.0, 4.5, 6.0, 9.0]  # the first after 2, 4, 6 and 8
    assert [(p["env_steps"], p["updates"], p["return_mean"]) for p in course.curve] == [
        (20, 2, 2.0),
        (30, 3, 3.0),
        (40, 4, 4.0),
        (60, 6, 6.0),
    ]
    course = courses.Course(courses.Budget(8.0, 100), 4)
    ends = [course.due(0.0, steps) for steps in (20, 80, 90, 99, 100)]
    assert ends == [False, True, False, False, True]  # of parts that pass together only one is evaluated


def curve_of(*rows):
    names = ("seconds", "env_steps", "updates", "return_mean")
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_curves_are_read_between_evaluations_but_not_outside(report):
    curve = curve_of((10.0, 1000, 50, 100.0), (20.0, 3000, 250, 500.0))
    assert report.at(curve, "seconds", 15.0) == curve_of((15.0, 2000, 150, 300.0))[0]
    assert report.at(curve, "env_steps", 1500) == curve_of((12.5, 1500, 100, 200.0))[0]
    assert report.at(curve, "seconds", 20.0) == curve[-1]
    assert report.at(curve, "seconds", 9.9) is None
    assert report.at(curve, "env_steps", 3001) is None
    clock = ((0, 0.0), (500, 5.0), (1500, 25.0))  # quick random steps first
    timed = report.timed({"curve": curve, "budget": 62.5, "budget_steps": 3000, "rate": 40.0, "clock": clock})
    assert [point["seconds"] for point in timed] == [15.0, 25.0 + 1500 / 40]
    assert report.timed({"curve": curve, "budget": 0.0, "budget_steps": 3000}) is curve


def test_tables_by_seconds_and_by_env_steps_have_the_other_counts_beside(report):
    def run(contender, seed, *rows):
        facts = {"task": "hopper", "contender": contender, "seed": seed, "budget": 40.0, "budget_steps": None}
        return {**facts, "curve": curve_of(*rows), "updates": rows[-1][2]}

    runs = [
        run("pql:sac", 1, (10.0, 50_000, 100, 200.0), (40.0, 140_000, 400, 500.0)),
        run("pql:sac", 2, (10.0, 50_000, 100, 400.0), (40.0, 140_000, 400, 1000.0)),
        run("skrl:sac", 1, (10.0, 20_000, 30, 10.0), (40.0, 60_000, 90, 90.0)),
        run("skrl:sac", 2, (10.0, 10_000, 30, 10.0), (40.0, 40_000, 90, 90.0)),
    ]
    seconds, steps = (part.splitlines() for part in report.curve_tables(runs).split("By env steps:"))
    assert "| hopper | pql:sac | 40 | 140,000 | 400 | 750 | 750 | 750 | 2 |" in seconds
    assert "| hopper | pql:sac | 27 | 100,000 | 267 | 550 | 550 | 550 | 2 |" in steps
    assert "| hopper | skrl:sac | 19 | 25,000 | 49 | 35 | 35 | 35 | 2 |" in steps
    assert sum("skrl" in line for line in steps) == 1  # one of its runs begins after 10,000, one ends before 50,000
    assert report.curve_tables([{"task": "hopper", "contender": "pql:sac", "budget": 1.0}]) == ""


def test_our_sizes_in_their_names(tool):
    from pql.config.compose import compose

    peers, config = tool("peers.contenders"), compose(["task=hopper", "algo=ppo", "device=cpu"])
    rows = config.num_envs * config.algo.horizon
    theirs, sb3 = (peers.contender(f"{name}:ppo-ours").settings("hopper") for name in ("rsl_rl", "sb3"))
    assert theirs["num_envs"] * theirs["num_steps_per_env"] == sb3["num_envs"] * sb3["model"]["n_steps"] == rows
    assert theirs["algorithm"]["num_mini_batches"] == rows / sb3["model"]["batch_size"] == config.algo.minibatches
    assert theirs["actor"]["hidden_dims"] == sb3["policy"]["net_arch"]["pi"] == config.algo.policy.hidden
    assert theirs["critic"]["hidden_dims"] == sb3["policy"]["net_arch"]["vf"] == config.algo.critic.hidden
    assert theirs["algorithm"]["desired_kl"] == config.algo.kl_target


def test_contenders_by_group_and_our_presets_by_name(bench):
    assert bench.named(["on-policy"]) == list(bench.GROUPS["on-policy"])
    assert {"pql:pql2", "skrl:sac", "rl_games:sac-ours", "sb3:td3", "sbx:sac"} < set(bench.named(["off-policy"]))
    assert bench.named(["pql:fasttd3", "sb3:sac", "pql:fasttd3"]) == ["pql:fasttd3", "sb3:sac"]
    assert bench.contender("pql:td3").settings("hopper")["words"][:2] == ["task=hopper", "algo=td3"]
    more = bench.contender("pql:td3 algo.v_per_step=7").settings("hopper")
    assert more["words"][1:3] == ["algo=td3", "algo.v_per_step=7"]
    assert more["config"]["algo.v_per_step"] == 7
    with pytest.raises(ConfigError, match=r"settings of the algorithm \(algo.KEY=VALUE\), not device=cuda"):
        bench.contender("pql:td3 device=cuda").settings("hopper")
    with pytest.raises(SystemExit, match=r"--contenders sb3:ddpg: on-policy, off-policy, .*pql:PRESET are allowed"):
        bench.named(["sb3:ddpg"])
