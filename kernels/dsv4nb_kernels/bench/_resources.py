"""Compile a kernel for a GPU that need not be there, and read from the machine code what it occupies."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one compiled kernel needs.

    Attributes:
        registers: per thread.
        stack_bytes: per thread; spilled registers live here.
        shared_bytes: per program, what the launch adds included, with the 1024 that the system takes from sm_90 on.
        moves_lanes: whether a tensor changes its layout on the way, which inline PTX on lanes does not survive.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    moves_lanes: bool


def resources(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int | bool],
    options: Mapping[str, int | bool],
    capability: int,
) -> Resources:
    """Compile `kernel` for compute capability `capability` / 10.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function; not one that the interpreter took over.
        signature: types of the run-time arguments, such as {"x_ptr": "*bf16", "T": "i32"}; pointers count as aligned.
        constants: the compile-time arguments.
        options: the compiler's, such as {"num_warps": 2}.
    """
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature.get(name, "").startswith("*")
    }
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, types, dict(constants), aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = _USAGE.search(listing)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage names no registers: {listing!r}")
    registers, stack, shared = map(int, found.groups())
    return Resources(
        registers=registers,
        stack_bytes=stack,
        shared_bytes=shared + compiled.metadata.shared,
        moves_lanes="ttg.convert_layout" in compiled.asm["ttgir"],
    )
