"""PyTorch's own weight files: tensors load lazily and bit by bit, and nothing else in them is ever run."""

import os
from pathlib import Path

import pytest
import torch

from specbuild.errors import CheckpointError
from specbuild.picklefile import read_pickle


class Unsafe:
    """Unpickled, it would make a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int8"])
def test_a_tensor_has_its_dtype_shape_and_values(tmp_path, zipped, dtype):
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    torch.save({"a.weight": tensor, "b": tensor[0]}, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    entries = read_pickle(tmp_path / "x.bin")
    entry = entries["a.weight"]
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int8": "I8"}
    assert list(entries) == ["a.weight", "b"]
    assert (entry.name, entry.dtype, entry.shape, entry.path) == ("a.weight", names[dtype], (3, 4), tmp_path / "x.bin")
    assert entry.nbytes == tensor.nbytes
    assert torch.equal(entry.load(), tensor)


def test_a_parameter_is_its_tensor(tmp_path):
    torch.save({"w": torch.nn.Parameter(torch.ones(2))}, tmp_path / "x.bin")
    assert not read_pickle(tmp_path / "x.bin")["w"].load().requires_grad


def test_a_zip_file_is_mapped_and_not_read(tmp_path):
    torch.save({"w": torch.zeros(1 << 24)}, tmp_path / "x.bin")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    read_pickle(tmp_path / "x.bin")
    before = resident()
    entries = read_pickle(tmp_path / "x.bin")
    assert resident() - before < 1 << 23
    assert entries["w"].nbytes == 1 << 26


@pytest.mark.parametrize("zipped", [True, False])
def test_what_would_run_code_is_refused_and_not_run(tmp_path, zipped):
    torch.save({"w": torch.ones(2), "x": Unsafe(tmp_path / "made")}, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"^Cannot read weights in \S+x.bin: it holds \w+\.mkdir, expected tensors alone[^\n]*\.$"):
        read_pickle(tmp_path / "x.bin")
    assert not (tmp_path / "made").exists()


def whole(path):
    torch.save({"w": torch.ones(1000)}, path)
    return path.read_bytes()


BAD = {
    "empty": (lambda p: b"", "damaged"),
    "no pickle": (lambda p: b"hello, this is no weight file", "damaged"),
    "cut": (lambda p: whole(p)[:-200], "damaged"),
    "cut to its start": (lambda p: whole(p)[:300], "damaged"),
    "Git LFS pointer": (lambda p: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "Git LFS pointer"),
}


@pytest.mark.parametrize(("make", "match"), BAD.values(), ids=BAD)
def test_a_damaged_file_is_one_line(tmp_path, make, match):
    data = make(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"^Cannot read weights in \S+x.bin: [^\n]*{match}[^\n]*\.$"):
        read_pickle(tmp_path / "x.bin")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([torch.ones(2)], "holds a list, expected tensors by name"),
        ({"state_dict": {"w": torch.ones(2)}}, "state_dict is no plain tensor .dict."),
        ({"w": torch.ones(2).to_sparse()}, "w is no plain tensor"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "torch.complex64, expected one of"),
    ],
)
def test_what_is_no_mapping_of_plain_tensors_is_refused(tmp_path, value, match):
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=match):
        read_pickle(tmp_path / "x.bin")
