"""The drafter network against drafts of an independent reference, and what its slots may see (dspark.md 10.4)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import BF16_FULL, CONTRACTS, FP32_PLAIN
from dsv4nb.reference.drafter import DrafterNetwork, Drafts
from dsv4nb.reference.loading import load_drafter, load_network
from dsv4nb.reference.network import Network

# largest and median difference of a row; the drafter reads given taps, so that a rounding that falls the other way
# stays within its block
LIMITS = {"fp32_plain": (1e-4, 1e-4), "fp32_qat": (float("inf"), 1e-3), "fp32_full": (float("inf"), 1e-3)}


@pytest.fixture(scope="module")
def plain(goldens_dspark: Path) -> dict[str, Tensor]:
    return load_file(goldens_dspark / "fp32_plain.safetensors")


@pytest.fixture(scope="module")
def trunk(dspark_checkpoint: Checkpoint) -> Network:
    return load_network(dspark_checkpoint, FP32_PLAIN)


@pytest.fixture(scope="module")
def drafter(dspark_checkpoint: Checkpoint, trunk: Network) -> DrafterNetwork:
    return load_drafter(dspark_checkpoint, trunk, FP32_PLAIN)


def blocks(drafter: DrafterNetwork, golden: dict[str, Tensor], plain: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return hidden values and pending ids of the frozen blocks."""
    context = drafter.context(plain["dspark.taps"][None])
    position, pending = golden["dspark.position"], golden["dspark.ids"][:, 0]
    return drafter.hidden(context, torch.zeros_like(position), position, pending), pending


def off(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).abs().amax(-1)


def test_taps_match_the_frozen_ones(trunk: Network, plain: dict[str, Tensor]) -> None:
    _, taps = trunk.tapped(plain["prompt"][None])
    assert off(taps[0], plain["dspark.taps"]).max() <= 1e-4


@pytest.mark.parametrize("mode", ["fp32_plain", "fp32_full"])
def test_context_rows_match_the_frozen_ring(
    dspark_checkpoint: Checkpoint, trunk: Network, goldens_dspark: Path, plain: dict[str, Tensor], mode: str
) -> None:
    drafter = load_drafter(dspark_checkpoint, trunk, CONTRACTS[mode])
    ring = load_file(goldens_dspark / f"{mode}.safetensors")["dspark.ring"]
    for rows, expected in zip(drafter.context(plain["dspark.taps"][None]), ring, strict=True):
        assert off(rows[0, -len(expected) :], expected).median() <= 1e-5
        assert mode != "fp32_plain" or off(rows[0, -len(expected) :], expected).max() <= 1e-4


@pytest.mark.parametrize("mode", LIMITS)
def test_matches_the_frozen_drafts(
    dspark_checkpoint: Checkpoint, trunk: Network, goldens_dspark: Path, plain: dict[str, Tensor], mode: str
) -> None:
    golden = load_file(goldens_dspark / f"{mode}.safetensors")
    drafter = load_drafter(dspark_checkpoint, trunk, CONTRACTS[mode])
    hidden, pending = blocks(drafter, golden, plain)
    walked = drafter.walk(hidden, pending)
    highest, median = LIMITS[mode]
    assert off(walked.base, golden["dspark.base_logits"]).max() <= highest
    assert off(walked.base, golden["dspark.base_logits"]).median() <= median
    same = walked.previous == golden["dspark.ids"][:, :-1]  # logits depend on the draft before
    assert same.all() or (mode != "fp32_plain" and same.float().mean() > 0.8)
    assert off(walked.logits, golden["dspark.logits"])[same].max() <= highest
    assert (walked.confidence - golden["dspark.confidence"])[same].abs().max() <= highest
    if mode == "fp32_plain":
        assert torch.equal(walked.logits.argmax(-1), golden["dspark.ids"][:, 1:])


def test_m06_a_contract_is_arithmetic_not_a_label(
    dspark_checkpoint: Checkpoint, trunk: Network, goldens_dspark: Path, plain: dict[str, Tensor]
) -> None:
    golden = load_file(goldens_dspark / "fp32_full.safetensors")
    other = load_drafter(dspark_checkpoint, trunk, CONTRACTS["fp32_qat"])
    hidden, _ = blocks(other, golden, plain)
    assert off(other.base(hidden), golden["dspark.base_logits"]).median() > LIMITS["fp32_full"][1]


def test_bf16_hand_over_stays_near_the_same_roundings_in_float32(
    dspark_checkpoint: Checkpoint, trunk: Network, goldens_dspark: Path, plain: dict[str, Tensor]
) -> None:
    golden = load_file(goldens_dspark / "fp32_full.safetensors")
    drafter = load_drafter(dspark_checkpoint, trunk, BF16_FULL)
    drafter_off = off(drafter.base(blocks(drafter, golden, plain)[0]), golden["dspark.base_logits"])
    assert 1e-3 < drafter_off.median() < 0.5


def test_from_ids_to_drafts_in_one_call(drafter: DrafterNetwork, trunk: Network, plain: dict[str, Tensor]) -> None:
    _, taps = trunk.tapped(plain["prompt"][None])
    for i, position in enumerate(plain["dspark.position"].tolist()):
        one = drafter.draft(taps[0, :position], int(plain["prompt"][position]), position)
        assert off(one.logits[0], plain["dspark.logits"][i]).max() <= 1e-4
        assert one.logits[0].argmax(-1).tolist() == plain["dspark.ids"][i, 1:].tolist()


def forced(drafter: DrafterNetwork, ids: Tensor, taps: Tensor, position: Tensor) -> Drafts:
    return drafter(ids[None], taps[None], torch.zeros_like(position), position)


def test_told_its_own_drafts_the_forward_gives_what_the_walk_gave(
    drafter: DrafterNetwork, plain: dict[str, Tensor]
) -> None:
    for i, position in enumerate(plain["dspark.position"].tolist()[:-1]):
        ids = plain["prompt"].clone()
        ids[position : position + 6] = plain["dspark.ids"][i]
        out = forced(drafter, ids, plain["dspark.taps"], torch.tensor([position]))
        assert torch.equal(out.previous[0], plain["dspark.ids"][i, :-1])
        assert off(out.logits[0], plain["dspark.logits"][i]).max() <= 1e-4
        assert (out.confidence[0] - plain["dspark.confidence"][i]).abs().max() <= 1e-4


def test_blocks_do_not_see_each_other(drafter: DrafterNetwork, plain: dict[str, Tensor]) -> None:
    position = torch.tensor([2, 64, 66, 120])
    together = forced(drafter, plain["prompt"], plain["dspark.taps"], position)
    for m in range(4):
        alone = forced(drafter, plain["prompt"], plain["dspark.taps"], position[m : m + 1])
        torch.testing.assert_close(together.logits[m], alone.logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", [1, 33, 64, 100])
def test_a_slot_sees_the_window_before_the_pending_token_and_nothing_else(
    drafter: DrafterNetwork, plain: dict[str, Tensor], position: int
) -> None:
    before = drafter.draft(plain["dspark.taps"], 9, position).base
    seen = set(range(max(0, position - drafter.config.sliding_window), position))
    for changed in {0, position - 65, position - 64, position - 1, position, position + 1} & set(range(140)):
        taps = plain["dspark.taps"].clone()
        taps[changed] = -taps[changed]
        moved = off(drafter.draft(taps, 9, position).base, before)[0]
        assert (moved > 1e-4).tolist() == [changed in seen] * 5, changed


def test_the_block_is_bidirectional(
    drafter: DrafterNetwork, plain: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drafter.draft(plain["dspark.taps"], 9, 80).base[0]
    embed = drafter._borrowed[0]

    def changed(ids: Tensor) -> Tensor:
        rows = embed(ids).clone()
        rows[:, 4] = -rows[:, 4]
        return rows

    monkeypatch.setattr(drafter, "_borrowed", (changed, drafter._borrowed[1]))
    assert off(drafter.draft(plain["dspark.taps"], 9, 80).base[0], before).min() > 1e-3


def test_without_the_markov_term_a_row_does_not_depend_on_the_token_before(
    dspark_checkpoint: Checkpoint, trunk: Network, plain: dict[str, Tensor]
) -> None:
    drafter = load_drafter(dspark_checkpoint, trunk, FP32_PLAIN)
    ids, changed, position = plain["prompt"], plain["prompt"].clone(), torch.tensor([70])
    changed[71:75] = (changed[71:75] + 17) % 256
    with_term = [forced(drafter, x, plain["dspark.taps"], position) for x in (ids, changed)]
    assert torch.equal(with_term[0].base, with_term[1].base)
    assert off(with_term[0].logits, with_term[1].logits)[0, 1:].min() > 1e-3
    assert torch.equal(with_term[0].logits[0, 0], with_term[1].logits[0, 0])
    torch.nn.init.zeros_(drafter.mtp[2].markov_head.markov_w2.weight)
    without = [forced(drafter, x, plain["dspark.taps"], position).logits for x in (ids, changed)]
    assert torch.equal(without[0], without[1])


def test_parameters_have_the_official_names_and_come_back(
    dspark_checkpoint: Checkpoint, trunk: Network, drafter: DrafterNetwork
) -> None:
    official = drafter.official()
    assert set(official) == {n for n in dspark_checkpoint.entries if n.startswith("mtp.") and not n.endswith(".scale")}
    again = DrafterNetwork(trunk)
    again.load_official(official)
    for name, value in again.state_dict().items():
        assert torch.equal(value, drafter.state_dict()[name]), name


def test_every_parameter_learns_and_the_trunk_does_not(
    dspark_checkpoint: Checkpoint, trunk: Network, plain: dict[str, Tensor]
) -> None:
    drafter = load_drafter(dspark_checkpoint, trunk, CONTRACTS["ref_fp8_round"])
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not name.endswith("gate.bias"))
    drafter.mode.round_weights = True
    position = torch.arange(3, 130, 5)
    out = forced(drafter, plain["prompt"], plain["dspark.taps"], position)
    target = plain["prompt"][position[:, None] + torch.arange(1, 6)]
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), target.flatten())
    (loss + out.confidence.square().mean()).backward()  # type: ignore[no-untyped-call]
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in trunk.parameters())
