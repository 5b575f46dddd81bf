"""Training the drafter: where blocks are, the trunk's own words, figures, steps, and the folder that comes out."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.contract import REF_FP8_ROUND
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.reference.drafter import DrafterNetwork, Drafts
from dsv4nb.reference.loading import load_drafter, load_network
from dsv4nb.reference.network import Network
from dsv4nb.toy import draft_evaluation
from dsv4nb.toy.batches import BUCKETS, Batch, Encoder, make_batch
from dsv4nb.toy.blocks import all_blocks, draw_blocks, supervised_slots
from dsv4nb.toy.draft_figures import Rollout, auc_of, judge, losses, roll_out, summarise
from dsv4nb.toy.export import rounded
from dsv4nb.toy.graphs import Graphs
from dsv4nb.toy.probes import Probe, held_out_conversations
from dsv4nb.toy.regenerate import Regenerator
from dsv4nb.toy.train import EXACT, PLAIN
from dsv4nb.toy.train_drafter import (
    DraftSteps,
    initialise,
    learning_rate,
    load_trunk,
    make_optimizer,
    update,
    write_beside_trunk,
)

BUNDLED = Path(__file__).parents[2] / "dsv4nb" / "toy" / "model"
ENCODER = Encoder(ChatTokenizer.from_file(BUNDLED / "tokenizer.json"))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trunk() -> Network:
    return load_trunk(BUNDLED, CPU)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(replace(BUCKETS[0], rows=4, length=48), ENCODER, random.Random(3))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def new_drafter(trunk: Network) -> DrafterNetwork:
    drafter = DrafterNetwork(trunk)
    initialise(drafter, trunk, 0)
    return drafter


def test_a_slot_has_a_label_while_the_assistant_writes() -> None:
    weight = torch.tensor([[0.0, 0.02, 1, 1, 1, 0.02, 1, 1]])
    slots = supervised_slots(weight, 3)[0].int().tolist()
    none = [0, 0, 0]
    assert slots == [none, none, [1, 1, 0], [1, 0, 0], none, none, [1, 0, 0], none]
    found = all_blocks(weight, 3)
    assert found.position.tolist() == [2, 3, 6]
    assert found.supervised.int().tolist() == [slots[2], slots[3], slots[6]]


def test_blocks_are_drawn_once_and_filled_up_with_unsupervised_ones(batch: Batch) -> None:
    there = all_blocks(batch.weight, 5)
    count = len(there.row)
    few, many = (draw_blocks(batch, 5, n, generator()) for n in (7, count + 4))
    assert few.supervised.shape == (7, 5)
    assert few.supervised[:, 0].all()
    places = set(zip(many.row[:count].tolist(), many.position[:count].tolist(), strict=True))
    assert places == set(zip(there.row.tolist(), there.position.tolist(), strict=True))
    assert many.supervised.shape == (count + 4, 5)
    assert not many.supervised[count:].any()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "drawn"])
def test_passes_over_whole_rows_draw_what_token_by_token_would(trunk: Network, batch: Batch, greedy: bool) -> None:
    found = Regenerator(trunk, Graphs(CPU), ENCODER.tokenizer.eos_id).batch(batch, generator(), greedy=greedy)
    g = generator()
    if not greedy:  # which of the replies comes first in the stream of random numbers
        torch.rand(batch.weight.shape, generator=g)
    uniform = torch.rand(batch.ids.shape, generator=g)
    share = trunk(found.ids)[:, :-1].softmax(-1)
    drawn = share.argmax(-1) if greedy else (share.cumsum(-1) <= uniform[:, 1:, None]).sum(-1)
    assert not greedy or torch.equal(found.weight, batch.weight.eq(1).float())  # it learned these answers
    for row in range(len(batch.ids)):
        said = (found.weight[row] == 1).nonzero()[:, 0]
        first, end = int(said[0]), int(said[-1])
        assert batch.weight[row, first] == 1
        assert torch.equal(found.ids[row, :first], batch.ids[row, :first])
        # rows are causal: each token is what its own draw picks behind the tokens before it
        assert torch.equal(found.ids[row, first : end + 1], drawn[row, first - 1 : end])
        assert found.ids[row, end] == ENCODER.tokenizer.eos_id
        assert ENCODER.tokenizer.eos_id not in found.ids[row, first:end]
        assert (found.ids[row, end:] == ENCODER.tokenizer.eos_id).all()


def test_auc_counts_pairs_and_halves_ties() -> None:
    outcome = torch.tensor([True, True, False, False])
    assert auc_of(torch.tensor([2.0, 3.0, 0.0, 1.0]), outcome) == 1.0
    assert auc_of(torch.tensor([0.0, 3.0, 0.0, 1.0]), outcome) == (0.5 + 0 + 1 + 1) / 4
    assert auc_of(torch.zeros(4), outcome) == 0.5
    assert math.isnan(auc_of(torch.zeros(2), torch.tensor([True, True])))


def test_rounds_of_a_known_text() -> None:
    text = [5, 6, 7, 8, 9, 1]
    rounds, places = roll_out(text, [[6, 7, 0], [0, 0, 0], [0, 0, 0], [9, 1, 4], [1, 1, 1]])
    # 6 and 7 kept, 8 is the trunk's own; behind 8 two of the three drafts are judged, for the text ends
    assert rounds == Rollout(verified=(3, 2), accepted=(2, 2))
    assert places == [0, 3]
    assert rounds.tau == 3.0
    assert [rounds.unconditional(k) for k in range(3)] == [1.0, 1.0, 0.0]
    assert rounds.conditional(2) == 0.0
    assert math.isnan(Rollout(verified=(2,), accepted=(2,)).conditional(2))


def test_drafts_with_the_logits_of_the_trunk_are_perfect() -> None:
    target = torch.randn(3, 2, 7, generator=generator())
    there = torch.tensor([[True, True], [True, False], [True, True]])
    drafts = Drafts(previous=there.long(), base=target, logits=target, confidence=torch.full((3, 2), 9.0))
    figures = summarise(judge(drafts, target, target.argmax(-1), there))
    assert figures.accepted == figures.agrees == (1.0, 1.0)
    assert figures.tau_prob == 3.0
    off = summarise(judge(replace(drafts, logits=target.roll(1, -1)), target, target.argmax(-1), there))
    assert off.tau_prob < 3.0
    assert off.losses[1] > figures.losses[1]


def test_unsupervised_slots_and_late_slots_weigh_less() -> None:
    table = torch.zeros(6, 2, 5)
    table[0], table[0, 1, 2:] = 1.0, 0.0
    table[1, 0, 4], table[1, 1, 4] = 1.0, 100.0
    w = [math.exp(-k / 5) for k in range(5)]
    assert losses(table)[0].item() == pytest.approx(w[4] / (sum(w) + w[0] + w[1]))
    assert losses(torch.zeros(6, 2, 5)).tolist() == [0.0, 0.0, 0.0]


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    rates = [learning_rate(p / 100) for p in range(101)]
    assert rates[0] == 0
    assert rates.index(max(rates)) == 4
    assert rates[-1] < 1e-9


def test_a_few_steps_lower_the_loss_and_leave_the_trunk(trunk: Network, batch: Batch) -> None:
    drafter = new_drafter(trunk)
    drafter.parts.balance.differentiated = 3
    steps, optimizer = DraftSteps(trunk, drafter, Graphs(CPU)), make_optimizer(drafter)
    blocks = draw_blocks(batch, 5, 12, generator())
    before = {name: value.clone() for name, value in trunk.state_dict().items()}
    seen = []
    for phase in (PLAIN, PLAIN, PLAIN, EXACT, EXACT):
        seen.append(losses(steps.run(batch, blocks, phase)))
        for name, parameter in drafter.named_parameters():
            assert not parameter.requires_grad or parameter.grad.isfinite().all(), name
        update(drafter, optimizer, 1e-3)
    assert seen[-1][0] < 0.8 * seen[0][0]
    assert seen[-1][1] < 0.9 * seen[0][1]
    assert seen[-1][2] < seen[0][2]
    assert all(stage.ffn.gate.bias.abs().max() > 0 for stage in drafter.stages)
    for name, value in trunk.state_dict().items():
        assert torch.equal(value, before[name]), name


def _bytes(folder: Path) -> dict[str, bytes]:
    out = {}
    for file in sorted({entry.file for entry in open_checkpoint(folder).entries.values()}):
        with safe_open(file, framework="pt") as tensors:
            out |= {n: tensors.get_tensor(n).view(torch.uint8).numpy().tobytes() for n in tensors.keys()}  # noqa: SIM118
    return out


def test_the_folder_holds_the_old_trunk_and_the_drafter_a_reader_gets(trunk: Network, tmp_path: Path) -> None:
    drafter = new_drafter(trunk)
    parameters = drafter.official()
    total = write_beside_trunk(BUNDLED, tmp_path, parameters)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.drafter == "dspark"
    assert checkpoint.payload_bytes == total
    assert (checkpoint.encoding.revision, checkpoint.encoding.certain) == ("v0731", True)
    assert checkpoint.contract == REF_FP8_ROUND
    old, new = ({n: v for n, v in _bytes(f).items() if not n.startswith("mtp.")} for f in (BUNDLED, tmp_path))
    assert old == new
    expected = rounded(parameters)
    for name, value in load_drafter(checkpoint, load_network(checkpoint)).official().items():
        assert torch.equal(value, expected[name]), name
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) < 11_990_000


def test_rounding_in_the_loop_uses_the_numbers_of_the_export(trunk: Network) -> None:
    drafter = new_drafter(trunk)
    expected = rounded(drafter.official())
    drafter.mode.round_weights = True
    with torch.no_grad():
        assert torch.equal(drafter.mtp[0].main_proj.effective(), expected["mtp.0.main_proj.weight"])
        assert torch.equal(
            drafter.last.markov_head.markov_w2.effective(), expected["mtp.2.markov_head.markov_w2.weight"]
        )
        rows = drafter.last.markov_head.markov_w1(torch.arange(1280))
        assert torch.equal(rows, expected["mtp.2.markov_head.markov_w1.weight"])


def test_the_evaluation_decodes_held_out_answers(trunk: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = held_out_conversations(5, ENCODER.tokenizer.count, 1)
    asked = [Probe(name=n, conversation=c, thinking=False) for n, c in drawn if n in ("addition", "subtraction")]
    monkeypatch.setattr(draft_evaluation, "probes", lambda *_: asked)
    drafter = new_drafter(trunk)
    report = draft_evaluation.evaluate(trunk, drafter, ENCODER, 5, 1)
    assert report["rounds"] > 1
    assert report["greedy_tau"] == 1 + round(sum(report["greedy_unconditional"]), 3)
    assert set(report["greedy_tau_by_skill"]) == {"addition/chat", "subtraction/chat"}

    def oracle(hidden: Tensor, pending: Tensor) -> Drafts:
        logits = torch.zeros(*hidden.shape[:2], drafter.config.vocab_size)
        logits[..., ENCODER.tokenizer.eos_id] = 1.0
        return Drafts(previous=pending, base=logits, logits=logits, confidence=logits[..., 0])

    monkeypatch.setattr(drafter, "walk", oracle)
    ended = draft_evaluation.evaluate(trunk, drafter, ENCODER, 5, 1)
    # the only draft that is kept is the end, once in each answer
    assert round((ended["greedy_tau"] - 1) * ended["rounds"]) == 2
