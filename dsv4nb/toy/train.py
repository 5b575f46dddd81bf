"""Train the bundled model and write its checkpoint: `python -m dsv4nb.toy.train --out FOLDER`.

One GPU, minutes. The schedule runs by the clock: plain float32 at first, then with every rounding of the export
and of the official arithmetic in the loop, and with the indexer's own picks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from dsv4nb.contract import FP32_PLAIN, REF_FP8_ROUND, Contract
from dsv4nb.encoding.render import render_text
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.reference.layers import Mode
from dsv4nb.reference.network import Block, Network, Official
from dsv4nb.toy.batches import BUCKETS, Batch, Batches, Encoder, draw
from dsv4nb.toy.corpus.tasks import Sampler
from dsv4nb.toy.export import rounded, write_checkpoint
from dsv4nb.toy.graphs import Graphs
from dsv4nb.toy.probes import Probe, probes, score
from dsv4nb.toy.shape import model_config
from dsv4nb.toy.vocabulary import train_tokenizer

PEAK_LR = 1.8e-3
WARM_UP = 0.02  # shares of the run
EXACT_FROM = 0.60
DECAY_FROM = 0.60
BALANCE_RATE = 2e-3  # per step, of the router's selection bias


def initialise(network: Network, seed: int) -> None:
    """Draw the starting weights; residual branches start small, streams start nearly unmixed."""
    draw_weights(network, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for block in network.blocks:
            if block.attn.compressor is not None:
                # entries start in the space of the window rows, so that what finds one finds the other
                halves = block.attn.compressor.wkv.weight.shape[0] // block.attn.wkv.weight.shape[0]
                block.attn.compressor.wkv.weight.copy_(block.attn.wkv.weight.repeat(halves, 1))


def draw_weights(network: Official, g: torch.Generator) -> None:
    """Fill every parameter by what its official name says it is."""

    def normal(shape: torch.Size, std: float) -> Tensor:
        return torch.randn(shape, generator=g) * std

    hc = network.config.hc_mult
    with torch.no_grad():
        for name, p in network.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if name == "embed.weight":
                p.copy_(normal(p.shape, 0.5))
            elif "norm" in name or leaf in ("attn_sink", "ape", "bias"):
                continue  # already ones and zeros
            elif "markov_head" in name:
                p.copy_(normal(p.shape, 0.02))
            elif "confidence_head" in name:
                p.zero_()
            elif leaf.endswith("_fn"):
                p.copy_(normal(p.shape, 0.1 * p.shape[-1] ** -0.5))
            elif leaf.endswith("_scale"):
                p.fill_(0.5)
            elif leaf == "hc_head_base":
                p.copy_(normal(p.shape, 0.1) - 1.1)  # sigmoid(-1.1) = 1/4: the mean of the streams
            elif leaf.endswith("_base"):
                # different streams start with different shares, or they would stay copies of each other
                p[:hc] = normal(p[:hc].shape, 0.5) - 1.1
                p[hc : 2 * hc] = normal(p[hc : 2 * hc].shape, 0.5)
                p[2 * hc :] = (3.0 * torch.eye(hc)).flatten()
            else:
                small = 0.3 if name.endswith(("wo_b.weight", "w2", "w2.weight")) else 1.0
                p.copy_(normal(p.shape, small * p.shape[-1] ** -0.5))


def assign_hash_experts(network: Network, frequency: Tensor, seed: int) -> None:
    """Fill the token-id tables so that experts get about equal shares of the corpus.

    Args:
        frequency: [V] how often each id occurs.
    """
    chosen, experts = network.config.num_experts_per_tok, network.config.n_routed_experts
    for layer, block in enumerate(network.blocks):
        if block.ffn.gate.bias is not None:
            continue
        rng, load = random.Random(f"{seed}/{layer}"), [0.0] * experts
        for token in frequency.argsort(descending=True).tolist():
            order = sorted(range(experts), key=lambda e: (load[e], rng.random()))[:chosen]
            for e in order:
                load[e] += float(frequency[token]) + 1e-9
            block.ffn.gate.tid2eid[token] = torch.tensor(sorted(order))


def corpus_texts(seed: int, per_bucket: int) -> list[str]:
    """Return rendered conversations to learn the vocabulary from, control tokens left out."""
    rng = random.Random(seed)
    s, texts = Sampler(rng), []
    for bucket in BUCKETS:
        for _ in range(per_bucket):
            conversation, thinking = draw(bucket, s, lambda text: len(text) // 4)
            text = render_text(conversation.messages, revision="v0731", thinking=thinking)
            texts += [piece for piece in _CONTROL.split(text) if piece]
    return texts


_CONTROL = re.compile(r"<｜[^｜]*｜>|｜DSML｜|</?think>")


def learning_rate(progress: float) -> float:
    """Warm up, hold, decay linearly to zero."""
    if progress < WARM_UP:
        return PEAK_LR * progress / WARM_UP
    return PEAK_LR * min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What is switched on in one part of the run."""

    contract: Contract
    round_weights: bool
    select_entries: bool

    def enter(self, mode: Mode) -> None:
        """Switch a network's mode."""
        mode.contract = self.contract
        mode.round_weights, mode.select_entries = self.round_weights, self.select_entries


PLAIN = Phase(contract=FP32_PLAIN, round_weights=False, select_entries=False)
EXACT = Phase(contract=REF_FP8_ROUND, round_weights=True, select_entries=True)


class Steps:
    """Gradients of one batch."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self.network, self._graphs = network, Graphs(device)
        for p in network.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p)

    def run(self, batch: Batch, phase: Phase) -> Tensor:
        """Fill the parameters' `grad` and nudge the routers.

        Returns:
            Language loss, indexer loss and share of assistant tokens predicted.
        """
        body = partial(self._gradients, phase)
        return self._graphs.run((batch.bucket, phase), body, batch.ids, batch.weight)

    def _gradients(self, phase: Phase, ids: Tensor, weight: Tensor) -> Tensor:
        mode = self.network.mode
        phase.enter(mode)
        mode.counted, mode.index_losses = weight > 0, []
        torch._foreach_zero_([p.grad for p in self.network.parameters() if p.grad is not None])
        logits = self.network(ids)[:, :-1]
        target, w = ids[:, 1:], weight[:, 1:]
        ce = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(w)
        said = w == 1
        hit = ((logits.detach().argmax(-1) == target) & said).sum() / said.sum()
        language, index = (ce * w).sum() / w.sum(), torch.stack(mode.index_losses).mean()
        (language + index).backward()
        balance_experts(self.network.blocks)
        return torch.stack([language.detach(), index.detach(), hit])


def balance_experts(blocks: Sequence[Block]) -> None:
    """Nudge each router's selection bias toward equal load (the loss-free balancing of `noaux_tc`)."""
    for block in blocks:
        bias, load = block.ffn.gate.bias, block.ffn.load
        if bias is not None and load is not None:
            with torch.no_grad():
                bias.add_(torch.sign(load.float().mean() - load.float()), alpha=BALANCE_RATE)


def train(network: Network, tokenizer_path: Path, minutes: float, seed: int, workers: int, device: torch.device) -> int:
    """Run the schedule for `minutes`; `network` is changed in place. Return the steps made."""
    loader = DataLoader(Batches(str(tokenizer_path), seed), batch_size=None, num_workers=workers,
                        prefetch_factor=4 if workers else None, pin_memory=device.type == "cuda")  # fmt: skip
    matrices = [p for p in network.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in network.parameters() if p.requires_grad and p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-10, fused=device.type == "cuda",
    )  # fmt: skip
    encoder = Encoder(ChatTokenizer.from_file(tokenizer_path))
    few = probes(seed + 1, encoder, many=48)
    steps = Steps(network, device)
    started, step, reported, probed = time.monotonic(), 0, 0.0, 0.0
    seen: dict[str, list[Tensor]] = {}
    for batch in loader:
        elapsed = time.monotonic() - started
        progress = elapsed / (60 * minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        phase = EXACT if progress >= EXACT_FROM else PLAIN
        figures = steps.run(batch, phase)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        seen.setdefault(batch.bucket, []).append(figures)
        step += 1
        if step % 20 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # or the clock runs ahead of the device
        if elapsed - reported > 15:
            reported = elapsed
            means = {k: torch.stack(v).mean(0).tolist() for k, v in sorted(seen.items())}
            shown = "  ".join(f"{k} {a:.3f}/{b:.3f}/{c:.3f}" for k, (a, b, c) in means.items())
            print(f"{elapsed:6.0f} s  step {step}  lr {learning_rate(progress):.1e}  {shown}", flush=True)
            seen.clear()
        if elapsed - probed > 90:
            probed = elapsed
            phase.enter(network.mode)
            print("        " + _table(evaluate(network, encoder, few)), flush=True)
    return step


def evaluate(network: Network, encoder: Encoder, asked: list[Probe]) -> dict[str, float]:
    """Score `asked` without recording losses."""
    network.mode.index_losses, network.mode.counted = None, None
    return score(network, encoder, asked)


def _table(scores: dict[str, float]) -> str:
    return "  ".join(f"{k} {v:.2f}" for k, v in scores.items())


def expert_shares(network: Network) -> list[float]:
    """Return, per layer, the busiest expert's load over the mean of the last forward."""
    loads = [block.ffn.load.float() for block in network.blocks if block.ffn.load is not None]
    return [round(float(load.max() / load.mean()), 2) for load in loads]


def main() -> None:
    """Make vocabulary and model, train, compare before and after export, write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=12.0, help="length of the training loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")
    parser.add_argument("--start", type=Path, help="float32 parameters of an earlier run to go on from")
    parser.add_argument("--save-master", type=Path, help="where to keep the float32 parameters")
    parser.add_argument("--tokenizer", type=Path, help="an existing tokenizer.json; trained when not given")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "tokenizer.json"
    if args.tokenizer:
        path.write_text(args.tokenizer.read_text(encoding="utf-8"), encoding="utf-8")
    else:
        train_tokenizer(corpus_texts(args.seed, 3000)).save(str(path))
    encoder = Encoder(ChatTokenizer.from_file(path))
    network = Network(model_config())
    initialise(network, args.seed)
    if args.start:
        network.load_official(torch.load(args.start))
    else:
        rng, frequency = random.Random(args.seed), torch.zeros(network.config.vocab_size)
        s = Sampler(rng)
        for bucket in BUCKETS:
            for _ in range(400):
                conversation, thinking = draw(bucket, s, encoder.tokenizer.count)
                ids = torch.tensor(encoder.ids(conversation, thinking=thinking))
                frequency += torch.bincount(ids, minlength=frequency.numel()) * bucket.share
        assign_hash_experts(network, frequency, args.seed)
    network.to(device)
    network.parts.balance.differentiated = 3
    steps = train(network, path, args.minutes, args.seed, args.workers, device)
    report = finish(network, encoder, args.out, path, args.seed)
    report |= {
        "minutes": args.minutes,
        "steps": steps,
        "seed": args.seed,
        "device": str(device),
        "torch": torch.__version__,
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.save_master:
        torch.save(network.official(), args.save_master)


def finish(network: Network, encoder: Encoder, out: Path, tokenizer: Path, seed: int) -> dict[str, object]:
    """Write the checkpoint and score it: before export without roundings, after export with all of them."""
    asked = probes(seed + 2, encoder, many=256)
    network.mode.contract, network.mode.round_weights, network.mode.select_entries = FP32_PLAIN, False, True
    before = evaluate(network, encoder, asked)
    shares = expert_shares(network)
    parameters = network.official()
    total = write_checkpoint(out, parameters, tokenizer.read_text(encoding="utf-8"))
    exported = Network(network.config, REF_FP8_ROUND)
    exported.load_official(rounded(parameters))
    after = evaluate(exported.to(next(network.parameters()).device), encoder, asked)
    print(f"{'held out':24}{'float32':>9}{'export':>9}")
    for key in after:
        print(f"{key:24}{before[key]:9.3f}{after[key]:9.3f}")
    print(f"payload {total / 1e6:.2f} MB; busiest expert over mean, per layer: {shares}", flush=True)
    return {"float32": before, "export": after, "payload_bytes": total, "busiest_expert": shares}


if __name__ == "__main__":
    main()
