"""Compare the CPU engine with the full tiny goldens and print a table (model.md section 10).

    PYTHONPATH=.:kernels python tests/data/compare_goldens.py DIR

DIR is what the independent reference script wrote: `tiny-*-fp8fp4` checkpoints and `golden-*.safetensors`. End to end
the rounded contracts amplify one rounding that falls the other way, so they are also compared layer by layer, each
layer on the golden input. Exits with 1 when a limit is passed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.contract import CONTRACTS
from dsv4nb.engine.batch import Batch, Rotary
from dsv4nb.engine.cache import PREFILL_ROWS
from dsv4nb.engine.forward import Forward
from dsv4nb.engine.layer import Layer
from dsv4nb.engine.state import CpuState
from dsv4nb.weights.loader import load_weights
from dsv4nb.weights.store import Weights

ANY = float("inf")
END_TO_END = {"fp32_plain": (1e-4, 1e-4), "fp32_qat": (ANY, 0.02), "fp32_full": (ANY, ANY)}
LAYER = {"fp32_plain": (1e-4, 1e-4), "fp32_qat": (ANY, 1e-4), "fp32_full": (0.05, 5e-3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table: the largest and the median difference over positions, and what they may be."""

    what: str
    largest: float
    median: float
    limits: tuple[float, float]

    @property
    def holds(self) -> bool:
        return self.largest <= self.limits[0] and self.median <= self.limits[1]

    def __str__(self) -> str:
        verdict = "ok" if self.holds else "TOO FAR"
        return f"{self.what:<44}{self.largest:>12.2e}{self.median:>12.2e}  {verdict}"


def line(what: str, found: Tensor, expected: Tensor, limits: tuple[float, float], *, relative: bool = False) -> Line:
    off = (found - expected).flatten(1).abs().amax(1)
    if relative:
        off = off / expected.flatten(1).abs().amax(1)
    return Line(what=what, largest=off.max().item(), median=off.median().item(), limits=limits)


def end_to_end(
    name: str, mode: str, checkpoint: Checkpoint, weights: Weights, golden: dict[str, Tensor]
) -> Iterator[Line]:
    forward, state = Forward(weights, checkpoint.config, CONTRACTS[mode]), CpuState(checkpoint.config)
    prompt, decoded = golden["prompt"].tolist(), golden["decode_tokens"].tolist()
    rows = []
    for first in range(0, len(prompt), PREFILL_ROWS):
        part = prompt[first : first + PREFILL_ROWS]
        rows.append(forward.rows(state, part))
        state.commit(len(part))
    yield line(f"{name} {mode} prefill", torch.cat(rows), golden["prefill_logits"], END_TO_END[mode])
    rows = []
    for token in decoded:
        rows.append(forward.rows(state, [token]))
        state.commit(1)
    yield line(f"{name} {mode} decode", torch.cat(rows), golden["decode_logits"], END_TO_END[mode])


def layer_by_layer(
    name: str, mode: str, checkpoint: Checkpoint, weights: Weights, golden: dict[str, Tensor]
) -> Iterator[Line]:
    config, prompt = checkpoint.config, golden["prompt"].tolist()
    layer, rotary, state = Layer(config, CONTRACTS[mode]), Rotary(config), CpuState(config)
    state.reserve(len(prompt))
    before = weights.embed[golden["prompt"]][:, None].expand(-1, config.hc_mult, -1)
    for index, (own, cache) in enumerate(zip(weights.layers, state.layers, strict=True)):
        expected, rows = golden[f"trace.layers.{index}.stream"], []
        for first in range(0, len(prompt), PREFILL_ROWS):
            batch = Batch(prompt[first : first + PREFILL_ROWS], first, config, rotary)
            stream = before.new_zeros(batch.places, *before.shape[1:])
            stream[batch.live] = before[first : batch.stop]
            rows.append(layer(batch, stream, own, cache)[batch.live])
        yield line(f"{name} {mode} layer {index} ({own.kind})", torch.cat(rows), expected, LAYER[mode], relative=True)
        before = expected


def lines(folder: Path) -> Iterator[Line]:
    for name in ("tiny-preview", "tiny-0731"):
        checkpoint = open_checkpoint(folder / f"{name}-fp8fp4", require_tokenizer=False)
        weights = load_weights(checkpoint)
        for mode in END_TO_END:
            golden = load_file(folder / f"golden-{name}-{mode}.safetensors")
            yield from end_to_end(name, mode, checkpoint, weights, golden)
            if "trace.layers.0.stream" in golden:
                yield from layer_by_layer(name, mode, checkpoint, weights, golden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"{'':<44}{'largest':>12}{'median':>12}")
    failed = False
    with torch.inference_mode():
        for each in lines(folder):
            print(each)
            failed |= not each.holds
    sys.exit(failed)


if __name__ == "__main__":
    main()
