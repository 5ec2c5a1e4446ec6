"""Stored shapes and costs against what mlx itself makes, for every number of bits and every group size."""

from math import prod

import mlx.core as mx
import pytest
from motif_convert.quantize.errors import RecipeError
from motif_convert.quantize.precision import DTYPE_BYTES, Float, Quantized, stored_tensors, tensor_bytes

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
MLX_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32}
EVERY_QUANTIZED = [Quantized("affine", bits, group) for bits in BITS for group in GROUP_SIZES]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("precision", EVERY_QUANTIZED, ids=str)
def test_stored_tensors_are_those_of_mlx(precision, dtype):
    w = mx.zeros((3, 5, 384), MLX_DTYPES[dtype])
    arrays = mx.quantize(w, group_size=precision.group_size, bits=precision.bits, mode=precision.mode, stream=mx.cpu)
    stored = stored_tensors((3, 5, 384), dtype, precision)
    assert list(stored) == [".weight", ".scales", ".biases"]
    for (name, shape), array in zip(stored.values(), arrays, strict=True):
        assert (MLX_DTYPES[name], shape) == (array.dtype, array.shape)
        assert tensor_bytes(name, shape) == array.nbytes


@pytest.mark.parametrize("precision", EVERY_QUANTIZED, ids=str)
def test_bits_per_weight(precision):
    """The code, and two BF16 numbers a group."""
    shape = (7, 1280)
    size = sum(tensor_bytes(*t) for t in stored_tensors(shape, "BF16", precision).values())
    assert 8 * size / prod(shape) == precision.bits + 32 / precision.group_size


@pytest.mark.parametrize(("bits", "cost"), [(4, 4.5), (8, 8.5)])
def test_the_names_of_the_recipes_are_their_cost(bits, cost):
    stored = stored_tensors((384, 2560, 4096), "BF16", Quantized("affine", bits, 64))
    assert 8 * sum(tensor_bytes(*t) for t in stored.values()) == cost * 384 * 2560 * 4096


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 5)])
@pytest.mark.parametrize(("target", "stored"), [(None, "F32"), ("BF16", "BF16"), ("F16", "F16"), ("F32", "F32")])
def test_floats_keep_their_shape(shape, target, stored):
    assert stored_tensors(shape, "F32", Float(target)) == {"": (stored, shape)}


ELEMENTS = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    2: ("U16", "I16", "F16", "BF16"),
    4: ("U32", "I32", "F32"),
    8: ("U64", "I64", "F64"),
}


@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for size in ELEMENTS for dtype in ELEMENTS[size]])
def test_bytes_of_an_element(dtype, size):
    assert DTYPE_BYTES[dtype] == tensor_bytes(dtype, ()) == size
    assert tensor_bytes(dtype, (384, 2560, 4096)) == 4_026_531_840 * size
    assert tensor_bytes(dtype, (3, 0)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("affine", 1, 64), "bits 1 is not one of 2, 3, 4, 5, 6, 8"),
        (("affine", 7, 64), "bits 7 is not one of 2, 3, 4, 5, 6, 8"),
        (("affine", 16, 64), "bits 16 is not"),
        (("affine", 0, 64), "bits 0 is not"),
        (("affine", -4, 64), "bits -4 is not"),
        (("affine", "4", 64), "bits '4' is not"),
        (("affine", None, 64), "bits None is not"),
        (("affine", 4, 16), "group_size 16 is not one of 32, 64, 128"),
        (("affine", 4, 256), "group_size 256 is not"),
        (("affine", 4, 0), "group_size 0 is not"),
        (("affine", 4, None), "group_size None is not"),
        (("nvfp4", 8, 16), "mode nvfp4 has bits 4 and group_size 16"),
        (("", 4, 64), "mode '' is not known; use affine"),
        ((None, 4, 64), "mode None is not known; use affine"),
    ],
)
def test_what_mlx_does_not_have(arguments, message):
    with pytest.raises(RecipeError) as refusal:
        Quantized(*arguments)
    assert message in str(refusal.value)


def test_an_entry_of_config_json():
    assert Quantized("affine", 4, 64).as_config() == {"mode": "affine", "bits": 4, "group_size": 64}


def test_precisions_are_values():
    assert {Quantized("affine", 4, 64), Quantized("affine", 4, 64), Float(), Float(None)} == {
        Quantized("affine", 4, 64),
        Float(),
    }
    assert [str(p) for p in (Quantized("affine", 4, 64), Float(), Float("F16"))] == [
        "affine 4-bit, group 64",
        "source",
        "F16",
    ]
