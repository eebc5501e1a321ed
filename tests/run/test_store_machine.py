"""Checkpoint folders and run directories' locks under random operations, with processes killed in between."""

import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machines import effort

from pql.config import from_dict
from pql.data import tensorfile
from pql.errors import ConfigError, PqlWarning
from pql.run.store import checkpoint
from pql.run.store.checkpoint import CorruptCheckpointError
from pql.run.store.claim import LOCK, Claim, claim, claim_new, holder
from pql.run.store.manifest import config_entries


class Killed(BaseException):
    """The process dies: every later operation on files fails as well."""


@contextmanager
def killed_after(steps):
    """Let ``steps`` operations on files pass; the next stops half-way, and none follows. None: all pass."""
    left = [float("inf") if steps is None else steps]

    def mortal(real, half):
        def call(*args, **more):
            if left[0] <= 0:
                if left[0] == 0:
                    half(*args)
                left[0] = -1
                raise Killed
            left[0] -= 1
            return real(*args, **more)

        return call

    def half_file(path, *_):
        path.write_bytes(b"half")

    def half_tree(path, *_):
        for file in sorted(path.glob("*"))[:1]:
            file.unlink()

    def nothing(*_):
        pass

    with (
        mock.patch.object(tensorfile, "write", mortal(tensorfile.write, half_file)),
        mock.patch.object(checkpoint, "create_file", mortal(checkpoint.create_file, half_file)),
        mock.patch.object(shutil, "rmtree", mortal(shutil.rmtree, half_tree)),
        mock.patch.object(os, "fsync", mortal(lambda handle: None, nothing)),
        mock.patch.object(Path, "rename", mortal(Path.rename, nothing)),
        mock.patch.object(Path, "replace", mortal(Path.replace, nothing)),
        mock.patch.object(Path, "mkdir", mortal(Path.mkdir, nothing)),
    ):
        yield


SETTINGS = [config_entries(from_dict({"seed": seed})) for seed in (0, 1)]
SPEC = {"name": "x", "obs": {"policy": {"shape": [1], "dtype": "float32"}}, "action": 1, "max_episode_steps": None}
STEPS = st.none() | st.integers(0, 12)


class CheckpointMachine(RuleBasedStateMachine):
    """``kept``: name -> value of every checkpoint; None if it is damaged. ``seeds``: name -> seed in its manifest; None
    if that is damaged."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.kept, self.seeds, self.tick, self.value, self.seed = {}, {}, 0, 0.0, 0

    def teardown(self):
        shutil.rmtree(self.folder)

    def points(self):
        return sorted(name for name in self.kept if name.startswith("tick-"))

    def stored(self, name):
        """The value in a checkpoint; None if it is damaged or absent."""
        try:
            return checkpoint.load(self.folder / name)[0]["a"].item()
        except CorruptCheckpointError:
            return None

    def seed_of(self, name):
        """The seed in a manifest; None if it is damaged."""
        try:
            return checkpoint._manifest(self.folder / name, ())["config"]["seed"]
        except (OSError, ValueError):
            return None

    @rule(where=st.sampled_from(["new", "new", "newest", "last", "best"]), steps=STEPS)
    def save(self, where, steps):
        self.tick += where == "new" or not self.points()
        name = where if where in ("last", "best") else f"tick-{self.tick:03d}"
        self.value += 1
        counters = {"ticks": self.tick, "seconds": 0.0}
        facts = {"kind": "resume", **SETTINGS[self.seed], "spec": SPEC, "counters": counters}
        try:
            with killed_after(steps):
                checkpoint.save(self.folder / name, {"a": torch.tensor(self.value)}, facts)
        except Killed:
            found = self.stored(name)
            assert found in (self.value, self.kept.get(name))  # the new one or the one before, nothing else
            if found == self.value:
                self.kept[name], self.seeds[name] = found, self.seed
            if where == "new" and found is None:
                self.tick -= 1
        else:
            self.kept[name], self.seeds[name] = self.value, self.seed
            assert not (self.folder / f".writing-{name}").exists()
            assert not (self.folder / f".old-{name}").exists()

    @rule(keep=st.integers(1, 3), steps=STEPS)
    def rotate(self, keep, steps):
        leaving, staying = self.points()[:-keep], {*self.kept} - {*self.points()[:-keep]}
        try:
            with killed_after(steps):
                checkpoint.rotate(self.folder, keep)
        except Killed:
            for name in leaving:
                if not (self.folder / name).exists():  # else it is whole
                    del self.kept[name]
            return
        self.kept = {name: self.kept[name] for name in staying}
        assert {p.name for p in self.folder.iterdir() if not p.name.startswith("skipped-")} == staying

    @rule(data=st.data(), file=st.sampled_from([checkpoint.TENSORS, checkpoint.MANIFEST]))
    def damage(self, data, file):
        if self.kept:
            name = data.draw(st.sampled_from(sorted(self.kept)))
            for path in (self.folder / name / file, self.folder / f".old-{name}" / file):
                if path.exists():
                    path.write_bytes(path.read_bytes()[:-3])
            self.kept[name] = None
            if file == checkpoint.MANIFEST:
                self.seeds[name] = None

    @rule(steps=STEPS)
    def amend(self, steps):
        """A resumed run begins: its settings go into all points, except those whose manifest is damaged."""
        self.seed = 1 - self.seed
        config = from_dict({"seed": self.seed})
        try:
            with killed_after(steps):
                checkpoint.amend_manifest(self.folder, config)
        except Killed:
            pass
        else:
            assert all(self.seed_of(name) in (None, self.seed) for name in self.points())
        for name in self.points():
            assert self.seed_of(name) in (self.seeds[name], self.seeds[name] if self.seeds[name] is None else self.seed)
            self.seeds[name] = self.seed_of(name)

    @rule()
    def set_aside(self):
        """Once a resumed run has chosen its resume point, damaged newer ones are no longer found."""
        intact = [name for name in self.points() if self.kept[name] is not None]
        if intact:
            checkpoint.recover(self.folder)
            before = {*self.folder.glob("skipped-*")}
            checkpoint.set_aside(self.folder, self.folder / intact[-1])
            newer = [name for name in self.points() if name > intact[-1]]
            aside = {*self.folder.glob("skipped-*")} - before
            assert len(aside) == len(newer)
            assert all(any(path.name.startswith(f"skipped-{name}") for path in aside) for name in newer)
            for name in newer:
                del self.kept[name]

    @invariant()
    def a_reader_finds_the_newest_intact_one(self):
        assert {name: self.stored(name) for name in self.kept} == self.kept
        assert {name: self.seed_of(name) for name in self.kept} == {name: self.seeds[name] for name in self.kept}
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            intact = [name for name in self.points() if self.kept[name] is not None]
            if intact:
                tensors, _, path = checkpoint.newest_checkpoint(self.folder)
                assert (path.name, tensors["a"].item()) == (intact[-1], self.kept[intact[-1]])
            else:
                with pytest.raises(ConfigError, match="none is intact" if self.points() else "there is none"):
                    checkpoint.newest_checkpoint(self.folder)
        skipped = [name for name in self.points() if not intact or name > intact[-1]]
        said = [str(w.message) for w in found if issubclass(w.category, PqlWarning)]
        assert len(said) == len(skipped)
        assert all(name in text for name, text in zip(reversed(skipped), said, strict=True))


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = effort(20, 20)


class ClaimMachine(RuleBasedStateMachine):
    """Claims within one process exclude each other as those of several do: each has opened the lock itself.

    ``locks``: directory -> its claim, or None where a killed process left the file. ``files``: directories, each with
    whether a run has written into it.
    """

    PATHS = ("a/b", "a/c", "d")

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.locks: dict[Path, Claim | None] = {}
        self.files: dict[Path, bool] = {}
        self.made: dict[Claim, list[Path]] = {}

    def teardown(self):
        for one in self.made:
            one.close()
        shutil.rmtree(self.root)

    def missing(self, path):
        return [
            p for p in (path, *path.parents) if p.is_relative_to(self.root) and p != self.root and not self.there(p)
        ]

    def there(self, path):
        return path in self.files

    def took(self, one, path, made):
        self.made[one] = made
        self.files |= dict.fromkeys(made, False)
        self.locks[path] = one
        assert one.path == path

    @rule(name=st.sampled_from(PATHS))
    def claim(self, name):
        path = self.root / name
        if self.locks.get(path) is not None:
            with pytest.raises(ConfigError, match=f"no other run writes to: process {os.getpid()} on .* holds it"):
                claim(path)
        else:
            made = self.missing(path)
            self.took(claim(path), path, made)

    @rule(name=st.sampled_from(PATHS))
    def claim_new(self, name):
        stem = self.root / name
        names = [stem, *(stem.with_name(f"{stem.name}-{i}") for i in range(2, 60))]
        path = next(p for p in names if not self.there(p))
        made = self.missing(path)
        self.took(claim_new(stem), path, made)

    @rule(data=st.data())
    def close(self, data):
        if not self.made:
            return
        one = data.draw(st.sampled_from(list(self.made)))
        one.close()
        one.close()  # again is no error
        if self.locks.get(one.path) is one:
            del self.locks[one.path]
        for path in self.made.pop(one):
            inside = [p for p in self.files if p.parent == path]
            if not self.there(path) or inside or self.files[path] or path in self.locks:
                break
            del self.files[path]

    @rule(data=st.data())
    def kill(self, data):
        """As the kernel does with the files of a process that dies."""
        if self.made:
            one = data.draw(st.sampled_from(list(self.made)))
            one._drop()
            del self.made[one]
            if self.locks.get(one.path) is one:
                self.locks[one.path] = None

    @rule(data=st.data())
    def write(self, data):
        if self.files:
            path = data.draw(st.sampled_from(sorted(self.files)))
            (path / "config.yaml").write_text("")
            self.files[path] = True

    @rule(data=st.data())
    def delete(self, data):
        if self.files:
            path = data.draw(st.sampled_from(sorted(self.files)))
            shutil.rmtree(path)
            self.files = {p: v for p, v in self.files.items() if not p.is_relative_to(path)}
            self.locks = {p: v for p, v in self.locks.items() if not p.is_relative_to(path)}

    @rule(data=st.data())
    def delete_lock(self, data):
        if self.locks:
            path = data.draw(st.sampled_from(sorted(self.locks)))
            (path / LOCK).unlink()
            del self.locks[path]

    @rule(data=st.data())
    def renew(self, data):
        """The directory or its lock may have been deleted, and another may have taken its name."""
        if not self.made:
            return
        one = data.draw(st.sampled_from(list(self.made)))
        if self.locks.get(one.path) is one:
            one.renew()  # changes nothing
        elif self.locks.get(one.path) is not None:
            with pytest.raises(ConfigError, match="no other run writes to"):
                one.renew()
        else:
            made = self.missing(one.path)
            one.renew()
            self.files |= dict.fromkeys(made, False)
            self.locks[one.path] = one

    @invariant()
    def the_folders_are_as_the_model(self):
        assert {p for p in self.root.rglob("*") if p.is_dir()} == {*self.files}
        assert {p.parent for p in self.root.rglob(LOCK)} == {*self.locks}
        for path in self.files:
            held = self.locks.get(path) is not None
            assert (holder(path) or "").startswith(f"process {os.getpid()} on ") == held


TestClaimMachine = ClaimMachine.TestCase
TestClaimMachine.settings = effort(25, 20)
