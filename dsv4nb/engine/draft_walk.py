"""The walk along the rows of a block: each draft biases the row behind it (dspark.md 2.3, steps 4 to 6).

Plain choices are made on the device: a whole walk runs without the host, which gets the drafts, and what is shown of
them, in one small copy. For other choices the rows come to the host, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.config import SamplerConfig
from dsv4nb.engine.graphs import Graphs, Held
from dsv4nb.engine.lap import Lap
from dsv4nb.engine.lent_rows import Lender, LentRows
from dsv4nb.engine.plain_choice import PlainChoice
from dsv4nb.engine.protocol import ChooseDraft, Proposal
from dsv4nb.engine.rank_draws import Draws, can_draw_from
from dsv4nb.engine.step import TOKENS_AT, Room
from dsv4nb.errors import DrafterFault
from dsv4nb.weights.rank_store import RankDraft
from dsv4nb_kernels import markov_step
from dsv4nb_kernels._best import Best, Scored
from dsv4nb_kernels._draw_rules import Stages
from dsv4nb_kernels.draw import Drawn

Send = Callable[[Tensor, Sequence[int], int], None]  # starts the copy of a position and tokens to the device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One step of the walk.

    Attributes:
        given: [5] int32: its position, three of nothing, and the token before it. The host sends them, or the draw
            before it leaves the token there.
        scored: its logits [1, V] and the best of them.
        drawn: what is chosen from them on the device.
    """

    given: Tensor
    scored: Scored
    drawn: Drawn

    @property
    def token(self) -> Tensor:
        """[1], the token before it."""
        return self.given[TOKENS_AT:]


class Said:
    """What a walk tells, on the host, once it was waited for.

    Attributes:
        host: the copy of all of it.
        ids: [B] int32; numbers: [5, B] float32: log-probabilities, confidences, the two best logits, sums.
    """

    def __init__(self, lines: Tensor) -> None:
        self.host = torch.zeros(lines.shape, dtype=torch.int32, pin_memory=lines.is_cuda)
        sent = self.host.numpy()  # read through numpy, as `_Staging` writes
        self.ids: npt.NDArray[np.int32] = sent[0, :, 0]
        self.numbers: npt.NDArray[np.float32] = sent.view(np.float32)[1:6, :, 0]


@dataclass(slots=True, kw_only=True)
class Drafting:
    """Drafts that were launched, and that nobody has waited for yet.

    Attributes:
        ids: [B] int32, where they are going to be, on the drafter's device; each is always one.
        rows: [B, V], what they are chosen from.
        lap: what it takes; None where the caller can tell.
    """

    walk: DraftWalk
    ids: Tensor
    rows: Tensor
    said: Said
    lap: Lap | None
    ready: torch.cuda.Event | None = None

    def keep(self) -> None:
        """Let the rows stay what they are when the next walk is launched before these land."""
        self.rows, self.ready = self.walk.keep(self.rows)

    def land(self) -> Proposal:
        """Return the drafts, once they were waited for; the rows are lent.

        Raises:
            DrafterFault: a row or a confidence is not finite.
        """
        log_probs, confidences, best, second, sums = self.said.numbers
        for number, row in enumerate(zip(confidences.tolist(), sums.tolist(), strict=True)):
            _require_finite(number, *row)
        return Proposal(
            ids=tuple(self.said.ids.tolist()),
            conf_logits=tuple(confidences.tolist()),
            rows=self.walk.lend(self),
            margins=tuple((best - second).tolist()),
            probs=tuple(np.exp(log_probs).tolist()),
            ms=None if self.lap is None else self.lap.ms(),
        )


class DraftWalk:
    """Chooses the drafts of a block that was launched.

    Args:
        base: [B, V] float32, logits of the block without what the tokens before say.
        trusted: [B] float32, what the collapsed streams say of the confidences.
        tokens, positions: [B] int32, of the block.
        send: copies to the device.
    """

    def __init__(
        self,
        draft: RankDraft,
        config: ModelConfig,
        *,
        base: Tensor,
        trusted: Tensor,
        tokens: Tensor,
        positions: Tensor,
        room: Room,
        graphs: Graphs,
        send: Send,
    ) -> None:
        self._draft, self._config, self._room, self._graphs, self._send = draft, config, room, graphs, send
        self._base, self._trusted, self._tokens, self._positions = base, trusted, tokens, positions
        (size, vocab), device = base.shape, base.device
        self._told = _Told(size, device)
        self._rows = room.tensor("draft rows", size, vocab)
        self._given = torch.zeros(size, 2 * TOKENS_AT, dtype=torch.int32, device=device)
        self._slots = [
            _Slot(
                given=self._given[number, : TOKENS_AT + 1],
                scored=Scored(self._rows[number : number + 1], self._told.best(number)),
                drawn=self._told.drawn(number),
            )
            for number in range(size)
        ]
        self._drafted = torch.zeros(size, dtype=torch.int32, device=device)
        self._draws = Draws(vocab, device, room, lines=size, together=1)
        self._lender = Lender()
        self._held: Held = {}

    def choose(self, pos: int, pending: int, choose: ChooseDraft) -> Proposal:
        """Choose the drafts behind `pending`, which stands at `pos`.

        Raises:
            DrafterFault: a row or a confidence is not finite.
        """
        can_draw = can_draw_from(self._config.vocab_size)
        if can_draw and isinstance(choose, PlainChoice) and choose.first == pos + 1:
            drafting = self.begin(choose.config)
            self._wait()
            return drafting.land()
        self._lender.recall()
        return self._chosen(pos, pending, choose)

    def begin(self, config: SamplerConfig, lap: Lap | None = None) -> Drafting:
        """Let the device choose, and wait for nothing.

        Args:
            lap: ends behind it.
        """
        self._lender.recall()
        stages = self._draws.ask(config)
        self._graphs.run(self._held, stages, partial(self._launch, stages))
        said = self._told.send()
        if lap is not None:
            lap.stop()
        return Drafting(walk=self, ids=self._drafted, rows=self._rows, said=said, lap=lap)

    def keep(self, rows: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Launch a copy of rows to where no walk writes; return it, and what tells that it is there."""
        kept = self._room.tensor("kept draft rows", *rows.shape)
        return kept, self._lender.keep(rows, kept)

    def lend(self, drafting: Drafting) -> LentRows:
        """Return the rows of drafts that were launched, which stay what they are."""
        return self._lender.lend(drafting.rows, drafting.ready)

    def _chosen(self, pos: int, pending: int, choose: ChooseDraft) -> Proposal:
        """Choose one draft after the other on the host."""
        rows = torch.empty(self._rows.shape, pin_memory=self._rows.is_cuda)
        ids: list[int] = []
        for number, slot in enumerate(self._slots):
            self._send(slot.given, [ids[-1] if ids else pending], pos + number)
            self._graphs.run(self._held, number, partial(self._launch_slot, number))
            rows[number].copy_(slot.scored.logits[0], non_blocking=True)
            self._wait()
            row = rows[number].numpy()
            _require_finite(number, float(row.sum()))
            ids.append(choose(row, number, ids))
        self._graphs.run(self._held, "confidence", self._launch_confidence)
        said = self._told.send()
        self._wait()
        confidences = said.numbers[1].tolist()
        for number, confidence in enumerate(confidences):
            _require_finite(number, confidence)
        return Proposal(ids=tuple(ids), conf_logits=tuple(confidences), rows=tuple(rows.numpy()))

    def _wait(self) -> None:
        if self._rows.is_cuda:
            torch.cuda.current_stream(self._rows.device).synchronize()

    def _launch(self, stages: Stages) -> None:
        """Launch the whole walk, and what is told of it."""
        self._draws.place(self._positions)
        self._slots[0].token.copy_(self._tokens[:1])
        for number, slot in enumerate(self._slots):
            self._launch_slot(number)
            self._draws.launch(slot.scored.logits, stages, slot.drawn, number)
            if number + 1 < len(self._slots):
                torch.clamp(slot.drawn.ids, min=0, out=self._slots[number + 1].token)  # -1 of a row without a choice
        torch.clamp(self._told.ids, min=0, out=self._drafted)
        self._launch_confidence()
        self._told.launch(self._rows, self._room)

    def _launch_slot(self, number: int) -> None:
        """Launch what a token says of the one behind it: its logits and the best of them."""
        slot, draft = self._slots[number], self._draft
        programs = self._config.vocab_size // markov_step.TUNING.rows
        markov_step.markov_step(
            self._base[number : number + 1], slot.token, draft.markov_in, draft.markov_out,
            parts=self._room.tensor("markov parts", 1, programs, dtype=torch.int64), out=slot.scored, dependent=True,
        )  # fmt: skip

    def _launch_confidence(self) -> None:
        """Launch the confidences of the block, from the token before each draft."""
        draft, room, size = self._draft, self._room, len(self._slots)
        tokens = room.tensor("near tokens", size, dtype=torch.int32).copy_(self._given[:, TOKENS_AT])
        near = room.tensor("near", size, draft.markov_in.shape[1], dtype=torch.bfloat16)
        torch.index_select(draft.markov_in, 0, tokens, out=near)
        wide, said = room.tensor("near wide", *near.shape).copy_(near), room.tensor("near said", size)
        torch.mv(wide, draft.confidence[self._config.hidden_size :], out=said)
        torch.add(said, self._trusted, out=self._told.confidences)


class _Told:
    """What a walk tells the host, in one copy: the drafts, their log-probabilities, and of each row the confidence, the
    two best logits and the sum.

    Attributes:
        ids: [B] int32; confidences: [B] float32, before the sigmoid.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        # kernels write their numbers one by one, each at a 16-byte boundary
        self._lines = torch.zeros(7, size, 4, dtype=torch.int32, device=device)
        self._said = cycle([Said(self._lines), Said(self._lines)])
        numbers = self._lines.view(torch.float32)
        self.ids, self._log_probs, self._best = self._lines[0, :, 0], numbers[1], numbers[3]
        self.confidences, self._second, self._sums = numbers[2, :, 0], numbers[4, :, 0], numbers[5, :, 0]

    def drawn(self, number: int) -> Drawn:
        """Return where a draw leaves the draft of a slot."""
        return Drawn(self._lines[0, number, :1], self._log_probs[number, :1])

    def best(self, number: int) -> Best:
        """Return where a step of the walk leaves the best of its row."""
        return Best(self._best[number, :1], self._lines[6, number, :1])

    def launch(self, rows: Tensor, room: Room) -> None:
        """Launch what else is told of the rows, [B, V]."""
        places = room.tensor("best places", len(rows), 1, dtype=torch.int64).copy_(self._lines[6, :, :1])
        torch.sum(rows, 1, out=self._sums)
        others = room.tensor("others", *rows.shape).copy_(rows).scatter_(1, places, -torch.inf)
        torch.amax(others, 1, out=self._second)

    def send(self) -> Said:
        """Start the copy to the host; two may be on their way."""
        said = next(self._said)
        said.host.copy_(self._lines, non_blocking=True)
        return said


def _require_finite(number: int, *values: float) -> None:
    if not all(math.isfinite(value) for value in values):
        raise DrafterFault(f"the drafter's row {number} is not finite", param="drafter")
