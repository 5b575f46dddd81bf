"""Tokens chosen on one GPU, as `sampler.choose` chooses them on the host, bit for bit.

What a request asks for stands in small tensors, sent when it changes; positions are those of the rows, on the device
already. So a captured draw follows both, and one small copy brings the tokens of a step to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.graphs import Graphs, Held
from dsv4nb.engine.lent_rows import Lender
from dsv4nb.engine.pair_turns import on
from dsv4nb.engine.protocol import MAX_ROWS, Verified
from dsv4nb.engine.step import TOKENS_AT, Inputs, Room
from dsv4nb_kernels import draw
from dsv4nb_kernels._draw_rules import Settings, Stages
from dsv4nb_kernels.draw import Drawn, Scratch
from dsv4nb_kernels.reference.draw import Rule

_POSITION = 2  # the column of `Settings.whole`
_PICKED = 2  # logits of a row that are told: at its token, and at the one that was run behind it


def can_draw_from(vocab: int) -> bool:
    """Whether rows of `vocab` logits are drawn from on a GPU; of larger ones the host draws."""
    return vocab <= draw.IDS_MAX


def rule_of(config: SamplerConfig, vocab: int) -> Rule:
    """Return what a kernel is told of a request; positions are not in it."""
    return Rule(
        temperature=config.temperature,
        top_k=config.top_k if config.top_k < vocab else 0,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed,
    )


class Draws:
    """Draws from rows that stand at consecutive places of one sequence.

    Args:
        room: of the rank, which its draws share.
        lines: rows of a step at most.
        together: rows that are drawn from at a time; with one the rows of a step are drawn from one after the other.
    """

    def __init__(self, vocab: int, device: torch.device, room: Room, *, lines: int, together: int) -> None:
        self._vocab, self._lines = vocab, lines
        self._settings = Settings.of([Rule()] * lines, device)
        empty = Scratch.empty(together, vocab, torch.device("meta"))
        self._scratch = Scratch(
            **{
                name: room.tensor(f"draw {name}", *tensor.shape, dtype=tensor.dtype)
                for name, tensor in ((field.name, getattr(empty, field.name)) for field in fields(empty))
            }
        )
        self._asked: SamplerConfig | None = None
        self._stages = Stages.of([Rule()])

    def ask(self, config: SamplerConfig) -> Stages:
        """Send what a request asks for, where it is another one than before, and return the launches that it needs."""
        if config != self._asked:
            rule = rule_of(config, self._vocab)
            self._settings.set([rule] * self._lines)
            self._asked, self._stages = config, Stages.of([rule])
        return self._stages

    def place(self, positions: Tensor) -> None:
        """Launch what lets the row at each of `positions`, [T] int32, choose for the place behind it."""
        torch.add(positions, 1, out=self._settings.whole[: len(positions), _POSITION])

    def launch(self, logits: Tensor, stages: Stages, out: Drawn, first: int = 0) -> None:
        """Launch the draws from `logits`, [T, V]: rows `first` … of the step."""
        rows = len(logits)
        own, room = self._settings, self._scratch
        draw.draw(
            logits,
            Settings(numbers=own.numbers[first : first + rows], whole=own.whole[first : first + rows]),
            stages,
            scratch=Scratch(**{field.name: getattr(room, field.name)[:rows] for field in fields(room)}),
            out=out,
            dependent=True,
        )


class Sent:
    """Where the choices behind the rows of a forward arrive on the host.

    Attributes:
        ids: [MAX_ROWS] int32; log_probs: [MAX_ROWS], picked: [MAX_ROWS, 2], float32.
        copied: behind the copy; None on a CPU, which copies at once.
    """

    def __init__(self, told: Tensor) -> None:
        is_cuda = told.is_cuda
        self._host = torch.zeros(told.shape, dtype=told.dtype, pin_memory=is_cuda)
        self._all, self._one = (self._host, told), (self._host[:1], told[:1])
        # read through numpy, as `_Staging` writes
        self.ids, numbers = self._host.numpy()[:MAX_ROWS], self._host.numpy()[MAX_ROWS:].view(np.float32)
        self.log_probs, self.picked = numbers[:MAX_ROWS], numbers[MAX_ROWS:].reshape(MAX_ROWS, _PICKED)
        self.copied = torch.cuda.Event() if is_cuda else None

    def send(self, rows: int) -> None:
        """Start the copy to the host on the current stream; of one row the choice is all that is told."""
        host, told = self._one if rows == 1 else self._all
        host.copy_(told, non_blocking=True)
        if self.copied is not None:
            self.copied.record()


@dataclass(slots=True, kw_only=True)
class Flight:
    """Rows that were launched, with the choices behind them, and that nobody has waited for yet.

    Attributes:
        logits: [T, V], where they are going to be.
        position: [1], of the first one; on its device.
        events: behind all of it; none on a CPU.
        check: called once they have passed; raises what went wrong on a device.
    """

    draws: RankDraws
    logits: Tensor
    position: Tensor
    sent: Sent
    events: Sequence[torch.cuda.Event]
    check: Callable[[], None] = lambda: None
    ready: torch.cuda.Event | None = None

    def keep(self) -> None:
        """Let the rows stay what they are when the next forward is launched before these land."""
        self.logits, self.ready = self.draws.keep(self.logits)

    def after(self, drafted: Tensor | None = None) -> Tensor:
        """Launch what is to be run behind them, as `RankDraws.after` says it."""
        return self.draws.after(self, drafted)

    def wait(self) -> None:
        """Wait for the devices, and look at nothing."""
        for event in self.events:
            event.synchronize()

    def land(self) -> Verified:
        """Wait for the choices, and return them; the rows are lent.

        Raises:
            EngineError: what `check` says.
        """
        self.wait()
        self.check()
        return self.draws.read(self)


class RankDraws:
    """The tokens behind the rows of a forward.

    Two forwards may be on their way: what is told of them goes to places that take turns.

    Args:
        graphs: captures the draws of each width.
    """

    def __init__(self, vocab: int, device: torch.device, room: Room, graphs: Graphs) -> None:
        self._draws = Draws(vocab, device, room, lines=MAX_ROWS, together=MAX_ROWS)
        self._room, self._graphs, self._lender = room, graphs, Lender()
        self._held: Held = {}
        # [ids, log-probabilities, two logits of each row], each from a 16-byte boundary on
        self._told = torch.zeros((2 + _PICKED) * MAX_ROWS, dtype=torch.int32, device=device)
        self._sent = cycle([Sent(self._told), Sent(self._told)])
        self._picked = torch.zeros(MAX_ROWS, _PICKED, dtype=torch.int64, device=device)
        self._after = torch.zeros(TOKENS_AT + 1, dtype=torch.int32, device=device)

    def launch(self, logits: Tensor, inputs: Inputs, config: SamplerConfig) -> Flight:
        """Choose behind T rows, and wait for nothing.

        Args:
            logits: [T, V], of the rows where `inputs` stand.
        """
        stages, tokens, positions = self._draws.ask(config), inputs.tokens, inputs.positions
        places = logits.data_ptr(), tokens.data_ptr(), positions.data_ptr()
        self._graphs.run(
            self._held, (len(logits), stages, places), partial(self._launch, logits, tokens, positions, stages)
        )
        sent = next(self._sent)
        sent.send(len(logits))
        events = () if sent.copied is None else (sent.copied,)
        return Flight(draws=self, logits=logits, position=inputs.position, sent=sent, events=events)

    def read(self, flight: Flight) -> Verified:
        """Return what was chosen and waited for, and lend the rows."""
        n, sent, rows = len(flight.logits), flight.sent, self._lender.lend(flight.logits, flight.ready)
        ids = tuple(sent.ids[:n].tolist())
        if n == 1:
            return Verified(rows=rows, ids=ids)
        own, behind = sent.picked[: n - 1].T
        with np.errstate(invalid="ignore", over="ignore"):  # of rows without a choice
            probs = np.exp(sent.log_probs[: n - 1] + (behind - own))
        return Verified(rows=rows, ids=ids, probs=tuple(probs.tolist()))

    def recall(self) -> None:
        """Start the copies of rows that are still held, before a forward writes where they are."""
        self._lender.recall()

    def keep(self, logits: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Launch a copy of rows to where no forward writes; return it, and what tells that it is there."""
        kept = self._room.tensor("kept logits", *logits.shape)
        return kept, self._lender.keep(logits, kept)

    def after(self, flight: Flight, drafted: Tensor | None) -> Tensor:
        """Launch what finds the token that the rows of the last launch leave to be run, and where it stands.

        It is the one that was chosen behind the first row and behind all drafts in a row that were chosen in their
        places (dspark.md 3.7).

        Args:
            drafted: [B] int32, that were run behind the first row; None of one row.

        Returns:
            [5] int32, as a step of one row is given it: the position, three of nothing, and the token, 0 where none
            was chosen.
        """
        rows, position = len(flight.logits), flight.position
        drafts = self._told[:0] if drafted is None else drafted[: rows - 1]
        key = "after", rows, position.data_ptr(), drafts.data_ptr()
        with on(self._told.device):
            self._graphs.run(self._held, key, partial(self._launch_after, rows, position, drafts))
        return self._after

    def _launch_after(self, rows: int, position: Tensor, drafts: Tensor) -> None:
        ids, place, token = self._told[:rows], self._after[:1], self._after[TOKENS_AT:]
        torch.add(position, 1, out=place)
        if rows == 1:
            torch.clamp(ids, min=0, out=token)
            return
        agree = self._room.tensor("agree", rows - 1, dtype=torch.bool)
        leading = self._room.tensor("leading", rows - 1, dtype=torch.int64)
        count = self._room.tensor("leading count", 1, dtype=torch.int64)
        torch.eq(ids[:-1], drafts, out=agree)
        torch.cumprod(leading.copy_(agree), 0, out=leading)
        torch.sum(leading, 0, keepdim=True, out=count)
        place.add_(count)
        torch.index_select(ids, 0, count, out=token).clamp_(min=0)

    def _launch(self, logits: Tensor, tokens: Tensor, positions: Tensor, stages: Stages) -> None:
        rows, numbers = len(logits), self._told[MAX_ROWS:].view(torch.float32)
        ids = self._told[:rows]
        self._draws.place(positions)
        self._draws.launch(logits, stages, Drawn(ids, numbers[:rows]))
        if rows == 1:
            return  # nothing was run behind it
        picked = self._picked[:rows]
        picked[:, 0].copy_(ids)
        picked[:-1, 1].copy_(tokens[1:])
        picked.clamp_(min=0)  # of a row without a choice
        torch.gather(logits, 1, picked, out=numbers[MAX_ROWS:].view(MAX_ROWS, _PICKED)[:rows])
