"""H-04, A-24 without a GPU: what requests launch was compiled and captured in the warm-up.

    python tests/engine/forms.py --ranks 2 --placement tensor

Kernels are noted in the form in which a GPU's would be compiled, and none runs; graphs are noted, and hold nothing.
So it takes some seconds, on a CPU that stands for each GPU. Prompts end on either side of the positions behind which
entries are chosen. It must not run in Triton's interpreter, which has no forms.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from typing import Any

import torch

import dsv4nb_kernels
from dsv4nb.bench.asked import Asked
from dsv4nb.checkpoint.revision import detect_contract
from dsv4nb.config import SamplerConfig
from dsv4nb.engine import graphs, peer_link, warm_up
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.synthetic import SyntheticReader
from dsv4nb_kernels import _direct

CPU = torch.device("cpu")
MAX_SEQ = 4096
# every kind of layer, with as many choices of entries and experts as the full size has; small but for what kernels need
SHAPE: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "num_hash_layers": 1,
    "hidden_size": 1024,
    "moe_intermediate_size": 1024,
    "num_experts_per_tok": 6,
    "num_attention_heads": 64,
    "o_groups": 16,
    "o_lora_rank": 128,
    "q_lora_rank": 256,
    "index_n_heads": 16,
    "index_topk": 512,
    "sliding_window": 128,
    "vocab_size": 2048,
    "dspark_target_layer_ids": [1, 2, 3],
}
REQUESTS = (  # tokens, and how what follows is chosen
    (17, GREEDY),
    (333, SamplerConfig(temperature=1.0, top_k=40)),
    (1000, SamplerConfig(temperature=1.0, top_p=0.95)),
    (2048, SamplerConfig(temperature=0.6)),
    (4000, GREEDY),
)
MULTIPLE = 16  # that Triton tells apart

Form = tuple[object, ...]


class NoGraph:
    """A graph in which nothing was captured."""

    def replay(self) -> None:
        """Launch nothing: what would run was noted when it was captured."""


class Notes:
    """Forms of kernels and keys of graphs, in place of launching and capturing them."""

    def __init__(self) -> None:
        self.forms: set[Form] = set()
        self.keys: list[object] = []

    def call(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kinds = tuple(_kind(parameter, one) for parameter, one in zip(kernel.params, arguments, strict=False))
        self.forms.add((kernel.__name__, kinds, tuple(sorted((name, repr(one)) for name, one in constants.items()))))

    def capture(self, owner: Any, held: Any, key: object, launch: Any) -> bool:
        if owner.pool is None:
            return False
        launch()
        held[key] = NoGraph()
        owner.captured += 1
        self.keys.append(key)
        return True

    def put_in_place(self) -> None:
        """Let whatever is launched or captured from now on be noted."""
        _direct.call = self.call
        for module in pkgutil.iter_modules(dsv4nb_kernels.__path__):
            if module.name != "bench":
                _as_on_a_gpu(importlib.import_module(f"dsv4nb_kernels.{module.name}"))
        own, notes = graphs.Graphs.__init__, self

        def init(graph: graphs.Graphs, device: torch.device, *, is_on: bool) -> None:
            own(graph, device, is_on=is_on)
            graph.pool = (0, 0) if is_on else None

        graphs.Graphs.__init__ = init  # type: ignore[method-assign]
        graphs.Graphs.capture = lambda *args: notes.capture(*args)  # type: ignore[method-assign]
        peer_link._require_pushes = lambda *args: None  # nothing is pushed


def _as_on_a_gpu(module: Any) -> None:
    for name in ("runs_ptx", "runs_wgmma"):
        if hasattr(module, name):
            setattr(module, name, lambda device: True)
    if hasattr(module, "programs"):  # which asks a GPU for its multiprocessors
        module.programs = lambda total, inner, device: min(total, 132)


def _kind(parameter: Any, argument: object) -> object:
    """Return what Triton compiles for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % MULTIPLE == 0
    if type(argument) is not int or parameter.do_not_specialize:
        return type(argument)
    return 1 if argument == 1 else argument % MULTIPLE == 0


def engine_of(ranks: int, placement: Any) -> DeviceEngine:
    asked = Asked(shape="tiny-0731", layers=4, experts=16, changes=SHAPE, drafter=True)
    config = asked.config()
    reader = SyntheticReader(config, seed=0, device=CPU)
    weights = load_ranks(reader, [CPU] * ranks, kind=placement, drafter=True, source=reader)
    contract, _ = detect_contract(config, ())
    engine = DeviceEngine(weights, config, contract, max_seq=MAX_SEQ)
    assert engine.prefill_form == "fast" and engine.block_size == 5, (engine.prefill_fault, engine.draft_fault)
    return engine


def request(engine: DeviceEngine, length: int, config: SamplerConfig) -> None:
    """Read a prompt, draft and choose rows of every width; go on from a snapshot."""
    state = engine.new_state()
    engine.prefill(state, [(17 * i) % engine.vocab_size for i in range(length)])
    for width in (1, 2, 6, 4, 3, 5):
        engine.draft(state, 7, PlainChoice(config=config, first=state.pos + 1))
        engine.draw_rows(state, [7] * width, config)
        engine.commit(state, 1)
    engine.draft_and_draw(state, 7, 6, drafts_by=config, config=config)
    snapshot = engine.capture(state)
    engine.release(state)
    state = engine.restore(snapshot)
    engine.prefill(state, [3] * 21)
    engine.release(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--placement", choices=("tensor", "pipeline"), default="tensor")
    args = parser.parse_args()
    torch.set_num_threads(1)
    notes = Notes()
    notes.put_in_place()
    engine = engine_of(args.ranks, args.placement)
    warm_up.warm_up(engine)
    known, captured, new = set(notes.forms), len(notes.keys), list[str]()
    sys.stdout.write(f"{len(known)} forms and {captured} graphs in the warm-up\n")
    for length, config in REQUESTS:
        request(engine, length, config)
        new += [f"{length} tokens: {form}" for form in sorted(notes.forms - known, key=str)]
        new += [f"{length} tokens: graph {key}" for key in notes.keys[captured:]]
        known, captured = set(notes.forms), len(notes.keys)
    sys.stdout.write("".join(f"{line}\n" for line in [*new, f"{len(new)} new"]))
    raise SystemExit(bool(new))


if __name__ == "__main__":
    main()
