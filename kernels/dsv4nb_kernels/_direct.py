"""How every launcher calls its kernel: what Triton compiled for a call is kept, and the next such call is direct.

Triton's own call binds, specializes and looks up anew each time, which costs the host more than the launch itself; a
chunk of a prompt makes thousands. Here a call is told by all that Triton compiles for: the kernel, the GPU, the
constants and options, the types of tensors and numbers, and of each whether it is a multiple of 16, or 1. The first
such call is Triton's, and what it returns is launched by the later ones.

They are Triton's too, every one, in its interpreter, while a hook watches launches (a profiler's) or the calls of a
kernel, of an argument that is no tensor or number, and under a version whose launcher was not read for this. A knob of
Triton's that changes what is compiled holds for calls that were not made yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

READ = ("3.6", "3.7", "3.8", "3.9")  # versions whose CompiledKernel.run takes what `call` gives it
MULTIPLE = 16  # that a compiler may rely on
INT32 = 1 << 31

is_direct = ".".join(triton.__version__.split(".")[:2]) in READ


class _Kept(NamedTuple):
    """A compiled kernel: what `CompiledKernel.run` takes besides a grid, a stream and run-time arguments."""

    run: Callable[..., None]
    function: int
    packed: object
    constants: tuple[Any, ...]


_kept: dict[tuple[Any, ...], _Kept] = {}


def call(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` on the current stream of the current device, as `kernel[grid](*arguments, **constants)` does.

    Args:
        grid: programs, in up to three directions.
        arguments: all of the run-time ones, in their order: tensors, numbers, None.
        constants: the compile-time ones, and options of the compiler.

    Raises:
        ValueError: a tensor is not where a GPU can read it.
        RuntimeError: the driver refuses the launch.
    """
    if not is_direct or not isinstance(kernel, JITFunction) or _is_watched(kernel):
        kernel[grid](*arguments, **constants)
        return
    active = driver.active
    device = active.get_current_device()
    told: list[Any] = [id(kernel), device, *constants, *constants.values()]
    values: list[Any] = []
    for argument in arguments:
        kind: Any = type(argument)
        if kind is Tensor:
            place = argument.data_ptr()
            kind = (argument.dtype,) if place % MULTIPLE else argument.dtype
            # of a tensor Triton's launcher finds out whether a GPU can read it; a number it takes as it is
            values.append(place if argument.is_cuda else argument)
        else:
            values.append(argument)
            if kind is int:
                kind = _kind(argument)
        told.append(kind)
    key = tuple(told)
    kept = _kept.get(key)
    if kept is None:
        compiled = kernel[grid](*arguments, **constants)
        if compiled is not None and _is_told(kernel, arguments):  # a hook may have kept it from being compiled
            _kept[key] = _Kept(
                compiled.run, compiled.function, compiled.packed_metadata, _last(kernel, arguments, constants)
            )
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = active.get_current_stream(device)
    kept.run(x, y, z, stream, kept.function, kept.packed, None, None, None, *values, *kept.constants)


def _kind(number: int) -> int:
    """Return what Triton compiles an integer for: 0 for any, 1, 16 for a multiple; one of 64 bits is told by itself."""
    if not -INT32 <= number < INT32:
        return number
    return 1 if number == 1 else 0 if number % MULTIPLE else MULTIPLE


def _is_watched(kernel: Any) -> bool:
    """Whether somebody is to be called at each launch."""
    runtime = knobs.runtime
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hooks is not None and getattr(hooks, "calls", True):
            return True
    return bool(kernel.pre_run_hooks)


def _is_told(kernel: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether nothing else is compiled for: on another GPU than NVIDIA's, or for other arguments, there may be more."""
    runs, constants = kernel.params[: len(arguments)], kernel.params[len(arguments) :]
    return (
        driver.active.get_current_target().backend == "cuda"
        and not any(parameter.is_constexpr for parameter in runs)
        and all(parameter.is_constexpr for parameter in constants)
        and all(argument is None or type(argument) in (Tensor, int, float, bool) for argument in arguments)
    )


def _last(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return the constants in the order of the parameters: a launcher is given them, and reads none."""
    return tuple(constants.get(each.name, each.default) for each in kernel.params[len(arguments) :])
