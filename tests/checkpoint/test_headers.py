from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.checkpoint.headers import INDEX, SINGLE, TensorEntry, read_entries, scan
from dsv4nb.errors import DamagedCheckpoint, NotACheckpoint

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "I8", "shape": [4], "data_offsets": [24, 28]}


def write(path: Path, header: object, data: bytes = bytes(28)) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def faults(folder: Path) -> str:
    with pytest.raises(DamagedCheckpoint) as caught:
        read_entries(folder)
    assert "Fetch the files named above again" in str(caught.value)
    return "\n".join(caught.value.problems)


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    path = write(tmp_path / SINGLE, {"__metadata__": {"format": "pt"}, "b": B, "a": A})
    start = path.stat().st_size - 28
    assert read_entries(tmp_path) == {
        "a": TensorEntry(name="a", dtype="F32", shape=(2, 3), file=path, offset=start, nbytes=24),
        "b": TensorEntry(name="b", dtype="I8", shape=(4,), file=path, offset=start + 24, nbytes=4),
    }


def test_scalars_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    empty = {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]}
    write(tmp_path / SINGLE, {"scalar": scalar, "empty": empty}, bytes(4))
    assert {n: e.nbytes for n, e in read_entries(tmp_path).items()} == {"scalar": 4, "empty": 0}


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ({"a": A, "b": B | {"dtype": "F4"}}, "b: unknown dtype 'F4'"),
        ({"a": A, "b": B | {"dtype": 3}}, "b: unknown dtype 3"),
        ({"a": A, "b": B | {"shape": [-4]}}, "b: shape is"),
        ({"a": A, "b": B | {"shape": [4.0]}}, "b: shape is"),
        ({"a": A, "b": B | {"shape": [True]}}, "b: shape is"),
        ({"a": A, "b": B | {"shape": [5]}}, r"b: I8 \[5\] needs 5 bytes, data_offsets span 4"),
        ({"a": A, "b": B | {"data_offsets": [28, 24]}}, "b: data_offsets are"),
        ({"a": A, "b": B | {"data_offsets": [24]}}, "b: data_offsets are"),
        ({"a": A, "b": B | {"data_offsets": [20, 24]}}, "b: begins at byte .* inside a"),
        ({"a": A, "b": B | {"data_offsets": [0, 4]}}, "a: begins at byte .* inside b"),
        ({"a": A, "b": B | {"data_offsets": [26, 30]}}, "b: begins at byte .*, 2 bytes after a ends"),
        ({"a": A, "b": {"dtype": "I8", "shape": [4]}}, "b: the header says"),
        ({"a": A, "b": B | {"extra": 1}}, "b: the header says"),
        ({"a": A, "b": None}, "b: the header says None"),
        ({"a": A}, r"has \d+ bytes, expected"),
        ([A, B], "JSON is a list"),
    ],
)
def test_a_header_that_contradicts_itself(header: object, fault: str, tmp_path: Path) -> None:
    write(tmp_path / SINGLE, header)
    with pytest.raises(DamagedCheckpoint, match=fault):
        read_entries(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "has 0 bytes, the header alone needs 8"),
        (b"\x02\0\0\0", "has 4 bytes, the header alone needs 8"),
        (b"\xff" * 64, "has 64 bytes, the header alone needs"),
        ((200).to_bytes(8, "little") + b"{}", "has 10 bytes, the header alone needs 208"),
        ((2).to_bytes(8, "little") + b"}{", "header of 2 bytes cannot be read"),
        ((4).to_bytes(8, "little") + b'{"\xff"', "header of 4 bytes cannot be read"),
    ],
)
def test_a_header_that_is_none(content: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=fault):
        read_entries(tmp_path)


def test_an_absurd_header_length_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    path.write_bytes((200_000_000).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(300_000_000)  # sparse
    with pytest.raises(DamagedCheckpoint, match="claims a header of 200000000 bytes; at most 100000000"):
        read_entries(tmp_path)


def test_a_name_that_appears_twice_is_refused(tmp_path: Path) -> None:
    text = b'{"a": %s, "a": %s}' % (json.dumps(B).encode(), json.dumps(B).encode())
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(28))
    with pytest.raises(DamagedCheckpoint, match="'a' appears twice"):
        read_entries(tmp_path)


class TestIndex:
    @pytest.mark.parametrize(
        ("index", "fault"),
        [
            ("{", "Expecting"),
            ("[]", "not an object"),
            ("{}", "no weight_map"),
            ('{"weight_map": {}}', "no weight_map"),
            ('{"weight_map": {"a": 3}}', "no plain name"),
            ('{"weight_map": {"a": "../other/model.safetensors"}}', "no plain name"),
            ('{"weight_map": {"a": "/etc/passwd"}}', "no plain name"),
            ('{"weight_map": {"a": ".."}}', "no plain name"),
            ('{"weight_map": {"a": ""}}', "no plain name"),
            ('{"weight_map": {"a": "..\\\\x.safetensors"}}', "no plain name"),
            ('{"weight_map": {"a": "pytorch_model.bin"}}', "no plain name"),
        ],
    )
    def test_a_bad_index(self, index: str, fault: str, tmp_path: Path) -> None:
        (tmp_path / INDEX).write_text(index)
        assert fault in faults(tmp_path)

    def test_the_index_wins_over_a_single_file(self, tmp_path: Path) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
        write(tmp_path / "x.safetensors", {"a": A}, bytes(24))
        (tmp_path / SINGLE).write_bytes(b"")
        assert read_entries(tmp_path)["a"].file.name == "x.safetensors"

    def test_a_tensor_in_another_file_than_the_index_says(self, tmp_path: Path) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
        write(tmp_path / "x.safetensors", {"a": A, "b": B})
        write(tmp_path / "y.safetensors", {"c": A}, bytes(24))
        assert faults(tmp_path).splitlines() == [
            "b: is in x.safetensors, but the index puts it into y.safetensors",
            "b: the index puts it into y.safetensors, which lacks it",
            "c: is in y.safetensors, but the index does not name it",
        ]
        assert scan(tmp_path).entries.keys() == {"a"}

    def test_a_shard_that_is_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
        (tmp_path / "x.safetensors").mkdir()
        assert faults(tmp_path).startswith("x.safetensors: ")


def test_offsets_find_the_bytes_that_were_written(tiny: Callable[..., Path]) -> None:
    folder = tiny("none")
    scan_of = scan(folder)
    entry = scan_of.entries["layers.0.ffn.gate.tid2eid"]
    assert (entry.dtype, entry.shape, entry.nbytes) == ("I64", (512, 2), 8192)
    data = entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    ids = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    assert min(ids) == 0
    assert max(ids) == 7
    assert scan_of.file_bytes == sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert [f.name for f in scan_of.files] == sorted(f.name for f in folder.glob("*.safetensors"))


def cut(folder: Path, n_bytes: int, shard: int) -> Path:
    path = sorted(folder.glob("*.safetensors"))[shard]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - n_bytes)
    return path


def test_a_file_one_byte_short_is_named_with_both_sizes(tiny: Callable[..., Path]) -> None:
    folder = tiny()
    size = sorted(folder.glob("*.safetensors"))[2].stat().st_size
    path = cut(folder, 1, 2)
    assert faults(folder) == f"{path.name}: has {size - 1} bytes, expected {size}"


def test_a_file_with_bytes_too_many_is_named(tiny: Callable[..., Path]) -> None:
    folder = tiny()
    path = sorted(folder.glob("*.safetensors"))[0]
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0")
    assert faults(folder) == f"{path.name}: has {size + 1} bytes, expected {size}"


def test_a_missing_file_is_one_line(tiny: Callable[..., Path]) -> None:
    folder = tiny()
    path = sorted(folder.glob("*.safetensors"))[1]
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    lost = sum(file == path.name for file in index["weight_map"].values())
    path.unlink()
    assert faults(folder) == f"{path.name}: missing; {lost} tensors are in it"
    assert scan(folder).named == index["weight_map"].keys()
