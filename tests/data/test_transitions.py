"""Replay files: a ring is restored bit for bit, and recorded data give the expected windows."""

import re

import pytest
import torch
from conftest import small_config
from histories import CPU, SPECS, Recorded, picture
from run_files import words
from safetensors.torch import load_file, save_file
from test_transitions_frames import FakeCollector

from pql.algos.registry import seeds
from pql.cli.main import main
from pql.collect.prefill import prefill
from pql.contract.env import ObsSpec
from pql.data import transitions
from pql.data.replay import Cursor, Replay
from pql.data.sizes import ReplayLayout
from pql.errors import ConfigError
from pql.run.build import build
from pql.types import Acted, Batch, Step

KINDS = ("step", "step", "step", "terminate", "truncate", "lose", "forget", "life", "cut", "stall", "restart")


def clone(ring: Recorded, rows: int | None = None) -> Replay:
    """An empty ring of the same shape."""
    old = ring.replay
    layout = ReplayLayout(SPECS, 1, old.num_envs, rows or old.rows, old.horizon, old.fillers)
    return Replay(layout, CPU, obs_only=old.obs_only)


def sealed(replay: Replay) -> Cursor:
    cursor = Cursor(replay.num_envs, CPU)
    for mine, live in zip(cursor.tensors(), replay.live.tensors(), strict=True):
        mine.copy_(live)
    return cursor


def sample(replay: Replay, n: int) -> tuple[Batch, Cursor]:
    cursor = sealed(replay)
    return replay.sample(cursor, 256, n, 0.9, torch.Generator().manual_seed(7)), cursor


def test_the_file_holds_the_documented_columns_with_the_history_in_them(tmp_path):
    ring = Recorded(2, 20, 1)
    kinds = ["step", "truncate", "step", "terminate", "lose", "step"]
    for kind in kinds:
        ring.insert([kind, "step"])
    ring.insert(["step"], [1])
    transitions.save_replay(ring.replay, tmp_path / "ring.safetensors")
    data = load_file(tmp_path / "ring.safetensors")
    assert data["length"].tolist() == [8, 7]  # two fillers; what "lose" lost is lost
    assert {k: tuple(v.shape) for k, v in data.items()} == {
        "obs.policy": (9, 2, 2),
        "obs.frame": (9, 2, 1, 3),
        "action": (8, 2, 1),
        "reward": (8, 2),
        "terminated": (8, 2),
        "truncated": (8, 2),
        "first": (8, 2),
        "valid": (8, 2),
        "length": (2,),
    }
    for i in range(2):
        events = ring.events[i]
        shown = picture([e.obs for e in events] + [events[-1].after])
        for k, v in shown.items():
            assert torch.equal(data[f"obs.{k}"][: len(events) + 1, i], v.to(data[f"obs.{k}"]))
        for name in ("terminated", "truncated", "first", "valid"):
            assert data[name][: len(events), i].flatten().tolist() == [getattr(e, name) for e in events], name
        for name in ("action", "reward"):
            rows = [t for t, e in enumerate(events) if e.valid]
            assert data[name][rows, i].flatten().tolist() == [getattr(events[t], name) for t in rows], name


@pytest.mark.parametrize("older", [False, True])
def test_final_observations_in_columns_of_their_own_become_filler_rows(tmp_path, older):
    """As release 0.2 wrote them, which dropped rows without one, and as other software may."""
    flags = {k: torch.zeros(4, 2, dtype=torch.bool) for k in ("terminated", "truncated", "first")}
    flags["truncated"][1], flags["first"][1, 0], flags["terminated"][2, 1] = True, True, True
    flags["first"][2, 1] = True
    shown = torch.arange(10.0).view(5, 2)
    columns = {f"obs.{k}": torch.stack([picture(row.long().tolist())[k] for row in shown]) for k in SPECS}
    columns |= flags | {"action": torch.zeros(4, 2, 1), "reward": torch.arange(8.0).view(4, 2)}
    columns |= {"final_row": torch.tensor([2, 5]), **{f"final_obs.{k}": v for k, v in picture([90, 91]).items()}}
    save_file(columns, tmp_path / "rows", {"format": "pql-replay-1"} if older else None)
    ring = clone(Recorded(2, 12, 1))
    transitions.load_replay(ring, tmp_path / "rows")
    assert ring.live.head.tolist() == [5, 5]
    found = {}
    for i in range(2):
        row = torch.arange(5)
        batch = ring.windows(sealed(ring), row, torch.full((5,), i), torch.full((5,), 5), 1, 0.5)
        for k in batch.mask.nonzero().flatten().tolist():
            found[int(batch.obs["policy"][k, 0])] = (batch.discount[k].item(), int(batch.next_obs["policy"][k, 0]))
    want = {0: (0.5, 2), 1: (0.5, 3), 2: (0.5, 90), 3: (0.5, 5), 4: (0.5, 6), 5: (0.0, 91), 6: (0.5, 8), 7: (0.5, 9)}
    assert found == {k: v for k, v in want.items() if not (older and k == 3)}  # its row did not say that it is known


def test_a_smaller_ring_takes_the_newest_rows(tmp_path):
    ring = Recorded(2, 40, 1)
    for t in range(30):
        ring.insert(["truncate" if t % 4 == i else "step" for i in range(2)])
    transitions.save_replay(ring.replay, tmp_path / "ring.safetensors")
    small = clone(ring, 12)
    transitions.load_replay(small, tmp_path / "ring.safetensors")
    assert small.live.head.tolist() == [11, 11]
    for column, newest in enumerate(ring.events):
        cells = torch.arange(11) * 2 + column
        assert small.obs["policy"][cells, 0].tolist() == [e.obs for e in newest[-11:]]
        assert small.reward[cells].tolist() == [e.reward for e in newest[-11:]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_whole_numbers_keep_their_type(tmp_path, dtype):
    specs = {"policy": ObsSpec((2,), dtype)}
    rings = [Replay(ReplayLayout(specs, 1, 2, 8, 1, 5), CPU) for _ in range(2)]
    values = torch.randint(2 if dtype == torch.bool else 100, (5, 2, 2), generator=torch.Generator().manual_seed(0))
    rings[0].begin({"policy": values[0].to(dtype)})
    no = torch.zeros(2, dtype=torch.bool)
    for row in values[1:]:
        obs = {"policy": row.to(dtype)}
        rings[0].insert(Acted(torch.zeros(2, 1), {}), Step(obs, torch.ones(2), no, no, no, obs, ~no, ~no, {}))
    transitions.save_replay(rings[0], tmp_path / "x.safetensors")
    transitions.load_replay(rings[1], tmp_path / "x.safetensors")
    one, two = (ring.obs["policy"].unflatten(0, (-1, 2)) for ring in rings)
    assert one.dtype == dtype
    assert torch.equal(one[:5], values.to(dtype))
    assert torch.equal(one[:5], two[:5])
    other = Replay(ReplayLayout({"policy": ObsSpec((2,))}, 1, 2, 8, 1, 5), CPU)
    with pytest.raises(ConfigError, match=r"a column obs\.policy of float \[5, 2, 2\], not"):
        transitions.load_replay(other, tmp_path / "x.safetensors")


# -- prefill ----------------------------------------------------------------------------------------------------------


def flat(steps: int, ends: dict[int, str]) -> dict[str, torch.Tensor]:
    """Transitions of one environment, observation i -> i + 1; at an end the next episode begins at i + 1 + 1000."""
    now, after, number = [], [], 0
    for i in range(steps):
        now.append(number)
        after.append(number + 1)
        number = number + 1001 if i in ends else number + 1
    data = {f"obs.{k}": v for k, v in picture(now).items()} | {f"next_obs.{k}": v for k, v in picture(after).items()}
    data["action"] = torch.linspace(-1, 1, steps)[:, None]
    data["reward"] = torch.arange(steps) / 8
    data["terminated"] = torch.tensor([ends.get(i) == "terminated" for i in range(steps)])
    data["truncated"] = torch.tensor([ends.get(i) == "truncated" for i in range(steps)])
    return data


def windows_by_number(replay: Replay, n: int) -> dict[int, tuple]:
    """Every usable window: first observation's number -> (action, reward, discount, number of the last successor)."""
    cursor, out = sealed(replay), {}
    for column in range(replay.num_envs):
        row = torch.arange(int(cursor.head[column]))
        where = torch.full_like(row, column)
        batch = replay.windows(cursor, row, where, cursor.head[where], n, 0.5)
        for k in batch.mask.nonzero().flatten().tolist():
            number = int(batch.obs["policy"][k, 0])
            assert torch.equal(batch.obs["frame"][k], picture([number])["frame"][0])
            assert number not in out
            out[number] = (
                batch.action[k].item(),
                batch.reward[k].item(),
                batch.discount[k].item(),
                int(batch.next_obs["policy"][k, 0]),
            )
    return out


def test_prefilled_transitions_become_their_n_step_windows(tmp_path):
    data = flat(12, {3: "terminated", 7: "truncated"})
    save_file(data, tmp_path / "data.safetensors")
    collector = FakeCollector(SPECS, 1, 40)
    assert prefill(collector, tmp_path / "data.safetensors") == 12
    found = windows_by_number(collector.replays[0], 3)
    now = data["obs.policy"][:, 0].int().tolist()
    assert sorted(found) == sorted(now)  # none is lost
    for i, number in enumerate(now):
        end = 3 if i <= 3 else 7 if i <= 7 else 11
        m = min(3, end - i + 1)
        over = end == 3 and i + m - 1 == 3
        assert found[number][0] == pytest.approx(data["action"][i].item())
        assert found[number][1] == pytest.approx(sum(0.5**j * (i + j) / 8 for j in range(m)))
        assert found[number][2] == (0 if over else 0.5**m)
        if not over:
            assert found[number][3] == number + m
    views = collector.replays[1].sample_obs(sealed(collector.replays[1]), 500, torch.Generator().manual_seed(0))
    assert {int(x) for x, use in zip(views.obs["policy"][:, 0], views.mask, strict=True) if use} == {*now}
    moments = collector.normalizer.moments["policy"]
    assert moments.count == 12
    assert moments.mean[0].item() == pytest.approx(sum(now) / 12)
    assert collector.normalizer.scale_policy[0] < 0.01  # frozen, in use


def test_several_environments_share_the_data_and_the_newest_are_taken(tmp_path):
    save_file(flat(100, dict.fromkeys(range(9, 100, 10), "truncated")), tmp_path / "data.safetensors")
    collector = FakeCollector(SPECS, 3, 12)
    taken = prefill(collector, tmp_path / "data.safetensors")
    assert collector.replays[0].live.head.tolist() == [11, 11, 11]
    found = windows_by_number(collector.replays[0], 1)
    assert len(found) == taken
    assert 26 <= taken <= 28  # 30 rows, 3 or so of them fillers after an end
    newest = load_file(tmp_path / "data.safetensors")["obs.policy"][-taken:, 0].int().tolist()
    assert sorted(found) == sorted(newest)
    assert all(found[k][2:] == (0.5, k + 1) for k in found)


# -- from the command line --------------------------------------------------------------------------------------------


def test_a_run_saves_its_replay_and_another_starts_with_it(tmp_path, capsys):
    first, second = tmp_path / "a", tmp_path / "b"
    more = ("task.kwargs.max_episode_steps=7",)
    assert main(["train", *words(first, *more, "replay.save=true")]) == 0
    data = load_file(first / "replay.safetensors")
    assert data["reward"].shape == (22, 16)  # 20 steps, and two time limits
    assert data["valid"].sum() == 20 * 16
    file = first / "replay.safetensors"
    before = file.read_bytes()
    file.unlink()
    assert main(["resume", str(first), "replay.save=true"]) == 0  # its budget is spent: not a step is made
    assert file.read_bytes() == before
    capsys.readouterr()
    assert main(["train", *words(second, *more, f"replay.prefill={file}", "num_envs=8", "budget.env_steps=72")]) == 0
    assert f"replay starts with 320 transitions of {file}" in capsys.readouterr().out
    assert not (second / "replay.safetensors").exists()


def test_prefilled_rows_are_learned_from_beside_the_runs_own(tmp_path):
    data = {f"{w}.policy": torch.randn(400, 3) for w in ("obs", "next_obs")}
    data |= {"action": torch.rand(400, 1), "reward": torch.full((400,), 77.0)}
    data |= {k: torch.zeros(400, dtype=torch.bool) for k in ("terminated", "truncated")}
    save_file(data, tmp_path / "d.safetensors")
    parts = build(small_config())
    parts.prepare()
    parts.collector.start(seeds(3)["env"])
    assert prefill(parts.collector, tmp_path / "d.safetensors") == 400
    parts.collector.warm_up(16)
    parts.begin()
    parts.schedule.tick()  # the learners pull what was sealed
    batch = parts.learners["v"].draw(20, torch.Generator().manual_seed(0))
    reward = torch.cat([b.reward[b.mask > 0] for b in batch])
    assert 0.5 < (reward == 77).float().mean() < 0.9  # 400 beside 128, and fillers are masked


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reward": None, "rewards": torch.zeros(5)},
            "a column reward (did you mean rewards?); it has action, next_obs",
        ),
        ({"next_obs.policy": None}, "a column next_obs.policy"),
        ({"obs.policy": torch.zeros(5, 4)}, "a column obs.policy of float [5, 3], not float32 [5, 4]"),
        ({"obs.policy": torch.zeros(5, 3, dtype=torch.uint8)}, "a column obs.policy of float [5, 3], not uint8 [5, 3]"),
        ({"action": torch.zeros(5, 2)}, "a column action of float [5, 1], not float32 [5, 2]"),
        ({"action": torch.full((5, 1), 2.0)}, "actions in [-1, 1], as the policy gives them; one is 2"),
        ({"terminated": torch.zeros(5)}, "a column terminated of bool [5], not float32 [5]"),
        ({"reward": torch.full((5,), torch.nan)}, "finite numbers in column reward"),
        ({"reward": torch.zeros(5, 1, 1)}, "a column reward of shape [T, N] or [M], not [5, 1, 1]"),
        ({"reward": torch.zeros(5, 1)}, "a column obs.policy of float [6, 1, 3], not float32 [5, 3]"),
    ],
)
def test_wrong_columns_are_refused_by_name_before_anything_is_written(tmp_path, capsys, change, message):
    data = {f"{w}.policy": torch.zeros(5, 3) for w in ("obs", "next_obs")}
    data |= {"action": torch.zeros(5, 1), "reward": torch.zeros(5)}
    data |= {k: torch.zeros(5, dtype=torch.bool) for k in ("terminated", "truncated")}
    data |= change
    file = tmp_path / "d.safetensors"
    save_file({k: v for k, v in data.items() if v is not None}, file)
    capsys.readouterr()
    assert main(["train", *words(tmp_path / "run", f"replay.prefill={file}", "num_envs=4")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pql: replay.prefill={file}: expected {message}"), error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_files_that_are_none_and_data_too_few_are_refused(tmp_path, capsys):
    other = tmp_path / "other.safetensors"
    other.write_text("something else")
    for file in (tmp_path / "nothing", other, tmp_path):
        assert main(["train", *words(tmp_path / "run", f"replay.prefill={file}")]) == 2
        assert f"replay.prefill={file}: expected a safetensors file (" in capsys.readouterr().err
    save_file(flat(1, {}), tmp_path / "one.safetensors")
    with pytest.raises(ConfigError, match="at least 3 transitions, one for each environment"):
        prefill(FakeCollector(SPECS, 3, 12), tmp_path / "one.safetensors")


def test_load_refuses_another_number_of_environments_and_rows_out_of_range(tmp_path):
    ring = Recorded(2, 12, 1)
    ring.insert(["truncate", "step"])
    file = tmp_path / "ring.safetensors"
    transitions.save_replay(ring.replay, file)
    other = Replay(ReplayLayout(SPECS, 1, 3, 12, 3, True), CPU)
    with pytest.raises(ConfigError, match=re.escape("rows of 3 environments, not rewards of shape [2, 2]")):
        transitions.load_replay(other, file)
    data = load_file(file)
    for name, wrong, top in (("length", torch.tensor([1, 9]), 2), ("final_row", torch.tensor([5]), 3)):
        final = {f"final_obs.{k}": v[0, :1].clone() for k, v in data.items() if k.startswith("obs.")}
        save_file(data | {k.replace("obs.obs", "obs"): v for k, v in final.items()} | {name: wrong}, file)
        with pytest.raises(ConfigError, match=f"a column {name} within 0 to {top}"):
            transitions.load_replay(clone(ring), file)
