"""Our reader of GGUF files beside that of the gguf package."""

from pathlib import Path

import gguf
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.weights.gguf_file import read_gguf_file
from tests.weights.files import write_all


def write(path: Path) -> Path:
    """Write a file with a field of each type, and tensors of several shapes and types."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "你好 \n")
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.strings", ["a", "", "ß"])
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    writer.add_tensor("matrix", values)
    writer.add_tensor("vector", values[0].astype(np.float16))
    quantized = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    write_all(writer)
    return path


def test_fields_and_tensors_are_those_of_the_package(tmp_path):
    path = write(tmp_path / "a.gguf")
    file, reader = read_gguf_file(path), gguf.GGUFReader(path)
    expected = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert len(expected) >= 14 and file.fields == expected
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.type, ours.shape) == (tensor.tensor_type, tuple(tensor.shape[::-1].tolist()))
        assert bytes(ours.data[: tensor.n_bytes]) == tensor.data.tobytes()


@settings(
    max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_file_is_an_error_that_names_it(data, tmp_path):
    whole = write(tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"matrix")
    damaged = data.draw(
        st.one_of(
            # Cut within the header.
            st.integers(0, header).map(lambda end: whole[:end]),
            # Another count, length or type.
            st.integers(8, header).map(lambda place: whole[:place] + b"\xff" * 8 + whole[place + 8 :]),
        )
    )
    path = tmp_path / f"{data.draw(st.uuids())}.gguf"
    path.write_bytes(damaged)
    try:
        read_gguf_file(path)
    except UserError as error:
        assert path.name in str(error)
