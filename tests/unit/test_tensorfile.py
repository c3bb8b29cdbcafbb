import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specbuild.errors import CheckpointError
from specbuild.tensorfile import TensorSpec, TensorWriter, read_header

DTYPES = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}  # fmt: skip


def tensor_of(dtype, shape):
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_reads_what_the_safetensors_library_wrote(tmp_path):
    tensors = {name: tensor_of(dtype, (3, 5)) for name, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(2.5)
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "x.safetensors")
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        loaded = entries[name].load()
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)


def test_the_safetensors_library_reads_what_was_written_in_any_order(tmp_path):
    tensors = {name: tensor_of(dtype, (3, 5)) for name, dtype in DTYPES.items()}
    path = tmp_path / "x.safetensors"
    writer = TensorWriter(path, [TensorSpec(name, name, (3, 5)) for name in tensors], {"format": "pt"})
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.close()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in load_file(path).items())
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == tensors.keys()
        assert file.metadata() == {"format": "pt"}


def test_a_view_is_written_as_it_looks(tmp_path):
    tensor = torch.arange(12.0).reshape(3, 4)
    writer = TensorWriter(tmp_path / "x.safetensors", [TensorSpec("t", "F32", (4, 3)), TensorSpec("half", "F32", (3, 2))])
    writer.write("t", tensor.T)
    writer.write("half", tensor.chunk(2, dim=1)[1])
    writer.close()
    loaded = load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["t"], tensor.T)
    assert torch.equal(loaded["half"], tensor[:, 2:])


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3, dtype=torch.float16), torch.zeros(3, 2)], ids=["dtype", "shape"])
def test_a_tensor_unlike_its_plan_is_refused(tmp_path, tensor):
    writer = TensorWriter(tmp_path / "x.safetensors", [TensorSpec("t", "F32", (2, 3))])
    with pytest.raises(CheckpointError, match="Cannot write tensor t"):
        writer.write("t", tensor)
    writer.abort()


def test_a_promised_tensor_must_be_written(tmp_path):
    writer = TensorWriter(tmp_path / "x.safetensors", [TensorSpec("a", "F32", (1,)), TensorSpec("b", "F32", (1,))])
    writer.write("a", torch.ones(1))
    with pytest.raises(CheckpointError, match="tensor b was never written"):
        writer.close()


def header(values):
    raw = json.dumps(values).encode() if not isinstance(values, bytes) else values
    return struct.pack("<Q", len(raw)) + raw


ONE = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes hold no whole safetensors header"),
        (b"short", "no whole safetensors header"),
        (struct.pack("<Q", 1 << 40), "no whole safetensors header"),
        (header({"a": ONE})[:20], "no whole safetensors header"),
        (header(b"{nonsense"), "not valid safetensors"),
        (header([1]), "not valid safetensors"),
        (header({"a": {"dtype": "F32"}}), "not valid safetensors"),
        (header({"a": ONE}) + b"\0" * 15, "truncated"),
        (header({"a": {**ONE, "data_offsets": [0, 8]}}) + b"\0" * 16, "not valid safetensors"),  # bytes unlike the shape
        (header({"a": {**ONE, "data_offsets": [-16, 0]}}) + b"\0" * 16, "not valid safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_after_its_header_was_read_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"t": torch.ones(64)}, path)
    entry = read_header(path)["t"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="ends after 248 of 256 bytes"):
        entry.load()
