"""Files that somebody else has made: each is refused in one line, in bounded time, and nothing in it is executed."""

import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import points, words
from safetensors.torch import load_file, save_file

import pql
from pql import checkpoint
from pql.errors import ConfigError
from pql.main import main
from pql.report import runs

SECONDS = 10.0  # on a busy machine; by itself each takes well below 2


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


def refused(*command: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command is refused."""
    capsys.readouterr()
    begun = time.monotonic()
    assert main([str(word) for word in command]) == 2
    assert time.monotonic() - begun < SECONDS
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("pql: ")
    assert len(lines[0]) < 1000
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
]  # fmt: skip


@pytest.mark.parametrize(("change", "why"), MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_that_no_run_writes_is_one_line(run: Path, capsys, change, why: str) -> None:
    rewrite(run / "checkpoints" / "last", change)
    assert why in refused("eval", run, capsys=capsys)


def test_a_resume_point_needs_its_counters(run: Path, capsys) -> None:
    for change, why in ((drop("counters"), "ticks"), (put(-1, "counters", "ticks"), "ticks"), (drop("spec"), "spec")):
        shutil.copytree(points(run)[-1], run / "kept")
        rewrite(points(run)[-1], change)
        with pytest.warns(UserWarning, match=f"{why}.* is not"):
            assert "none is intact" in refused("resume", run, "budget.env_steps=900", capsys=capsys)
        shutil.rmtree(points(run)[-1])
        (run / "kept").rename(run / "checkpoints" / "tick-000000000012")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000 + "1" + "}" * 200_000, "[" * 500 + "]" * 500,
                                  "1" * 10_000, '{"format": 1e999}', "\x00", "", "null", " " * (17 << 20)])  # fmt: skip
def test_a_manifest_of_brackets_or_noise_is_one_line(run: Path, capsys, text: str) -> None:
    (run / "checkpoints" / "last" / "manifest.json").write_text(text)
    assert "a complete, intact checkpoint" in refused("eval", run, capsys=capsys)


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


def test_a_header_of_a_million_tensors_is_not_read(run: Path, capsys) -> None:
    header = b"{" + b'"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' * 1_000_000 + b"}"
    point = run / "checkpoints" / "last"
    (point / "tensors.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    rewrite(point, lambda facts: None)
    assert "a header of" in refused("eval", run, capsys=capsys)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "an alias"),
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
        assert "no ordinary file" in refused("eval", run, capsys=capsys)
        path.unlink()
        path.write_bytes(whole)


def test_the_run_itself_still_loads(run: Path) -> None:
    assert pql.load_policy(run)(torch.zeros(4, 3)).shape == (4, 1)
    with pytest.raises(ConfigError, match="a run directory with a checkpoint"):
        pql.load_policy(run / "nothing")
