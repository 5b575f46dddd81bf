"""Where the kernels of a test run: on the GPU, or in Triton's interpreter with its inline PTX emulated."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

# before any kernel module is imported: the decorator decides what a kernel is
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

Lanes = np.ndarray[Any, np.dtype[Any]]  # one element per thread


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel runs: where, and with its inline PTX or the plain equal."""

    device: torch.device
    ptx: bool


@pytest.fixture(
    params=[
        "interpreted",
        "emulated",
        pytest.param("compiled", marks=pytest.mark.gpu),
        pytest.param("lanes", marks=pytest.mark.gpu),
    ]
)
def form(request: pytest.FixtureRequest) -> Form:
    """The plain form interpreted, the PTX form emulated, and both on a GPU."""
    if request.param in ("compiled", "lanes"):
        return Form(torch.device("cuda"), request.param == "lanes")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    if request.param == "emulated":
        request.getfixturevalue("emulated_ptx")
    return Form(torch.device("cpu"), request.param == "emulated")


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels without inline PTX run: interpreted, and on a GPU."""
    if request.param == "compiled":
        return torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # the interpreter's scalars are arrays of one element, which numpy no longer makes an int of
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index)
    return torch.device("cpu")


@pytest.fixture
def emulated_ptx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the interpreter run inline PTX, all threads of a program in lockstep."""
    from triton.language import core
    from triton.runtime import interpreter

    def create_inline_asm(
        self: object, asm: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> _Results:
        assert pack == 1
        shape = values[0].data.shape if values else (1,)
        outputs = _run(asm, constraints, [value.data.reshape(-1) for value in values], int(np.prod(shape)))
        handles = [
            interpreter.TensorHandle(_typed(bits, dtype.scalar).reshape(shape), dtype.scalar)
            for bits, dtype in zip(outputs, types, strict=True)
        ]
        return _Results(handles)

    def add_right(self: Any, left: tuple[Any, ...]) -> Any:
        return core.tuple([*left, *self.values])

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
    # compiled, a Python tuple and a tuple of results add up; interpreted, only with this
    monkeypatch.setattr(core.tuple, "__radd__", add_right, raising=False)
    yield


@dataclass(frozen=True, slots=True)
class _Results:
    handles: list[Any]

    def get_result(self, i: int) -> Any:
        return self.handles[i]


def _typed(bits: Lanes, dtype: Any) -> Lanes:
    kinds = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
    return bits.view(kinds[str(dtype)])


def _run(asm: str, constraints: str, values: list[Lanes], threads: int) -> list[Lanes]:
    """Run one asm block; returns the bits of its outputs."""
    kinds = constraints.split(",")
    outputs = [kind for kind in kinds if kind.startswith("=")]
    machine = _Machine(threads)
    for i, kind in enumerate(outputs):
        machine.registers[f"${i}"] = np.zeros(threads, np.uint64 if kind.endswith("l") else np.uint32)
    for i, value in enumerate(values, len(outputs)):
        machine.registers[f"${i}"] = value.view(np.uint64 if value.itemsize == 8 else np.uint32).copy()
    text = re.sub(r"//.*", "", asm).strip()
    if text.startswith("{"):
        text = text.removeprefix("{").removesuffix("}")
    for statement in re.split(r";", text):
        if statement.strip():
            machine.step(statement.strip())
    return [machine.registers[f"${i}"] for i in range(len(outputs))]


def _f32(bits: Lanes) -> Lanes:
    return bits.view(np.float32)


def _bits(values: Lanes) -> Lanes:
    return values.astype(np.float32).view(np.uint32)


def _fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    # a product of two float32 is exact in float64; the sum is rounded twice, which the scales' powers of two allow
    return _bits(_f32(a).astype(np.float64) * _f32(b) + _f32(c))


_E4M3 = np.arange(256, dtype=np.uint8)
_E4M3_VALUES = torch.from_numpy(_E4M3).view(torch.float8_e4m3fn).to(torch.float16).numpy()


def _pair(high: Lanes, low: Lanes) -> Lanes:
    """Two float32 as float16 in one word."""
    halves = [_f32(bits).astype(np.float16).view(np.uint16).astype(np.uint32) for bits in (low, high)]
    return halves[0] | halves[1] << 16


def _e4m3_pair(high: Lanes, low: Lanes) -> Lanes:
    codes = [
        torch.from_numpy(_f32(bits).clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)
        for bits in (low, high)
    ]
    return codes[0] | codes[1] << 8


def _mul_pairs(a: Lanes, b: Lanes) -> Lanes:
    halves = [
        (_half(a, i, False) * _half(b, i, False)).astype(np.float16).view(np.uint16).astype(np.uint32) for i in (0, 1)
    ]
    return halves[0] | halves[1] << 16


_ARITHMETIC: dict[str, Callable[..., Lanes]] = {
    "max.f32": lambda a, b: _bits(np.maximum(_f32(a), _f32(b))),
    "mul.rn.f16x2": _mul_pairs,
    "cvt.rn.f16x2.f32": _pair,
    "cvt.rn.satfinite.e4m3x2.f32": _e4m3_pair,
    "add.rn.f32": lambda a, b: _bits(_f32(a) + _f32(b)),
    "mul.rn.f32": lambda a, b: _bits(_f32(a) * _f32(b)),
    "fma.rn.f32": _fma,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.eq.b32": lambda a, b: a == b,
    "setp.ne.b32": lambda a, b: a != b,
}


@dataclass(slots=True)
class _Machine:
    """The registers and the shared memory of one program; every instruction runs for all its threads at once."""

    threads: int
    registers: dict[str, Lanes] = field(default_factory=dict)
    shared: Lanes = field(default_factory=lambda: np.zeros(0, np.uint8))

    def step(self, statement: str) -> None:
        mask = np.ones(self.threads, np.bool_)
        if statement.startswith("@"):
            guard, statement = statement.split(None, 1)
            name = guard.lstrip("@!")
            mask = self.registers[name] ^ ("!" in guard)
        opcode, _, rest = statement.partition(" ")
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if o.strip()]
        if opcode in (".reg", "bar.sync", "bar.warp.sync", "griddepcontrol.wait", "griddepcontrol.launch_dependents"):
            return
        if opcode == ".shared":
            self.shared = np.zeros(int(re.findall(r"\[(\d+)\]", rest)[0]), np.uint8)
        elif opcode.startswith(("ld.", "st.")):
            self._move_memory(opcode, operands, mask)
        elif opcode.startswith("mov."):
            self._move(operands, mask)
        elif opcode.startswith("activemask"):
            self._write(operands[0], np.full(self.threads, 0xFFFFFFFF, np.uint32), mask)
        elif opcode.startswith("shfl.sync."):
            lane = np.arange(self.threads)
            place = self.value(operands[2]).astype(np.int64)
            source = lane ^ place if "bfly" in opcode else lane // 32 * 32 + place % 32
            self._write(operands[0], self.value(operands[1])[source], mask)
        elif opcode == "cvt.rn.f16x2.e4m3x2":
            pair = self.value(operands[1])
            halves = [_E4M3_VALUES[pair >> shift & 0xFF].view(np.uint16).astype(np.uint32) for shift in (0, 8)]
            self._write(operands[0], halves[0] | halves[1] << 16, mask)
        elif opcode.startswith("mma.sync.aligned.m16n8k16.row.col.f32"):
            self._multiply("bf16" in opcode, operands, mask)
        else:
            self._write(operands[0], _ARITHMETIC[opcode](*map(self.value, operands[1:])), mask)

    def value(self, operand: str) -> Lanes:
        if operand in self.registers:
            return self.registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.threads, number & 0xFFFFFFFF, np.uint32)

    def _write(self, name: str, value: Lanes, mask: Lanes) -> None:
        old = self.registers.get(name, np.zeros_like(value))
        self.registers[name] = np.where(mask, value, old).astype(value.dtype)

    def _move(self, operands: list[str], mask: Lanes) -> None:
        target, source = operands
        if target.startswith("{"):
            for i, half in enumerate(_names(target)):
                self._write(half, self.value(source) >> 16 * i & 0xFFFF, mask)
        elif source.startswith("{"):
            low, high = map(self.value, _names(source))
            self._write(target, low | high << 16, mask)
        elif source == "partial":  # the one shared array starts at 0
            self._write(target, np.zeros(self.threads, np.uint32), mask)
        else:
            self._write(target, self.value(source), mask)

    def _move_memory(self, opcode: str, operands: list[str], mask: Lanes) -> None:
        place = next(o for o in operands if o.startswith("["))
        names = _names(next(o for o in operands if not o.startswith("[")))
        base, _, offset = place.strip("[]").partition("+")
        address = self.value(base).astype(np.uint64) + np.uint64(int(offset or 0))
        for i, name in enumerate(names):
            at = address + np.uint64(4 * i)
            if opcode.startswith("st.shared"):
                for thread in np.flatnonzero(mask):
                    self.shared[at[thread] : at[thread] + 4] = self.value(name)[thread : thread + 1].view(np.uint8)
                continue
            read = self._read_shared if opcode.startswith("ld.shared") else _read_global
            words = np.zeros(self.threads, np.uint32)
            for thread in np.flatnonzero(mask):
                words[thread] = read(int(at[thread]))
            self._write(name, words, mask)

    def _read_shared(self, address: int) -> int:
        return int(self.shared[address : address + 4].view(np.uint32)[0])

    def _multiply(self, is_bf16: bool, operands: list[str], mask: Lanes) -> None:
        """d = a · b + c of 16x16 by 16x8, in the fragments of the instruction."""
        assert mask.all()
        d, a, b, c = [_names(operand) for operand in operands]
        warps = self.threads // 32
        lane = np.arange(self.threads)
        warp, g, t = lane // 32, lane % 32 // 4, lane % 4
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        total = np.zeros((warps, 16, 8))
        for i, name in enumerate(a):
            for half in range(2):
                left[warp, g + i % 2 * 8, 2 * t + half + i // 2 * 8] = _half(self.value(name), half, is_bf16)
        for i, name in enumerate(b):
            for half in range(2):
                right[warp, 2 * t + half + i * 8, g] = _half(self.value(name), half, is_bf16)
        for i, name in enumerate(c):
            total[warp, g + i // 2 * 8, 2 * t + i % 2] = _f32(self.value(name))
        total += left @ right
        for i, name in enumerate(d):
            self._write(name, _bits(total[warp, g + i // 2 * 8, 2 * t + i % 2]), mask)


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]


def _half(word: Lanes, half: int, is_bf16: bool) -> Lanes:
    bits = word >> 16 * half & 0xFFFF
    return _f32(bits << 16) if is_bf16 else bits.astype(np.uint16).view(np.float16)


def _read_global(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value
