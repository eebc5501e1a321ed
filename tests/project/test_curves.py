"""``tools/peers/curves.py``: curves of run directories as JSON, and pictures of them."""

import json

import pytest


@pytest.fixture
def curves(tool):
    return tool("peers.curves")


def run(folder, seed, *words):
    """A run directory with two evaluations, at 1,000 and 3,000 env steps."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"task: {{name: pendulum}}\nseed: {seed}\n")
    (folder / "overrides.yaml").write_text(json.dumps([*words, "device=cpu", f"seed={seed}"]))
    (folder / "git.json").write_text('{"commit": "0123456789abcdef", "dirty": false}')
    rows = [
        {"steps/env": 1000, "eval/return_mean": -900.123, "eval/success": 0.25, "updates/v": 10},
        {"steps/env": 2000, "updates/v": 20},
        {"steps/env": 3000, "eval/return_mean": -300.0 - seed, "eval/success": 0.5},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(folder)


def test_stored_runs_have_what_changes_learning_and_their_evaluations(curves, tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"note": "kept", "runs": [1]}')
    folders = [
        run(tmp_path / "b", 2, "algo=pql2", "replay.capacity=1000", "eval.num_envs=8"),
        run(tmp_path / "a", 1, "algo=pql2"),
    ]
    curves.main(["store", *folders, "--json", str(file), "--rates", "pendulum=500", "--also", "eval/success"])
    data = json.loads(file.read_text())
    assert (data["note"], data["rates"]) == ("kept", {"pendulum": 500.0})
    first, second = data["runs"]
    assert first == {
        "task": "pendulum",
        "seed": 1,
        "overrides": "algo=pql2",
        "commit": "0123456",
        "critic_updates": 20,
        "curve": [[1000, -900.12, 0.25], [3000, -301.0, 0.5]],
    }
    assert (second["seed"], second["overrides"]) == (2, "algo=pql2 replay.capacity=1000")
    (line, *_) = curves.series("x", data, data["rates"])
    assert [point["seconds"] for point in line["curve"]] == [2.0, 6.0]


def test_pictures_over_both_axes(curves, tmp_path):
    pytest.importorskip("matplotlib")
    file, pictures = tmp_path / "c.json", tmp_path / "pictures"
    folders = [run(tmp_path / "b", 2, "algo=pql2"), run(tmp_path / "a", 1, "algo=pql2")]
    curves.main(["store", *folders, "--json", str(file), "--rates", "pendulum=500"])
    curves.main(["draw", f"one={file}", f"two={file}", "--pictures", str(pictures)])
    assert {path.name for path in pictures.iterdir()} == {"env_steps.png", "seconds.png"}


def test_what_is_missing_or_wrong_is_named(curves, tmp_path, capsys):
    (tmp_path / "no").mkdir()
    file = tmp_path / "c.json"
    with pytest.raises(SystemExit, match=r"no: no run: .*config\.yaml is missing"):
        curves.main(["store", str(tmp_path / "no"), "--json", str(file)])
    folder = run(tmp_path / "a", 1, "algo=pql2")
    curves.main(["store", folder, "--json", str(file)])
    for words, message in (
        (("draw", f"one={file}", "--pictures", str(tmp_path)), "one: no rate of pendulum"),
        (
            ("draw", "one=no.json", "--pictures", str(tmp_path)),
            r"no\.json: a file of tools/peers/curves\.py store is expected",
        ),
        (("store", folder, "--json", str(file), "--also", "eval/x"), "--also eval/x: .*a metric of every evaluation"),
        (("store", folder, folder, "--json", str(file)), "two runs of pendulum 1 algo=pql2"),
    ):
        with pytest.raises(SystemExit, match=message):
            curves.main(words)

    with pytest.raises(SystemExit):
        curves.main(["store", folder, "--json", "c.json", "--rates", "pendulum=fast"])
    assert "pendulum=fast: env steps per second above 0 are expected" in capsys.readouterr().err
