"""`python -m dsv4nb_kernels.bench`: the table of measured shares of the copy rate."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path

import torch

from dsv4nb_kernels import bench
from dsv4nb_kernels.bench import _driver

LAYER = "layer"  # of all operations in a row
CHUNK = "chunk"  # the steps of a layer in prefill


def operations() -> list[str]:
    """Return the operations that have a bench, in alphabetical order."""
    return sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if not m.name.startswith("_"))


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table last, and write the numbers where asked."""
    parser = argparse.ArgumentParser(prog="python -m dsv4nb_kernels.bench", description=__doc__)
    parser.add_argument(
        "--op", nargs="+", choices=[*operations(), LAYER, CHUNK], default=operations(), help="which; all when absent"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 6, 2048], help="steps of this many rows")
    parser.add_argument("--shape", nargs="+", help="only these, as the table names them; all when absent")
    parser.add_argument("--quick", action="store_true", help="the product's arms and the peers, no other cuts")
    parser.add_argument("--best", type=int, default=2, help="how many of our arms to print besides the product's")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for measuring, compiling not counted")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    began = time.monotonic()
    names = [f"_{op}" if op in (LAYER, CHUNK) else op for op in options.op]
    modules = [importlib.import_module(f"{bench.__name__}.{name}") for name in names]
    arms = [arm for module in modules for arm in module.arms(device) if arm.rows in options.rows]
    arms = [arm for arm in arms if options.shape is None or arm.shape in options.shape]
    arms = [arm for arm in arms if arm.is_product or arm.is_peer] if options.quick else arms
    _driver.precompile(arms)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {len(arms)} arms, ", end="")
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    if not arms:
        return 0
    timings = _driver.measure(arms, device, options.seconds)
    if options.json is not None:
        rows = [_row(timing) for timing in timings]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(_driver.table(timings, options.best))
    dense = timings[0].dense_tflops
    also = "" if dense is None else f"; dense bfloat16 rate (T: TFLOP/s and shares of it): {dense:.0f} TFLOP/s"
    print(f"copy rate of this run: {timings[0].copy_tb_s:.2f} TB/s (read + written){also}; ", end="")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


def _row(timing: _driver.Timing) -> dict[str, str | float | None]:
    arm = timing.arm
    return {
        "op": arm.op,
        "shape": arm.shape,
        "rows": arm.rows,
        "arm": arm.name,
        "bytes_read": arm.bytes_read,
        "us": timing.us,
        "tb_s": timing.tb_s,
        "tflops": timing.tflops,
        "share": timing.share,
        "copy_tb_s": timing.copy_tb_s,
        "dense_tflops": timing.dense_tflops,
        "is_product": arm.is_product,
        "is_peer": arm.is_peer,
        "note": timing.note,
    }


if __name__ == "__main__":
    sys.exit(main())
