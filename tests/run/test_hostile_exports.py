"""Exports from untrusted sources: nothing in them is executed, and invalid ones are rejected in one line."""

import copy
import io
import json
import os
import pickle
import random
import resource
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import mutate, words

import pql
from pql.cli.main import main
from pql.errors import ConfigError
from pql.run.export.files import KNOWN, check_onnx, read_members
from pql.run.export.program import OPERATORS, UnknownOperatorError, find_operator, takes_device

SECONDS = 2.0  # of this process, so that a busy machine does not matter
OBS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export as it is written."""
    path = tmp_path_factory.mktemp("exports") / "run"
    assert main(["train", *words(path)]) == 0
    return pql.export_policy(path, formats=["pt2"]).files["pt2"]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "executed"


class Payload:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def pack(path: Path, content: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "w", kind) as file:
            for name, data in content.items():
                file.writestr(name, data)
    return path


def edited(good: Path, path: Path, changes: dict[str, bytes | Callable[[Any], object] | None]) -> Path:
    """The export with members replaced, added, dropped (None), or as their JSON is after a function."""
    content = members(good)
    for name, change in changes.items():
        full = f"policy/{name}"
        if change is None:
            del content[full]
        elif callable(change):
            data = json.loads(content[full])
            change(data)
            content[full] = json.dumps(data).encode()
        else:
            content[full] = change
    return pack(path, content)


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
    assert {name.removeprefix("policy/") for name in content if "/weights/weight_" not in name} <= KNOWN
    for name, data in content.items():
        assert b"\x80\x02" not in data[:2], name
        assert str(Path(pql.__file__).parent).encode() not in data, name


@pytest.mark.fault(15)
def test_an_older_export_with_its_sample_inputs_loads(good: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(((torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64)), {}), buffer, pickle_protocol=2)
    old = edited(good, tmp_path / "policy.pt2", {"data/sample_inputs/model.pt": buffer.getvalue()})
    assert torch.equal(pql.load_policy(old)(OBS), pql.load_policy(good)(OBS))


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
def test_a_pickle_in_any_member_is_refused(good: Path, tmp_path: Path, mark: Path, member: str, form: str) -> None:
    bad = edited(good, tmp_path / "policy.pt2", {member: pickled(mark, form)})
    assert "sample inputs" in (text := refused(bad, mark)) or "which no export has" in text


@pytest.mark.fault(16, 31)
def test_weights_that_say_they_are_pickled_are_refused(good: Path, tmp_path: Path, mark: Path) -> None:
    def change(config: Any) -> None:
        next(iter(config["config"].values()))["use_pickle"] = True

    name = "data/weights/model_weights_config.json"
    bad = edited(good, tmp_path / "a.pt2", {name: change, "data/weights/weight_0": pickled(mark, "2")})
    assert "pickled" in refused(bad, mark)

    def opaque(config: Any) -> None:
        config["config"]["x"] = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}

    name = "data/constants/model_constants_config.json"
    bad = edited(good, tmp_path / "b.pt2", {name: opaque, "data/constants/tensor_0": pickled(mark, "2")})
    assert "pickled" in refused(bad, mark)


@pytest.mark.fault(16)
def test_what_torch_would_load_is_what_pql_refuses(good: Path, tmp_path: Path, mark: Path) -> None:
    """The payload is a real one: torch's own loader runs it, as --trust does."""
    bad = edited(good, tmp_path / "policy.pt2", {"data/sample_inputs/model.pt": pickled(mark, "2")})
    refused(bad, mark)
    assert main(["eval", str(bad), "episodes=1"]) == 2
    assert not mark.exists()
    with pytest.raises(ConfigError):
        pql.load_policy(bad, trust=True)
    assert mark.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../evil", "which no export has"),
        ("/etc/evil", "which no export has"),
        ("data/weights/../../x", "no export has"),
        ("data/aotinductor/model/model.so", "no export has"),
        ("data/executorch/x", "no export has"),
        ("models/other.json", "no export has"),
        ("data/weights/weight_0/x", "no export has"),
    ],
)
@pytest.mark.fault(31)
def test_other_members_are_refused(good: Path, tmp_path: Path, mark: Path, name: str, why: str) -> None:
    assert why in refused(edited(good, tmp_path / "policy.pt2", {name: b"x"}), mark)


def test_archives_of_another_make_are_refused(good: Path, tmp_path: Path, mark: Path) -> None:
    content, path = members(good), tmp_path / "policy.pt2"
    big = {**content, "policy/data/weights/weight_0": bytes(100 << 20)}
    assert "than the archive can hold" in refused(pack(path, big, zipfile.ZIP_DEFLATED), mark)
    packed = {"policy/data/weights/weight_0": os.urandom(100_000)}  # which packing makes larger
    assert "compressed" in refused(pack(path, packed, zipfile.ZIP_DEFLATED), mark)
    assert "several folders" in refused(pack(path, {**content, "other/models/model.json": b"{}"}), mark)
    assert "an incomplete archive" in refused(_write(path, good.read_bytes()[:-40]), mark)
    assert "an incomplete archive" in refused(_write(path, b""), mark)
    assert "an incomplete archive" in refused(_write(path, pickled(mark, "plain")), mark)
    legacy = {"version": b"8.0", "serialized_state_dict.pt": pickled(mark, "2")}
    assert "several folders" in refused(pack(path, legacy), mark)
    for lacking in ("models/model.json", "extra/metadata.json", "archive_format", "byteorder"):
        assert "it lacks" in refused(edited(good, path, {lacking: None}), mark)
    assert "byte order" in refused(edited(good, path, {"byteorder": b"big"}), mark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(pack(path, content), "a") as file:
            file.writestr("policy/models/model.json", b"{}")
    assert "two members with one name" in refused(path, mark)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def target(name: str) -> Callable[[Any], object]:
    def change(model: Any) -> None:
        model["graph_module"]["graph"]["nodes"][0]["target"] = name

    return change


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "torch.hub.load",
        "torch.ops.load_library",
        "torch.ops.aten.from_file.default",
        "builtins.eval",
        "_operator.attrgetter",
        "torch.ops.aten.add.out",
        "torch.ops.aten.as_strided.default",
        "math.sqrt",
        "torch.ops.aten.set_.default",
        "torch.ops.higher_order.cond",
        "#namespace:operator",
        "torch.ops.aten.__class__.default",
        "torch.ops.prims.device_put.default",
        "torch.ops.aten.save.default",
        "",
    ],
)
@pytest.mark.fault(31)
def test_operators_that_are_not_on_the_list_are_refused(good: Path, tmp_path: Path, mark: Path, name: str) -> None:
    text = refused(edited(good, tmp_path / "policy.pt2", {"models/model.json": target(name)}), mark)
    assert "operators that pql knows, not the operator" in text
    assert "--trust (trust=True)" in text


def test_the_list_holds_operators_that_torch_has_and_none_that_takes_a_name_of_a_file() -> None:
    for name in OPERATORS:
        packet = getattr(torch.ops.aten, name, None)
        assert packet is not None, name
        for overload in packet.overloads():
            arguments = {a.name for a in getattr(packet, overload)._schema.arguments}
            assert not arguments & {"filename", "shared", "storage"}, name
    assert find_operator("torch.ops.aten.relu_.default") is torch.ops.aten.relu_.default


@pytest.mark.fault(16, 31)
def test_text_that_torch_evaluates_is_only_text_here(good: Path, tmp_path: Path, mark: Path) -> None:
    """torch's loader evaluates sizes as expressions and makes source code of names; here they are never looked at."""
    text = members(good)["policy/models/model.json"].decode()
    assert "Symbol('s" in text
    evil = f"__import__('os').mkdir({str(mark)!r})"
    start = text.index("Symbol('s")
    symbol = text[start : text.index('"', start)]
    named = text.replace(symbol, evil).replace("inputs_0", f"x=__import__('os').mkdir({str(mark)!r})")
    bad = edited(good, tmp_path / "policy.pt2", {"models/model.json": named.encode()})
    assert torch.equal(pql.load_policy(bad)(OBS), pql.load_policy(good)(OBS))
    assert not mark.exists()


def in_graph(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda model: change(model["graph_module"]["graph"])


def bomb(graph: Any) -> None:
    """Products of all pairs of numbers, of all pairs of these, and so on."""
    name = graph["nodes"][0]["outputs"][0]["as_tensor"]["name"]
    for i in range(6):
        for operator, names in (("flatten.using_ints", ["self"]), ("outer.default", ["self", "vec2"])):
            inputs = [{"name": k, "arg": {"as_tensor": {"name": name}}, "kind": 1} for k in names]
            name = f"{operator}{i}"
            node = {"target": f"torch.ops.aten.{operator}", "inputs": inputs, "metadata": {}}
            graph["nodes"].insert(-1, {**node, "outputs": [{"as_tensor": {"name": name}}]})


@pytest.mark.fault(31)
def test_a_graph_that_would_fill_the_memory_is_refused(good: Path, tmp_path: Path, mark: Path) -> None:
    path = tmp_path / "policy.pt2"
    assert "elements" in refused(edited(good, path, {"models/model.json": in_graph(bomb)}), mark)

    def wide(config: Any) -> None:
        next(iter(config["config"].values()))["tensor_meta"]["sizes"] = [{"as_int": 10**9}, {"as_int": 10**9}]

    name = "data/weights/model_weights_config.json"
    assert "larger than its data" in refused(edited(good, path, {name: wide}), mark)
    idle = {"target": "torch.ops.aten.relu.default", "inputs": [], "outputs": [], "metadata": {}}
    many = in_graph(lambda graph: graph["nodes"].extend([idle] * 20_001))
    assert "operators" in refused(edited(good, path, {"models/model.json": many}), mark)
    assert "nested" in refused(edited(good, path, {"models/model.json": b"[" * 200_000}), mark)


def node(target: str, output: dict[str, Any], *arguments: dict[str, Any], **named: dict[str, Any]) -> dict[str, Any]:
    """An operator of a graph, as JSON."""
    inputs = [{"name": "", "arg": argument, "kind": 1} for argument in arguments]
    inputs += [{"name": name, "arg": argument, "kind": 2} for name, argument in named.items()]
    return {"target": target, "inputs": inputs, "outputs": [output], "metadata": {}}


def size(name: str) -> dict[str, Any]:
    return {"as_sym_int": {"as_name": name}}


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def calls(target: str, *arguments: dict[str, Any], result: str = "x", times: int = 1) -> Callable[[Any], object]:
    """A graph that begins with an operator, its result named ``result`` (0), as often as said."""
    outputs = [
        {"as_sym_int": {"as_name": f"{result}{i}"}} if "_operator" in target else tensor(f"{result}{i}")
        for i in range(times)
    ]
    return in_graph(
        lambda graph: graph["nodes"].__setitem__(slice(0, 0), [node(target, o, *arguments) for o in outputs])
    )


FULL = ("torch.ops.aten.full.default", {"as_ints": [1 << 20]}, {"as_int": 1})
BOMBS: dict[str, tuple[Callable[[Any], object], str]] = {
    "text times a number": (
        calls("_operator.mul", {"as_string": "A"}, {"as_int": 10**11}),
        "mul of invalid sizes",
    ),
    "text as a format": (calls("_operator.mod", {"as_string": "%099999999999d"}, {"as_int": 1}), "mod of invalid"),
    "a text's sum": (calls("_operator.add", {"as_string": "A"}, {"as_string": "A"}), "add of invalid sizes"),
    "a number too large": (
        calls("_operator.mul", {"as_int": 1 << 40}, {"as_int": 1 << 40}),
        "mul of invalid sizes",
    ),
    "a list times a number": (calls("torch.ops.aten.mul.left_t", {"as_ints": [1]}, {"as_int": 10**10}), "no tensor"),
    "a power of numbers": (calls("torch.ops.aten.pow.int", {"as_int": 3}, {"as_int": 10**9}), "gives no tensor"),
    "many tensors": (calls(*FULL, times=100), "more elements"),
    "on the CPU": (calls("torch.ops.aten.full.default", {"as_ints": [1 << 34]}, {"as_int": 1}), "more elements"),
    "many pieces": (
        in_graph(
            lambda graph: graph["nodes"].__setitem__(
                slice(0, 0),
                [
                    node("torch.ops.aten.full.default", tensor("x"), {"as_ints": [1 << 24]}, {"as_int": 1}),
                    node("torch.ops.aten.unbind.int", {"as_tensors": []}, tensor("x")),
                ],
            )
        ),
        "more than 65,536 pieces",
    ),
    "in place, often": (
        in_graph(
            lambda graph: graph["nodes"].__setitem__(
                slice(0, 0),
                [
                    node(FULL[0], tensor("x0"), {"as_ints": [1 << 20]}, {"as_float": 1.0}),
                    *(node("torch.ops.aten.sin_.default", tensor(f"x{i + 1}"), tensor(f"x{i}")) for i in range(100)),
                ],
            )
        ),
        "more elements",
    ),
}


@pytest.mark.parametrize(("change", "why"), BOMBS.values(), ids=BOMBS)
@pytest.mark.fault(31)
def test_small_files_that_ask_for_much_are_refused(good: Path, tmp_path: Path, mark: Path, change, why: str) -> None:
    bad = edited(good, tmp_path / "policy.pt2", {"models/model.json": change})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert why in refused(bad, mark)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_numbers_do_not_grow_by_squaring(good: Path, tmp_path: Path, mark: Path) -> None:
    def squares(graph: Any) -> None:
        first = [node("_operator.add", size("s0"), {"as_int": 3}, {"as_int": 0})]
        graph["nodes"][:0] = first + [
            node("_operator.mul", size(f"s{i + 1}"), size(f"s{i}"), size(f"s{i}")) for i in range(45)
        ]

    assert "mul of invalid sizes" in refused(
        edited(good, tmp_path / "policy.pt2", {"models/model.json": in_graph(squares)}), mark
    )


@pytest.mark.parametrize("grow", ["powers", "a step"])
def test_a_batch_takes_no_more_than_its_rows_justify(good: Path, tmp_path: Path, grow: str) -> None:
    """Sizes of batch ** 8, or that jump at a batch of 16, pass for the two rows that a file is first looked at with."""

    def change(graph: Any) -> None:
        own = graph["inputs"][-1]["as_tensor"]["name"]
        nodes = [node("torch.ops.aten.sym_size.int", size("s0"), tensor(own), {"as_int": 0})]
        if grow == "powers":
            nodes += [node("_operator.mul", size(f"s{i + 1}"), size(f"s{i}"), size(f"s{i}")) for i in range(3)]
        else:
            nodes += [
                node("_operator.ge", size("s1"), size("s0"), {"as_int": 16}),
                node("_operator.mul", size("s2"), size("s1"), {"as_int": 1 << 34}),
                node("_operator.add", size("s3"), size("s2"), {"as_int": 1}),
            ]
        full = node("torch.ops.aten.full.default", tensor("x"), {"as_sym_ints": [{"as_name": "s3"}]}, {"as_int": 1})
        graph["nodes"][:0] = [*nodes, full]

    policy = pql.load_policy(edited(good, tmp_path / "policy.pt2", {"models/model.json": in_graph(change)}))
    assert policy(OBS[:2]).shape == (2, 1)
    with pytest.raises(ConfigError, match=r"a policy that acts for 16 environments \(more elements than its size just"):
        policy(torch.zeros(16, 3))
    assert pql.load_policy(good)(torch.zeros(4096, 3)).shape == (4096, 1)


def test_many_names_of_one_member_take_no_more_than_it(good: Path, tmp_path: Path, mark: Path) -> None:
    name = "data/weights/model_weights_config.json"

    def rename(config: Any, shift: bool) -> None:
        largest = max(config["config"].values(), key=lambda entry: len(json.dumps(entry["tensor_meta"]["sizes"])))
        for i in range(2000):
            entry = config["config"][f"w{i}"] = copy.deepcopy(largest)
            if shift:
                entry["tensor_meta"]["sizes"][0]["as_int"] = 1
                entry["tensor_meta"]["strides"][0]["as_int"] += i

    bad = edited(good, tmp_path / "policy.pt2", {name: lambda config: rename(config, True)})
    assert "more tensors than data" in refused(bad, mark)
    tied = edited(good, tmp_path / "tied.pt2", {name: lambda config: rename(config, False)})
    assert torch.equal(pql.load_policy(tied)(OBS), pql.load_policy(good)(OBS))  # all names of one tensor


def test_what_makes_a_tensor_of_nothing_takes_a_device() -> None:
    """Else it would be on the CPU while shapes alone are looked at."""
    for name in OPERATORS:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            try:
                function = find_operator(f"torch.ops.aten.{name}.{overload}")
            except UnknownOperatorError:
                continue
            of = [str(argument.type) for argument in function._schema.arguments]
            assert any("Tensor" in kind for kind in of) or takes_device(function), (name, overload)


@pytest.mark.parametrize(
    ("entry", "value", "why"),
    [
        ("format", "other", "format is not pql-policy"),
        ("format_version", 9, "format_version 2 or older; this is 9"),
        ("format_version", "1", "format_version is not a whole number"),
        ("spec", None, "spec is not a mapping"),
        ("task", {"name": "x", "process": {"python": "./evil"}}, "task is not name, id"),
        ("inputs", [], "an action"),
        ("algorithm", "a\x1b]0;OWN\x07", r"without control characters: a\x1b]0;OWN\x07"),
        ("family", "\ud800", r"\ud800"),
        ("task", {"name": "${oc.env:HOME}"}, "without interpolations"),
        ("action", {"kind": "box"}, "a kind and a size"),
        ("inputs", [{"name": "obs.policy", "shape": ["batch", 7], "dtype": "float32"}], "a group of spec.obs"),
        ("outputs", [{"name": "action", "shape": ["batch", 2], "dtype": "float32"}], "unlike in its metadata"),
    ],
)
@pytest.mark.fault(31)
def test_metadata_that_no_export_has_are_refused(good: Path, tmp_path: Path, mark: Path, entry, value, why) -> None:
    bad = edited(good, tmp_path / "policy.pt2", {"extra/metadata.json": lambda about: about.update({entry: value})})
    assert why in refused(bad, mark)


def test_an_export_s_task_is_looked_at_as_a_run_s(good: Path, tmp_path: Path, mark: Path) -> None:
    (tmp_path / "evil_task.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    for task in ({"name": "evil_task:make"}, {"name": "pendulum", "kwargs": {"file": "/etc/passwd"}}):
        bad = edited(
            good, tmp_path / "policy.pt2", {"extra/metadata.json": lambda about, task=task: about.update(task=task)}
        )
        assert main(["eval", str(bad), "episodes=1"]) == 2
        assert main(["play", str(bad), "steps=1"]) == 2
        assert torch.equal(pql.load_policy(bad)(OBS), pql.load_policy(good)(OBS))  # which needs no task
    assert not mark.exists()


def test_the_file_beside_it_says_which_archive_it_is(good: Path, tmp_path: Path, mark: Path) -> None:
    beside = json.loads(good.with_name("policy.json").read_text())
    assert set(beside["sha256"]) == {"policy.pt2"}
    (tmp_path / "policy.json").write_text(json.dumps(beside))
    (tmp_path / "policy.pt2").write_bytes(good.read_bytes())
    pql.load_policy(tmp_path / "policy.pt2")
    other = edited(good, tmp_path / "policy.pt2", {})
    assert "its hash is not the one in policy.json next to it" in refused(other, mark)
    (tmp_path / "policy.json").write_text("[" * 200_000)
    assert "nested" in refused(other, mark)
    (tmp_path / "policy.json").unlink()
    pql.load_policy(other)


def test_mutated_exports_load_as_they_were_or_are_refused(good: Path, tmp_path: Path, mark: Path) -> None:
    """Bytes, members and JSON values changed at random: one line, or a policy; never another exception."""
    rng, want, whole = random.Random(3), pql.load_policy(good)(OBS), good.read_bytes()
    loaded = 0
    for i in range(120):
        path = tmp_path / f"{i}.pt2"
        if i % 3 == 0:
            data = bytearray(whole)
            for _ in range(rng.choice((1, 4, 64))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data if i % 2 else data[: rng.randrange(len(data))])
        else:
            name = rng.choice(("models/model.json", "extra/metadata.json", "data/weights/model_weights_config.json"))
            edited(good, path, {name: lambda tree: mutate(tree, rng)})
        try:
            got = pql.load_policy(path)(OBS)
        except ConfigError:
            pass
        else:
            loaded += 1
            assert got.shape == want.shape
            if i % 3 == 0:
                assert torch.equal(got, want)
        path.unlink()
    assert 0 < loaded < 110
    assert not mark.exists()


# -- ONNX -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(16, 31)
def test_onnx_files_with_more_than_their_own_numbers_are_refused(good: Path, tmp_path: Path, mark: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = pql.export_policy(good.parents[1], tmp_path / "out", formats=["onnx"]).files["onnx"]
    (path.with_name("policy.json")).unlink()
    assert pql.load_policy(path)(OBS).shape == (6, 1)
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
        model = onnx.load(path)
        change(model)
        bad = tmp_path / "bad.onnx"
        bad.write_bytes(model.SerializeToString())
        assert why in refused(bad, mark)
    for data in (b"", b"\xff" * 100, path.read_bytes()[:200], pickled(mark, "plain"), b"\x3a" + b"\xff" * 9 + b"\x01"):
        bad.write_bytes(data)
        refused(bad, mark)


def test_an_overlong_number_hides_nothing() -> None:
    """data_location=1 as protocol buffers may also write it, in three bytes, within a model's graph and initializer."""
    tensor = bytes([14 << 3, 0x81, 0x80, 0x00])
    graph = bytes([5 << 3 | 2, len(tensor)]) + tensor
    with pytest.raises(ValueError, match="another file"):
        check_onnx(bytes([7 << 3 | 2, len(graph)]) + graph)
    check_onnx(bytes([7 << 3 | 2, 0]))


def test_members_are_read_by_name(good: Path) -> None:
    content = read_members(good.read_bytes())
    assert content["archive_format"] == b"pt2"
    assert json.loads(content["extra/metadata.json"])["task"]["name"] == "pendulum"
