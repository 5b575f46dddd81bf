"""The command line of the measurements.

`--model` measures a checkpoint as a person meets it. `--synthetic` measures the GPU engine on random weights of any
shape, forward by forward; `rounds`, `prefill`, `whole`, `kernels`, `peer` and `load` are measured so alone, except
that `load` also takes files. `gil --devices` measures a checkpoint on GPUs too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from dsv4nb.bench import devices
from dsv4nb.bench.asked import Asked
from dsv4nb.bench.decode import decode
from dsv4nb.bench.gil import gil
from dsv4nb.bench.overhead import overhead
from dsv4nb.bench.reuse import reuse
from dsv4nb.bench.spec import spec
from dsv4nb.checkpoint.synthetic import SHAPES, field_change
from dsv4nb.engine.gpus import PIPELINE, TENSOR
from dsv4nb.engine.prefill import FAST_ROWS, FORMS
from dsv4nb.errors import Dsv4Error

STDOUT = "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(arguments)
    try:
        report = _report(args)
    except Dsv4Error as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except MemoryError as error:
        said, _, _ = str(error).partition("\n")
        sys.stderr.write(f"memory ran out: {said}\n")
        return 1
    told = json.dumps(asdict(report), indent=1)  # type: ignore[call-overload]
    sys.stdout.write(f"{told if args.json == STDOUT else report}\n")
    if args.json in (None, STDOUT):
        return 0
    try:
        Path(args.json).write_text(f"{told}\n", encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"{args.json}: {error.strerror}\n")
        return 1
    return 0


def _report(args: argparse.Namespace) -> object:
    if getattr(args, "files", None) is not None:
        devices.devices_of(args.devices, args.placement)  # refuses before anything brings Triton
        from dsv4nb.bench.file_loading import file_loading

        return file_loading(args.files, args.devices, args.placement, runs=args.runs)
    if getattr(args, "synthetic", None) is not None:
        return _synthetic(args)
    if args.command == "decode":
        return decode(args.model, prompt_tokens=args.prompt_tokens, new=args.new, runs=args.runs)
    if args.command == "overhead":
        return overhead(vocab_size=args.vocab, new=args.new)
    if args.command == "spec":
        return spec(args.model, temperature=args.temperature, new=args.new, runs=args.runs)
    if args.command == "reuse":
        return reuse(args.model, prompt_tokens=args.prompt_tokens, runs=args.runs)
    path = None if args.wait_only else args.model
    return gil(path, new=args.new, runs=args.runs, devices=args.devices, placement=args.placement)


def _synthetic(args: argparse.Namespace) -> object:
    asked = Asked(
        shape=args.synthetic,
        devices=args.devices or "0",
        placement=args.placement,
        layers=args.layers,
        experts=args.experts,
        changes=dict(args.set),
        contexts=tuple(dict.fromkeys(args.context)),
        widths=tuple(dict.fromkeys(args.widths)),
        routes=args.routes,
        graphs=args.graphs,
        seconds=args.seconds,
        max_seq=args.max_seq,
    )
    devices.devices_of(asked.devices, asked.placement)  # refuses before anything brings Triton
    if args.command == "decode":
        from dsv4nb.bench.synthetic_decode import synthetic_decode

        return synthetic_decode(asked)
    if args.command == "kernels":
        from dsv4nb.bench.step_kernels import step_kernels

        return step_kernels(asked)
    if args.command == "peer":
        from dsv4nb.bench.peer import peer

        return peer(asked, compiles=args.compile)
    if args.command == "whole":
        from dsv4nb.bench.whole import whole

        return whole(asked, lambda line: print(line, file=sys.stderr, flush=True))
    if args.command == "rounds":
        from dsv4nb.bench.rounds import rounds

        return rounds(asked)
    if args.command == "prefill":
        from dsv4nb.bench.prefill import prefill

        return prefill(replace(asked, form=args.form, chunk_rows=args.chunk), rows=args.rows)
    if args.command == "gil":
        from dsv4nb.bench.synthetic_gil import synthetic_gil

        return synthetic_gil(asked, new=args.new, runs=args.runs)
    from dsv4nb.bench.loading import loading

    return loading(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv4nb.bench", description="Measure a model on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    of_decode = commands.add_parser("decode", help="load, first token and decode speed")
    of_decode.add_argument("--prompt-tokens", type=_AtLeast(1), default=100, metavar="N")
    of_decode.add_argument("--new", type=_AtLeast(2), default=64, metavar="N", help="tokens of the reply")
    of_overhead = commands.add_parser("overhead", help="what everything above the engine costs per token")
    of_overhead.add_argument("--vocab", type=_AtLeast(512), default=129280, metavar="V", help="width of a row")
    of_overhead.add_argument("--new", type=_AtLeast(8), default=256, metavar="N", help="tokens of each reply")
    of_gil = commands.add_parser("gil", help="decode speed while a cell computes in pure Python")
    of_gil.add_argument("--new", type=_AtLeast(8), default=48, metavar="N", help="tokens of each reply")
    of_gil.add_argument("--wait-only", action="store_true", help="leave the model out, measure a step that waits")
    of_reuse = commands.add_parser("reuse", help="first token with and without what earlier turns computed")
    of_reuse.add_argument("--prompt-tokens", type=_AtLeast(200), default=2000, metavar="N")
    of_spec = commands.add_parser("spec", help="decode speed with and without speculation")
    of_spec.add_argument("--temperature", type=float, default=0.0, metavar="T")
    of_spec.add_argument("--new", type=_AtLeast(8), default=64, metavar="N", help="tokens of each reply at most")
    for command in (of_decode, of_gil, of_reuse, of_spec):
        command.add_argument("--model", default="toy", metavar="PATH", help="the checkpoint's folder, or toy")
        command.add_argument("--runs", type=_AtLeast(1), default=3, metavar="N")
    of_rounds = commands.add_parser("rounds", help="what a round of each width takes on random weights")
    of_whole = commands.add_parser("whole", help="all of these from one load of random weights")
    of_kernels = commands.add_parser("kernels", help="the kernels of a forward on each GPU, adding up to its time")
    of_peer = commands.add_parser("peer", help="what a token takes here and with transformers, on the same numbers")
    of_peer.add_argument("--compile", action="store_true", help="let torch compile what of transformers it can")
    of_prefill = commands.add_parser("prefill", help="what a prompt takes on random weights")
    of_prefill.add_argument("--rows", type=_AtLeast(1), default=2048, metavar="N", help="tokens behind each context")
    of_prefill.add_argument("--form", choices=FORMS, default="fast", help="how prompts are read")
    of_prefill.add_argument("--chunk", type=_AtLeast(1), default=FAST_ROWS, metavar="N", help="rows of a fast chunk")
    of_load = commands.add_parser("load", help="what loading takes, of random weights or of files")
    of_load.add_argument("--runs", type=_AtLeast(1), default=3, metavar="N", help="of --files")
    synthetic = (of_decode, of_gil, of_rounds, of_whole, of_kernels, of_peer, of_prefill, of_load)
    for command in synthetic:
        _add_synthetic(command, required=command not in (of_decode, of_gil), has_files=command is of_load)
    of_gil.set_defaults(devices=None, widths=[1])  # of --model, where load() looks for them
    of_rounds.set_defaults(widths=[1, 2, 3, 4, 5, 6])
    of_kernels.set_defaults(widths=[1, 6])
    of_peer.set_defaults(layers=4, widths=[1])  # all of them are more than fits beside each other
    for command in (*synthetic, of_overhead, of_reuse, of_spec):
        told = "write one JSON object, without FILE in place of the table"
        command.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help=told)
    return parser


def _add_synthetic(command: argparse.ArgumentParser, *, required: bool, has_files: bool) -> None:
    """Add what random weights are measured with, and a folder of files in their place."""
    group = command.add_argument_group("random weights on GPUs")
    either = group.add_mutually_exclusive_group(required=required)
    either.add_argument("--synthetic", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    if has_files:
        either.add_argument("--files", type=Path, metavar="DIR", help="a checkpoint's folder")
    group.add_argument("--layers", type=_AtLeast(1), metavar="N", help="as many as the shape has when left out")
    group.add_argument("--experts", type=_AtLeast(1), metavar="N", help="routed experts of a layer")
    group.add_argument("--set", type=field_change, action="append", default=[], metavar="FIELD=VALUE")
    group.add_argument("--devices", default="0", metavar="IDS", help="such as 0, or 0,1")
    group.add_argument("--placement", choices=[TENSOR, PIPELINE], help="how several GPUs share the model")
    group.add_argument("--context", type=_AtLeast(0), nargs="+", default=[1024], metavar="N")
    group.add_argument("--max-seq", type=_AtLeast(1), metavar="N", help="room of the caches; just enough when left out")
    group.add_argument("--widths", type=_AtLeast(1), nargs="+", default=[1, 2, 4, 6], metavar="T", help="rows")
    group.add_argument("--routes", choices=["free", "measured"], default="free", help="measured: as a text has them")
    group.add_argument("--no-graphs", dest="graphs", action="store_false", help="launch kernel by kernel")
    group.add_argument("--seconds", type=_AtLeast(0), default=60, metavar="S", help="no new turn begins after that")


class _AtLeast:
    """A whole number with a lower limit, for argparse."""

    def __init__(self, low: int) -> None:
        self._low = low

    def __call__(self, text: str) -> int:
        number = int(text)
        if number < self._low:
            raise argparse.ArgumentTypeError(f"{number} is less than {self._low}")
        return number
