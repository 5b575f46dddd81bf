"""The step behind a step, begun before anybody asks for it, so that no GPU waits for the host.

Whoever decodes runs what the device chose, right behind, for the same sampler: one token, or a round of drafts. So
behind two such moves the engine launches the next one along with the one that it was asked for: which token is run, and
where, is on the device already. The host waits for the move before alone, by events. If the guess is right, the next
call finds its move on its way, launches the one behind it, and waits; else what was begun is forgotten.

Nothing has to be undone then. What a row writes is provisional until it is committed (see `protocol`): its place in a
ring was last used by a position that no row can see any more, its entries lie behind all that a row sees, and whoever
stands at its position writes all of them again. So are the drafter's context rows: which are there, the host alone
counts, up to committed positions. Rows of two moves stand past the committed ones at most, 16, and rings have room for
a whole chunk. Choices follow positions, so a move that is begun early chooses what it would have chosen later.
Everything goes through the same streams: what is launched later finds it done.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.accept import rows_kept
from dsv4nb.engine.device_forward import DeviceForward
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.draft_walk import Drafting
from dsv4nb.engine.extent import extent_of
from dsv4nb.engine.protocol import Proposal, Verified
from dsv4nb.engine.rank_draws import Flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks for, besides the token that is run first.

    Attributes:
        rows: of the forward.
        config: chooses behind each.
        drafts_by: chooses the drafts, which are the other rows; None of a plain step, of one row.
    """

    rows: int
    config: SamplerConfig
    drafts_by: SamplerConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A step or a round on its way."""

    drafting: Drafting | None
    flight: Flight

    def keep(self) -> None:
        """Let rows stay what they are when the next move is launched."""
        self.flight.keep()
        if self.drafting is not None:
            self.drafting.keep()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """The move before, and the call that would go on behind it.

    Attributes:
        state: of which sequence; it may be forgotten.
        pos, token: where that call stands, and what it runs; the token is -1 where none was chosen.
        behind: what it asks for, if that was begun.
    """

    state: weakref.ref[DeviceState]
    pos: int
    token: int
    asked: Asked
    behind: _Move | None

    def leads_to(self, own: DeviceState, token: int, asked: Asked) -> bool:
        return self.state() is own and (own.pos, token, asked) == (self.pos, self.token, self.asked)


class RunAhead:
    """Runs the plain steps and the rounds of an engine.

    Args:
        max_seq: of the engine.

    Attributes:
        is_on: begin what nobody has asked for.
    """

    def __init__(self, *, is_on: bool, max_seq: int) -> None:
        self.is_on, self._max_seq = is_on, max_seq
        self._last: _Last | None = None
        self._moves: list[_Move] = []  # launched, and not waited for

    def leads_to(self, own: DeviceState, token: int, asked: Asked) -> bool:
        """Whether a call goes on right behind the last one."""
        return self._last is not None and self._last.leads_to(own, token, asked)

    def end(self) -> None:
        """Forget what was begun, and wait until it is over: every call but one that is led to begins with this.

        What went wrong in it is told by the next forward, which nothing of it is part of.
        """
        self._last = None
        moves, self._moves = self._moves, []
        for move in moves:
            try:
                move.flight.wait()
            except RuntimeError:  # of a GPU that is lost: so will whoever needs it say
                return

    def run(
        self, forward: DeviceForward, own: DeviceState, token: int, asked: Asked
    ) -> tuple[Proposal | None, Verified]:
        """Run what is asked for, of a state that has room for it; behind a move that led there, begin the next one.

        Raises:
            EngineError: a forward failed.
            DrafterFault: the drafter computes no numbers.
        """
        last, self._last = self._last, None
        move = None if last is None else last.behind
        if move is None:
            move = self._begun(_begin(forward, own, token, asked))
        elif move.drafting is not None:
            own.context = own.pos  # the rows of what was committed since came with it
        behind = None
        if self.is_on and last is not None and self._has_room(own, asked):
            move.keep()
            behind = self._begun(_go_on(forward, own, move, asked))
        verified = move.flight.land()
        proposal = None if move.drafting is None else move.drafting.land()
        self._moves.remove(move)
        kept = 1 if proposal is None else rows_kept(proposal.ids[: asked.rows - 1], verified.ids)
        self._last = _Last(
            state=weakref.ref(own), pos=own.pos + kept, token=verified.ids[kept - 1], asked=asked, behind=behind
        )
        return proposal, verified

    def _has_room(self, own: DeviceState, asked: Asked) -> bool:
        """Whether the move behind the one at `own.pos` needs neither room nor a graph that is not there."""
        first, last = own.pos + asked.rows, own.pos + 2 * asked.rows  # where this one ends, and the next at most
        is_same = extent_of(first, self._max_seq) == extent_of(last, self._max_seq)
        return is_same and last <= min(own.caches.positions, self._max_seq)

    def _begun(self, move: _Move) -> _Move:
        self._moves.append(move)
        return move


def _begin(forward: DeviceForward, own: DeviceState, token: int, asked: Asked) -> _Move:
    """Launch what the host knows."""
    drafting, tokens = None, [token] * asked.rows  # drafts take the places behind the first one
    if asked.drafts_by is not None:
        assert forward.drafter is not None
        own.catch_up()
        drafting = forward.drafter.begin(own.caches, own.pos, token, asked.drafts_by)
    flight = forward.draw(own.caches, tokens, own.pos, asked.config, _ids(drafting))
    return _Move(drafting=drafting, flight=flight)


def _go_on(forward: DeviceForward, own: DeviceState, move: _Move, asked: Asked) -> _Move:
    """Launch the same behind a move at `own.pos` that nobody has waited for."""
    drafting, after = None, move.flight.after(_ids(move.drafting))
    if asked.drafts_by is not None:
        assert forward.drafter is not None
        drafting = forward.drafter.go_on(own.caches, own.pos, asked.drafts_by, after)
    stop = own.pos + 2 * asked.rows
    flight = forward.go_on(own.caches, asked.rows, stop, asked.config, after, _ids(drafting))
    return _Move(drafting=drafting, flight=flight)


def _ids(drafting: Drafting | None) -> Tensor | None:
    return None if drafting is None else drafting.ids
