"""LeRobot datasets and robomimic files as demonstrations: every transition, ends, units, refusals."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from conftest import go_on, start

from pql.collect.prefill import transitions_of
from pql.config.compose import compose
from pql.contract.env import ObsSpec, make_env
from pql.data.datasets import read_dataset
from pql.data.transitions import File, read_transitions
from pql.errors import ConfigError, PqlWarning

SPEC = make_env("pendulum", 1).spec  # 3 observations; one torque, from -2 to 2
LENGTHS = (4, 3, 3)
T = sum(LENGTHS)
EPISODE = np.repeat(np.arange(3), LENGTHS)
FRAME = np.concatenate([np.arange(n) for n in LENGTHS])
OBS = np.stack([EPISODE, FRAME, EPISODE * 10 + FRAME], 1).astype(np.float32)
TORQUE = np.linspace(-2, 2, T, dtype=np.float32)[:, None]
REWARD = np.arange(T, dtype=np.float32)
LAST = np.array([3, 6, 9])
DONE, SUCCESS = np.isin(np.arange(T), [3, 9]), np.arange(T) == 3  # the second episode is cut off, the third one fails


def read(path, keys=None, obs=SPEC.obs):
    data = read_dataset("replay.demos", path, keys or {}, obs, SPEC)
    return transitions_of(read_transitions(File("replay.demos", path, obs, obs, data), torch.zeros(1, 1)), obs)


def shown(found):
    """(row of the data, row of its successor or None, terminated, cut) of every transition."""
    rows = found.columns["reward"].int().tolist()
    assert (found.columns["action"][:, 0] * 2 - torch.from_numpy(TORQUE)[rows, 0]).abs().max() < 1e-6
    frames, after = (found.frames["policy"][v["policy"][:, 0]] for v in (found.obs, found.next_obs))
    assert frames.equal(torch.from_numpy(OBS)[rows])
    known = found.followed.tolist()
    next_rows = [(one == torch.from_numpy(OBS)).all(1).nonzero().flatten() for one in after]
    next_rows = [int(one) if ok else None for one, ok in zip(next_rows, known, strict=True)]
    return list(zip(rows, next_rows, found.terminated.tolist(), found.cut.tolist(), strict=True))


def steps(*ends):
    """What :func:`shown` gives: every frame but the last ones of episodes, and ``ends``."""
    inner = [(t, t + 1, False, False) for t in range(T) if t not in LAST]
    return sorted([*inner, *ends], key=lambda row: row[0])


# -- LeRobot -----------------------------------------------------------------------------------------------------------


def lerobot(folder, version="v2.1", leave_out=(), **more):
    """Write a dataset: a file for each episode (v2.1), or two files of two chunks (v3.0)."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"observation.state": OBS, "action": TORQUE, "next.reward": REWARD, "next.done": DONE}
    columns |= {"next.success": SUCCESS, "episode_index": EPISODE, "frame_index": FRAME, **more}
    columns = {k: v for k, v in columns.items() if k not in leave_out}
    shapes = {k: list(v.shape[1:]) or [1] for k, v in columns.items()}
    features = {k: {"dtype": str(v.dtype), "shape": shapes[k], "names": None} for k, v in columns.items()}
    features["observation.images.top"] = {"dtype": "video", "shape": [8, 8, 3], "names": None}
    parts = {"episode_000000": EPISODE == 0, "episode_000001": EPISODE == 1, "episode_000002": EPISODE == 2}
    if version == "v3.0":
        parts = {"file-000": EPISODE > 0, "file-001": EPISODE == 0}  # in any order
    for name, rows in parts.items():
        arrays = {k: pa.array(list(v[rows]) if v.ndim > 1 else v[rows]) for k, v in columns.items()}
        (folder / "data" / "chunk-000").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(arrays), folder / "data" / "chunk-000" / f"{name}.parquet")
    (folder / "meta").mkdir()
    info = {"codebase_version": version, "total_frames": T, "features": features}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_lerobot_ends_are_terminations_where_they_are_successes(tmp_path, version):
    # what follows the last frames is not in the dataset: without a termination they are left out
    assert shown(read(lerobot(tmp_path, version))) == steps((3, None, True, False))


def test_lerobot_without_success_terminates_where_done(tmp_path):
    folder = lerobot(tmp_path, leave_out=("next.success",))
    assert shown(read(folder)) == steps((3, None, True, False), (9, None, True, False))
    assert shown(read(folder, {"terminated": []})) == steps()


def test_missing_frames_end_an_episode(tmp_path):
    frame = FRAME.copy()
    frame[2:4] += 5
    found = shown(read(lerobot(tmp_path, frame_index=frame)))
    assert [row for row, *_ in found] == [0, 2, 3, 4, 5, 7, 8]


def test_columns_are_joined_and_renamed(tmp_path):
    parts = {"observation.angle": OBS[:, :2], "observation.speed": OBS[:, 2:], "torque": TORQUE, "points": REWARD}
    folder = lerobot(tmp_path, leave_out=("observation.state", "action", "next.reward"), **parts)
    keys = {"policy": ["observation.angle", "observation.speed"], "action": "torque", "reward": ["points"]}
    assert shown(read(folder, keys)) == steps((3, None, True, False))


def test_the_only_column_of_the_width_is_taken(tmp_path):
    folder = lerobot(tmp_path, leave_out=("observation.state",), **{"observation.pose": OBS})
    assert shown(read(folder)) == steps((3, None, True, False))


def test_actions_outside_the_bounds_are_clipped_and_counted(tmp_path):
    action = TORQUE.copy()
    action[[0, 5]] = [[-9.0], [2.5]]
    with pytest.warns(PqlWarning, match="2 of 10 actions are outside the task's bounds: clipped"):
        found = read(lerobot(tmp_path, action=action))
    assert found.columns["action"].flatten()[[0, 5]].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ({"leave_out": ["next.reward"]}, {}, "demo_keys.reward=null: expected columns of numbers (else "
         "['next.reward']); the dataset has observation.state float32 [3], action"),
        ({"observation.state": OBS[:, :2]}, {}, "demo_keys.policy=null: expected columns of numbers, of shape [3] "
         "together (else ['observation.policy']); the dataset has"),
        ({"action": np.repeat(TORQUE, 2, 1)}, {}, "demo_keys.action=null"),
        ({}, {"policy": ["observation.images.top"]}, "observation.images.top is not decoded; the dataset has"),
        ({}, {"policy": ["observation.stat"]}, "demo_keys.policy=['observation.stat']: expected columns"),
        ({}, {"polcy": ["x"]}, "demo_keys.polcy=['x']: expected one of policy, action, reward, terminated (did"),
        ({"version": "v1.6"}, {}, "a dataset of LeRobot v2 or v3, not v1.6"),
    ],
)  # fmt: skip
def test_lerobot_refusals(tmp_path, change, keys, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(lerobot(tmp_path, **change), keys)


def test_an_incomplete_download_and_missing_packages_are_named(tmp_path, monkeypatch):
    folder = lerobot(tmp_path)
    (folder / "data" / "chunk-000" / "episode_000001.parquet").unlink()
    with pytest.raises(ConfigError, match=r"a LeRobot dataset .a dataset with its 10 frames; data has 7"):
        read(folder)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "h5py", None)
    for path, name in ((folder, "pyarrow"), (tmp_path / "low_dim.hdf5", "h5py")):
        with pytest.raises(ConfigError, match=rf"the package '{name}\S*', .* pip install 'pql-rl\[demos\]'"):
            read(path)


# -- robomimic ---------------------------------------------------------------------------------------------------------


def robomimic(path, leave_out=()):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, episode in (("demo_10", 2), ("demo_2", 1), ("demo_0", 0)):
            rows, demo = episode == EPISODE, file.create_group(f"data/{name}")
            after = np.concatenate((OBS[rows][1:], OBS[rows][-1:] + 100))
            obs = {"pose": OBS[rows][:, :2].astype(np.float64), "speed": OBS[rows][:, 2:]}
            following = {"pose": after[:, :2].astype(np.float64), "speed": after[:, 2:]}
            facts = {"actions": TORQUE[rows], "rewards": REWARD[rows], "dones": SUCCESS[rows].astype(np.int64)}
            for group, columns in (("obs", obs), ("next_obs", following), ("", facts)):
                for key, values in columns.items():
                    if key not in leave_out and group not in leave_out:
                        demo[f"{group}/{key}" if group else key] = values
    return path


KEYS = {"policy": ["pose", "speed"]}


def test_robomimic_has_what_followed_the_last_steps(tmp_path):
    found = read(robomimic(tmp_path / "low_dim.hdf5"), KEYS)
    rows = list(range(T))
    assert found.columns["reward"].int().tolist() == rows
    after = found.frames["policy"][found.next_obs["policy"][:, 0]]
    expected = torch.from_numpy(OBS)[[min(t + 1, T - 1) for t in rows]]
    expected[LAST] = torch.from_numpy(OBS[LAST] + 100)
    assert after.equal(expected)
    assert found.followed.all()
    assert found.terminated.nonzero().flatten().tolist() == [3]
    assert found.cut.nonzero().flatten().tolist() == [6, 9]
    assert shown(read(robomimic(tmp_path / "b.h5", ["next_obs"]), KEYS)) == steps((3, None, True, False))
    assert not read(robomimic(tmp_path / "c.h5", ["dones"]), KEYS).terminated.any()


def test_robomimic_groups_are_found_by_their_names(tmp_path):
    obs = {"pose": ObsSpec((2,)), "speed": ObsSpec((1,))}
    found = read(robomimic(tmp_path / "low_dim.hdf5"), obs=obs)
    assert found.frames["speed"][found.obs["speed"][:, 0], 0].tolist() == OBS[:, 2].tolist()


def test_robomimic_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"demo_keys.policy=null.*pose float64 \[2\], speed float32 \[1\]"):
        read(robomimic(tmp_path / "a.hdf5"))
    with pytest.raises(ConfigError, match=r"demo_keys.reward=null.*the dataset has actions"):
        read(robomimic(tmp_path / "b.hdf5", ["rewards"]), KEYS)
    (tmp_path / "c.hdf5").write_text("none")
    with pytest.raises(ConfigError, match=r"c\.hdf5: expected a Robomimic dataset"):
        read(tmp_path / "c.hdf5")


def test_robomimic_files_cannot_name_other_files(tmp_path):
    robomimic(tmp_path / "secret.h5")
    h5py = pytest.importorskip("h5py")
    with h5py.File(robomimic(tmp_path / "a.h5"), "a") as file:
        del file["data/demo_0/rewards"]
        file["data/demo_0/rewards"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/data/demo_0/rewards")
    with h5py.File(robomimic(tmp_path / "b.h5"), "a") as file:
        del file["data/demo_0/rewards"]
        file["data/demo_0"].create_dataset("rewards", (4,), "f4", external=[(str(tmp_path / "secret.h5"), 0, 16)])
    for name in ("a.h5", "b.h5"):
        with pytest.raises(ConfigError, match="/data/demo_0/rewards is in another file"):
            read(tmp_path / name, KEYS)


def test_a_run_reads_a_dataset_and_refuses_keys_of_other_files(tmp_path):
    words = ["task=pendulum", "algo=sac", "num_envs=2", "device=cpu", "placement.executor=inline", "algo.batch_size=8"]
    words += ["algo.warmup_steps=4", f"replay.demos={robomimic(tmp_path / 'low_dim.hdf5')}"]
    parts = go_on(start(compose([*words, "replay.demo_keys.policy=[pose,speed]"])), 2)
    assert int(parts.collector.normalizer.moments["policy"].count) >= T
    parts.close_envs()
    with pytest.raises(ConfigError, match=r"replay\.demo_keys=.*expected replay\.demos with it"):
        compose(["task=pendulum", "algo=sac", "replay.demo_keys.policy=[a]"])
    with pytest.raises(ConfigError, match=r"replay\.demo_keys=.*expected .* for demos\.safetensors"):
        read(tmp_path / "demos.safetensors", {"policy": ["a"]})
