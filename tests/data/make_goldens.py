"""Write the frozen checkpoint and golden logits of `goldens/` from an independent reference.

    python tests/data/make_goldens.py --reference PATH/make_tiny_reference.py

The reference script draws random weights under the official names and runs a slow forward that keeps the history of
every row. Here its dimensions are cut down until the result fits a repository: one layer of each kind.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent / "goldens"
SEED = 20260731
RATIOS = [0, 4, 128]
REDUCED = {
    "compress_ratios": RATIOS,
    "hidden_size": 128,
    "index_n_heads": 8,
    "index_topk": 16,
    "n_routed_experts": 3,
    "num_attention_heads": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": len(RATIOS),
    "num_nextn_predict_layers": 0,
    "o_lora_rank": 64,
    "sliding_window": 64,
    "vocab_size": 256,
}
N_PROMPT, N_DECODE = 300, 60
# scores of entries at the edge of the selection must differ by more than another order of summation can move them
MIN_GAP = 1e-5
MODES = ("fp32_plain", "fp32_qat", "fp32_full")
EVERY = 4  # of the rounded modes, so many prompt rows apart are kept; of fp32_plain all


def load(path: Path) -> ModuleType:
    """Import the reference script from a path."""
    spec = importlib.util.spec_from_file_location("reference_script", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, required=True, help="make_tiny_reference.py")
    reference = load(parser.parse_args().reference)

    vars(reference)["TRUNK_RATIOS"] = RATIOS
    config = {**reference.HF, **REDUCED}
    bank = reference.Bank(SEED)
    reference.build_trunk(bank, config)
    checkpoint = HERE / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in bank.quant.items()}, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    prompt = torch.randint(2, config["vocab_size"], (N_PROMPT,), generator=torch.Generator().manual_seed(1))
    for mode in MODES:
        golden, *_ = reference.run_goldens(bank, config, mode, prompt, N_DECODE)
        gap = golden["index_min_gap"].item()
        print(f"{mode}: smallest gap between a picked and a dropped entry {gap:.2e}")
        assert mode != "fp32_plain" or gap > MIN_GAP, "choose another seed"
        rows = torch.arange(0, N_PROMPT, 1 if mode == "fp32_plain" else EVERY)
        kept = {
            "prompt": prompt,
            "prefill_rows": rows,
            "prefill_logits": golden["prefill_logits"][rows],
            "decode_tokens": golden["decode_tokens"],
            "decode_logits": golden["decode_logits"],
        }
        save_file({name: value.contiguous() for name, value in kept.items()}, HERE / f"{mode}.safetensors")


if __name__ == "__main__":
    main()
