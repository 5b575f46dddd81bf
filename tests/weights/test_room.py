"""Weights that do not fit are refused before anything is read, with what would fit."""

from __future__ import annotations

import pytest
import torch

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.errors import NotEnoughMemory
from dsv4nb.weights import rank_loader
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.synthetic import SyntheticReader

GB = 10**9
FLASH = SyntheticReader(from_hf(hf_config("flash-0731")))
ONE, PAIR = [torch.device("cuda", 0)], [torch.device("cuda", number) for number in range(2)]


@pytest.mark.parametrize(
    ("free", "devices", "drafter", "told"),
    [
        ((141, 141), ONE, True, "needs 166.9 GB of memory, as it is stored, on cuda:0; there are 141.0 GB. What fits:"),
        ((141, 141), ONE, True, r"What fits: devices=\(0, 1\) \(\d\d\.\d GB\)\. open_checkpoint"),
        ((141, 141), ONE, False, r"on cuda:0; there are 141.0 GB. What fits: devices=\(0, 1\) \(\d\d\.\d GB\)\. open"),
        ((160, 10), ONE, True, r"What fits: drafter=False \(15\d\.\d GB\)\. open"),
        ((141, 10, 100), ONE, True, r"What fits: devices=\(0, 2\) \(\d\d\.\d GB\)\. open"),
        ((85, 85), ONE, True, r"What fits: devices=\(0, 1\), drafter=False \(\d\d\.\d GB\)\. open"),
        ((85, 85), PAIR, True, r"on cuda:0; there are 85.0 GB. What fits: drafter=False \(\d\d\.\d GB\)\. open"),
        ((85, 40), PAIR, False, "on cuda:1; there are 40.0 GB. open_checkpoint"),
        ((24,), ONE, True, "on cuda:0; there are 24.0 GB. open_checkpoint"),
    ],
)
def test_what_would_fit_is_told(
    monkeypatch: pytest.MonkeyPatch, free: tuple[int, ...], devices: list[torch.device], drafter: bool, told: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index] * GB, 150 * GB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(rank_loader, "_parts", None)  # nothing is read
    with pytest.raises(NotEnoughMemory, match=told):
        load_ranks(FLASH, devices, drafter=drafter, source=FLASH)
