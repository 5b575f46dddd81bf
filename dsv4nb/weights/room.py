"""Whether weights fit into what GPUs have free, and what would fit where they do not; nothing is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.errors import NotEnoughMemory, RequestError
from dsv4nb.weights.load_order import load_order
from dsv4nb.weights.pieces import batch_of
from dsv4nb.weights.placement import SharedKind, Stored, place

_Entries = Mapping[str, Stored]


def require_room(
    name: str,
    config: ModelConfig,
    entries: _Entries,
    devices: Sequence[torch.device],
    kind: SharedKind,
    needed: Sequence[int],
) -> None:
    """Refuse weights that are larger than what a GPU has free; of a CPU nothing is asked.

    Args:
        entries: what would be read.
        needed: bytes of each rank, on one of `devices` each.

    Raises:
        NotEnoughMemory: naming the first GPU that has too little, and what fits.
    """
    for device, nbytes in zip(devices, needed, strict=True):
        if device.type == "cuda" and nbytes > (free := _free(device)):
            fits = tuple(_what_fits(config, entries, devices, kind))
            raise NotEnoughMemory(name, nbytes, free, f"as it is stored, on {device}", fits)


def _what_fits(
    config: ModelConfig, entries: _Entries, devices: Sequence[torch.device], kind: SharedKind
) -> Iterator[str]:
    """Yield what could be asked for instead, and what it takes on the fullest GPU."""
    trunk = {name: entry for name, entry in entries.items() if not name.startswith("mtp.")}
    ways: list[tuple[str, Sequence[torch.device], _Entries]] = []
    if len(trunk) < len(entries):
        ways.append(("drafter=False", devices, trunk))
    if len(devices) == 1:
        own = devices[0].index or 0
        for other in (number for number in range(torch.cuda.device_count()) if number != own):
            pair = [torch.device("cuda", number) for number in (own, other)]
            ways += [
                (f"devices=({own}, {other})", pair, entries),
                (f"devices=({own}, {other}), drafter=False", pair, trunk),
            ]
    for how, places, wanted in ways:
        try:
            needed = _held(config, wanted, len(places), kind)
        except RequestError:  # the model does not divide into so many
            continue
        if all(nbytes <= _free(device) for device, nbytes in zip(places, needed, strict=True)):
            yield f"{how} ({max(needed) / 1e9:,.1f} GB)"
            if len(places) > len(devices):
                return


def _held(config: ModelConfig, entries: _Entries, ranks: int, kind: SharedKind) -> list[int]:
    placement = place(config, entries, ranks=ranks, kind="single" if ranks == 1 else kind)
    batches = [batch_of(names, entries, placement) for names in load_order(entries, config)]
    return [sum(batch.held_bytes(rank) for batch in batches) for rank in range(ranks)]


def _free(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
