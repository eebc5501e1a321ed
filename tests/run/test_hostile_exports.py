"""Exports from untrusted sources: nothing in them is executed, and invalid ones are rejected in one line."""

import io
import json
import pickle
import random
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from payload import Payload
from run_files import mutate, words

import pql
from pql.cli.main import main
from pql.errors import ConfigError
from pql.run.export.onnx_check import check_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SECONDS = 2.0  # of this process, so that a busy machine does not matter
OBS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``.pt2`` of an export as it is written, with its ``.onnx`` beside it."""
    path = tmp_path_factory.mktemp("exports") / "run"
    assert main(["train", *words(path)]) == 0
    return pql.export_policy(path).files["pt2"]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "executed"


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def pack(path: Path, content: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in content.items():
            file.writestr(name, data)
    return path


def with_member(good: Path, path: Path, name: str, data: bytes) -> Path:
    return pack(path, {**members(good), f"policy/{name}": data})


def of_model(good: Path, path: Path, change: Callable[[Any], object]) -> Path:
    """The ``.onnx`` after ``change`` of its model."""
    model = onnx.load(good.with_suffix(".onnx"))
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


def of_metadata(good: Path, path: Path, change: Callable[[Any], object]) -> Path:
    """The ``.onnx`` after ``change`` of its metadata."""

    def replaced(model: Any) -> None:
        (entry,) = (one for one in model.metadata_props if one.key == "pql")
        tree = json.loads(entry.value)
        change(tree)
        entry.value = json.dumps(tree)

    return of_model(good, path, replaced)


def refused(path: Path, mark: Path) -> str:
    begun, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        pql.load_policy(path)
    assert time.process_time() - begun < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # KB
    assert not mark.exists()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 2500
    return text


def pickled(mark: Path, form: str) -> bytes:
    """A payload that makes a directory when it is unpickled."""
    if form == "plain":
        return pickle.dumps(Payload(mark))
    buffer = io.BytesIO()
    torch.save(((torch.zeros(2, 3), Payload(mark)), {}), buffer, pickle_protocol=int(form))
    return buffer.getvalue()


def test_an_export_holds_no_pickle_and_no_path(good: Path) -> None:
    content = members(good)
    assert content.pop("policy/data/sample_inputs/model.pt") == b""
    for name, data in content.items():
        assert b"\x80\x02" not in data[:2], name
        assert str(Path(pql.__file__).parent).encode() not in data, name


@pytest.mark.parametrize("form", ["plain", "2", "4"])
@pytest.mark.parametrize(
    "member",
    [
        "data/sample_inputs/model.pt",
        "data/weights/model.pt",
        "data/constants/model.pt",
        "data/constants/opaque_obj_0",
        "data/constants/custom_obj_0",
        "data/weights/weight_99.pt",
        "extra/other",
        "data.pkl",
    ],
)
@pytest.mark.fault(16, form="exported file")
@pytest.mark.fault(31, form="pickled member")
def test_a_pickle_in_any_member_is_not_read(good: Path, tmp_path: Path, mark: Path, member: str, form: str) -> None:
    bad = with_member(good, tmp_path / "policy.pt2", member, pickled(mark, form))
    assert "--trust (trust=True) if the file is yours" in refused(bad, mark)


@pytest.mark.parametrize("how", ["pickled sample inputs", "a size as an expression"])
@pytest.mark.fault(16, 31)
def test_a_pt2_that_torch_would_execute_is_executed_with_trust_alone(
    good: Path, tmp_path: Path, mark: Path, capsys, how: str
) -> None:
    """The payloads are real ones: torch unpickles sample inputs and evaluates the text of sizes."""
    if how == "pickled sample inputs":
        name, data = "data/sample_inputs/model.pt", pickled(mark, "2")
    else:
        name = "models/model.json"
        text = members(good)[f"policy/{name}"].decode()
        start = text.index("Symbol('s")
        symbol = text[start : text.index('"', start)]
        data = text.replace(symbol, f"__import__('os').mkdir({str(mark)!r})").encode()
    bad = with_member(good, tmp_path / "policy.pt2", name, data)
    assert "an export as .onnx" in refused(bad, mark)
    for command in (["eval", str(bad), "episodes=1"], ["play", str(bad), "steps=1"]):
        capsys.readouterr()
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            "policy.pt2: expected --trust (trust=True) if the file is yours, since torch runs code from a .pt2; "
            "or an export as .onnx"
        )
        assert not mark.exists()
    with pytest.raises(ConfigError, match=r"a \.pt2 file that pql export wrote"):
        pql.load_policy(bad, trust=True)
    assert mark.exists()


@pytest.mark.parametrize(
    ("entry", "value", "why"),
    [
        ("format", "other", "format is not pql-policy"),
        ("format_version", 9, "format_version 3 or older; this is 9"),
        ("format_version", "1", "format_version is not a whole number"),
        ("spec", None, "spec is not a mapping"),
        ("task", {"name": "x", "process": {"python": "./evil"}}, "task is not name, id"),
        ("inputs", [], "an action"),
        ("algorithm", "a\x1b]0;OWN\x07", r"without control characters: a\x1b]0;OWN\x07"),
        ("family", "\ud800", r"\ud800"),
        ("task", {"name": "${oc.env:HOME}"}, "without interpolations"),
        ("action", {"kind": "box"}, "a kind and a size"),
        ("inputs", [{"name": "obs.policy", "shape": ["batch", 7], "dtype": "float32"}], "a group of spec.obs"),
    ],
)
@pytest.mark.fault(31)
def test_metadata_that_no_export_has_are_refused(good: Path, tmp_path: Path, mark: Path, entry, value, why) -> None:
    bad = of_metadata(good, tmp_path / "policy.onnx", lambda about: about.update({entry: value}))
    assert why in refused(bad, mark)


def test_an_export_s_task_is_looked_at_as_a_run_s(good: Path, tmp_path: Path, mark: Path) -> None:
    (tmp_path / "evil_task.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    for task in ({"name": "evil_task:make"}, {"name": "pendulum", "kwargs": {"file": "/etc/passwd"}}):
        bad = of_metadata(good, tmp_path / "policy.onnx", lambda about, task=task: about.update(task=task))
        assert main(["eval", str(bad), "episodes=1"]) == 2
        assert main(["play", str(bad), "steps=1"]) == 2
        assert torch.equal(pql.load_policy(bad)(OBS), pql.load_policy(good.with_suffix(".onnx"))(OBS))  # needs no task
    assert not mark.exists()


def test_the_file_beside_it_says_which_archive_it_is(good: Path, tmp_path: Path, mark: Path) -> None:
    beside = json.loads(good.with_name("policy.json").read_text())
    assert set(beside["sha256"]) == {"policy.onnx", "policy.pt2"}
    (tmp_path / "policy.json").write_text(json.dumps(beside))
    path = tmp_path / "policy.onnx"
    path.write_bytes(good.with_suffix(".onnx").read_bytes())
    pql.load_policy(path)
    other = of_model(good, path, lambda model: model.metadata_props.add(key="x", value="y"))
    assert "its hash is not the one in policy.json next to it" in refused(other, mark)
    (tmp_path / "policy.pt2").write_bytes(good.read_bytes() + b" ")
    with pytest.raises(ConfigError, match="its hash is not the one"):
        pql.load_policy(tmp_path / "policy.pt2", trust=True)
    (tmp_path / "policy.json").write_text("[" * 200_000)
    assert "nested" in refused(other, mark)
    (tmp_path / "policy.json").unlink()
    pql.load_policy(other)


def test_mutated_metadata_load_as_they_were_or_are_refused(good: Path, tmp_path: Path, mark: Path) -> None:
    """JSON values changed at random: one line, or a policy; never another exception."""
    rng, want = random.Random(3), pql.load_policy(good.with_suffix(".onnx"))(OBS)
    loaded = 0
    for i in range(80):
        path = of_metadata(good, tmp_path / f"{i}.onnx", lambda tree: mutate(tree, rng))
        try:
            got = pql.load_policy(path)(OBS)
        except ConfigError:
            continue
        loaded += 1
        assert got.shape == want.shape
    assert 0 < loaded < 75
    assert not mark.exists()


# -- ONNX -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(16, 31)
def test_onnx_files_with_more_than_their_own_numbers_are_refused(good: Path, tmp_path: Path, mark: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(4096))

    def outside(model: Any) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../secret")

    def branch(model: Any) -> None:
        attribute = model.graph.node[0].attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        attribute.g.name = "inner"

    def foreign(model: Any) -> None:
        model.graph.node[0].domain = "com.evil"

    def functions(model: Any) -> None:
        model.functions.add(name="f", domain="com.evil")

    def unnamed(model: Any) -> None:
        del model.metadata_props[:]

    for change, why in (
        (outside, "in another file"),
        (branch, "a graph within a graph"),
        (foreign, "not ONNX's own"),
        (functions, "model-defined functions"),
        (unnamed, "pql"),
    ):
        bad = of_model(good, tmp_path / "bad.onnx", change)
        assert why in refused(bad, mark)
    for data in (b"", b"\xff" * 100, bad.read_bytes()[:200], pickled(mark, "plain"), b"\x3a" + b"\xff" * 9 + b"\x01"):
        bad.write_bytes(data)
        refused(bad, mark)


def test_an_overlong_number_hides_nothing() -> None:
    """data_location=1 as protocol buffers may also write it, in three bytes, within a model's graph and initializer."""
    tensor = bytes([14 << 3, 0x81, 0x80, 0x00])
    graph = bytes([5 << 3 | 2, len(tensor)]) + tensor
    with pytest.raises(ValueError, match="another file"):
        check_onnx(bytes([7 << 3 | 2, len(graph)]) + graph)
    check_onnx(bytes([7 << 3 | 2, 0]))
