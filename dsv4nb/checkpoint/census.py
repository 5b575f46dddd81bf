"""The four `dspark_*` keys: all of them or none (model.md 4.4, encoding.md 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4nb.errors import CheckpointError

DSPARK_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")


def has_dspark_keys(raw: Mapping[str, Any], source: str = "config.json") -> bool:
    """Whether all four keys are there.

    Raises:
        CheckpointError: only some of them are.
    """
    present = [k for k in DSPARK_KEYS if k in raw]
    if present and len(present) < len(DSPARK_KEYS):
        missing = [k for k in DSPARK_KEYS if k not in raw]
        raise CheckpointError(
            f"{source} has {', '.join(present)} but lacks {', '.join(missing)}; refusing to guess "
            "which drafter and encoding this is. All four keys belong together: fetch config.json again.",
            param=missing[0],
        )
    return bool(present)
