"""What packing, splitting and rounding keep, whatever the shape: properties over random sizes, groups and ranks."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specbuild.compilers.nbits import pack_blocks
from specbuild.quant import SCHEMES, Levels
from specbuild.quant.packing import pack_rows, unpack_rows
from specbuild.quant.rounding import round_channels, round_groups
from specbuild.ranks import join_tensor, split_shape, split_tensor
from specbuild.shape import ModelShape

fixed = settings(max_examples=60, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
GROUPS = st.sampled_from([32, 48, 64, 128])
TP = st.sampled_from([1, 2, 3, 4, 8])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
MAGNITUDES = st.floats(-30, 30)  # of weights, as a power of two


def random_integers(seed, low, high, shape):
    return torch.randint(low, high, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def random_floats(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- packing


@fixed
@given(SEEDS, st.integers(1, 40), st.integers(1, 70))
def test_packed_rows_unpack_to_themselves_and_any_bytes_to_rows_that_pack_to_them(seed, pairs, columns):
    q = random_integers(seed, -8, 8, (2 * pairs, columns))
    packed = pack_rows(q)
    assert (packed.dtype, tuple(packed.shape)) == (torch.int8, (pairs, columns))
    assert torch.equal(unpack_rows(packed), q)
    stored = random_integers(seed, -128, 128, (pairs, columns))
    assert torch.equal(pack_rows(unpack_rows(stored)), stored)


@fixed
@given(SEEDS, st.integers(1, 8), st.integers(1, 9))
def test_the_contract_s_vector_keeps_its_bytes_wherever_it_stands(seed, pairs, columns):
    q = random_integers(seed, -8, 8, (2 * pairs, columns + 1))
    row, column = 2 * (seed % pairs), seed % columns
    q[row : row + 2, column : column + 2] = torch.tensor([[1, -2], [3, -8]])
    assert pack_rows(q)[row // 2, column : column + 2].tolist() == [0x31, 0x8E - 256]


# --- ranks


@st.composite
def shapes_of_ranks(draw):
    """A model's dimensions, and a number of ranks that convert accepts for them."""
    tp = draw(TP)
    kv_heads = draw(st.sampled_from([n for n in range(1, 17) if n % tp == 0 or tp % n == 0]))
    heads = kv_heads * draw(st.integers(1, 3)) * (tp if tp > kv_heads else 1)
    shape = ModelShape(
        architecture="LlamaForCausalLM", layers=1, hidden=draw(st.integers(1, 5)) * tp, intermediate=draw(st.integers(1, 5)) * tp,
        heads=heads, kv_heads=kv_heads, head_dim=draw(st.integers(1, 6)), vocab=draw(st.integers(1, 40)), max_positions=8,
        rope_theta=1e4, norm_eps=1e-5,
    )  # fmt: skip
    return shape, tp


def sizes_of(split, shape):
    """Return the sizes of a tensor that is cut in a way."""
    rows = {"qkv": shape.q_rows + 2 * shape.kv_rows, "halves": 2 * shape.intermediate, "vocab": shape.vocab, "rows": shape.intermediate}
    return rows.get(split, shape.hidden), shape.hidden


@pytest.mark.parametrize("split", ["none", "rows", "columns", "qkv", "halves", "vocab"])
@fixed
@given(shapes_of_ranks(), st.booleans())
def test_what_is_split_among_ranks_joins_to_itself(split, ranks, vector):
    shape, tp = ranks
    size = sizes_of(split, shape)
    size = size[-1 if split == "columns" else 0 :][:1] if vector and split != "vocab" else size
    whole = torch.arange(np.prod(size), dtype=torch.float64).reshape(size) + 1  # every value once, and no zero
    pieces = [split_tensor(whole, split, shape, tp, rank) for rank in range(tp)]
    assert {tuple(piece.shape) for piece in pieces} == {split_shape(size, split, shape, tp)}
    assert torch.equal(join_tensor(pieces, split, shape), whole)
    kept = torch.cat([piece.flatten() for piece in pieces])
    assert torch.equal(kept[kept > 0].unique(), whole.flatten())  # padding is zero


@fixed
@given(shapes_of_ranks())
def test_every_rank_has_the_key_value_heads_that_its_query_heads_read(ranks):
    """A query head reads key-value head `head // (heads / kv_heads)`, in the whole model and within a rank."""
    shape, tp = ranks
    count = [shape.heads, shape.kv_heads, shape.kv_heads]
    names = torch.cat([torch.arange(n).repeat_interleave(shape.head_dim) + 1000 * i for i, n in enumerate(count)])
    per_rank, kv_per_rank = shape.heads // tp, max(1, shape.kv_heads // tp)
    for rank in range(tp):
        piece = split_tensor(names, "qkv", shape, tp, rank)[:: shape.head_dim].tolist()
        query, key, value = piece[:per_rank], piece[per_rank:][:kv_per_rank], piece[per_rank + kv_per_rank :]
        for place, head in enumerate(query):
            wanted = head // (shape.heads // shape.kv_heads)
            local = place // (per_rank // kv_per_rank)
            assert (key[local], value[local]) == (1000 + wanted, 2000 + wanted)


# --- INT4 groups


@fixed
@given(SEEDS, DTYPES, GROUPS, st.integers(1, 5), st.integers(1, 4), MAGNITUDES)
def test_group_rounding_is_within_half_a_step_or_clamped(seed, dtype, group, rows, groups, magnitude):
    floats = random_floats(seed, (rows, groups * group)) * 2**magnitude
    weight = floats.clamp(-60000, 60000).to(dtype)  # what float16 can hold
    q, scale = round_groups(weight, group)
    assert (q.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.float32, (rows, groups))
    assert bool((scale.isfinite() & (scale > 0)).all())
    steps = weight.double() / scale.double().repeat_interleave(group, dim=1)
    inside = (q > -8) & (q < 7)
    assert float((q - steps)[inside].abs().max()) <= 0.5 + 1e-5
    assert bool((steps[q == 7] >= 6.5 - 1e-5).all())  # the largest of a group, a hair above 7 where its scale was rounded
    assert bool((steps[q == -8] <= -7.5 + 1e-5).all())


@fixed
@given(SEEDS, DTYPES, GROUPS, st.integers(1, 5), st.integers(2, 4))
def test_a_group_of_zeros_stays_zero_beside_others(seed, dtype, group, rows, groups):
    weight = random_floats(seed, (rows, groups * group)).to(dtype)
    row, zero = seed % rows, seed % groups
    weight[row, zero * group : (zero + 1) * group] = 0
    q, scale = round_groups(weight, group)
    assert not q[row, zero * group : (zero + 1) * group].any()
    assert scale[row, zero] == 1
    assert bool(q.reshape(rows, groups, group)[row, zero - 1].any())


@pytest.mark.parametrize("split", ["rows", "columns", "qkv", "halves"])
@fixed
@given(SEEDS, shapes_of_ranks(), DTYPES, st.sampled_from([32, 64]))
def test_a_rank_s_tensors_are_the_same_whether_split_before_or_after_quantizing(split, seed, ranks, dtype, group):
    """Rows are packed in pairs and columns share scales in groups: a rank's must not be cut. check_groups refuses the others."""
    shape, tp = ranks
    shape = dataclasses.replace(shape, head_dim=2 * shape.head_dim, hidden=tp * group * (1 + seed % 2), intermediate=2 * shape.intermediate)
    weight = random_floats(seed, sizes_of(split, shape)).to(dtype)
    whole = SCHEMES["int4_awq"].quantize(weight, group, None)
    integers = unpack_rows(whole["weight"])
    for rank in range(tp):
        alone = SCHEMES["int4_awq"].quantize(split_tensor(weight, split, shape, tp, rank), group, None)
        assert torch.equal(alone["weight"], pack_rows(split_tensor(integers, split, shape, tp, rank)))
        assert torch.equal(alone["weights_scaling_factor"], split_tensor(whole["weights_scaling_factor"], split, shape, tp, rank))
        if split in ("rows", "columns"):  # packing itself commutes too
            assert torch.equal(alone["weight"], split_tensor(whole["weight"], split, shape, tp, rank))


# --- one scale per output row


@pytest.mark.parametrize("scheme", ["int8_wo", "int4_wo"])
@fixed
@given(SEEDS, DTYPES, st.integers(1, 8), st.integers(2, 70), st.integers(-10, 3))
def test_stored_channels_give_their_integers_and_scales_back(scheme, seed, dtype, rows, columns, exponent):
    """Every row reaches an end of its range, as rounding with the row's own scale makes it; scales are ones that the dtype holds."""
    bits = SCHEMES[scheme].bits
    top = 2 ** (bits - 1)
    q = random_integers(seed, -top, top, (rows, columns))
    for row in range(rows):
        q[row, (seed + row) % columns] = -top if (seed >> row % 32) & 1 else top - 1
    scale = ((random_floats(seed, (rows, 1)).abs() + 0.5) * 2.0**exponent).to(dtype).float()
    tensors = SCHEMES[scheme].store(Levels(q, scale, None, bits), dtype)
    assert (tensors.keys(), tensors["weight"].dtype) == ({"weight"}, dtype)
    found, scales = round_channels(tensors["weight"], bits)
    assert torch.equal(scales, scale)
    assert torch.equal(found, q)


@pytest.mark.parametrize("scheme", ["int8_wo", "int4_wo"])
@fixed
@given(SEEDS, DTYPES, st.integers(1, 8), st.integers(1, 70))
def test_integers_of_rounded_channels_survive_being_stored(scheme, seed, dtype, rows, columns):
    weight = random_floats(seed, (rows, columns)).to(dtype)
    assume(bool(weight.any(dim=1).all()))
    levels = SCHEMES[scheme].levels({"weight": weight})
    again = SCHEMES[scheme].levels(SCHEMES[scheme].store(levels, dtype))
    assert torch.equal(again.scale, levels.scale)
    assert torch.equal(again.q, levels.q)


# --- MatMulNBits


def read_blocks(packed, scales, bits, block):
    """Dequantize by the operator's documentation: unsigned, low nibble first, zero point 2^(bits - 1), one scale per block."""
    rows, blocks = scales.shape
    weight = np.zeros((rows, blocks * block), np.float32)
    for column in range(blocks * block):
        at, inside = divmod(column, block)
        byte = packed[:, at, inside * bits // 8]
        value = byte if bits == 8 else (byte >> (4 * (inside % 2))) & 15
        weight[:, column] = (value.astype(np.float32) - 2 ** (bits - 1)) * scales[:, at]
    return weight


@fixed
@given(SEEDS, st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 4), st.sampled_from([16, 32, 64]), st.integers(1, 4))
def test_blocks_dequantize_to_the_integers_times_their_scales(seed, bits, rows, groups, block, per_group):
    rng = np.random.default_rng(seed)
    group = block * per_group
    q = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (rows, groups * group), dtype=np.int8)
    scale = rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float32)
    packed, scales = pack_blocks(q, scale, bits, block)
    assert np.array_equal(read_blocks(packed, scales, bits, block), q * np.repeat(scale, group, axis=1))


@fixed
@given(SEEDS, st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 200), st.sampled_from([16, 32, 64]))
def test_one_scale_per_row_may_end_within_a_block(seed, bits, rows, columns, block):
    rng = np.random.default_rng(seed)
    q = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (rows, columns), dtype=np.int8)
    scale = rng.uniform(0.01, 0.1, (rows, 1)).astype(np.float32)
    weight = read_blocks(*pack_blocks(q, scale, bits, block), bits, block)
    assert np.array_equal(weight[:, :columns], q * scale)
    assert not weight[:, columns:].any()
