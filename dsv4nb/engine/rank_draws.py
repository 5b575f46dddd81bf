"""Tokens chosen on one GPU, as `sampler.choose` chooses them on the host, bit for bit.

What a request asks for stands in small tensors, sent when it changes; positions are those of the rows, on the device
already. So a captured draw follows both, and one small copy brings the tokens of a step to the host.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.graphs import Graphs, Held
from dsv4nb.engine.lent_rows import Lender
from dsv4nb.engine.protocol import MAX_ROWS, Verified
from dsv4nb.engine.step import Inputs, Room
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


class RankDraws:
    """The tokens behind the rows of a forward.

    Args:
        graphs: captures the draws of each width.
    """

    def __init__(self, vocab: int, device: torch.device, room: Room, graphs: Graphs) -> None:
        self._draws = Draws(vocab, device, room, lines=MAX_ROWS, together=MAX_ROWS)
        self._graphs, self._lender = graphs, Lender()
        self._held: Held = {}
        # [ids, log-probabilities, two logits of each row], each from a 16-byte boundary on
        self._told = torch.zeros((2 + _PICKED) * MAX_ROWS, dtype=torch.int32, device=device)
        self._host = torch.zeros(self._told.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._one = self._host[:1], self._told[:1]
        # read through numpy, as `_Staging` writes
        self._ids, self._numbers = self._host.numpy(), self._host.numpy()[MAX_ROWS:].view(np.float32)
        self._picked = torch.zeros(MAX_ROWS, _PICKED, dtype=torch.int64, device=device)

    def launch(self, logits: Tensor, inputs: Inputs, config: SamplerConfig) -> None:
        """Choose behind T rows, and wait for nothing.

        Args:
            logits: [T, V], of the rows where `inputs` stand.
        """
        stages, tokens, positions = self._draws.ask(config), inputs.tokens, inputs.positions
        places = logits.data_ptr(), tokens.data_ptr(), positions.data_ptr()
        self._graphs.run(
            self._held, (len(logits), stages, places), partial(self._launch, logits, tokens, positions, stages)
        )
        host, told = self._one if len(logits) == 1 else (self._host, self._told)
        host.copy_(told, non_blocking=True)

    def read(self, logits: Tensor) -> Verified:
        """Return what was chosen and waited for, and lend the rows.

        Args:
            logits: as of `launch`.
        """
        n, rows = len(logits), self._lender.lend(logits)
        ids = tuple(self._ids[:n].tolist())
        if n == 1:
            return Verified(rows=rows, ids=ids)
        own, behind = self._numbers[MAX_ROWS:].reshape(MAX_ROWS, _PICKED)[: n - 1].T
        with np.errstate(invalid="ignore", over="ignore"):  # of rows without a choice
            probs = np.exp(self._numbers[: n - 1] + (behind - own))
        return Verified(rows=rows, ids=ids, probs=tuple(probs.tolist()))

    def recall(self) -> None:
        """Start the copies of rows that are still held, before a forward writes where they are."""
        self._lender.recall()

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
