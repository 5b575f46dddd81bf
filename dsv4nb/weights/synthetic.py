"""Checkpoints of any shape with random weights: tensors made from a seed, in the stored formats.

    config = from_hf(hf_config("flash-0731"))
    with SyntheticReader(config, device="cuda:0") as reader:
        codes = reader.read("layers.7.ffn.experts.3.w1.weight")    # int8, on the device, no file anywhere

    python -m dsv4nb.weights.synthetic flash-0731 --layers 4 --experts 8 --to DIR     # files that `load` opens

The numbers keep activations at the size that they have, through any number of layers; clamps fire, and no sublayer
drowns the others. All formats of one seed hold the same numbers: the bf16 one is the exact dequantisation of the FP8
and FP4 one. Which experts a token visits is up to the random gates and hash tables, which spreads consecutive tokens
over as many experts as independent ones; `replayed_routes` has tables as a text has them.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.checkpoint.inventory import Drafter, ExpertFormat, Spec, expected_tensors
from dsv4nb.checkpoint.opening import TOKENIZER
from dsv4nb.checkpoint.synthetic import (
    EXPERT_FORMATS,
    SHAPES,
    Format,
    field_change,
    hf_config,
    inference_config,
    official_shard,
)
from dsv4nb.encoding.byte_tokenizer import byte_tokenizer
from dsv4nb.errors import Dsv4Error
from dsv4nb.weights.packing import FP8_MAX, e8m0_to_float, pack_fp8, spread_tiles, unpack_fp4, unpack_fp8
from dsv4nb.weights.reader import DTYPES
from dsv4nb.weights.writing import Shard, write_folder

_FP4_RMS = math.sqrt(68.5 / 8)  # of the codes: every byte is as likely as any other
_FP8_RMS = 64.0  # at most; codes are normal, and reach seven times as far

_NVFP4_SHIFT = 6  # e4m3 holds the powers 2**-9 … 2**8, around the middle of which the scales are moved

# mean and standard deviation by the end of the name; a matrix that is not listed keeps the size of its input
_MOMENTS = (
    (r"norm\.weight|enorm\.weight|hnorm\.weight", 1.0, 0.1),
    (r"embed\.weight|markov_w1\.weight|attn_sink", 0.0, 1.0),
    (r"ape", 0.0, 0.7),
    (r"hc_(attn|ffn|head)_base", 0.0, 0.5),
    (r"hc_(attn|ffn)_scale", 0.8, 0.2),
    (r"hc_head_scale", 0.8, 0.1),
)
# small sublayer outputs keep a flipped rounding local; w1 and w3 reach the clamp
_GAINS = ((r"attn\.wo_b|w2", 0.7), (r"w1|w3", 1.5), (r"head", 2.0))
# of `gate.bias`, times the number of experts: about the distance of neighbouring scores, so that it decides now and
# then, and no expert is everybody's
_BIAS_SPREAD = 2.4


class SyntheticReader:
    """Makes the tensors that a `Reader` of such a checkpoint would read, one at a time, and keeps none.

    A tensor is a function of (seed, name, shape, kind of device) alone: it is the same in any order, on any rank, and
    however many layers and experts there are beside it.

    Args:
        expert_format: of the trunk's routed experts; that of the config when None, which cannot say NVFP4.
        device: where tensors are made and stay. The bytes of a CPU and of a GPU differ.

    Attributes:
        name: for people.
        config, expert_format: what is made up.
        entries: what there is, by official name: for `place`, and for whoever asks for sizes.
        bytes_read: bytes of the tensors made so far, as stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        expert_format: ExpertFormat | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        drafter = _drafter(config)
        stored: Mapping[str, ExpertFormat] = {"fp4": "fp4", "fp8": "fp8", "bf16": "bf16"}
        self.name, self.config = "random weights", config
        self.expert_format: ExpertFormat = expert_format or stored[config.expert_dtype]
        self.entries: Mapping[str, Spec] = expected_tensors(config, drafter, self.expert_format)
        # what is drawn; other formats are made of it
        self._drawn = expected_tensors(replace(config, quantized=True, expert_dtype="fp4"), drafter, "fp4")
        self._n_experts = config.n_routed_experts
        self._seed, self._device = seed, torch.device(device)
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def dtype(self, name: str) -> str:
        """Return the safetensors spelling of the dtype of `name`."""
        return self.entries[name].dtype

    def read(self, name: str) -> Tensor:
        """Make tensor `name`; e8m0 scales come as their bytes, uint8."""
        spec = self.entries[name]
        self.bytes_read += spec.nbytes
        with torch.no_grad():
            value = self._draw(name) if self._drawn.get(name) == spec else self._recode(name, spec)
        assert value.shape == spec.shape and value.dtype == DTYPES[spec.dtype], (name, spec, value.dtype)
        return value

    def _recode(self, name: str, spec: Spec) -> Tensor:
        """Make a tensor of a matrix that is not stored as it is drawn."""
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight_scale_2", "input_scale"):
            return torch.tensor(2.0**-_NVFP4_SHIFT if leaf == "weight_scale_2" else 1.0, device=self._device)
        if leaf == "weight_scale":
            scale = e8m0_to_float(self._draw(f"{module}.scale")) * 2.0**_NVFP4_SHIFT
            return scale.to(torch.float8_e4m3fn).repeat_interleave(2, -1)
        codes = self._draw(f"{module}.weight")
        if spec.dtype == "U8":
            return codes.view(torch.uint8)
        unpack = unpack_fp4 if codes.dtype == torch.int8 else unpack_fp8
        weight = unpack(codes, self._draw(f"{module}.scale"))
        if spec.dtype == "BF16":
            return weight.to(torch.bfloat16)
        codes, scale = pack_fp8(weight)
        return codes if leaf == "weight" else e8m0_to_float(scale)

    def _draw(self, name: str) -> Tensor:
        spec = self._drawn[name]
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little") >> 1)
        match spec.dtype:
            case "I8":
                return self._bytes(spec.shape, generator)
            case "F8_E4M3":
                return self._codes(name, spec.shape, generator)
            case "F8_E8M0":
                return self._scales(name, spec.shape, generator)
            case "I64":
                scores = torch.rand((spec.shape[0], self._n_experts), generator=generator, device=self._device)
                return scores.topk(spec.shape[1], 1).indices
        mean, std = _moments(name, spec.shape)
        dtype = DTYPES[spec.dtype]
        return torch.randn(spec.shape, generator=generator, device=self._device, dtype=dtype).mul_(std).add_(mean)

    def _bytes(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        n = prod(shape)
        words = torch.empty(-(-n // 8), dtype=torch.int64, device=self._device)
        words.random_(-(2**63), None, generator=generator)  # eight at a time
        return words.view(torch.int8)[:n].view(shape)

    def _codes(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        scale = e8m0_to_float(self._draw(_scale_of(name)))
        codes = torch.randn(shape, generator=generator, device=self._device)
        codes.mul_(spread_tiles(_moments(name, shape)[1] / scale, *shape))
        return codes.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

    def _scales(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Powers of two of some variety; the matrix has its standard deviation whatever they are."""
        weight = f"{name.removesuffix('scale')}weight"
        spec = self._drawn[weight]
        draws = torch.rand(shape, generator=generator, device=self._device)
        if spec.dtype == "I8":
            std = _moments(weight, (*spec.shape[:-1], 2 * spec.shape[-1]))[1]
            # the mean of 4 ** floor(e + 2u), u in [0, 1), is 4 ** floor(e) times 2.5 + 7.5 of what floor takes off
            power = (std / _FP4_RMS) ** 2 / 2.5
            low = math.floor(math.log(power, 4))
            draws.mul_(2).add_((power / 4**low - 1) / 3)
        else:
            low = math.ceil(math.log2(_moments(weight, spec.shape)[1] / _FP8_RMS))
            draws.mul_(2)
        return draws.floor_().add_(127 + low).to(torch.uint8)


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('weight')}scale"


def write_synthetic(
    folder: Path,
    raw: Mapping[str, Any],
    *,
    fmt: Format = "fp8fp4",
    seed: int = 0,
    device: torch.device | str = "cpu",
    shard_of: Callable[[str], Shard] = official_shard,
) -> SyntheticReader:
    """Write a checkpoint without a tokenizer, few tensors in memory at a time.

    Args:
        folder: made when it does not exist.
        raw: config.json, as `hf_config` returns it for the same `fmt`.
        shard_of: the file of a tensor, as a key; files are numbered in the order of the keys.

    Returns:
        What made the tensors.

    Raises:
        CheckpointError: a field of `raw` is bad.
        RequestError: the folder holds a checkpoint already, or the disk lacks the room; nothing was written.
    """
    reader = SyntheticReader(from_hf(raw), expert_format=EXPERT_FORMATS[fmt], seed=seed, device=device)
    write_folder(folder, raw, inference_config(raw), reader, reader.entries, shard_of)
    return reader


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(arguments)
    counts = {"num_hidden_layers": args.layers, "n_routed_experts": args.experts}
    changes = {name: value for name, value in counts.items() if value is not None} | dict(args.set)
    try:
        raw = hf_config(args.shape, changes, fmt=args.format)
        reader = write_synthetic(args.to, raw, fmt=args.format, seed=args.seed, device=args.device)
    except Dsv4Error as error:
        sys.stderr.write(f"{error}\n")
        return 1
    (args.to / TOKENIZER).write_text(byte_tokenizer(), encoding="utf-8")
    sys.stdout.write(f"{args.to}: {len(reader.entries):,} tensors, {reader.bytes_read:,} bytes\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dsv4nb.weights.synthetic", description="Write a checkpoint of random weights."
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="an empty folder, or one to make")
    parser.add_argument("--layers", type=int, metavar="N", help="as many as the shape has when left out")
    parser.add_argument("--experts", type=int, metavar="N", help="routed experts of a layer")
    any_field = parser.add_argument("--set", type=field_change, action="append", default=[], metavar="FIELD=VALUE")
    any_field.help = "a field of config.json; may be repeated"
    parser.add_argument("--format", choices=list(EXPERT_FORMATS), default="fp8fp4")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--device", default="cpu", help="where the numbers are made; a GPU makes others than a CPU")
    return parser


def _drafter(config: ModelConfig) -> Drafter:
    if config.dspark is not None:
        return "dspark"
    return "nextn" if config.num_nextn_predict_layers else "none"


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name.endswith("gate.bias"):
        return 0.0, min(0.3, _BIAS_SPREAD / shape[0])
    for pattern, mean, std in _MOMENTS:
        if re.search(rf"(^|\.|_)({pattern})$", name):
            return mean, std
    gain = next((g for pattern, g in _GAINS if re.search(rf"(^|\.)({pattern})\.weight$", name)), 1.0)
    return 0.0, gain * shape[-1] ** -0.5


if __name__ == "__main__":
    sys.exit(main())
