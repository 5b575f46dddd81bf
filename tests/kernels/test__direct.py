"""A direct call launches what Triton's own would: on every GPU, and here under a driver that notes launches.

Triton's interpreter, which the other tests of this folder run in, leaves nothing to launch; so this file runs itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _direct

pytestmark = pytest.mark.kernels

NUMBERS = (0, 1, 2, 16, 17, -16, -1, 2**31 - 1, -(2**31), 2**31, 2**31 + 16, 2**40 + 1, 2**63, True, False, 0.5, 1.0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8)


@triton.jit
def _add_kernel(x_ptr, out_ptr, other_ptr, n, C: tl.constexpr, SIGN: tl.constexpr = 1):
    o = tl.program_id(0) * C + tl.arange(0, C)
    b = tl.load(x_ptr + o)
    if other_ptr is not None:
        b += tl.load(other_ptr + o)
    tl.store(out_ptr + o, (b + n * SIGN).to(out_ptr.dtype.element_ty))


def calls(device: torch.device) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield a name, arguments and constants of calls that differ in one thing each."""
    room = {dtype: torch.ones(64, dtype=dtype, device=device) for dtype in DTYPES}
    x, out = room[torch.float32], torch.zeros(64, device=device)
    plain = {"C": 16, "num_warps": 1}
    for number in NUMBERS:
        yield f"n = {number!r}", (x, out, x, number), plain
    for dtype, rows in room.items():
        yield f"{dtype}", (rows, out, x, 3), plain
        yield f"{dtype}, off 16 bytes", (rows[1:], out, x, 3), plain
        yield f"{dtype}, at another 16 bytes", (rows[16:], out, x, 3), plain
    yield "nothing to add", (x, out, None, 3), plain
    yield "another constant", (x, out, x, 3), plain | {"C": 32}
    yield "a constant by default, given", (x, out, x, 3), plain | {"SIGN": 1}
    yield "a constant by default, another", (x, out, x, 3), plain | {"SIGN": -1}
    yield "warps", (x, out, x, 3), plain | {"num_warps": 2}
    yield "launched early", (x, out, x, 3), plain | {"launch_pdl": True}
    yield "stages in place of warps", (x, out, x, 3), {"C": 16, "num_stages": 1}


# under a driver that launches nothing

STREAM = 7


class Driver:
    """Notes what is launched; programs are numbers."""

    def __init__(self) -> None:
        self.device, self.launched, self.loaded = 0, list[tuple[Any, ...]](), 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20}, load_binary=self.load_binary
        )
        self.launcher_cls = lambda source, metadata: self.launch

    def launch(self, *launch: Any) -> None:
        self.launched.append(launch)
        *_, metadata, enter, leave = launch[:9]
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)

    def load_binary(self, *args: object) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return self.loaded, self.loaded, 0, 0, 1024

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def told(launch: tuple[Any, ...]) -> list[Any]:
    """Grid, stream, program and arguments of a launch, a tensor by its address; constants do not count."""
    x, y, z, stream, function, _, _, _, _, *arguments = launch
    run_time = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments[:4]]
    return [x, y, z, stream, function, *run_time]


def observe() -> dict[str, Any]:
    from triton.runtime import JITFunction
    from triton.runtime import driver as drivers

    driver = Driver()
    drivers.set_active(driver)
    runs, run = [0], JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        runs[0] += 1
        return run(self, *args, **options)

    def launched(call: Any) -> tuple[list[Any], int]:
        before = runs[0]
        call()
        return told(driver.launched[-1]), runs[0] - before

    found: dict[str, Any] = {}
    with patch.object(JITFunction, "run", counted):
        for name, arguments, constants in calls(torch.device("cpu")):
            public, _ = launched(lambda: _add_kernel[(3, 2)](*arguments, **constants))  # noqa: B023
            direct = [launched(lambda: _direct.call(_add_kernel, (3, 2), *arguments, **constants)) for _ in range(3)]  # noqa: B023
            found[name] = {"public": public, "direct": [each for each, _ in direct], "runs": [n for _, n in direct]}
        arguments, constants = next((given, more) for name, given, more in calls(torch.device("cpu")))

        def direct_call() -> None:
            _direct.call(_add_kernel, (1,), *arguments, **constants)

        for device in (1, 0, 1):
            driver.device = device
            found.setdefault("devices", []).append(launched(direct_call))
        seen = list[object]()
        triton.knobs.runtime.launch_enter_hook.add(seen.append)
        found["watched"] = [launched(direct_call)[1], len(seen)]
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
        _add_kernel.add_pre_run_hook(lambda *args, **options: seen.append(args))
        found["hooked"] = [launched(direct_call)[1], len(seen)]
        _add_kernel.pre_run_hooks.clear()
        with patch.object(_direct, "is_direct", False):
            found["unread version"] = launched(direct_call)[1]
        found["after all"] = launched(direct_call)[1]
    found["compiled"] = len(_add_kernel.device_caches[0][0])
    return found


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Run this file in a process whose kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


NAMES = [name for name, _, _ in calls(torch.device("cpu"))]


@pytest.mark.parametrize("name", NAMES)
def test_the_program_that_triton_would_launch_is_launched(report: dict[str, Any], name: str) -> None:
    row = report[name]
    assert row["direct"] == [row["public"]] * 3
    assert row["public"][:4] == [3, 2, 1, STREAM]
    assert row["runs"][1:] == [0, 0]


def test_programs_differ_where_triton_compiles_another(report: dict[str, Any]) -> None:
    programs = {name: report[name]["public"][4] for name in NAMES}
    assert len(set(programs.values())) == report["compiled"]
    different = ("n = 1", "n = 2", "n = 16", "n = 2147483648", "n = 0.5", "n = True", "torch.float16", "warps")
    assert len({programs[name] for name in (*different, "nothing to add", "launched early")}) == len(different) + 2
    assert programs["torch.float16"] != programs["torch.float16, off 16 bytes"]
    same = ("torch.float32", "a constant by default, given", "torch.float32, at another 16 bytes")
    assert len({programs[name] for name in same}) == 1


def test_each_gpu_has_its_program_and_its_stream(report: dict[str, Any]) -> None:
    (first, one), (zero, _), (again, none) = report["devices"]
    assert (first, one, none) == (again, 1, 0)
    assert (first[3], zero[3]) == (STREAM + 1, STREAM) and first[4] != zero[4]


def test_whoever_watches_launches_sees_each(report: dict[str, Any]) -> None:
    assert report["watched"] == [1, 1]
    assert report["hooked"] == [1, 2]
    assert report["unread version"] == 1
    assert report["after all"] == 0


def test_the_interpreter_takes_every_call() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    x, out = torch.arange(64.0), torch.zeros(64)
    for n in (1, 2):
        _direct.call(_add_kernel, (4,), x, out, None, n, C=16)
        assert torch.equal(out, x + n)


# on a GPU


@pytest.mark.gpu
def test_both_paths_give_the_same_bits_on_the_gpu() -> None:
    device = torch.device("cuda")
    for name, arguments, constants in calls(device):
        found = []
        for is_direct in (False, True, True):
            arguments[1].fill_(-1)
            with patch.object(_direct, "is_direct", is_direct):
                _direct.call(_add_kernel, (2,), *arguments, **constants)
            found.append(arguments[1].clone())
        assert found[0].isfinite().all(), name
        assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2]), name


@pytest.mark.gpu
def test_a_direct_call_is_captured_and_goes_to_the_current_stream_on_the_gpu() -> None:
    x, out = torch.arange(64.0, device="cuda"), torch.zeros(64, device="cuda")

    def launch(n: int) -> None:
        for given, left in ((x, out), (out, out)):
            _direct.call(_add_kernel, (4,), given, left, None, n, C=16, launch_pdl=False)

    launch(3)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        launch(3)
    for turn in range(3):
        x.fill_(turn)
        graph.replay()
        assert torch.equal(out, x + 6)


@pytest.mark.gpu
def test_a_tensor_that_a_gpu_cannot_read_is_refused_on_the_gpu() -> None:
    x, out = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    for _ in range(2):
        _direct.call(_add_kernel, (4,), x, out, None, 5, C=16)
    with pytest.raises(ValueError, match="cannot be accessed"):
        _direct.call(_add_kernel, (4,), x.cpu(), out, None, 5, C=16)


@pytest.mark.gpu2
def test_each_gpu_runs_its_own_on_two_gpus() -> None:
    for turn in range(3):
        for number in range(2):
            with torch.cuda.device(number):
                x, out = torch.full((64,), float(turn), device="cuda"), torch.zeros(64, device="cuda")
                _direct.call(_add_kernel, (4,), x, out, None, 5, C=16)
                assert torch.equal(out, x + 5)


if __name__ == "__main__":
    json.dump(observe(), sys.stdout)
