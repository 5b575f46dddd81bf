"""Write the frozen checkpoints and golden logits of `goldens/` and `goldens_dspark/` from an independent reference.

    python tests/data/make_goldens.py --reference PATH/make_tiny_reference.py

The reference script draws random weights under the official names and runs a slow forward that keeps the history of
every row. Here its dimensions are cut down until the result fits a repository: one layer of each kind. The checkpoint
of `goldens_dspark/` has the same trunk, so only the drafter's file and the configs of it are kept there; the fixture
`dspark_checkpoint` puts the folder together.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent / "goldens"
DSPARK_HERE = Path(__file__).parent / "goldens_dspark"
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

DSPARK = {
    "compress_ratios": [*RATIOS, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_markov_rank": 16,
    "dspark_noise_token_id": 250,
    "dspark_target_layer_ids": [0, 1, 2],
    "num_nextn_predict_layers": 1,
}
N_TAPPED = 140  # positions that the trunk has run
# of pending tokens: the first one that can be drafted behind, then before, at and behind a full window of 64
PENDING = (1, 41, 63, 64, 65, 139)
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
    _save(bank.quant, checkpoint / "model.safetensors")
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
        _save(kept, HERE / f"{mode}.safetensors")
    write_dspark(reference, bank)


def write_dspark(reference: ModuleType, trunk: Any) -> None:
    """Write the drafter beside `trunk`, what it reads of the trunk, and its drafts in every mode."""
    config = {**reference.HF, **REDUCED, **DSPARK}
    drafter = reference.Bank(SEED + 3)
    reference.build_dspark(drafter, config)
    checkpoint = DSPARK_HERE / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    _save(drafter.quant, checkpoint / "drafter.safetensors")
    files = dict.fromkeys(trunk.quant, "model.safetensors") | dict.fromkeys(drafter.quant, "drafter.safetensors")
    index = {"metadata": {}, "weight_map": dict(sorted(files.items()))}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (checkpoint / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    for table in ("val", "plain", "quant", "kind"):
        getattr(drafter, table).update(getattr(trunk, table))
    ids = torch.randint(2, config["vocab_size"], (N_TAPPED,), generator=torch.Generator().manual_seed(2))
    _, _, taps = reference.Ref(drafter, config, "fp32_plain").extend(ids)
    for mode in MODES:
        ref = reference.Ref(drafter, config, mode)
        # the same taps in every mode: how the trunk rounds is the matter of the other goldens
        ref.dspark_feed(taps, 0)
        drafts, logits, confidence, base = (
            torch.stack(part) for part in zip(*(ref.dspark_draft(int(ids[p]), p - 1) for p in PENDING), strict=True)
        )
        kept = {
            "dspark.position": torch.tensor(PENDING),
            "dspark.ids": drafts,
            "dspark.logits": logits,
            "dspark.base_logits": base,
            "dspark.confidence": confidence,
        }
        if mode in ("fp32_plain", "fp32_full"):
            rows = [ref.hist[f"mtp.{stage}.attn.ctx"] for stage in range(3)]
            kept["dspark.ring"] = torch.stack(rows)[:, -config["sliding_window"] :]
        if mode == "fp32_plain":
            kept |= {"prompt": ids, "dspark.taps": taps}
        _save(kept, DSPARK_HERE / f"{mode}.safetensors")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


if __name__ == "__main__":
    main()
