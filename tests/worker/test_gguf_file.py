"""Our header reader against the `gguf` package's, and against damage."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf.constants import GGUFValueType
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_tiny, write_gguf

from worker.gguf_file import GgufArray, GgufFile
from worker.model_error import ModelError

SCALARS = st.one_of(
    st.tuples(st.just(GGUFValueType.UINT8), st.integers(0, 255)),
    st.tuples(st.just(GGUFValueType.INT8), st.integers(-128, 127)),
    st.tuples(st.just(GGUFValueType.UINT16), st.integers(0, 2**16 - 1)),
    st.tuples(st.just(GGUFValueType.INT16), st.integers(-(2**15), 2**15 - 1)),
    st.tuples(st.just(GGUFValueType.UINT32), st.integers(0, 2**32 - 1)),
    st.tuples(st.just(GGUFValueType.INT32), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just(GGUFValueType.UINT64), st.integers(0, 2**64 - 1)),
    st.tuples(st.just(GGUFValueType.INT64), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just(GGUFValueType.FLOAT32), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just(GGUFValueType.FLOAT64), st.floats(allow_nan=False)),
    st.tuples(st.just(GGUFValueType.BOOL), st.booleans()),
    st.tuples(st.just(GGUFValueType.STRING), st.text(min_size=1, max_size=20)),
)
ARRAYS = st.one_of(
    st.lists(st.text(max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(-100, 100), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5),
)


@given(values=st.lists(st.one_of(SCALARS, ARRAYS), max_size=8))
def test_metadata_comes_back_and_arrays_are_stepped_over(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected: dict[str, Any] = {"general.architecture": "llama"}
    for index, value in enumerate(values):
        key = f"key.{index}"
        if isinstance(value, list):
            writer.add_array(key, value)
            expected[key] = GgufArray(len(value))
        else:
            writer.add_key_value(key, value[1], value[0])
            expected[key] = value[1]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert GgufFile(path).metadata == expected


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, make_tiny("llama"))
    return path


def test_tensors_lie_where_the_package_finds_them(model_file: Path) -> None:
    reader = gguf.GGUFReader(model_file)
    file = GgufFile(model_file)
    assert file.data_start == reader.data_offset
    assert [
        (tensor.name, tensor.kind, list(tensor.shape), tensor.start, tensor.end)
        for tensor in file.tensors.values()
    ] == [
        (tensor.name, tensor.tensor_type, list(reversed(tensor.shape.tolist())), start, start + tensor.n_bytes)
        for tensor in reader.tensors
        for start in [int(tensor.data_offset)]
    ]


@given(share=st.floats(0, 1, exclude_max=True), in_header=st.booleans())
def test_a_file_cut_anywhere_is_refused(model_file: Path, share: float, in_header: bool) -> None:
    whole = model_file.read_bytes()
    last = max(tensor.end for tensor in GgufFile(model_file).tensors.values())
    cut = model_file.with_name("cut.gguf")
    cut.write_bytes(whole[: int(share * (GgufFile(model_file).data_start if in_header else last))])
    with pytest.raises(ModelError, match=r"cut\.gguf: "):
        GgufFile(cut)


@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(model_file: Path, data: st.DataObject) -> None:
    whole = bytearray(model_file.read_bytes())
    header = GgufFile(model_file).data_start
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, header - 1))
        whole[at] = data.draw(st.integers(0, 255))
    damaged = model_file.with_name("damaged.gguf")
    damaged.write_bytes(whole)
    with suppress(ModelError):
        GgufFile(damaged)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(60), "version 9"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "version"),  # big-endian
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        GgufFile(path)
