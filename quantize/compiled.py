"""The compiled loops behind `affine.py` and `fp4.py`, which check the arguments. Importing this file needs numba.

Plain loops, left to numba's own vectorizer, reach 3 to 8 GB/s, depending on the group size; told what to do with whole
vectors, it reaches 12 to 14. That code names no processor: LLVM cuts vectors to the registers there are. Nothing is
reordered: divisions are divisions, and no multiplication is fused with an addition.

All cached functions are here, because numba recompiles them when this file changes, and only then.
"""

from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import literally, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .lanes import F32, I8, I16, I32, arrays

TILE = 16  # groups whose scales and biases are computed side by side
BLOCK = 16  # NVFP4 codes that share a block scale

SMALLEST_SCALE = float(np.float32(1e-7))
HUGE = 0x6C80  # 2^90 in BF16. Below it nothing overflows or becomes NaN on the way to a code
ROUND = 1.5 * 2**23  # a float32 of this size has no bits for a fraction: x + ROUND rounds x, halves to even


# --- affine: the formula stands in `affine.quantize_into` ---


def _key(x):
    """BF16 bits, as int16, to integers in the order of the numbers and back: a negative one is minus its magnitude."""
    return (x < 0).where(x.constant(-0x8000) - x, x)


def _group_extremes(rows, start, size):
    """Keys of the values from rows[start] on, reduced to 32 minima and 32 maxima."""
    low = high = _key(rows.load(start, I16, 32))
    for i in range(start + 32, start + size, 32):
        key = _key(rows.load(i, I16, 32))
        low, high = low.minimum(key), high.maximum(key)
    return low, high


def _interleave(run):
    """How to bring runs of lanes of two vectors of 32 together: the near half of each, and the far half.

    Short runs stay within sections of 128 bits, which is cheaper on x86.
    """
    section = 8 if run < 8 else 32
    starts = [start + i for start in range(0, 32, section) for i in range(0, section // 2, run)]
    near = [start + side + i for start in starts for side in (0, 32) for i in range(run)]
    return near, [lane + section // 2 for lane in near]


def _tile_extremes(rows, size, first=0, groups=TILE):
    """Keys of minimum and maximum, 32 lanes each: lane i is of group i % groups of these, counted from the first.

    A vector of n groups and another become one of 2 n groups: half of their lanes against the other half.
    """
    if groups == 1:
        return _group_extremes(rows, first * size, size)
    run = groups // 2
    near, far = _interleave(run)
    left, right = _tile_extremes(rows, size, first, run), _tile_extremes(rows, size, first + run, run)
    low, high = ((a.shuffle(near, b), a.shuffle(far, b)) for a, b in zip(left, right, strict=True))
    return low[0].minimum(low[1]), high[0].maximum(high[1])


def _magnitude(x):
    """Integers in the order of |x|, x in float32."""
    return x.view(I32) & 0x7FFFFFFF


def _to_f32(key):
    return (_key(key).resize(I32) << 16).view(F32)


def _to_bf16(x):
    """Float32 to BF16 bits, nearest even; not for NaN."""
    raw = x.view(I32)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).resize(I16)


def _scale_and_bias(low, high, bits):
    """Float32 minimum and maximum, one group a lane, to its scale and bias, not yet rounded to BF16."""
    flip = _magnitude(low) > _magnitude(high)
    step = ((high - low) / (2.0**bits - 1)).maximum(SMALLEST_SCALE)
    step = flip.where(step, -step)
    edge = flip.where(low, high)
    edge_code = (edge / step).rint()
    off_zero = _magnitude(edge_code) > 0
    return off_zero.where(edge / edge_code, step), off_zero.where(edge, 0)


def _code_pairs(pairs, scale, bias, bits):
    """16 pairs of BF16 values, as int32, to 16 pairs of codes, as integers of 2 * bits bits.

    No code is negative: bias is the end of the group from which scale leads to the other, or all is within half a step.
    """
    even, odd = (pairs << 16).view(F32), (pairs & 0xFFFF0000).view(F32)
    even, odd = ((((x - bias) / scale).minimum(2.0**bits - 1) + ROUND).view(I32) for x in (even, odd))
    return (even | odd << bits).resize(ir.IntType(2 * bits))


@intrinsic(prefer_literal=True)
def survey(typing, rows, group, bits, size, steps, slot, scales, biases):
    """Scales and biases of the 16 groups from `group` on; in float32 too, 16 and 16 numbers from steps[slot] on.

    Returns whether the tile is tame. With a NaN, an infinity or a magnitude from 2^90 on in it, they are worth nothing.
    """
    signature = types.boolean(rows, group, bits, size, steps, slot, scales, biases)
    n_bits, n_values = bits.literal_value, size.literal_value

    def generate(context, builder, signature, args):
        array = arrays(context, builder, signature, args)
        group, slot = args[1], args[5]
        lows, highs = _tile_extremes(array(0, group, n_values), n_values)
        (low, low_too), (high, high_too) = lows.halves(), highs.halves()
        low, high = low.minimum(low_too), high.maximum(high_too)
        scale, bias = _scale_and_bias(_to_f32(low), _to_f32(high), n_bits)
        array(4, slot).store(0, scale)
        array(4, slot).store(TILE, bias)
        array(6, group).store(0, _to_bf16(scale))
        array(7, group).store(0, _to_bf16(bias))
        below = builder.icmp_signed("<", high.largest(), ir.Constant(I16, HUGE))
        return builder.and_(below, builder.icmp_signed(">", low.smallest(), ir.Constant(I16, -HUGE)))

    return signature, generate


@intrinsic(prefer_literal=True)
def encode(typing, rows, group, bits, size, steps, slot, packed):
    """Packed codes of the 16 groups from `group` on, by the scales and biases that `survey` left at steps[slot]."""
    signature = types.void(rows, group, bits, size, steps, slot, packed)
    n_bits, n_values = bits.literal_value, size.literal_value

    def generate(context, builder, signature, args):
        array = arrays(context, builder, signature, args)
        first, slot = args[1], args[5]
        with cgutils.for_range(builder, ir.Constant(first.type, TILE)) as loop:
            group = builder.add(first, loop.index)
            steps = array(4, builder.add(slot, loop.index))
            scale, bias = steps.spread(0, F32, 16), steps.spread(TILE, F32, 16)
            values, words = array(0, group, n_values), array(6, group, n_values * n_bits // 32)
            for i in range(0, n_values, 32):
                words.store(i * n_bits // 32, _code_pairs(values.load(i, I32, 16), scale, bias, n_bits))
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True)
def quantize(rows, bits, size, first, packed, scales, biases):
    """Groups from `first` on. Returns the group at which it had to stop, or the number of groups.

    It stops at a tile that is not tame, and if there are fewer groups than a tile has; `exact` can do the next 16. The
    last tile ends with the last group, and may do some groups once more. A tile is surveyed before the one ahead of it
    is encoded: one's chain of divisions fills the gaps of the other's.
    """
    literally(bits)
    literally(size)
    last = scales.size - TILE
    if last < 0:
        return first
    steps = np.empty(4 * TILE, np.float32)
    group, slot = min(first, last), 0
    tame = survey(rows, group, bits, size, steps, slot, scales, biases)
    while tame:
        next_group, next_slot = min(group + TILE, last), 2 * TILE - slot
        if group < last:
            tame = survey(rows, next_group, bits, size, steps, next_slot, scales, biases)
        encode(rows, group, bits, size, steps, slot, packed)
        if group == last:
            return scales.size
        group, slot = next_group, next_slot
    return group


@njit(nogil=True, cache=True, error_model="numpy")
def exact(rows, first, last, bits, size, packed, scales, biases):
    """Groups first to last - 1, one value after the other, right for every input."""
    top, smallest = np.float32((1 << bits) - 1), np.float32(SMALLEST_SCALE)
    raw, raw_step = np.empty(size, np.uint32), np.empty(2, np.uint32)
    values, step = raw.view(np.float32), raw_step.view(np.float32)
    per_word = 32 // bits
    for group in range(first, last):
        low, high = np.float32(np.inf), np.float32(-np.inf)
        for i in range(size):
            raw[i] = np.uint32(rows[group * size + i]) << np.uint32(16)
            low = values[i] if values[i] < low else low  # a NaN is not
            high = values[i] if values[i] > high else high
        flip = abs(low) > abs(high)
        scale = (high - low) / top
        scale = smallest if scale < smallest else scale  # NaN stays
        scale = scale if flip else -scale
        edge = low if flip else high
        edge_code = np.rint(edge / scale)
        bias = np.float32(0)
        if edge_code != 0:
            scale, bias = edge / edge_code, edge
        for word in range(size // per_word):
            codes = 0
            for i in range(per_word):
                code = np.rint((values[word * per_word + i] - bias) / scale)
                code = code if code > 0 else np.float32(0)  # for NaN too
                codes |= int(code if code < top else top) << bits * i
            packed[group * (size // per_word) + word] = codes
        step[0], step[1] = scale, bias
        for i, stored in enumerate((scales, biases)):
            is_nan = raw_step[i] & 0x7FFFFFFF > 0x7F800000
            stored[group] = 0x7FC0 if is_nan else (raw_step[i] + 0x7FFF + (raw_step[i] >> 16 & 1)) >> 16


# --- NVFP4 ---


@intrinsic
def decode_block(typing, codes, block_scales, table, out, block):
    """The 16 values of one block, by a permutation of the row of the table that its scale selects."""
    signature = types.void(codes, block_scales, table, out, block)

    def generate(context, builder, signature, args):
        array = arrays(context, builder, signature, args)
        block = args[4]
        scale = builder.zext(builder.load(array(1, block).pointer), block.type)
        pairs = array(0, block, BLOCK // 2).load(0, I8, BLOCK // 2).resize(I32)
        each = ((pairs | pairs << 12) & 0x000F000F).view(I16)
        array(3, block, BLOCK).store(0, each.lookup(array(2, scale, BLOCK).load(0, I16, BLOCK)))
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True, cache=True)
def decode_by_permutation(codes, block_scales, table, out):
    """BF16 values: out[i] = table[16 * block_scales[i // 16] + code i]."""
    for block in range(block_scales.size):
        decode_block(codes, block_scales, table, out, block)


@njit(nogil=True, cache=True)
def decode_one_by_one(codes, block_scales, table, out):
    """The same."""
    for block in range(block_scales.size):
        weights = table[BLOCK * block_scales[block] : BLOCK * (block_scales[block] + 1)]
        pairs = codes[BLOCK // 2 * block : BLOCK // 2 * (block + 1)]
        values = out[BLOCK * block : BLOCK * (block + 1)]
        for i in range(BLOCK // 2):
            values[2 * i], values[2 * i + 1] = weights[pairs[i] & 15], weights[pairs[i] >> 4]


# With AVX-512 the permutation is one instruction, with AVX2 a few. Elsewhere LLVM takes it apart, and a loop is faster.
decode = decode_by_permutation if binding.get_host_cpu_features().get("avx2") else decode_one_by_one


# --- what is compiled for each width and group size; arrays are flat ---


@cache
def quantizer(bits, size):
    """run(rows, first, packed, scales, biases) -> group, as `quantize`."""

    @njit(nogil=True, cache=True)
    def run(rows, first, packed, scales, biases):
        return quantize(rows, bits, size, first, packed, scales, biases)

    return run
