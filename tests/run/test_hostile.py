"""Files from untrusted sources: rejected in one line and bounded time, and nothing in them is executed."""

import contextlib
import copy
import dataclasses
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from payload import Payload, check_payload
from run_files import mutate, points, words
from safetensors.torch import load_file, save_file

import pql
from pql.cli.jobs import next_command
from pql.cli.main import main
from pql.config.compose import compose
from pql.config.files import read_yaml, walk
from pql.config.trust import TEXT, check_networks, check_task
from pql.contract.registry import import_name
from pql.errors import ConfigError
from pql.reports import runs, tell
from pql.run.log import trackers
from pql.run.resume import resume_config
from pql.run.store import checkpoint
from pql.run.store.run_dir import amend_config

SECONDS = 2.0  # of this process, so that a busy machine does not matter
MEGABYTES = 200


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "run"
    assert main(["train", *words(path)]) == 0
    return path


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "run"))


def rewrite(point: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter a manifest, with hashes that match, as an attacker would write them."""
    facts = json.loads((point / "manifest.json").read_text())
    change(facts)
    facts["sha256"] = hashlib.sha256((point / "tensors.safetensors").read_bytes()).hexdigest()
    facts["manifest_sha256"] = checkpoint._manifest_hash(facts)
    (point / "manifest.json").write_text(json.dumps(facts))


def peak_memory(since: float | None = None) -> float:
    """Return the memory in use in MB; with ``since``, the growth of its peak from there. 0 where Linux does not say."""
    try:
        if since is None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024 - (since or 0.0)


def refused(*command: Any, capsys: pytest.CaptureFixture[str], seconds: float = SECONDS) -> str:
    """The one line with which a command is refused."""
    capsys.readouterr()
    begun, memory = time.process_time(), peak_memory()
    assert main([str(word) for word in command]) == 2
    assert time.process_time() - begun < seconds
    assert peak_memory(memory) < MEGABYTES
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("pql: ")
    assert len(lines[0]) < 1000
    assert lines[0].isprintable()
    return lines[0]


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda facts: facts.pop(name)


def put(value: Any, *names: str) -> Callable[[dict[str, Any]], object]:
    def change(facts: dict[str, Any]) -> None:
        for name in names[:-1]:
            facts = facts[name]
        facts[names[-1]] = value

    return change


MANIFESTS = [
    (put("1", "format"), "format is not a whole number from 1 to 2, not '1'"),
    (put(0, "format"), "format is not a whole number"),
    (put(True, "format"), "format is not a whole number"),
    (put(7, "format"), "format 2 or older; this is 7: update pql"),
    (drop("format"), "format is not a whole number"),
    (put("pickle", "kind"), "kind is not policy or resume"),
    (drop("spec"), "spec is not a mapping"),
    (drop("config"), "config is not a mapping"),
    (put(["x"], "config"), "config is not a mapping"),
    (put(-5, "counters", "ticks"), "counters.ticks is not a number from 0 on"),
    (put(float("nan"), "counters", "seconds"), "counters.seconds is not a number from 0 on"),
    (put("load", "spec", "obs", "policy", "dtype"), "spec.obs.policy.dtype is not one of float32"),
    (put([-3], "spec", "obs", "policy", "shape"), "spec.obs.policy.shape is not sizes"),
    (put([10**9, 10**9], "spec", "obs", "policy", "shape"), "spec.obs.policy.shape is not at most"),
    (put({"discrete": "2"}, "spec", "action"), "spec.action is not a number of actions"),
    (put([0.0] * 7, "spec", "action_low"), "spec.action_low is not 1 numbers"),
    (put([100_000, 100_000], "config", "algo", "policy", "hidden"), "settings that make a policy of its size"),
    (put([-1], "config", "algo", "policy", "hidden"), "settings that make a policy of its size"),
    (put("x" * 100_000, "config", "algo", "policy", "hidden"), "algo.policy.hidden=xxxx"),
    (put([1] * 100_000, "config", "algo", "policy", "hidden"), "config: too many values"),
    (put("ddpg\x1b]0;OWN\x07", "config", "algo", "name"), r"is not without control characters: ddpg\x1b]0;OWN\x07"),
    (put("\ud800x", "config", "algo", "name"), r"config is not without control characters: \ud800x"),
    (put("a\u202eb", "config", "task", "name"), r"config is not without control characters: a\u202eb"),
    (put(1, "config", "task", "kwargs", "a\nb"), r"config is not without control characters: a\nb"),
    (put("\x9b2J", "spec", "name"), r"spec is not without control characters: \x9b2J"),
    (put("\x1b[2J", "kind"), "kind is not policy or resume"),
    (put(float("nan"), "config", "eval", "epsilon"), "config is not without NaN"),
    (put({"device": "cuda:0"}, "config", "task", "kwargs"), "task.kwargs.device=cuda:0: expected something built in"),
    (put({"device": "cpu"}, "config", "task", "kwargs"), "task.kwargs.device=cpu: expected no such keyword"),
    (put({"num_envs": 2}, "config", "task", "kwargs"), "task.kwargs.num_envs=2: expected no such keyword"),
    (put({"name": "a"}, "config", "task", "kwargs"), "task.kwargs.name=a: expected no such keyword"),
]


@pytest.mark.fault(31)
@pytest.mark.parametrize(("change", "why"), MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_that_no_run_writes_is_one_line(run: Path, capsys, change, why: str) -> None:
    rewrite(run / "checkpoints" / "last", change)
    assert why in refused("eval", run / "checkpoints" / "last", capsys=capsys)


def test_a_resume_point_needs_its_counters(run: Path, capsys) -> None:
    for change, why in ((drop("counters"), "ticks"), (put(-1, "counters", "ticks"), "ticks"), (drop("spec"), "spec")):
        shutil.copytree(points(run)[-1], run / "kept")
        rewrite(points(run)[-1], change)
        with pytest.warns(UserWarning, match=f"{why}.* is not"):
            assert "none is intact" in refused("resume", run, "budget.env_steps=900", capsys=capsys)
        shutil.rmtree(points(run)[-1])
        (run / "kept").rename(run / "checkpoints" / "tick-000000000012")


@pytest.mark.fault(31)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 500 + "]" * 500,
        "1" * 10_000,
        '{"format": 1e999}',
        "\x00",
        "",
        "null",
        " " * (17 << 20),
    ],
)
def test_a_manifest_of_brackets_or_noise_is_one_line(run: Path, capsys, text: str) -> None:
    (run / "checkpoints" / "last" / "manifest.json").write_text(text)
    assert "a complete, intact checkpoint" in refused("eval", run / "checkpoints" / "last", capsys=capsys)


def test_weights_that_are_not_finite_are_one_line(run: Path, capsys) -> None:
    for point in (run / "checkpoints" / "last", points(run)[-1]):
        tensors = load_file(point / "tensors.safetensors")
        name = next(k for k in tensors if k.endswith("net.0.weight") and "/target" not in k and "/v/" not in k)
        tensors[name].view(-1)[3] = float("nan")
        save_file(tensors, point / "tensors.safetensors")
        rewrite(point, lambda facts: None)
    assert "policy/net.0.weight: expected finite numbers" in refused("eval", run, capsys=capsys)
    assert "policy/net.0.weight: expected finite numbers" in refused("export", run, "formats=pt2", capsys=capsys)
    assert "policy/net.0.weight: expected finite numbers" in refused(
        "resume", run, "budget.env_steps=900", capsys=capsys
    )


def nested(rng: random.Random) -> str:
    """Brackets, braces or both, 200,000 deep, closed or not, alone or as the value of a name."""
    opening = rng.choice(("[", '{"a":', '[{"b":', '[0,"x",'))
    text = opening * 200_000
    if rng.random() < 0.5:
        text += "1" + "".join({"[": "]", "{": "}"}[c] for c in reversed(opening) if c in "[{") * 200_000
    return text if rng.random() < 0.5 else '{"format": 2, "config": ' + text + "}" * (rng.random() < 0.5)


@pytest.mark.fault(31, form="deep manifest", count=20)
def test_a_manifest_nested_200000_deep_is_one_line(run: Path, capsys, trial: int) -> None:
    (run / "checkpoints" / "last" / "manifest.json").write_text(nested(random.Random(trial)))
    assert "a complete, intact checkpoint" in refused("eval", run / "checkpoints" / "last", capsys=capsys)


@pytest.mark.fault(31, form="million tensors", count=20)
def test_a_header_of_a_million_tensors_is_not_read(run: Path, capsys, trial: int) -> None:
    entry = random.Random(trial).choice(
        (
            '"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},',
            f'"{trial}":{{"dtype":"I64","shape":[],"data_offsets":[0,8]}},',
            '"t":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1],"data_offsets":[0,4]},',
            '"":{},',
        )
    )
    header = b"{" + entry.encode() * 1_000_000 + b"}"
    point = run / "checkpoints" / "last"
    (point / "tensors.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    rewrite(point, lambda facts: None)
    assert "a header of" in refused("eval", point, capsys=capsys)


def bomb(wide: int = 9, deep: int = 9, form: str = "[{}]") -> str:
    """A YAML text whose aliases name ``wide`` ** ``deep`` values."""
    lines = ["a0: &a0 " + form.format(",".join(["x"] * wide))]
    lines += [f"a{i + 1}: &a{i + 1} " + form.format(",".join([f"*a{i}"] * wide)) for i in range(deep)]
    return "\n".join(lines) + "\n"


@pytest.mark.fault(31, form="alias bomb", count=20)
def test_a_bomb_of_aliases_is_one_line(run: Path, capsys, trial: int) -> None:
    """In a config and in overrides; long before a parser would expand it."""
    rng = random.Random(trial)
    text = bomb(rng.randrange(2, 30), rng.randrange(2, 30), rng.choice(("[{}]", "[[{}]]", "[{{y: [{}]}}]")))
    (run / "config.yaml").write_text(text if trial % 2 else text + (run / "config.yaml").read_text())
    shutil.rmtree(points(run)[-1])  # whose config would count
    assert "an alias" in refused("resume", run, "budget.env_steps=900", capsys=capsys)


@pytest.mark.fault(16, 31)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (bomb(), "an alias"),
        ("[" * 200_000, "nested"),
        ("- " * 300 + "a", "nested"),
        ("x" * (300 << 10), "larger than"),
        ("!!python/object/apply:os.system ['touch executed']", "could not determine a constructor"),
        ("1: 2", "names that are no text"),
        ("- 1", "readable config.yaml"),
    ],
)
def test_a_config_that_no_run_writes_is_one_line(run: Path, capsys, text: str, why: str) -> None:
    (run / "config.yaml").write_text(text)
    shutil.rmtree(points(run)[-1])  # whose config would count
    assert why in refused("resume", run, "budget.env_steps=900", capsys=capsys)
    with pytest.raises(ConfigError, match=why):
        runs.read([run])
    assert not Path("executed").exists()


def test_a_pipe_is_not_waited_for(run: Path, capsys) -> None:
    for name in ("manifest.json", "tensors.safetensors"):
        path = run / "checkpoints" / "last" / name
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        assert "no ordinary file" in refused("eval", path.parent, capsys=capsys)
        path.unlink()
        path.write_bytes(whole)


def test_the_run_itself_still_loads(run: Path) -> None:
    assert pql.load_policy(run)(torch.zeros(4, 3)).shape == (4, 1)
    with pytest.raises(ConfigError, match="a run directory with a checkpoint"):
        pql.load_policy(run / "nothing")


LINKED = [
    "summary.json",
    ".config.yaml",
    "checkpoints/.writing-last",
    "checkpoints/tick-000000000012/.manifest.json",
    "evaluations/last-seed0-1episodes.json",
    "videos/x.mp4",
    "report/index.html",
    "export/policy.pt2",
    *("evaluations", "videos", "report", "export", "wandb", "swanlab", "tensorboard"),
]
WRITERS: dict[str, list[str]] = {"eval": ["episodes=1"], "play": [], "report": [], "export": ["formats=pt2"]}
WRITES = {"eval": "evaluations", "play": "videos"}  # others: their own names


@pytest.mark.parametrize("name", LINKED)
def test_a_link_to_elsewhere_is_not_written_through(run: Path, tmp_path: Path, capsys, name: str) -> None:
    folder, link = tmp_path / "precious", run / name
    folder.mkdir()
    for file in ("policy.pt2", "index.html", "kept"):
        (folder / file).write_text("kept")
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(folder / "kept" if "." in name else folder)
    assert "without links to elsewhere" in refused("resume", run, "budget.env_steps=900", capsys=capsys)
    for command, more in WRITERS.items():
        if link.is_relative_to(run / WRITES.get(command, command)):
            # A report first imports what draws it.
            assert "without links to elsewhere" in refused(command, run, *more, capsys=capsys, seconds=20)
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys(
        ("policy.pt2", "index.html", "kept"), "kept"
    )


@pytest.mark.parametrize(
    "name", ["wandb/run-1/logs/debug-core.log", "wandb/run-id", "swanlab/latest", "mlruns/0/artifacts", "newest"]
)
def test_links_of_loggers_are_left_alone(run: Path, tmp_path: Path, monkeypatch, name: str) -> None:
    """wandb makes one itself; what pql has there is neither read nor written through a link."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "kept").write_text("secret0123456789")
    link = run / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(precious / "kept" if name == "wandb/run-id" else precious)
    assert main(["resume", str(run), "budget.env_steps=340"]) == 0
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    assert trackers.own_id(run / "wandb" / "run-id") != "secret0123456789"
    assert [(path.name, path.read_text()) for path in precious.iterdir()] == [("kept", "secret0123456789")]


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/tick-000000000099", "videos"])
def test_no_link_leads_into_a_folder_that_is_not_looked_through(run: Path, tmp_path: Path, capsys, name: str) -> None:
    hidden = run / "wandb" / "hidden"
    if name == "checkpoints":
        shutil.copytree(run / name, hidden)
        shutil.rmtree(run / name)
    hidden.mkdir(parents=True, exist_ok=True)
    (hidden / ".writing-last").symlink_to(tmp_path)
    for target in (hidden, run):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
        assert "without links to elsewhere" in refused("resume", run, "budget.env_steps=900", capsys=capsys)


@pytest.mark.parametrize("name", ["checkpoints/tick-000000000012/.manifest.json", ".config.yaml", ".overrides.yaml"])
def test_with_trust_too_what_is_written_aside_follows_no_link(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("kept")
    (run / name).symlink_to(tmp_path / "precious")
    amend_config(run, compose(words(run)), [])
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_run_of_links_is_read_as_it_is(run: Path, tmp_path: Path) -> None:
    """As in a cache of downloads: every file is a link. What a command writes is new."""
    copy = tmp_path / "cached"
    for path in run.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(run)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(run)).symlink_to(path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["eval", str(copy), "episodes=1"]) == 0
    assert main(["export", str(copy), "formats=pt2"]) == 0
    assert (copy / "evaluations/last-seed0-1episodes.json").is_file()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_on_another_disk_is_its_owner_s(run: Path, tmp_path: Path, capsys) -> None:
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    (run / "newest.jsonl").symlink_to("metrics.jsonl")
    assert main(["eval", str(run), "episodes=1"]) == 0
    assert "without links to elsewhere" in refused("resume", run, "budget.env_steps=900", capsys=capsys)
    assert main(["resume", str(run), "budget.env_steps=340", "--trust"]) == 0


def dump(settings: Any) -> str:
    return yaml.dump(settings, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


def test_mutated_runs_load_as_they_were_or_are_refused(run: Path) -> None:
    """Values of a manifest and of a config changed at random: one line, or a policy; never another exception."""
    shutil.rmtree(points(run)[-1])  # or these would count instead
    rng, want, loaded = random.Random(5), pql.load_policy(run)(torch.ones(2, 3)), 0
    manifest, config = run / "checkpoints" / "last" / "manifest.json", run / "config.yaml"
    whole, settings = manifest.read_text(), yaml.safe_load(config.read_text())
    for i in range(150):
        manifest.write_text(whole)
        rewrite(manifest.parent, lambda facts: mutate(facts, rng))
        changed = copy.deepcopy(settings)
        mutate(changed, rng)
        config.write_text(dump(changed) if i % 3 else dump(settings)[: rng.randrange(4000)])
        try:
            assert pql.load_policy(run)(torch.ones(2, 3)).shape == want.shape
            loaded += 1
        except ConfigError:
            pass
        with contextlib.suppress(ConfigError):
            resume_config(run, [])
    assert 0 < loaded < 150


# -- settings that name code, a program or a path ----------------------------------------------------------------------

SPY = "import pathlib\npathlib.Path({mark!r}).touch()\n"
NETWORK = SPY + "from pql.nets.mlp import DeterministicPolicy\n\ndef make(spec, config):\n    return None\n"


def plant(run: Path, setting: str, value: Any) -> None:
    """Write a setting into every file of a run that holds its config."""

    def change(facts: dict[str, Any]) -> None:
        put(value, "config", *setting.split("."))(facts)

    for point in (run / "checkpoints" / "last", points(run)[-1]):
        rewrite(point, change)
    config = yaml.safe_load((run / "config.yaml").read_text())
    put(value, *setting.split("."))(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the payloads here would leave: a program ``evil`` and a module ``evil_module``."""
    mark = tmp_path / "executed"
    program = tmp_path / "evil"
    program.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / "evil_module.py").write_text(NETWORK.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("evil_module", None)
    return mark


TASKS: list[tuple[str, Any]] = [
    ("task.process.python", "./evil"),
    ("task.name", "evil_module:make"),
    ("task.kwargs.curriculum", {"kind": "evil_module:make"}),
    ("task.kwargs.anything", [{"deep": ["evil_module:make"]}]),
    ("task.kwargs.xml_file", "/etc/passwd"),
    ("task.kwargs.cache", "~/cache"),
    ("task.kwargs.level", "maps/../../../secret"),
    ("task.id", "evil_module:Env-v0"),
    ("task.kwargs.curriculum", {"kind": "evil_module:1"}),
    ("task.kwargs.curriculum", {"kind": "evil-module:make"}),
    ("task.kwargs.curriculum", {"evil_module:make": 1}),
    ("task.id", "evil_module:1-v0"),
    ("task.id", "evil-module:A-v0"),
    ("task.game", ":"),
    ("task.model", "\u0435vil:x"),
    ("task.kwargs.listen", "127.0.0.1:5555"),
]


@pytest.mark.fault(31)
@pytest.mark.parametrize(("setting", "value"), TASKS, ids=range(len(TASKS)))
def test_a_task_that_names_code_a_program_or_a_path_is_refused(run: Path, mark: Path, capsys, setting, value) -> None:
    plant(run, setting, value)
    for command in (("eval", run), ("play", run, "steps=1"), ("resume", run, "budget.env_steps=900")):
        line = refused(*command, capsys=capsys)
        assert line.startswith(f"pql: {setting}")
        assert "--trust (in Python trust=True)" in line
    assert pql.load_policy(run)(torch.zeros(4, 3)).shape == (4, 1)  # which needs no task
    assert not mark.exists()


PROGRAMS = ("./evil", "evil", "{mark.parent}/evil", "/bin/sh", "sh -c ./evil", "../{mark.parent.name}/evil", "~/evil")
MODULES = ("evil_module:make", "evil_module:make.__call__", ".evil_module:make", "os:system", "evil_module:")


@pytest.mark.fault(31, form=lambda given: "program" if "process" in given["setting"] else "module", count=20)
@pytest.mark.parametrize("setting", ["task.process.python", "task.name", "algo.policy.net", "algo.critic.net"])
def test_a_run_that_names_a_program_or_a_module_is_refused(run: Path, mark: Path, capsys, setting, trial) -> None:
    value = random.Random(trial).choice(PROGRAMS if "process" in setting else MODULES).format(mark=mark)
    plant(run, setting, value)
    commands = [("eval", run), ("play", run), ("resume", run, "budget.env_steps=900")]
    if setting.startswith("algo."):  # an export and a loaded policy need no task
        commands.append(("export", run, "formats=pt2"))
        with pytest.raises(ConfigError, match="trust=True"):
            pql.load_policy(run)
    for command in commands:
        assert refused(*command, capsys=capsys).startswith(f"pql: {setting}={value}: expected something built in")
    assert not mark.exists()


def test_a_run_that_names_a_file_of_demonstrations_is_not_resumed(run: Path, capsys) -> None:
    plant(run, "replay.demos", "/etc/passwd")
    line = refused("resume", run, "budget.env_steps=900", capsys=capsys)
    assert line.startswith("pql: replay.demos=/etc/passwd: expected something built in")
    assert main(["eval", str(run), "episodes=1"]) == 0  # which reads no replay


def pickled(mark: Path, rng: random.Random) -> bytes:
    """A pickle of a payload: alone, in torch's archive, or where a safetensors file has its header or its data."""
    plain = pickle.dumps(Payload(mark), rng.randrange(pickle.HIGHEST_PROTOCOL + 1))
    buffer = io.BytesIO()
    torch.save({"policy": Payload(mark)}, buffer)
    header = b'{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(plain), len(plain))
    wrapped = struct.pack("<Q", len(plain)) + plain
    return rng.choice((plain, buffer.getvalue(), wrapped, struct.pack("<Q", len(header)) + header + plain))


LOADERS: dict[str, Callable[[Path], object]] = {
    "eval": lambda run: main(["eval", str(run), "episodes=1"]),
    "export": lambda run: main(["export", str(run), "formats=pt2"]),
    "resume": lambda run: main(["resume", str(run), "budget.env_steps=480"]),
    "report": lambda run: runs.read([run]),
    "load_policy": lambda run: pql.load_policy(run / "checkpoints" / "last"),
    "init_from": lambda run: main(["train", *words(run.parent / "new", f"init_from={run}")]),
}


@pytest.mark.fault(16, form="{loader}", count=20)
@pytest.mark.filterwarnings("ignore::pql.errors.PqlWarning")
@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickle_in_any_file_of_a_run_is_never_executed(run: Path, mark: Path, loader: str, trial: int) -> None:
    """In place of a file, or of two; hashes match, as an attacker would write them."""
    rng = random.Random(f"{loader} {trial}")
    files = sorted(path for path in run.rglob("*") if path.is_file())
    first = [path for path in files if path.name == "tensors.safetensors"] if trial % 2 == 0 else files
    for path in {rng.choice(first), rng.choice(files)}:
        path.write_bytes(pickled(mark, rng))
        if path.name == "tensors.safetensors" and (path.parent / "manifest.json").read_bytes().startswith(b"{"):
            rewrite(path.parent, lambda facts: None)
    with contextlib.suppress(ConfigError):
        LOADERS[loader](run)
    check_payload(mark)


def test_trust_is_one_flag_for_all_commands(run: Path, mark: Path, capsys) -> None:
    plant(run, "algo.policy.net", "evil_module:make")
    for command in (("eval", run), ("play", run), ("export", run, "formats=pt2")):
        assert "a torch module with parameters, not NoneType" in refused(*command, "--trust", capsys=capsys)
        assert mark.exists()
    with pytest.raises(ConfigError, match="NoneType"):
        pql.load_policy(run, trust=True)
    plant(run, "algo.policy.net", None)
    mark.unlink()
    for command in (("eval", run, "--trust"), ("resume", "--trust", run, "budget.env_steps=900")):
        plant(run, "task.process.python", "./evil")
        assert main([str(word) for word in command]) == 1  # no simulator, but it was started
        assert mark.exists()
        mark.unlink()


def test_what_is_typed_anew_needs_no_trust(run: Path, mark: Path, capsys) -> None:
    plant(run, "task.process.python", "./nothing")
    assert main(["resume", str(run), "budget.env_steps=900", f"task.process.python={mark.parent / 'evil'}"]) == 1
    assert mark.exists()  # the interpreter may be another one: it is the user's
    plant(run, "task.process.python", None)
    plant(run, "algo.policy.net", "evil_module:make")
    command = ["resume", run, "budget.env_steps=900"]
    assert "NoneType" in refused(*command, "algo.policy.net=evil_module:make", capsys=capsys)
    assert "algo.policy.net=evil_module:other: expected evil_module:make, as the run has it" in refused(
        *command, "algo.policy.net=evil_module:other", capsys=capsys
    )
    plant(run, "algo.policy.net", None)
    for word in ("task.process.python=./evil", "task.name=evil_module:make", "task.kwargs.x=1"):
        assert "as the run has it" in refused(*command, word, capsys=capsys)  # it had none: it would be another run


def test_too_little_memory_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("pql.run.opening.build", refuse)
    assert main(["resume", str(run), "budget.env_steps=900"]) == 1
    assert capsys.readouterr().err.startswith("pql: too little memory for this run: choose smaller algo.policy.hidden")


def test_a_report_shows_odd_facts_as_text(run: Path, capsys) -> None:
    for facts in ({"cores": "x"}, {"cores": [1], "torch": 3, "gpu": {}}, {"cores": 2, "cpu": "\x1b[2J"}):
        (run / "env.json").write_text(json.dumps(facts))
        machine = runs.read([run])[0].machine
    assert machine == "\\x1b[2J, 2 cores"
    tell({"tasks": [], "overall": {"groups": [], "tasks": []}, "notes": ["runs/a\x1b[2J: left out"]})  # a folder's name
    assert "note: runs/a\\x1b[2J: left out" in capsys.readouterr().out


SECRETS = (
    "${oc.env:SECRET}",
    "x${oc.env:SECRET,0}y",
    "${oc.decode:${oc.env:SECRET}}",
    "${logger.project}",
    "${hydra:job}",
)


@pytest.mark.fault(31, form="interpolation", count=20)
def test_an_interpolation_is_neither_resolved_nor_kept(run: Path, monkeypatch, capsys, trial: int) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    before, text = (run / "config.yaml").read_text(), SECRETS[trial % len(SECRETS)]
    for setting in ("logger.project", "task.kwargs.note"):
        plant(run, setting, text)
        for command in (("resume", run, "budget.env_steps=900"), ("eval", run), ("export", run)):
            line = refused(*command, *([], ["--trust"])[trial % 2], capsys=capsys)
            assert f"without interpolations: {text}" in line
            assert "hunter2" not in line
        (run / "config.yaml").write_text(before)
    (run / "config.yaml").write_text(before.replace("\ndevice: cpu", f"\n{text}: cpu"))
    assert "without interpolations" in refused("resume", run, capsys=capsys)
    assert not any(b"hunter2" in p.read_bytes() for p in run.rglob("*") if p.is_file())


def test_a_user_s_own_words_keep_their_interpolations(run: Path, monkeypatch) -> None:
    monkeypatch.setenv("PROJECT", "mine")
    assert resume_config(run, ["logger.project=${oc.env:PROJECT}"]).logger.project == "mine"
    assert compose(["device=cpu", "run_dir=${oc.env:PROJECT}/x"]).run_dir == "mine/x"


def test_no_preset_needs_trust() -> None:
    files = sorted(Path(pql.__file__).parent.glob("config/presets/**/*.yaml"))
    assert len(files) > 50
    for file in files:
        texts = [v for _, v in walk(read_yaml(file) or {}) if isinstance(v, str) and "${" not in v]
        assert not [text for text in texts if not TEXT.fullmatch(text)], file


def test_what_is_built_in_and_its_ordinary_keywords_need_no_trust() -> None:
    keywords = "task.kwargs.kwargs={render_fps: 30, mode: a/b-c.d, text: 'or not (to be)'}"
    check_task(compose(["device=cpu", "task=gymnasium", "task.id=ALE/Pong-v5", keywords]), "x")
    check_task(compose(["device=cpu", "task=remote", "task.kwargs.listen=127.0.0.1:0"]), "x")
    check_networks(compose(["device=cpu", "algo.policy.net=registered"]), "x")


def test_whatever_an_importer_would_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random texts: neither ``module:attribute`` here nor gymnasium's ``module:Id`` gets as far as an import."""
    rng, base, imported = random.Random(0), compose(["device=cpu", "task=gymnasium", "task.id=x"]), list[str]()
    monkeypatch.setattr("importlib.import_module", imported.append)
    signs = "aZ_9évil. -/:;~\\\n\t\x1b\u202e"
    for _ in range(3000):
        text = "".join(rng.choices(signs, k=rng.randrange(1, 9)))
        task = dataclasses.replace(base.task, id=text, kwargs={"curriculum": {"kind": text}})
        refused = False
        try:
            check_task(dataclasses.replace(base, task=task), "run")
        except ConfigError:
            refused = True
        harmless = not set(text) & set(":~\\\n\t\x1b\u202e") and ".." not in text and text[0] not in "/ "
        assert refused or harmless, text
        parts = [*text.partition(":")[0].split("."), *text.partition(":")[2].split(".")]
        if not all(part.isidentifier() for part in parts):  # nor does a user's own slip import half of it
            with pytest.raises(ConfigError, match="is no name in Python"):
                import_name("task", text)
    assert not imported


@pytest.mark.parametrize("remote", [{"token_file": "token"}, {"listen": "0.0.0.0:5555"}, {"listen": "[::1]:5:5"}])
def test_who_may_connect_is_no_matter_where_nobody_does(run: Path, capsys, remote: dict[str, str]) -> None:
    """A built-in task that actors stepped is evaluated here; going on with it would open the file, or the port."""
    plant(run, "task.remote", remote)
    assert main(["eval", str(run), "episodes=1"]) == 0
    assert refused("resume", run, "budget.env_steps=900", capsys=capsys).startswith("pql: task.remote.")
    remote = compose(["device=cpu", "task=remote", f"task.kwargs.{next(iter(remote))}={next(iter(remote.values()))!r}"])
    with pytest.raises(ConfigError, match=r"task\.kwargs\."):
        check_task(remote, "run")


SPARE = ("budget.seconds=null", "eval.final=false", "eval.every_seconds=null", "checkpoint.every_seconds=null")
SMALL = ("scale=cpu", "device=cpu", "num_envs=4", "algo.critic.hidden=[8]", "budget.env_steps=600")
DISCRETE = ["task=cartpole", *SMALL, *SPARE]


@pytest.mark.parametrize(("algo", "which"), [("pqn", "critic"), ("ppo", "critic")])
def test_weights_to_begin_with_bring_no_network(tmp_path: Path, mark: Path, capsys, algo: str, which: str) -> None:
    own = [*DISCRETE, f"algo={algo}"]
    assert main(["train", *own, f"run_dir={tmp_path / 'old'}"]) == 0
    shutil.rmtree(points(tmp_path / "old")[-1])
    rewrite(tmp_path / "old/checkpoints/last", put("evil_module:make", "config", "algo", which, "net"))
    new = [f"run_dir={tmp_path / 'new'}", f"init_from={tmp_path / 'old'}"]
    line = refused("train", *own, *new, capsys=capsys, seconds=20)  # networks are built, and captured, before
    assert line.startswith(f"pql: algo.{which}.net=null: expected evil_module:make, as in init_from=")
    assert not mark.exists()


def test_runs_of_one_command_resume_by_its_own_words(run: Path) -> None:
    (run / "summary.json").unlink(missing_ok=True)
    own = ["task.name=my:Env", "+algo.policy.net=my.nets:Net", "task.kwargs.a=1", "logger.mode=online"]
    assert next_command(run, ["task=env", "num_envs=16", "seed=1", *own]) == ["resume", str(run), *own]
