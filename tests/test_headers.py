"""Every way the header of a safetensors file can be wrong."""

import json

import pytest
from checkpoints import LFS_POINTER, entry, file_of, problem, write_folder
from motif_convert.convert.checkpoint import open_checkpoint
from motif_convert.quantize.errors import SourceError
from test_checkpoint import A, B

RIGHT = entry("BF16", [2, 3], 0, 12)

NOT_SAFETENSORS = {
    "empty": b"",
    "seven bytes": b"\x02" + bytes(6),
    "header of 0 bytes": file_of(b""),
    "header of 1 byte": file_of(b" "),
    "header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "header over 100 MB": (100_000_001).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("content", NOT_SAFETENSORS.values(), ids=NOT_SAFETENSORS)
def test_not_a_safetensors_file(tmp_path, content):
    folder = write_folder(tmp_path, {"model.safetensors": content})
    assert "model.safetensors: not a safetensors file" in problem(folder)


WRONG_HEADERS = {
    "longer than the file": (
        (50).to_bytes(8, "little") + b"{}",
        "cut off inside its header (10 bytes); download it again",
    ),
    "not JSON": (file_of(b"{]"), "header: not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "header: not valid JSON"),
    "nested lists": (file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "header: not valid JSON"),
    "nested objects": (file_of(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), "header: not valid JSON"),
    "a number of 5000 digits": (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "header: not valid JSON"),
    "a list": (file_of([]), "header: not a JSON object"),
    "a string": (file_of("tensors"), "header: not a JSON object"),
    "null": (file_of(None), "header: not a JSON object"),
    "a tensor twice": (file_of(b'{"a": 1, "b": 2, "a": 3}'), "header: not valid JSON (key 'a' twice)"),
    "a key twice": (file_of(b'{"a": {"shape": 1, "shape": 1}}'), "header: not valid JSON (key 'shape' twice)"),
    "git-lfs pointer": (LFS_POINTER, "a git-lfs pointer, not the file; run `git lfs pull`"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_HEADERS.values(), ids=WRONG_HEADERS)
def test_wrong_header(tmp_path, content, message):
    folder = write_folder(tmp_path, {"model.safetensors": content})
    assert f"model.safetensors: {message}" in problem(folder)


WRONG_TENSORS = {
    "not an object": (5, "needs dtype, shape and data_offsets"),
    "null": (None, "needs dtype, shape and data_offsets"),
    "a list": ([], "needs dtype, shape and data_offsets"),
    "no dtype": ({"shape": [2], "data_offsets": [0, 4]}, "needs dtype, shape and data_offsets"),
    "no shape": ({"dtype": "U8", "data_offsets": [0, 4]}, "needs dtype, shape and data_offsets"),
    "no offsets": ({"dtype": "U8", "shape": [4]}, "needs dtype, shape and data_offsets"),
    "another key": (RIGHT | {"strides": [3, 1]}, "needs dtype, shape and data_offsets"),
    "dtype unknown": (entry("F99", [2, 3], 0, 12), "unknown dtype 'F99'"),
    "dtype in lower case": (entry("bf16", [2, 3], 0, 12), "unknown dtype 'bf16'"),
    "dtype a number": (entry(16, [2, 3], 0, 12), "unknown dtype"),
    "dtype a list": (entry(["BF16"], [2, 3], 0, 12), "unknown dtype"),
    "dtype null": (entry(None, [2, 3], 0, 12), "unknown dtype"),
    "shape a number": (entry("BF16", 6, 0, 12), "shape 6 is not"),
    "shape null": (entry("BF16", None, 0, 12), "shape None is not"),
    "shape a string": (entry("BF16", "23", 0, 12), "shape 23 is not"),
    "shape negative": (entry("BF16", [-2, -3], 0, 12), "shape .-2, -3. is not"),
    "shape with true": (entry("BF16", [True, 6], 0, 12), "shape .True, 6. is not"),
    "shape with a float": (entry("BF16", [2.0, 3], 0, 12), "shape .2.0, 3. is not"),
    "shape with NaN": (entry("BF16", [float("nan")], 0, 12), "not valid JSON|shape .nan. is not"),
    "shape nested": (entry("BF16", [[2], 3], 0, 12), "shape ..2., 3. is not"),
    "shape of 2^63": (entry("U8", [2**63], 0, 12), "shape .9223372036854775808. is not"),
    "shape of 2^200, wrapping to 0": (entry("U8", [2**200], 0, 0), "shape .*is not"),
    "shape wrapping to 12": (entry("U8", [2**62, 4, 3], 0, 12), "12 bytes, but U8 .* takes 55340232221128654848"),
    "nine axes": (entry("BF16", [1] * 7 + [2, 3], 0, 12), "is not a list of at most 8"),
    "offsets null": ({"dtype": "U8", "shape": [4], "data_offsets": None}, "data_offsets None are not"),
    "one offset": ({"dtype": "U8", "shape": [4], "data_offsets": [0]}, "data_offsets .0. are not"),
    "three offsets": ({"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}, "data_offsets .0, 4, 8. are not"),
    "offsets negative": (entry("BF16", [2, 3], -12, 0), "data_offsets .-12, 0. are not"),
    "offsets reversed": (entry("BF16", [2, 3], 12, 0), "data_offsets .12, 0. are not"),
    "offsets with a float": (entry("BF16", [2, 3], 0.0, 12), "data_offsets .0.0, 12. are not"),
    "offsets with false": (entry("BF16", [2, 3], False, 12), "data_offsets .False, 12. are not"),
    "offsets of 2^64": (entry("BF16", [2, 3], 2**64, 2**64 + 12), "data_offsets .* are not"),
    "more bytes than the shape": (entry("BF16", [2, 2], 0, 12), "12 bytes, but BF16 .2, 2. takes 8"),
    "fewer bytes than the shape": (entry("F32", [2, 3], 0, 12), "12 bytes, but F32 .2, 3. takes 24"),
    "bytes for no elements": (entry("BF16", [0, 3], 0, 12), "12 bytes, but BF16 .0, 3. takes 0"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_wrong_tensor(tmp_path, wrong, message):
    folder = write_folder(tmp_path, {"model.safetensors": file_of({"some.weight": wrong}, bytes(12))})
    with pytest.raises(SourceError, match=f"model.safetensors: .*{message}") as refusal:
        open_checkpoint(folder)
    assert "some.weight" in str(refusal.value) or "not valid JSON" in str(refusal.value)


WRONG_LAYOUTS = {
    "overlap": ({"a": A, "b": entry("U8", [4], 3, 7)}, 7, "model.safetensors: b overlaps"),
    "the same bytes twice": ({"a": A, "b": A}, 4, "model.safetensors: b overlaps"),
    "one within another": ({"a": A, "b": entry("U8", [1], 1, 2)}, 4, "model.safetensors: b overlaps"),
    "gap": ({"a": A, "b": entry("U8", [4], 5, 9)}, 9, "model.safetensors: b leaves a gap"),
    "gap at the start": ({"a": entry("U8", [4], 1, 5)}, 5, "model.safetensors: a leaves a gap"),
    "far beyond the file": ({"a": entry("U8", [4], 2**62, 2**62 + 4)}, 4, "model.safetensors: a leaves a gap"),
    "cut by a byte": ({"a": A, "b": B}, 7, "model.safetensors: cut off: .* download it again"),
    "cut after the header": ({"a": A, "b": B}, 0, "model.safetensors: cut off: .* download it again"),
    "a byte more": ({"a": A, "b": B}, 9, "model.safetensors: longer than its header says: .* download it again"),
    "bytes but no tensor": ({}, 1, "model.safetensors: longer than its header says"),
}


@pytest.mark.parametrize(("header", "size", "message"), WRONG_LAYOUTS.values(), ids=WRONG_LAYOUTS)
def test_wrong_layout(tmp_path, header, size, message):
    folder = write_folder(tmp_path, {"model.safetensors": file_of(header, bytes(size))})
    with pytest.raises(SourceError, match=message):
        open_checkpoint(folder)


def test_a_tensor_twice_among_many(tmp_path):
    """100,000 tensors of no elements, the last of them twice."""
    empty = json.dumps(entry("U8", [0], 0, 0))
    header = "{" + ", ".join(f'"{i}": {empty}' for i in [*range(100_000), 99_999]) + "}"
    folder = write_folder(tmp_path, {"model.safetensors": file_of(header.encode())})
    assert "key '99999' twice" in problem(folder)


RIGHT_HEADERS = {
    "any order": {"b": B, "a": A},
    "metadata": {"__metadata__": {"format": "pt"}, "a": A, "b": B},
    "a scalar": {"a": entry("U8", [], 0, 1), "b": entry("U8", [7], 1, 8)},
    "no elements": {"b": B, "empty": entry("F32", [3, 0], 4, 4), "a": A, "none": entry("F32", [0], 0, 0)},
    "padding": json.dumps({"a": A, "b": B}).encode() + b" " * 13,
    "eight axes": {"a": entry("F32", [1] * 6 + [2, 1], 0, 8)},
}


@pytest.mark.parametrize("header", RIGHT_HEADERS.values(), ids=RIGHT_HEADERS)
def test_right_header(tmp_path, header):
    folder = write_folder(tmp_path, {"model.safetensors": file_of(header, bytes(range(8)))})
    expected = json.loads(header) if isinstance(header, bytes) else header
    with open_checkpoint(folder) as checkpoint:
        found = {
            name: (t.dtype, list(t.shape), bytes(checkpoint.read(name, 0, t.nbytes)))
            for name, t in checkpoint.tensors.items()
        }
    assert found == {
        name: (e["dtype"], e["shape"], bytes(range(*e["data_offsets"])))
        for name, e in expected.items()
        if name != "__metadata__"
    }
