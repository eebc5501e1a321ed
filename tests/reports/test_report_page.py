"""The report page: self-contained, consistent with the numbers; and the commands that write it."""

import base64
import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_files import words, write_run

import pql
from pql.cli.main import main
from pql.errors import ConfigError

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
from pql.reports import draw, write
from pql.reports.words import DASH, compact, findings, num

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Checked(HTMLParser):
    """Nesting, ids, what is linked, and the text of tables."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[str | None] = []
        self.cells: list[list[str]] = []
        self.regions = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [given[k] for k in ("href", "src", "xlink:href", "srcset", "data") if k in given]
        if tag == "img":
            self.images.append(given.get("alt"))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        self.regions += given.get("role") == "region"

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "small") and self.cells:
            self.cells[-1][-1] += " " + data.strip()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms, two tasks, two seeds; one run was cut off."""
    folder = tmp_path_factory.mktemp("runs")
    for task, scale in (("pendulum", 1.0), ("hopper", 10.0)):
        for algo, top in (("pql", 100.0), ("a<b>&", 50.0)):
            for seed in (1, 2):
                evals = [(10.0 * i, 1000 * i, scale * top * i * seed / 4) for i in range(1, 5)]
                path = folder / f"{task}-{'p' if algo == 'pql' else 'a'}-{seed}"
                write_run(path, evals, task, algo, seed, finished=(task, algo, seed) != ("hopper", "pql", 2))
    return folder


@pytest.fixture(scope="module")
def page(two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = write([str(two)], tmp_path_factory.mktemp("out") / "page")
    return path


def test_the_page_stands_alone_and_is_well_formed(page):
    text = page.read_text()
    checked = Checked(text)
    assert len(checked.ids) == len(set(checked.ids))
    assert checked.links
    for link in checked.links:
        assert link.startswith("data:image/png;base64,") or link[:1] == "#"
        assert link[:1] != "#" or link[1:] in checked.ids, link
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text
    assert "<script" not in text


def test_every_picture_is_in_the_page_and_beside_it_and_says_what_it_shows(page):
    checked = Checked(page.read_text())
    pictures = sorted(p.name for p in page.parent.glob("*.png"))
    curves = [f"curve-{i}-{axis}.png" for i in (0, 1) for axis in ("env_steps", "seconds", "updates")]
    speeds = [f"speed-{i}-{key}_per_s.png" for i in (0, 1) for key in ("env_steps", "updates")]
    both = ["all-seconds.png", "all-env_steps.png"]
    assert pictures == sorted([*curves, *speeds, *both, "score-0.png", "score-1.png", "score-all.png", "profile.png"])
    for path in page.parent.glob("*.png"):
        assert path.read_bytes().startswith(base64.b64decode("iVBORw0KGgo="))
    assert len(checked.images) == len(pictures)
    assert all(checked.images)
    assert (draw.shown({1}), draw.shown({1, 3, 2})) == ("", ": IQM of 1 to 3 runs each, 95 % band")
    assert "IQM on hopper: pql 1,500 (1,000 to 2,000); a<b>& 750 (500 to 1,000)." in checked.images


def test_names_are_no_formulas_and_letters_without_a_glyph_no_noise(tmp_path, recwarn):
    write_run(tmp_path / "runs" / "a", [(1.0, 10, 0.0), (2.0, 20, 1.0)], algo="$\\foo$", task="漢字")
    path, _ = write([str(tmp_path / "runs")], tmp_path / "out")
    assert "$\\foo$" in path.read_text()
    assert "漢字" in path.read_text()
    noise = [str(w.message) for w in recwarn if not issubclass(w.category, ResourceWarning)]  # of earlier tests
    assert noise == []


def test_the_tables_say_what_the_numbers_say(page):
    numbers = json.loads((page.parent / "numbers.json").read_text())
    rows = [[" ".join(c.split()) for c in row] for row in Checked(page.read_text()).cells]
    pql = numbers["tasks"][1]["groups"][0]
    assert (numbers["tasks"][1]["task"], pql["label"]) == ("pendulum", "pql")
    scores = ["pql", "2", "150 100 to 200", "150 100 to 200", "150 100 to 200"]
    assert [*scores, "0.73 0.47 to 1"] in rows  # evaluations from 12.5 to 200
    assert ["pql", "150 100 to 200", "150 100 to 200", "100"] in rows  # at 40 s, at 4,000 steps; steps/s
    assert ["pendulum", "12.5 the lowest evaluation of these runs", "200 the highest", "these runs"] in rows
    # 100 and 200 against 50 and 100: 3 of 4 and a tie. Interval: of both tasks, 1 / 256 of the draws is below 62 %.
    assert ["pql", "–", "88% 62% to 100%"] in rows
    assert ["a<b>&", "12% 0% to 38%", "–"] in rows
    cut = ["hopper-p-2 no summary.json: it is still running, or was cut off", "hopper", "pql", "2", "40", "4,000"]
    assert [*cut, "600", "4", "2,000", "2,000"] in rows
    assert ["pql", "100", "15"] in rows  # env steps and updates a second
    assert Checked(page.read_text()).regions == page.read_text().count("<table")


def test_the_first_words_are_the_findings(page):
    numbers = json.loads((page.parent / "numbers.json").read_text())
    ahead = "pql is ahead at 40 s, IQM 150 (100 to 200) over 2 runs; next a<b>& with 75 (50 to 100). "
    missing = "No verdict, which needs 5 seeds of each; missing: 3 of pql and 3 of a<b>&."
    assert findings(numbers)[1] == ("pendulum", ahead + missing)
    name, text = findings(numbers)[2]
    assert (name, text[-len(missing) :]) == ("2 tasks", missing)
    assert text.startswith("pql is ahead, normalised IQM 0.73 (")
    numbers["tasks"][1]["groups"][1] |= {"independent": 5}
    assert findings(numbers)[1][1].endswith("missing: 3 of pql.")
    text = page.read_text()
    assert "<h1>pql and a&lt;b&gt;&amp; on hopper and pendulum</h1>" in text
    assert "next a&lt;b&gt;&amp; with 75 (50 to 100). No verdict, which needs 5 seeds" in text
    assert "8 runs · 2 algorithms · 2 tasks · compared at equal wall-clock time" in text


@pytest.mark.parametrize(
    ("seeds", "low", "chance", "said"),
    [
        ((5, 9), 120.0, 0.6, "Verdict: a is better. The intervals do not overlap; the probability that a run of a"),
        ((5, 5), 90.0, 0.6, "Verdict: a is better. The intervals overlap; the probability that a run of a scores"),
        ((5, 5), 90.0, 0.5, "Verdict: no difference is shown. The intervals overlap; the probability"),
        ((5, 5), 90.0, 0.5, "that a run of a scores above one of b is 84% (50% to 100%)."),
        ((4, 5), 120.0, 0.6, "No verdict, which needs 5 seeds of each; missing: 1 of a."),
        ((1, 3), 120.0, 0.6, "missing: 4 of a and 2 of b."),
    ],
)
def test_a_verdict_needs_five_seeds_and_a_probability_above_one_half(seeds, low, chance, said):
    groups = [
        {"label": label, "scores": [0.0] * 5, "score": {"iqm": {"value": value, "low": least, "high": most}}}
        for label, value, least, most in (("a", 150.0, low, 180.0), ("b", 75.0, 50.0, 100.0))
    ]
    for group, count in zip(groups, seeds, strict=True):
        group |= {"independent": count, "beats": {"b": {"value": 0.84, "low": chance, "high": 1.0}}}
    numbers = {
        "x": "seconds",
        "tasks": [{"task": "t", "groups": groups, "end": {"seconds": 40.0}}],
        "overall": {"tasks": ["t"], "groups": groups},
    }
    (finding,) = findings(numbers)
    assert said in finding[1]


def test_each_run_s_file_of_settings_is_on_the_page(tmp_path):
    for seed in (1, 2):
        path = write_run(tmp_path / "runs" / f"a{seed}", [(1.0, 10, 0.0)], seed=seed, lr=0.5, net="</pre><b>")
    (path / "config.yaml").write_text((path / "config.yaml").read_text() + "# by hand\n")
    page, _ = write([str(tmp_path / "runs")], tmp_path / "out")
    text = page.read_text()
    found = re.findall(r'<details class="file"><summary>(.*?)</summary><pre tabindex="0">(.*?)</pre>', text, re.S)
    assert [name for name, _ in found] == ["a1/config.yaml", "a2/config.yaml"]
    assert html.unescape(found[1][1]) == (path / "config.yaml").read_text()
    assert "# by hand" in found[1][1]
    assert "</pre><b>" not in text


def test_settings_stand_side_by_side_where_algorithms_differ(tmp_path):
    for algo, rate in (("pql", 1e-3), ("ppo", 3e-4)):
        for seed in (1, 2):
            more = {"batch_size": 512} if algo == "pql" else {}
            write_run(tmp_path / f"{algo}{seed}", [(1.0, 10, 0.0)], algo=algo, seed=seed, lr=rate, gamma=0.99, **more)
            file = tmp_path / f"{algo}{seed}" / "config.yaml"
            budget = {"seconds": 30 if algo == "pql" else 60}
            file.write_text(json.dumps({**json.loads(file.read_text()), "budget": budget}))
    path, _ = write([str(tmp_path)], tmp_path / "out")
    rows = [[" ".join(c.split()) for c in row] for row in Checked(path.read_text()).cells]
    labels = next(row[1:] for row in rows if row and row[0] == "setting" and len(row) == 3)
    values = {row[0]: dict(zip(labels, row[1:], strict=True)) for row in rows if len(row) == 3 and row[0] != "setting"}
    assert values["algo.lr"] == {"pql": "0.001", "ppo": "0.0003"}
    assert values["algo.batch_size"] == {"pql": "512", "ppo": "–"}
    assert "algo.gamma" not in values
    assert ["algo.gamma", "0.99"] in rows
    assert values["budget.seconds"] == {"pql": "30", "ppo": "60"}
    assert not any(row and row[0] == "seed" for row in rows if len(row) < 5)


def test_axes_have_labels_and_narrow_cells_their_columns_names(page):
    text, numbers = page.read_text(), json.loads((page.parent / "numbers.json").read_text())
    for axis, name in (("seconds", "seconds"), ("env_steps", "env steps"), ("updates", "updates")):
        (ax,) = draw.learning_curves(numbers["tasks"][0], numbers["runs"], numbers["labels"], axis).axes
        assert (ax.get_xlabel(), ax.get_ylabel()) == (f"{name}: IQM of 2 runs each, 95 % band", "return")
        assert [text.get_text() for text in ax.get_legend().get_texts()] == numbers["labels"]
    for table in re.findall(r"<table>.*?</table>", text, re.S):
        names = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', table)
        for row in re.findall(r"<tr>(.*?)</tr>", table.split("</thead>")[1], re.S):
            columns = re.findall(r'data-column="([^"]*)"', row)
            assert columns == names[len(names) - len(columns) :]
    assert "content: attr(data-column)" in text


def test_a_narrow_screen_keeps_the_name_of_every_row(page):
    """Of a table that scrolls, what is scope=row stays: one cell a row, in the tables of thresholds the algorithm's."""
    tables = re.findall(r"<table>.*?</table>", page.read_text(), re.S)
    for table in tables:
        head, body = table.split("</thead>")
        assert head.count(" stuck") == 1
        rows = re.findall(r"<tr>.*?</tr>", body, re.S)
        assert rows
        assert all(row.count('scope="row"') == 1 for row in rows)
    thresholds = [table for table in tables if "runs there" in table]
    assert len(thresholds) == 2
    for table in thresholds:
        assert 'class="name stuck">algorithm<' in table
        stuck = re.findall(r'<th scope="row".*?</th>', table, re.S)
        assert len(stuck) == 6  # two algorithms at three returns
        assert all('class="chip"' in cell for cell in stuck)
    assert "th[scope=row], thead .stuck { position: sticky" in page.read_text()


def test_a_report_tells_every_number_and_success_with_the_returns(tmp_path):
    extra = {"eval/length_mean": 9.0, "eval/return_iqm": 1.0, "loss/v": 1.0}
    rows = [
        {"time/seconds": s, "steps/env": s, "eval/return_mean": s, "eval/success": s / 4, **extra} for s in (1.0, 2.0)
    ]
    path, _ = write([str(write_run(tmp_path / "r", [], rows=rows))], tmp_path / "out", single=True)
    shown = Checked(path.read_text()).images
    assert "Success of evaluated episodes over time; at the end 50%." in shown
    assert (tmp_path / "out" / "success.png").exists()
    for key in extra:
        assert any(text.startswith(f"{key} over time, from ") for text in shown), key


@pytest.mark.parametrize(
    ("value", "want", "small"),
    [
        (None, "–", "–"),
        (float("nan"), "–", "–"),
        (0.0, "0", "0"),
        (-162.04, "−162.0", "−162"),
        (12345.6, "12,346", "12.3k"),
        (2_087_000.0, "2,087,000", "2.09M"),
        (0.314, "0.31", "0.314"),
        (9500.0, "9,500", "9,500"),
        (0.00123, "0.0012", "0.00123"),
        (3.14159, "3.14", "3.14"),
    ],
)
def test_numbers_for_people(value, want, small):
    assert (num(value), compact(value)) == (want, small)


def test_the_ticks_of_an_axis_share_a_unit_and_differ():
    ticks = draw.Ticks()
    for locs, want in (
        ([0, 2000, 12000], ["0", "2k", "12k"]),
        ([0, 2.5, 5], ["0.0", "2.5", "5.0"]),
        ([-1500, 500], ["−1,500", "500"]),
        ([0.2925, 0.293], ["0.2925", "0.2930"]),
        ([0, 1.5e6], ["0.0", "1.5M"]),
    ):
        ticks.set_locs(locs)
        assert [ticks(v) for v in locs] == want


def test_every_run_is_inside_its_picture():
    rates = {"env_steps_per_s": 5.0}
    task = {"task": "t", "groups": [{"label": "a", "speed": rates}]}
    runs = [{"task": "t", "label": "a", "speed": {"env_steps_per_s": v}} for v in (1.0, 5.0, 90.0)]
    low, high = draw.rates(task, runs, ["a"], "env_steps_per_s").axes[0].get_xlim()
    assert low == 0
    assert 90 < high < 100
    low, high = draw.rates(task, runs[:1], ["a"], "env_steps_per_s").axes[0].get_xlim()
    assert (low, high) == (0, pytest.approx(5.25))  # all equal: the mark is not cut at the edge


def test_long_labels_that_differ_at_their_ends_stay_different():
    assert draw.clip("pql_sac, 20 letters!") == "pql_sac, 20 letters!"
    labels = [draw.clip(f"pql2 policy.hidden=[128,128] seed={seed}") for seed in (1, 2)]
    assert labels == ["pql2 poli…28] seed=1", "pql2 poli…28] seed=2"]
    assert {len(label) for label in labels} == {20}


# -- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_comparing_two_real_runs_and_reporting_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = ("eval.final=true", "eval.every_seconds=0.02", "task.kwargs.max_episode_steps=20", "budget.env_steps=1600")
    for seed in (1, 2):
        assert main(["train", *words(tmp_path / "multi" / f"seed={seed}", f"seed={seed}", *more)]) == 0
    capsys.readouterr()
    assert main(["compare", "multi/seed=1", "multi", "x=updates"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["page: comparison/index.html", "numbers: comparison/numbers.json"]
    numbers = json.loads(Path("comparison/numbers.json").read_text())
    final = [json.loads((tmp_path / "multi" / f"seed={s}" / "summary.json").read_text())["return_mean"] for s in (1, 2)]
    group = numbers["tasks"][0]["groups"][0]
    assert (numbers["x"], group["label"], group["seeds"]) == ("updates", "pql", [1, 2])
    assert group["scores"] == pytest.approx(final)
    assert numbers["tasks"][0]["task"] == "pendulum (max_episode_steps=20)"
    assert said[1].split()[2:4] == ["pql", "2"]
    assert num(sum(final) / 2) in said[1]
    speed = group["speed"]
    assert speed["configured"] == {"ratio/v_per_step": 2.0, "ratio/p_per_v": 0.5}
    assert (speed["ratio/v_per_step"], speed["ratio/p_per_v"], speed["lag/policy_ticks"]) == (2.0, 0.5, 1)
    assert 0 < speed["busy/v"] <= 1.1
    assert 0.05 < speed["memory/host_gib"] < 64

    assert main(["report", "multi/seed=1"]) == 0
    text = Path("multi/seed=1/report/index.html").read_text()
    Checked(text)
    for words_there in (
        "<dt>return, mean</dt>",
        f"<dd>{num(final[0])}</dd>",
        "algo.critic.hidden",
        "policy lag (ticks)",
    ):
        assert words_there in text
    reported = json.loads(Path("multi/seed=1/report/numbers.json").read_text())
    assert reported["series"]["ratio/v_per_step"]["y"][-1] == 2.0
    assert {p.stem for p in Path("multi/seed=1/report").glob("*.png")} >= {
        "curve-0-seconds",
        "curve-0-env_steps",
        "train",
        "busy",
        "memory",
        "lag",
        "ratio",
        "env_steps_per_s",
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["compare", "{}/pendulum-q-1"],
            "pendulum-q-1: expected a run directory, or a folder of runs (did you mean pend",
        ),
        (
            ["compare", "{}", "x=second"],
            "x=second: expected one of seconds, env_steps, updates (did you mean seconds?)",
        ),
        (
            ["compare", "{}", "xx=seconds"],
            "xx=seconds: expected one of x, out, thresholds, at, references (did you mean x?)",
        ),
        (["compare", "{}", "thresholds=5"], "thresholds=5: expected a list of numbers such as [100,200]"),
        (["compare", "{}", "thresholds=[a]"], "thresholds=['a']: expected a list of numbers such as [100,200]"),
        (["compare", "{}", "at=[1,true]"], "at=[1, True]: expected a list of numbers such as [100,200]"),
        (["compare", "{}", "at=[1e400]"], "at=[inf]: expected a list of numbers such as [100,200]"),
        (["compare", "{}", "out=/proc/x"], "out=/proc/x: expected a folder that can be written"),
        (["compare", "x=seconds"], "run=null: expected run directories"),
        (["compare", "{}/.."], "expected a run directory"),
        (["report", "{}"], "expected one run, not 8; to compare them: pql compare {}"),
        (["report", "{}/pendulum-p-1", "{}/pendulum-p-2"], "expected one run directory"),
        (["report"], "the following arguments are required: RUN"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(two, capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    if argv[-1].endswith(".."):
        (tmp_path / "empty").mkdir()
        argv = ["compare", str(tmp_path / "empty")]
    assert main([w.format(two) for w in argv]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message.format(two) in said.err


def test_a_run_without_metrics_is_named(tmp_path, capsys):
    path = write_run(tmp_path / "r", [(1.0, 1, 1.0)])
    (path / "metrics.jsonl").unlink()
    assert main(["compare", str(path)]) == 2
    assert f"run={path}: expected a run with metrics: metrics.jsonl is missing" in capsys.readouterr().err


def test_a_page_replaces_the_one_before_and_nothing_else(tmp_path):
    for i, evals in enumerate(([(1.0, 1, 1.0), (2.0, 2, 5.0)], [(1.0, 1, 1.0), (2.0, 2, 3.0)])):
        write_run(tmp_path / f"r{i}", evals, task=f"t{i}")
    out = tmp_path / "out"
    write([str(tmp_path / "r0"), str(tmp_path / "r1")], out)
    (out / "mine.png").write_text("")
    first = {p.name for p in out.glob("*.png")}
    assert {"curve-1-seconds.png", "score-all.png"} < first
    write([str(tmp_path / "r1")], out)
    pictures = {p.name for p in out.glob("*.png")}
    assert pictures == {*json.loads((out / "numbers.json").read_text())["pictures"], "mine.png"} < first
    assert "curve-1-seconds.png" not in pictures


@pytest.mark.parametrize("at", ["12", 5, None, [1500, None], [float("nan")]])
def test_points_that_are_no_numbers_are_refused_in_python_too(tmp_path, at):
    path = write_run(tmp_path / "r", [(10.0, 1000, 0.0)])
    with pytest.raises(ConfigError, match=r"at=.*: expected a list of numbers"):
        pql.compare(path, at=at, out=tmp_path / "out")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_returns_at_chosen_points_are_on_the_page_and_printed(tmp_path, capsys, command):
    path = write_run(tmp_path / "r", [(10.0, 1000, 0.0), (20.0, 2000, 100.0)])
    points = ",".join(["1250", "3000", *map(str, range(1251, 1300))])  # longer than a file's name may be
    assert main([command, str(path), "x=env_steps", f"at=[{points}]", f"out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "pendulum, pql, at 1,250 env steps: median 25 (25)" in said
    assert "note: No run on pendulum was evaluated before and after 3,000 env steps." in said
    text = (tmp_path / "out/index.html").read_text()
    [table] = [t for t in re.findall(r"<table>.*?</table>", text, re.S) if "at 1,250 env steps" in t]
    cells = [cell.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", table, re.S)]
    assert cells[:2] == ["25<small>25</small>", f"{DASH}<small>{DASH}</small>"]
    assert main([command, str(path), f"out={tmp_path / 'out'}"]) == 0
    assert "Returns at chosen points" not in (tmp_path / "out/index.html").read_text()


def test_an_axis_that_a_run_does_not_tell(tmp_path, capsys):
    path = write_run(tmp_path / "r", [(1.0, 1, 1.0)])
    (path / "metrics.jsonl").write_text('{"time/seconds": 1.0, "steps/env": 1, "eval/return_mean": 2.0}\n')
    assert main(["compare", str(path), "x=updates", f"out={tmp_path}"]) == 2
    assert "x=updates: expected an axis that all runs record; r does not" in capsys.readouterr().err
    assert main(["compare", str(path), f"out={tmp_path}"]) == 0


@pytest.mark.parametrize("without", ["a", "b"])
def test_a_run_with_updates_beside_one_without(tmp_path, without):
    """Of an axis that some runs lack, neither a group with such a run nor all tasks together have a curve."""
    for name in ("a", "b"):
        path = write_run(tmp_path / name, [(10.0, 1000, 0.0), (20.0, 2000, 100.0)], seed=ord(name))
        if name == without:
            rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
            kept = [{k: v for k, v in row.items() if not k.startswith("updates/")} for row in rows]
            (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = pql.compare(tmp_path / "a", tmp_path / "b", out=tmp_path / "out")
    [task] = found["tasks"]
    [mine] = task["groups"]
    assert (task["end"], mine["scores"]) == ({"seconds": 20, "env_steps": 2000, "updates": None}, [100, 100])
    assert [len(mine["curves"][axis]["x"]) for axis in ("seconds", "env_steps", "updates")] == [100, 100, 0]
    assert {k: len(v) for k, v in found["overall"]["x"].items()} == {"seconds": 50, "env_steps": 50, "updates": 0}


@pytest.mark.parametrize("without", ["hopper", "pendulum"])
def test_a_task_without_updates_leaves_no_curve_over_all_tasks(tmp_path, without):
    for task in ("hopper", "pendulum"):
        row = {"time/seconds": 1.0, "steps/env": 1, "eval/return_mean": 2.0}
        counts = {} if task == without else {"updates/v": 1.0}
        rows = [{k: v * scale for k, v in (row | counts).items()} for scale in (1, 2)]
        write_run(tmp_path / task, [], task=task, rows=rows)
    found = pql.compare(tmp_path / "hopper", tmp_path / "pendulum", out=tmp_path / "out")
    assert {k: len(v) for k, v in found["overall"]["x"].items()} == {"seconds": 50, "env_steps": 50, "updates": 0}


@pytest.mark.parametrize("package", ["matplotlib", "scipy", "jinja2"])
def test_a_package_that_is_not_installed_is_named(two, capsys, monkeypatch, package):
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else real(name))
    assert main(["compare", str(two)]) == 2
    assert f"report={package}: expected this package, which is not installed: pip install 'pql-rl[report]'" in (
        capsys.readouterr().err
    )


def test_the_command_line_does_not_need_them(tmp_path):
    import subprocess

    script = "import sys; import pql.cli.main; pql.cli.main.main(['list', 'algos']); import pql.reports; "
    script += "print(sorted({'matplotlib', 'scipy', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
