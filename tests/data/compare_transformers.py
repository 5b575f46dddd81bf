"""Compare the whole-sequence network with `transformers` in float32 on one plain bf16 checkpoint.

    PYTHONPATH=.:kernels python tests/data/compare_transformers.py DIR [--tokens 390]

DIR is a checkpoint under official names with bf16 experts, such as `tiny-preview-bf16` of the independent reference
script. Prints the largest difference of the logits, for the whole sequence at once and for cached decoding.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.contract import FP32_PLAIN
from dsv4nb.reference.loading import load_network


@torch.inference_mode()
def main() -> None:
    """Print two lines; leave with 1 when a difference passes 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=390)
    args = parser.parse_args()
    network = load_network(open_checkpoint(args.checkpoint, require_tokenizer=False), FP32_PLAIN)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(2, network.config.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    ours = network(ids)
    whole = (other(ids, use_cache=False).logits - ours).abs().max().item()
    split = args.tokens * 3 // 4
    out = other(ids[:, :split], use_cache=True)
    worst = (out.logits - ours[:, :split]).abs().max().item()
    for t in range(split, args.tokens):
        out = other(ids[:, t : t + 1], use_cache=True, past_key_values=out.past_key_values)
        worst = max(worst, (out.logits[:, 0] - ours[:, t]).abs().max().item())
    print(f"transformers {transformers.__version__}, {args.tokens} tokens, largest logit {ours.abs().max():.2f}")
    print(f"whole sequence {whole:.1e}\ncached decode  {worst:.1e}")
    raise SystemExit(max(whole, worst) > 1e-4)


if __name__ == "__main__":
    main()
