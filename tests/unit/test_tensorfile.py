import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specbuild.errors import CheckpointError
from specbuild.tensorfile import TensorSpec, TensorWriter, find_not_finite, read_header, row_blocks, run_each

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


@pytest.mark.parametrize("shift", [0, 1])
def test_a_large_tensor_is_read_wherever_it_lies_and_may_be_changed(tmp_path, shift):
    """A header of any length is legal, so data may lie at odd offsets."""
    tensor = torch.randn(3, 500_000, generator=torch.Generator().manual_seed(0)).half()
    item = {"dtype": "F16", "shape": [3, 500_000], "data_offsets": [6, 6 + tensor.nbytes]}
    raw = json.dumps({"small": {"dtype": "F16", "shape": [3], "data_offsets": [0, 6]}, "t": item}).encode()
    raw += b" " * (len(raw) % 2 + shift)
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + torch.ones(3).half().numpy().tobytes() + tensor.numpy().tobytes())
    entry = read_header(path)["t"]
    assert entry.offset % 2 == shift
    loaded = entry.load()
    assert torch.equal(loaded, tensor)
    loaded.zero_()
    assert torch.equal(entry.load(), tensor)


def test_rows_are_written_in_any_order_and_all_are_wanted(tmp_path):
    tensor = torch.arange(12.0).reshape(4, 3)
    writer = TensorWriter(tmp_path / "x.safetensors", [TensorSpec("t", "F32", (4, 3))])
    writer.write_rows("t", 2, tensor[2:])
    with pytest.raises(CheckpointError, match="2 rows of it still to come"):
        writer.write_rows("t", 0, tensor[:3])
    writer.write_rows("t", 0, tensor[:2])
    writer.close()
    assert torch.equal(load_file(tmp_path / "x.safetensors")["t"], tensor)
    writer = TensorWriter(tmp_path / "x.safetensors", [TensorSpec("t", "F32", (4, 3))])
    writer.write_rows("t", 0, tensor[:2])
    with pytest.raises(CheckpointError, match="tensor t was never written"):
        writer.close()


@pytest.mark.parametrize("shape", [(7,), (1, 1), (6, 1 << 18), (3, 1 << 20), (1001, 997), (0, 4)])
def test_row_blocks_are_a_tensor_in_even_steps(shape):
    blocks = list(row_blocks(shape))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(shape[0]))
    assert all((block.stop - block.start) % 2 == 0 for block in blocks[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_row_that_is_not_finite_is_found(dtype, value):
    tensor = torch.full((3000, 300), torch.finfo(dtype).max, dtype=dtype)
    tensor[0, 0], tensor[1, 1] = -torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    assert find_not_finite(tensor) is None
    assert find_not_finite(tensor.chunk(2, dim=1)[1]) is None
    tensor[2999, 299] = value
    assert find_not_finite(tensor) == 2999
    tensor[5, 0] = value
    assert find_not_finite(tensor) == 5
    assert find_not_finite(tensor[:, 0]) == 5
    assert find_not_finite(tensor[:0]) is None


def test_work_is_done_in_order_on_one_core_each_and_the_first_error_ends_it():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(run_each(lambda i: (i, torch.get_num_threads()), range(50))) == [(i, 1) for i in range(50)]
        assert torch.get_num_threads() == 2
        begun = []
        with pytest.raises(ZeroDivisionError):
            list(run_each(lambda i: begun.append(i) or 1 / (3 - i), range(1000)))
        assert len(begun) < 50
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


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
