"""The command line of the measurements."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from dsv4nb.bench.decode import decode
from dsv4nb.bench.gil import gil
from dsv4nb.bench.overhead import overhead
from dsv4nb.bench.reuse import reuse
from dsv4nb.bench.spec import spec
from dsv4nb.errors import Dsv4Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(arguments)
    try:
        if args.command == "decode":
            report: object = decode(args.model, prompt_tokens=args.prompt_tokens, new=args.new, runs=args.runs)
        elif args.command == "overhead":
            report = overhead(vocab_size=args.vocab, new=args.new)
        elif args.command == "spec":
            report = spec(args.model, temperature=args.temperature, new=args.new, runs=args.runs)
        elif args.command == "reuse":
            report = reuse(args.model, prompt_tokens=args.prompt_tokens, runs=args.runs)
        else:
            report = gil(None if args.wait_only else args.model, new=args.new, runs=args.runs)
    except Dsv4Error as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{json.dumps(asdict(report), indent=1) if args.json else report}\n")  # type: ignore[call-overload]
    return 0


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
    for command in (of_decode, of_overhead, of_gil, of_reuse, of_spec):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


class _AtLeast:
    """A whole number with a lower limit, for argparse."""

    def __init__(self, low: int) -> None:
        self._low = low

    def __call__(self, text: str) -> int:
        number = int(text)
        if number < self._low:
            raise argparse.ArgumentTypeError(f"{number} is less than {self._low}")
        return number
