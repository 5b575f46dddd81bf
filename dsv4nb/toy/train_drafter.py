"""Train the bundled model's DSpark drafter beside its frozen trunk: `python -m dsv4nb.toy.train_drafter --out FOLDER`.

One GPU, minutes (dspark.md section 8). The trunk runs as it is served, with every rounding; the drafter first in plain
float32, then with every rounding of its export in the loop.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.contract import REF_FP8_ROUND
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.reference.drafter import DrafterNetwork
from dsv4nb.reference.loading import official_tensors
from dsv4nb.reference.network import Network
from dsv4nb.toy.batches import Batch, Batches, Encoder
from dsv4nb.toy.blocks import Blocks, draw_blocks
from dsv4nb.toy.draft_evaluation import evaluate
from dsv4nb.toy.draft_figures import losses, summarise, told_drafts
from dsv4nb.toy.export import pack_all, rounded, write_packed
from dsv4nb.toy.graphs import Graphs
from dsv4nb.toy.regenerate import Regenerator
from dsv4nb.toy.shape import model_config
from dsv4nb.toy.train import EXACT, PLAIN, Phase, balance_experts, draw_weights

PEAK_LR = 1.2e-3
WARM_UP = 0.04  # shares of the run
EXACT_FROM = 0.5

# per batch; about as many as the assistant wrote tokens, so that a text is used once
BLOCKS = {"short": 3072, "thought": 3072, "turns": 3072, "recall": 3072, "tools": 3072, "memory": 768}

# a regenerated batch costs several forwards of the trunk: each is used a few times, with other blocks
USES = 3
KEPT = 48


def load_trunk(folder: Path, device: torch.device) -> Network:
    """Return the frozen trunk of a checkpoint in the roundings it is served with; its config has the drafter's keys."""
    trunk = Network(model_config(), REF_FP8_ROUND)
    trunk.load_official(official_tensors(open_checkpoint(folder), is_drafter=False))
    return trunk.requires_grad_(False).eval().to(device)


def initialise(drafter: DrafterNetwork, trunk: Network, seed: int) -> None:
    """Draw the starting weights; the last norm starts as the trunk's, whose output head it feeds."""
    draw_weights(drafter, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        drafter.last.norm.weight.copy_(trunk.norm.weight)


class DraftSteps:
    """Gradients of the blocks of one batch; the trunk's forward is part of the step."""

    def __init__(self, trunk: Network, drafter: DrafterNetwork, graphs: Graphs) -> None:
        self.trunk, self.drafter, self._graphs = trunk, drafter, graphs
        for p in drafter.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)

    def run(self, batch: Batch, blocks: Blocks, phase: Phase) -> Tensor:
        """Fill the drafter's `grad` and nudge its routers; return the table of `judge`."""
        body = partial(self._gradients, phase)
        return self._graphs.run(
            ("step", batch.bucket, phase), body, batch.ids, blocks.row, blocks.position, blocks.supervised
        )

    def _gradients(self, phase: Phase, ids: Tensor, row: Tensor, position: Tensor, supervised: Tensor) -> Tensor:
        phase.enter(self.drafter.mode)
        self.drafter.mode.counted = supervised
        torch._foreach_zero_([p.grad for p in self.drafter.parameters() if p.grad is not None])
        with torch.no_grad():
            stream, taps = self.trunk.tapped(ids)
            logits = self.trunk.logits(stream)
        table = told_drafts(self.drafter, ids, taps, logits, row, position, supervised)
        cross_entropy, distance, confidence = losses(table)
        (0.1 * cross_entropy + 0.9 * distance + confidence).backward()
        balance_experts(self.drafter.stages)
        return table.detach()


class Mixture:
    """Batches of the corpus, a share of them with replies in the trunk's own words."""

    def __init__(self, regenerator: Regenerator, share: float, seed: int) -> None:
        self._regenerator, self._share = regenerator, share
        self._rng, self._g = random.Random(seed), torch.Generator().manual_seed(seed)
        self._kept: list[Batch] = []

    def next(self, corpus: Batch) -> Batch:
        """Return `corpus`, or in its place a batch of the trunk's words."""
        if self._rng.random() >= self._share:
            return corpus
        if not self._kept or self._rng.random() < 1 / USES:
            self._kept = [*self._kept[1 - KEPT :], self._regenerator.batch(corpus, self._g)]
            return self._kept[-1]
        return self._rng.choice(self._kept)


def learning_rate(progress: float) -> float:
    """Warm up, then half a cosine to zero."""
    if progress < WARM_UP:
        return PEAK_LR * progress / WARM_UP
    return PEAK_LR * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2


def make_optimizer(drafter: DrafterNetwork) -> torch.optim.Optimizer:
    """Return AdamW on all that learns, without weight decay."""
    learning = [p for p in drafter.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        learning, lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=learning[0].is_cuda
    )


def update(drafter: DrafterNetwork, optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Make one step along the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()


def train(
    trunk: Network, drafter: DrafterNetwork, tokenizer: Path, args: argparse.Namespace, device: torch.device
) -> int:
    """Run the schedule for `args.minutes`; `drafter` is changed in place. Return the steps made."""
    loader = DataLoader(Batches(str(tokenizer), args.seed + 1000, args.shrink), batch_size=None,
                        num_workers=args.workers, prefetch_factor=4 if args.workers else None)  # fmt: skip
    graphs, g = Graphs(device), torch.Generator().manual_seed(args.seed)
    steps, optimizer = DraftSteps(trunk, drafter, graphs), make_optimizer(drafter)
    eos = ChatTokenizer.from_file(tokenizer).eos_id
    mixture = Mixture(Regenerator(trunk, graphs, eos), args.on_policy, args.seed)
    started, step, reported, seen = time.monotonic(), 0, 0.0, list[Tensor]()
    for corpus in loader:
        elapsed = time.monotonic() - started
        progress = elapsed / (60 * args.minutes)
        if progress >= 1:
            break
        phase = EXACT if progress >= EXACT_FROM else PLAIN
        batch = mixture.next(corpus)
        blocks = draw_blocks(batch, drafter.dspark.block_size, max(1, BLOCKS[batch.bucket] // args.shrink), g)
        seen.append(steps.run(batch, blocks, phase))
        update(drafter, optimizer, learning_rate(progress))
        step += 1
        if step % 20 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # or the clock runs ahead of the device
        if elapsed - reported > 15:
            reported = elapsed
            figures = summarise(torch.cat(seen, 1))
            print(f"{elapsed:6.0f} s  step {step}  lr {learning_rate(progress):.1e}  {figures}", flush=True)
            seen.clear()
    return step


def main() -> None:
    """Train, compare before and after export, write the trunk as it was and the drafter beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "model", help="holds the trunk")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--minutes", type=float, default=6.0, help="length of the training loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")
    parser.add_argument("--on-policy", type=float, default=0.3, help="share of the steps on the trunk's own words")
    parser.add_argument("--many", type=int, default=48, help="held-out questions of each skill and mode")
    parser.add_argument("--shrink", type=int, default=1, help="divides batches, for a machine without a GPU")
    parser.add_argument("--start", type=Path, help="float32 parameters of an earlier run to go on from")
    parser.add_argument("--save-master", type=Path, help="where to keep the float32 parameters")
    args = parser.parse_args()
    if args.out.absolute() == args.checkpoint.absolute():
        parser.error("--out must be another folder than --checkpoint")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    tokenizer = args.checkpoint / "tokenizer.json"
    trunk = load_trunk(args.checkpoint, device)
    drafter = DrafterNetwork(trunk)
    initialise(drafter, trunk, args.seed)
    if args.start:
        drafter.load_official(torch.load(args.start))
    drafter.to(device)
    drafter.parts.balance.differentiated = 3
    steps = train(trunk, drafter, tokenizer, args, device)
    if args.save_master:
        torch.save(drafter.official(), args.save_master)
    report = finish(trunk, drafter, args) | {
        "minutes": args.minutes,
        "steps": steps,
        "seed": args.seed,
        "on_policy": args.on_policy,
        "device": str(device),
        "torch": torch.__version__,
    }
    before = json.loads((args.checkpoint / "training.json").read_text(encoding="utf-8"))
    (args.out / "training.json").write_text(json.dumps(before | {"drafter": report}, indent=1) + "\n")


def finish(trunk: Network, drafter: DrafterNetwork, args: argparse.Namespace) -> dict[str, object]:
    """Write the checkpoint and judge what a reader of it gets, with all roundings, on held-out questions."""
    parameters = drafter.official()
    write_beside_trunk(args.checkpoint, args.out, parameters)
    exported = DrafterNetwork(trunk, REF_FP8_ROUND)
    exported.load_official(rounded(parameters))
    encoder = Encoder(ChatTokenizer.from_file(args.checkpoint / "tokenizer.json"))
    report = evaluate(trunk, exported.to(next(trunk.parameters()).device), encoder, args.seed + 2, args.many)
    for name, value in report.items():
        print(f"{name:24}{value}", flush=True)
    return report


def write_beside_trunk(checkpoint: Path, out: Path, parameters: dict[str, Tensor]) -> int:
    """Write the trunk of `checkpoint`, byte for byte, and the drafter of `parameters`; return the payload bytes."""
    packed: dict[str, Tensor] = {}
    for file in sorted({entry.file for entry in open_checkpoint(checkpoint).entries.values()}):
        packed |= {name: value for name, value in load_file(file).items() if not name.startswith("mtp.")}
    return write_packed(out, packed | pack_all(parameters), (checkpoint / "tokenizer.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
