"""Values in the raw form of their dtype, and codes unpacked bit by bit."""

import numpy as np

RAW = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


def raw_values(x, dtype):
    """float32 in the raw form of dtype; to BF16 by cutting off the lower half, which keeps a NaN a NaN."""
    if dtype == "BF16":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return x.astype(RAW[dtype])


def codes_by_bits(packed, bits):
    """A second way to unpack: bit by bit."""
    stream = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(*packed.shape[:-1], -1, bits) @ (1 << np.arange(bits))
