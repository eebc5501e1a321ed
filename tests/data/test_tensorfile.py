"""Tensor files that the safetensors library reads: all types, the hash, pieces, the result of a full disk."""

import hashlib
import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save

from pql.data import tensorfile

TENSORS = {
    "a/wide": torch.arange(5, dtype=torch.int64),
    "a/scalar": torch.tensor(2.5, dtype=torch.float64),
    "view": torch.arange(12.0).view(3, 4)[:, 1:3],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "one row": torch.arange(91.0).view(91, 1)[3].double(),
    "a stride of 91": torch.arange(4.0).as_strided((1,), (91,), 2),
    "none": torch.zeros(0, 3),
    "flags": torch.tensor([True, False, True]),
    "half": torch.randn(3, generator=torch.Generator().manual_seed(0)).half(),
    "short float": torch.tensor([1.5, -2.0]).bfloat16(),
    'bytes "é"': torch.arange(7, dtype=torch.uint8),
    **{f"int{n}": torch.arange(3, dtype=getattr(torch, f"int{n}")) for n in (8, 16, 32)},
    "nan": torch.tensor([float("nan"), float("inf")]),
}


@pytest.mark.parametrize("piece", [tensorfile.PIECE, 5])
def test_the_library_reads_what_is_written(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    file = tmp_path / "x"
    digest = tensorfile.write(file, TENSORS, {"format": "a-b"})
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    back = load_file(file)
    assert {k: (v.dtype, v.shape) for k, v in back.items()} == {k: (v.dtype, v.shape) for k, v in TENSORS.items()}
    assert all(torch.equal(back[k].nan_to_num(), v.nan_to_num()) for k, v in TENSORS.items())
    size = int.from_bytes(file.read_bytes()[:8], "little")
    assert size % 8 == 0
    assert json.loads(file.read_bytes()[8 : 8 + size])["__metadata__"] == {"format": "a-b"}


def test_the_bytes_are_the_librarys(tmp_path):
    """Except for types of the same width, which the library orders differently."""
    some = {k: TENSORS[k].contiguous() for k in ("a/wide", "view", "none", "flags", "half")}
    tensorfile.write(tmp_path / "x", some)
    assert (tmp_path / "x").read_bytes() == save(some)


def test_every_tensor_is_aligned_to_its_type(tmp_path):
    tensorfile.write(tmp_path / "x", TENSORS)
    data = (tmp_path / "x").read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    places = {k: (8 + size + v["data_offsets"][0]) % TENSORS[k].element_size() for k, v in entries.items()}
    assert set(places.values()) == {0}


@pytest.mark.fault(13)
def test_a_full_disk_is_an_os_error(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match=r"large|space"):
            tensorfile.write(tmp_path / "x", {"a": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
