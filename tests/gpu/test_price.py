"""Estimated GPU seconds against what was measured on an H200."""

import json

import pytest
import yaml

from pql.reports.runs import flat
from tools.gpu import price
from tools.gpu.price import COSTS, seconds_of, tick_seconds, update_us

WIDE, NARROW = [512, 256, 128], [128, 128]


def settings(hidden: list[int], batch: int, task: str = "cartpole_swingup", **more: object) -> dict[str, object]:
    own = {"hidden": [*hidden], "ensemble": 2, "atoms": 51}
    given = {f"algo.critic.{k}": v for k, v in own.items()} | {"algo.policy.hidden": hidden, "algo.batch_size": batch}
    return {**given, "algo.v_per_step": 8, "algo.p_per_v": 0.5, "num_envs": 4096, "task.name": task, **more}


@pytest.mark.parametrize(
    ("kernels", "hidden", "batch", "critic", "policy"),
    [
        ("first", WIDE, 8192, 2150, None),
        ("first", WIDE, 2048, 1086, None),
        ("compiled", WIDE, 8192, 484, 384),
        ("compiled", WIDE, 2048, 236, 208),
        ("compiled", NARROW, 2048, 144, None),
    ],
)
def test_updates_cost_what_was_measured(kernels, hidden, batch, critic, policy):
    v, p = update_us(settings(hidden, batch), 27, 8, COSTS[kernels])
    assert v == pytest.approx(critic, rel=0.06)
    assert policy is None or p == pytest.approx(policy, rel=0.06)


def test_ticks_take_what_was_measured():
    assert tick_seconds(settings(WIDE, 8192), 5, 1, COSTS["first"]) == pytest.approx(19.1e-3, rel=0.1)
    ppo = dict(flat({"task": {"name": "ant", "kwargs": {"legacy": True}}, "num_envs": 4096}))
    assert seconds_of({"steps/env": 558_000}, ppo, (27, 8), COSTS["first"]) == pytest.approx(1.0, rel=0.01)


def test_runs_without_a_price_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(price, "sizes_of", lambda run: (3, 1))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"steps/env": 1, "eval/return_mean": 0.0}) + "\n")
    for written, said in (
        ({"task": {"name": "pendulum"}, "num_envs": 8}, "task=pendulum: expected one whose speed is known here: ant,"),
        ({"task": {"name": "ant"}, "algo": {"name": "dqn", "v_per_step": 1}}, "algo=dqn: expected an actor-critic"),
        ({"task": {"name": "ant", "kwargs": {"model": "shipped"}}}, "task.kwargs.model=shipped: expected none: speeds"),
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
        with pytest.raises(SystemExit):
            price.main([str(tmp_path)])
        assert said in capsys.readouterr().err


def test_copies_of_runs_show_estimated_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(price, "sizes_of", lambda run: (27, 8))
    run = tmp_path / "ant"
    run.mkdir()
    flat = settings(NARROW, 2048, "ant", **{"algo.v_per_step": 36})
    nested = {"task": {"name": "ant"}, "num_envs": 4096, "algo": {"batch_size": 2048, "v_per_step": 36, "p_per_v": 0.5}}
    nested["algo"] |= {"critic": {"hidden": [*NARROW], "ensemble": 2, "atoms": 51}, "policy": {"hidden": [*NARROW]}}
    (run / "config.yaml").write_text(yaml.safe_dump(nested))
    rows = [{"time/seconds": 60.0, "steps/env": 4096 * 100, "updates/v": 3600, "eval/return_mean": 700.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    price.main([str(run), "--out", str(tmp_path / "out"), "--kernels", "goal"])
    want = 100 * tick_seconds(flat, 27, 8, COSTS["goal"])
    copied = json.loads((tmp_path / "out" / "ant" / "metrics.jsonl").read_text())
    assert copied == {**rows[0], "time/seconds": want}
    assert capsys.readouterr().out.splitlines()[1].split() == [f"{want:.1f}", "409,600", "3,600", "700"]
