"""Checkpoints are complete or absent: crashes at every stage, damage, full disks, hostile files, concurrent readers."""

import dataclasses
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch

import pql
from pql.config import Config, DdpgConfig, SacConfig, fingerprint, from_dict, to_dict
from pql.config.fields import setting
from pql.data import tensorfile
from pql.errors import ConfigError, PqlWarning
from pql.run.store import checkpoint
from pql.run.store.checkpoint import (
    CorruptCheckpointError,
    flatten,
    load,
    newest_checkpoint,
    recover,
    rotate,
    save,
    set_aside,
    unflatten,
)
from pql.run.store.manifest import config_entries
from pql.run.store.run_dir import claim_directory, create_run_dir, run_settings


def tree(value: float) -> dict:
    return {
        "a": {"w": torch.full((3, 2), value), "n": torch.tensor(7), "empty": torch.zeros(0)},
        "list": [torch.arange(4, dtype=torch.uint8), {"flag": torch.tensor([True, False])}],
        "count": 5,
    }


def value_at(path: Path) -> float:
    return load(path)[0]["a/w"][0, 0].item()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


# -- trees ----------------------------------------------------------------------------------------------------------


def test_a_tree_survives_with_its_types(tmp_path):
    save(tmp_path / "x", tree(1.5), {"ticks": 3})
    tensors, manifest = load(tmp_path / "x")
    back = unflatten(tensors, tree(0.0))
    assert manifest["ticks"] == 3
    assert manifest["format"] == checkpoint.FORMAT
    assert back["count"] == 5
    assert isinstance(back["count"], int)
    want = flatten(tree(1.5))
    assert {k: (v.dtype, v.tolist()) for k, v in flatten(back).items()} == {
        k: (v.dtype, v.tolist()) for k, v in want.items()
    }


def test_views_of_one_storage_are_stored_apart(tmp_path):
    flat = torch.arange(6.0)
    save(tmp_path / "x", {"all": flat, "head": flat[:2], "tail": flat[2:].view(2, 2)}, {})
    tensors, _ = load(tmp_path / "x")
    assert tensors["head"].tolist() == [0.0, 1.0]
    assert tensors["tail"].tolist() == [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.zeros(1)}, "checkpoint=b: expected a checkpoint of the same task, algorithm and version"),
        ({"w": torch.zeros(1, 2)}, "checkpoint=w: expected float32 [1, 2], from this run's settings; the "),
        ({"w": torch.zeros(3, 2, dtype=torch.float64)}, "expected float64 [3, 2]"),
    ],
)
def test_what_does_not_fit_is_refused_rather_than_broadcast(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        unflatten({"w": torch.zeros(3, 2)}, change)


# -- crashes --------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here: nothing that follows runs."""


def crash_at(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    def die(*args, **kwargs):
        raise Crash

    # A dead process cleans nothing up either.
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)
    if stage == "tensors":
        monkeypatch.setattr(tensorfile, "write", die)
    elif stage == "manifest":
        monkeypatch.setattr(checkpoint, "create_file", die)
    elif stage == "sync":
        monkeypatch.setattr(os, "fsync", die)
    else:
        real, calls = Path.rename, []

        def rename(self, target):
            calls.append(self)
            if len(calls) >= {"before the first rename": 1, "between the renames": 2}[stage]:
                raise Crash
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)


STAGES = ("tensors", "manifest", "sync", "before the first rename", "between the renames")


@pytest.mark.fault(11)
@pytest.mark.parametrize("stage", STAGES)
def test_a_crash_while_replacing_leaves_the_one_before(tmp_path, monkeypatch, stage):
    save(tmp_path / "last", tree(1.0), {})
    with monkeypatch.context() as patch:
        crash_at(patch, stage)
        with pytest.raises(Crash):
            save(tmp_path / "last", tree(2.0), {})
    assert value_at(tmp_path / "last") == 1.0  # a reader finds it wherever it stands
    recover(tmp_path)
    assert value_at(tmp_path / "last") == 1.0
    save(tmp_path / "last", tree(3.0), {})
    rotate(tmp_path, keep=1)
    assert value_at(tmp_path / "last") == 3.0
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


@pytest.mark.fault(11)
@pytest.mark.parametrize("stage", [s for s in STAGES if s != "between the renames"])
def test_a_crash_while_adding_leaves_the_points_before(tmp_path, monkeypatch, stage):
    save(tmp_path / "tick-1", tree(1.0), {})
    with monkeypatch.context() as patch:
        crash_at(patch, stage)
        with pytest.raises(Crash):
            save(tmp_path / "tick-2", tree(2.0), {})
    assert newest_checkpoint(tmp_path)[2].name == "tick-1"
    rotate(tmp_path, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["tick-1"]


@pytest.mark.fault(11)
def test_a_resume_point_whose_replacement_was_interrupted_still_counts(tmp_path):
    """It is the only one of a short run; without it the settings would be read from an edited config.yaml."""
    folder = tmp_path / "checkpoints"
    save_with_settings(folder / "tick-1", kind="resume", counters={"ticks": 1, "seconds": 0.0}, ranks=2)
    (folder / "tick-1").rename(folder / ".old-tick-1")  # killed between the renames
    (tmp_path / "config.yaml").write_text("seed: 9\n")
    assert checkpoint.resume_points(folder) == [folder / "tick-1"]
    assert newest_checkpoint(folder, ("resume",))[1]["counters"]["ticks"] == 1
    assert checkpoint.find(tmp_path)[2] == folder / "tick-1"
    assert checkpoint.ranks(folder) == 2
    with pytest.warns(PqlWarning, match=r"config\.yaml differs from the run in .*: the settings in its resume point"):
        assert run_settings(tmp_path)["seed"] == 0
    checkpoint.amend_manifest(folder, from_dict({"seed": 4}))
    recover(folder)
    assert load(folder / "tick-1", ("resume",))[1]["config"]["seed"] == 4


@pytest.mark.fault(11)
def test_rotation_after_a_crash_keeps_what_was_being_replaced(tmp_path):
    """``best`` is not written again by the next save: were its old copy deleted, it would be lost for good."""
    save(tmp_path / "best", tree(1.0), {})
    (tmp_path / "best").rename(tmp_path / ".old-best")
    rotate(tmp_path, keep=1)
    assert value_at(tmp_path / "best") == 1.0


def test_a_reader_beside_a_writer_retries(tmp_path, monkeypatch):
    """The checkpoint is replaced after its manifest has been read and before its tensors are."""
    save(tmp_path / "last", tree(1.0), {})
    real, calls = checkpoint._sha256, []

    def replace_first(path):
        if not calls:
            calls.append(path)
            save(tmp_path / "last", tree(2.0), {})
        return real(path)

    monkeypatch.setattr(checkpoint, "_sha256", replace_first)
    assert value_at(tmp_path / "last") == 2.0


def test_a_reader_that_finds_the_old_one_retries_once_the_new_one_is_complete(tmp_path, monkeypatch):
    """It is deleted after the reader has looked for it and before its files are read."""
    save(tmp_path / "last", tree(1.0), {})
    (tmp_path / "last").rename(tmp_path / ".old-last")  # between the renames of a save
    real, calls = checkpoint._read, []

    def read(path, kinds):
        if path.name == ".old-last" and not calls:
            calls.append(path)
            save(tmp_path / "last", tree(2.0), {})
        return real(path, kinds)

    monkeypatch.setattr(checkpoint, "_read", read)
    assert value_at(tmp_path / "last") == 2.0
    assert calls


def test_a_reader_retries_where_the_renames_came_while_it_looked(tmp_path, monkeypatch):
    """Between its two looks at the folder; the writer then stops for a while."""
    save(tmp_path / "last", tree(1.0), {})
    real = {name: getattr(checkpoint, name) for name in ("_present", "_stamp")}
    looks = []

    def look(name):
        def looked(path):
            looks.append(name)
            if len(looks) == 2:
                path.rename(checkpoint._old(path))
            return real[name](path)

        return looked

    for name in real:
        monkeypatch.setattr(checkpoint, name, look(name))
    assert load(tmp_path / "last")[0]["a/w"][0, 0] == 1.0
    assert len(looks) >= 2


def test_a_damaged_checkpoint_is_read_once(tmp_path, monkeypatch):
    """A replay of gigabytes is not hashed again where nobody has replaced it."""
    save(tmp_path / "last", tree(1.0), {})
    truncate(tmp_path / "last")
    real, calls = checkpoint._sha256, []
    monkeypatch.setattr(checkpoint, "_sha256", lambda path: (calls.append(path), real(path))[1])
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path / "last")
    assert len(calls) == 1


# -- damage ---------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    data = (path / "tensors.safetensors").read_bytes()
    (path / "tensors.safetensors").write_bytes(data[: len(data) // 2])


DAMAGE = {
    "truncated tensors": truncate,
    "flipped byte in the tensors' data": lambda p: flip(p / "tensors.safetensors", -1),
    "flipped byte in the tensors' header": lambda p: flip(p / "tensors.safetensors", 20),
    "no tensors": lambda p: (p / "tensors.safetensors").unlink(),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "truncated manifest": lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text()[:40]),
    "empty manifest": lambda p: (p / "manifest.json").write_text(""),
    "another manifest": lambda p: (p / "manifest.json").write_text("[1, 2]"),
    "not text": lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "altered counter": lambda p: (p / "manifest.json").write_text(
        (p / "manifest.json").read_text().replace('"ticks": 2', '"ticks": 3')
    ),
}


@pytest.mark.fault(12)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_seen_and_the_point_before_is_used(tmp_path, damage):
    for i in (1, 2):
        save(tmp_path / f"tick-{i}", tree(float(i)), {"ticks": i})
    assert newest_checkpoint(tmp_path)[1]["ticks"] == 2
    damage(tmp_path / "tick-2")
    with pytest.raises(CorruptCheckpointError, match=re.escape(f"checkpoint={tmp_path / 'tick-2'}: expected a")):
        load(tmp_path / "tick-2")
    with pytest.warns(PqlWarning, match="tick-2.*trying the previous one"):
        tensors, manifest, path = newest_checkpoint(tmp_path)
    assert (manifest["ticks"], path.name, tensors["a/w"][0, 0].item()) == (1, "tick-1", 1.0)


@pytest.mark.fault(12)
def test_a_flipped_bit_in_any_byte_of_a_manifest_is_seen(tmp_path):
    save(tmp_path / "x", {"a": torch.zeros(1)}, {"ticks": 1, "seconds": 0.5})
    path = tmp_path / "x" / "manifest.json"
    good = path.read_bytes()
    meaning = json.loads(good)
    unseen = []
    for at in range(len(good)):
        flip(path, at)
        try:
            load(tmp_path / "x")
            if json.loads(path.read_bytes()) != meaning:
                unseen.append(at)
        except ConfigError:
            pass
        path.write_bytes(good)
    assert unseen == []


@pytest.mark.fault(12, cases=(5, 200))
def test_any_flipped_bit_and_any_cut_is_seen_and_the_point_before_is_used(tmp_path, cases):
    for i in (1, 2):
        save(tmp_path / f"tick-{i}", tree(float(i)), {"ticks": i})
    rng = random.Random(0)
    for case in range(cases):
        path = tmp_path / "tick-2" / ("tensors.safetensors", "manifest.json")[case % 2]
        good = path.read_bytes()
        at = rng.randrange(len(good) - 2)  # a manifest without its last line feed means the same
        path.write_bytes(good[:at] if case % 3 == 0 else good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.warns(PqlWarning, match="tick-2.*trying the previous one"):
            tensors, manifest, found = newest_checkpoint(tmp_path)
        assert (manifest["ticks"], found.name, tensors["a/w"][0, 0].item()) == (1, "tick-1", 1.0), (path.name, at)
        path.write_bytes(good)
    assert newest_checkpoint(tmp_path)[2].name == "tick-2"


def test_none_intact_says_so(tmp_path):
    save(tmp_path / "checkpoints" / "tick-1", tree(1.0), {})
    truncate(tmp_path / "checkpoints" / "tick-1")
    with pytest.warns(PqlWarning), pytest.raises(ConfigError, match=r"run=.*a resume point: none is intact"):
        newest_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match=r"there is none \(checkpoint.replay=false keeps none\)"):
        newest_checkpoint(tmp_path / "elsewhere")


def test_every_point_that_was_skipped_stays_where_the_same_tick_comes_again(tmp_path):
    for i in range(3):
        save(tmp_path / "tick-1", tree(1.0), {})
        save(tmp_path / "tick-2", tree(10.0 + i), {})
        set_aside(tmp_path, keep_up_to=tmp_path / "tick-1")
    names = ["skipped-tick-2", "skipped-tick-2-2", "skipped-tick-2-3"]
    assert [value_at(tmp_path / name) for name in names] == [10.0, 11.0, 12.0]
    assert checkpoint.resume_points(tmp_path) == [tmp_path / "tick-1"]


@pytest.mark.fault(15)
def test_a_newer_format_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 99)
        patch.setattr(checkpoint, "check_unwritten", lambda *_: None)  # of a release that knows it
        save(tmp_path / "x", tree(1.0), {})
    with pytest.raises(ConfigError, match="format 2 or older; this is 99: update pql"):
        load(tmp_path / "x")


CARTPOLE = {
    "name": "cartpole",
    "obs": {"policy": {"shape": [4], "dtype": "float32", "stack": 1}},
    "action": {"discrete": 2},
    "max_episode_steps": 500,
}


def save_with_settings(path: Path, **changes) -> None:
    save(path, tree(1.0), {"kind": "policy", **config_entries(Config()), "spec": CARTPOLE, **changes})


@pytest.mark.fault(15)
def test_settings_that_this_release_lacks_are_named_with_the_release_that_wrote_them(tmp_path):
    save_with_settings(tmp_path / "x")
    facts = load(tmp_path / "x", ("policy",))[1]
    assert (facts["release"], facts["schema"]) == (pql.__version__, fingerprint(DdpgConfig))
    newer = to_dict(Config())
    newer["algo"]["gamma_decay"] = 0.5
    save_with_settings(tmp_path / "y", config=newer, release="7.1.0", schema="0" * 16)
    said = f"expected settings of pql {pql.__version__}; these are of pql 7.1.0: algo.gamma_decay=0.5: expected a known"
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "y", ("policy",))
    assert said in str(error.value)
    assert not isinstance(error.value, CorruptCheckpointError)  # an older checkpoint is not taken instead
    save_with_settings(tmp_path / "z", release="7.1.0", schema="0" * 16)  # other settings, all of them known here
    assert load(tmp_path / "z", ("policy",))[1]["release"] == "7.1.0"
    for name, value in (("schema", 3), ("schema", "x" * 65), ("release", ["0.2.0"]), ("release", "\x1b[2J")):
        save_with_settings(tmp_path / "z", **{name: value})
        with pytest.raises(CorruptCheckpointError, match=f"{name} is not (a short text|without control characters)"):
            load(tmp_path / "z", ("policy",))


def test_what_no_reader_would_accept_is_not_written(tmp_path):
    save_with_settings(tmp_path / "x")
    before = load(tmp_path / "x", ("policy",))[1]
    for changes in ({"return_mean": float("nan")}, {"counters": {"ticks": -1}}, {"spec": {**CARTPOLE, "name": "\x1b"}}):
        with pytest.raises(ValueError, match=r"return_mean is not a number|counters\.ticks|without control characters"):
            save_with_settings(tmp_path / "x", **changes)
    assert load(tmp_path / "x", ("policy",))[1] == before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.fault(15)
def test_a_run_to_resume_of_another_release_is_named(tmp_path):
    newer = {**to_dict(Config()), "curriculum": 3}
    point = tmp_path / "checkpoints" / "tick-1"
    counters = {"ticks": 1, "seconds": 0.0}
    save_with_settings(point, kind="resume", config=newer, release="7.1.0", schema="0" * 16, counters=counters)
    with pytest.raises(ConfigError, match=r"checkpoint=.*tick-1: expected settings of pql .* of pql 7\.1\.0: curric"):
        run_settings(tmp_path)


def test_the_fingerprint_follows_names_and_types():
    @dataclasses.dataclass(frozen=True)
    class Renamed(DdpgConfig):
        extra: int | None = setting(None, "A setting.")

    @dataclasses.dataclass(frozen=True)
    class Retyped(DdpgConfig):
        extra: float | None = setting(None, "A setting.")

    @dataclasses.dataclass(frozen=True)
    class Redefaulted(DdpgConfig):
        gamma: float = setting(0.5, "A setting.")

    prints = [fingerprint(one) for one in (DdpgConfig, SacConfig, Renamed, Retyped)]
    assert len({*prints}) == 4
    assert fingerprint(Redefaulted) == prints[0]


# -- full disks -----------------------------------------------------------------------------------------------------


@pytest.mark.fault(13, count=20)
def test_a_full_disk_is_an_os_error_and_the_one_before_stays(tmp_path, trial):
    """A file size limit stands in for the full disk: the library that writes reports both in its own class."""
    save(tmp_path / "last", tree(1.0), {})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 20_000 * trial, limit[1]))
    try:
        with pytest.raises(OSError, match=r"large|space"):
            save(tmp_path / "last", {"a": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert value_at(tmp_path / "last") == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


@pytest.mark.fault(13)
def test_without_enough_space_nothing_is_written_and_both_sizes_are_named(tmp_path, monkeypatch):
    save(tmp_path / "last", tree(1.0), {})
    asked, opened = [], []

    def usage(folder):
        asked.append(folder)
        return shutil._ntuple_diskusage(10**9, 10**9 - free, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(tensorfile, "pieces", lambda tensor: opened.append(tensor) or iter(()))
    free = 3_000_000
    with pytest.raises(OSError) as error:  # noqa: PT011 - compared below
        save(tmp_path / "last", {"a": torch.zeros(1_000_000)}, {})
    assert str(error.value) == "[Errno 28] No space left on device: 4.0 MB to write, 3.0 MB free"
    assert asked == [tmp_path / ".writing-last"]
    assert opened == []
    assert value_at(tmp_path / "last") == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    size = len(tensorfile.header({"a": torch.zeros(5)}, None)) + 20
    free = size - 1
    with pytest.raises(OSError, match="No space left"):
        tensorfile.write(tmp_path / "exact", {"a": torch.zeros(5)})
    free = size
    tensorfile.write(tmp_path / "exact", {"a": torch.zeros(5)})


def test_what_is_written_is_not_read_again_for_its_hash(tmp_path, monkeypatch):
    real, opened = io.open, []

    def watched(file, mode="r", *rest, **more):
        opened.append((Path(file).name, mode))
        return real(file, mode, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", watched)
        patch.setattr(checkpoint, "_sha256", None)
        save(tmp_path / "x", tree(1.0), {})
    assert opened == [("tensors.safetensors", "wb"), (".manifest.json", "x")]
    digest = hashlib.sha256((tmp_path / "x" / "tensors.safetensors").read_bytes()).hexdigest()
    assert json.loads((tmp_path / "x" / "manifest.json").read_text())["sha256"] == digest


@pytest.mark.fault(11)
def test_a_failed_last_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    save(tmp_path / "last", tree(1.0), {})
    real = Path.rename

    def fail(self, target):
        if self.name.startswith(".writing-"):
            raise OSError(28, "No space left on device")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path / "last", tree(2.0), {})
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    assert value_at(tmp_path / "last") == 1.0


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)])
def test_files_and_folders_of_a_run_have_the_modes_of_any_new_ones(tmp_path, mask, file, folder):
    before = os.umask(mask)
    try:
        config = from_dict({"run_dir": str(tmp_path / "runs" / "one")})
        with claim_directory(config) as held:
            create_run_dir(held.path, config, [])
            save(held.path / "checkpoints" / "tick-1", tree(1.0), {})
            found = [p for p in (tmp_path / "runs").rglob("*") if p.name != "git.json"]
            modes = {p.name: oct(p.stat().st_mode & 0o777) for p in (tmp_path / "runs", *found)}
    finally:
        os.umask(before)
    folders = ("runs", "one", "checkpoints", "tick-1")
    files = (".lock", "config.yaml", "overrides.yaml", "env.json", "tensors.safetensors", "manifest.json")
    assert modes == {**dict.fromkeys(folders, oct(folder)), **dict.fromkeys(files, oct(file))}


def test_finding_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(ConfigError, match="expected a run directory with a checkpoint"):
        checkpoint.find(tmp_path)
    save(folder / "best", tree(2.0), {})
    assert checkpoint.find(tmp_path)[2] == folder / "best"
    save(folder / "tick-1", tree(1.0), {})
    assert checkpoint.find(tmp_path)[2] == folder / "tick-1"
    save(folder / "tick-2", tree(1.0), {})
    assert checkpoint.find(tmp_path)[2] == folder / "tick-2"
    save(folder / "last", tree(3.0), {})
    assert checkpoint.find(tmp_path)[2] == folder / "last"
    assert checkpoint.find(tmp_path, whole=True)[2] == folder / "tick-2"
    assert checkpoint.find(folder / "tick-1")[2] == folder / "tick-1"
    (folder / "last").rename(folder / ".old-last")  # the moment between a save's renames
    assert checkpoint.find(tmp_path)[0]["a/w"][0, 0] == 3.0
