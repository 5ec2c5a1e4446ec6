"""What rounding costs at most, as verify computes it from the bits."""

import numpy as np
import pytest
from motif_convert.validate.rounding import allowed_error, half_ulp, widen


@pytest.mark.parametrize(("dtype", "kept", "smallest"), [("BF16", 8, -126), ("F16", 11, -14), ("F32", 24, -126)])
def test_half_ulp(dtype, kept, smallest):
    x = np.arange(1, 0x7F80, dtype=np.uint16)
    x = widen(x, "BF16")
    exponent = np.maximum(np.floor(np.log2(x.astype(np.float64))), smallest)
    np.testing.assert_array_equal(half_ulp(x, dtype), (2.0 ** (exponent - kept)).astype(np.float32))
    assert half_ulp(np.zeros(1, np.float32), dtype) == np.float32(2.0 ** (smallest - kept))


def test_a_group_without_bias_has_no_room_for_its_rounding():
    """A zero bias is exact: what its rounding may cost is at most half of the smallest number."""
    _, fixed, _ = allowed_error(np.float32([1e-7]), np.float32([0]), 4, "BF16")
    assert 0.5 < fixed[0] < 0.51
