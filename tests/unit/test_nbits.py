"""The layout for MatMulNBits, against plain arithmetic and against the operator itself."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from specbuild.compilers.nbits import pack_blocks

CASES = [  # bits, block, columns, groups
    (4, 32, 64, 2), (4, 32, 64, 1), (4, 32, 128, 1), (4, 16, 64, 2), (4, 128, 256, 2), (8, 32, 64, 1), (8, 128, 256, 1),
    (4, 32, 100, 1), (8, 32, 100, 1), (8, 128, 100, 1), (4, 32, 256, 2), (4, 256, 512, 2),
]  # fmt: skip
OUT = 48


def make_case(bits, columns, groups, seed=0):
    rng = np.random.default_rng(seed)
    top = 1 << (bits - 1)
    q = rng.integers(-top, top, (OUT, columns), dtype=np.int8)
    scale = rng.uniform(0.01, 0.1, (OUT, groups)).astype(np.float32)
    return q, scale, q * np.repeat(scale, columns // groups, axis=1)


@pytest.mark.parametrize(("bits", "block", "columns", "groups"), CASES)
def test_blocks_dequantize_with_the_documented_zero_point_to_the_same_matrix(bits, block, columns, groups):
    q, scale, expected = make_case(bits, columns, groups)
    packed, scales = pack_blocks(q, scale, bits, block)
    blocks = -(-columns // block)
    assert (packed.dtype, packed.shape) == (np.uint8, (OUT, blocks, block * bits // 8))
    assert (scales.dtype, scales.shape) == (np.float32, (OUT, blocks))
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(OUT, blocks, block) if bits == 4 else packed
    weight = (values.astype(np.float32) - (1 << (bits - 1))) * scales[:, :, None]
    weight = weight.reshape(OUT, -1)
    assert np.array_equal(weight[:, :columns], expected.astype(np.float32))
    assert not weight[:, columns:].any()


@pytest.mark.parametrize("accuracy", [0, 4])
@pytest.mark.parametrize(("bits", "block", "columns", "groups"), CASES)
def test_the_operator_multiplies_with_that_matrix(bits, block, columns, groups, accuracy):
    q, scale, weight = make_case(bits, columns, groups)
    packed, scales = pack_blocks(q, scale, bits, block)
    attributes = {"K": columns, "N": OUT, "bits": bits, "block_size": block, "accuracy_level": accuracy}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", OUT])],
        [onnx.numpy_helper.from_array(packed, "b"), onnx.numpy_helper.from_array(scales, "s")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).normal(size=(5, columns)).astype(np.float32)
    (y,) = session.run(None, {"x": x})
    # Level 4 rounds each block of x to 8 bits: an error of at most amax / 254 per value, about 1/400 of the product's size.
    tolerance = (0.02 if accuracy == 4 else 1e-5) * np.abs(y).max()
    np.testing.assert_allclose(y, x @ weight.T, atol=tolerance, rtol=0)
