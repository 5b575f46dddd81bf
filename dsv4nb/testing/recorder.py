"""Recording replies of a model, so that they can be played without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from dsv4nb.engine.protocol import Row
from dsv4nb.errors import RequestError
from dsv4nb.events import Done, Generation, TokenLogprob
from dsv4nb.handle import Model
from dsv4nb.rounds import Rounds
from dsv4nb.session.chat import Chat
from dsv4nb.session.choosing import Chooser
from dsv4nb.session.recipe import request_of
from dsv4nb.session.request import ChatTokens, Options, Request
from dsv4nb.testing.recording import Place, RecordedReply, Recording
from dsv4nb.testing.replay_engine import DraftedRow, Script, TargetRow
from dsv4nb.testing.replaying import asked_of, replay_model

_HEIGHTS = (0.5, 0.25, 0.75, 0.0, 1.0)  # of a drafter's row, in the order in which they are tried
_NEAR = 1e-4  # nats of an entropy


def record(
    source: Chat | Generation | Sequence[Generation],
    path: str | Path | None = None,
    *,
    model: Model | None = None,
    top: int = 5,
) -> Recording:
    """Record replies, and write them to a file.

    Log-probabilities are computed where a reply has none. The recording is played once before it is written, and has
    to say what the model said.

    Args:
        source: the turns of a chat's branch, or results.
        model: that made them; a chat knows its own.
        top: alternatives of each token.

    Raises:
        RequestError: a reply cannot be recorded: it failed, made calls between its runs, is constrained, accepted
            drafts by rejection or chose its window by measured costs; or results come without their model. Nothing
            was written.
    """
    if model is None and isinstance(source, Chat):
        model = cast("Model | None", source.model)
    if model is None:
        raise RequestError("results do not know their model; pass model=", param="model")
    replies = [
        _recorded(request, ids, rounds, done, model, top) for request, ids, rounds, done in _sources(source, model)
    ]
    if not replies:
        raise RequestError("there is no reply to record", param="source")
    rounded = Recording.from_json(_recording(replies, model).to_json())  # draws depend on the last digit
    recording = _fitted(rounded, model)
    _check(recording)
    if path is not None:
        recording.save(path)
    return recording


def _sources(source: object, model: Model) -> Iterator[tuple[Request, tuple[int, ...], Rounds, Done]]:
    if isinstance(source, Chat):
        for i, turn in enumerate(source.turns):
            if turn.error is not None or turn.calls or not turn.runs:
                why = "failed" if turn.error is not None else "made calls" if turn.calls else "came as text"
                raise RequestError(f"turn {i} cannot be recorded: it {why}", param="source")
            done, before = turn.runs[-1], source.branches.path()[i][0]
            messages = [*(m for node in (before.parent.path() if before.parent else ()) for m in node.messages)]
            options = _given(turn.options or Options())
            request = model.prepare(messages=[*messages, *before.messages[:-1]], **options)
            given = turn.ids[: turn.n_given]
            request = replace(request, config=done.config, spec=done.spec_config, given=given)
            yield request, turn.ids, turn.rounds, done
        return
    for result in (source,) if isinstance(source, Generation) else source:  # type: ignore[attr-defined]
        if not isinstance(result, Generation):
            what = type(result).__name__
            raise RequestError(f"source holds a {what}; it must be a chat or generations", param="source")
        for step in result.steps or (result,):
            request = request_of(step.recipe, model.limits)
            spec = step.done.spec_config
            yield replace(request, messages=step.messages[:-1], spec=spec), step.ids, step.rounds, step.done


def _given(options: Options) -> dict[str, Any]:
    """The options that were asked for."""
    named = {f.name: getattr(options, f.name) for f in fields(Options)}
    return {name: value for name, value in named.items() if value != getattr(Options(), name)}


def _recorded(
    request: Request, ids: Sequence[int], rounds: Rounds, done: Done, model: Model, top: int
) -> RecordedReply:
    if request.constraint is not None:
        raise RequestError("a constrained reply cannot be recorded: a grammar belongs to its model", param="source")
    spec = request.spec
    if spec is not None and (spec.mode == "rejection" or spec.window == "auto"):
        raise RequestError(
            f"a reply with spec_mode={spec.mode!r} and spec_window={spec.window!r} cannot be recorded: what was "
            "accepted depends on whole rows, or on measured costs",
            param="source",
        )
    n_given = len(request.given)
    scores = model.score(request.prompt, ids, top)
    places = list(map(_place, scores[n_given:]))
    end = _end(request, ids, done, model)
    if end is not None:
        places.append(_place(end))
    computed, steps = done.n_prompt - done.n_cached, max(1, done.n_tokens)
    return RecordedReply(
        asked=asked_of(request),
        prompt=request.prompt,
        text=model.decode(request.prompt),
        given=request.given,
        places=tuple(places),
        ends=end is not None,
        n_top=top,
        rounds=rounds,
        draft_rows=(),
        config=request.config,
        spec=request.spec,
        is_thinking=request.is_thinking,
        has_tools=request.has_tools,
        stops=request.stops,
        eos=tuple(sorted(request.eos)),
        max_new=request.max_new if done.stop_reason != "cancelled" else len(ids),
        prefill_ms=round(1e3 * (done.timings.prefill_s or 0.0) * done.n_prompt / max(1, computed), 3),
        step_ms=round(1e3 * (done.timings.decode_s or 0.0) / steps, 3),
    )


def _place(told: TokenLogprob) -> Place:
    return Place(id=told.id, logprob=told.logprob, rank=told.rank, entropy=told.entropy, top=told.top)


def _end(request: Request, ids: Sequence[int], done: Done, model: Model) -> TokenLogprob | None:
    """The end token behind a reply that has one."""
    text = model.decode(ids)
    if done.stop_reason not in ("stop", "tool_calls") or any(stop in text for stop in request.stops):
        return None
    behind = [model.score(request.prompt, (*ids, token), 5)[-1] for token in sorted(request.eos)]
    return max(behind, key=lambda told: told.logprob)


def _recording(replies: Sequence[RecordedReply], model: Model) -> Recording:
    tokens: ChatTokens = model._parts.tokens
    met = {token for reply in replies for token in (*reply.prompt, *reply.given, *reply.chosen)}
    met |= {token for reply in replies for place in reply.places for token, _ in place.top}
    met |= {draft.id for reply in replies for round in reply.rounds for draft in round.drafts}
    met |= tokens.control_ids
    controls = {tokens.token_bytes(id).decode(): id for id in sorted(tokens.control_ids)}
    return Recording(
        model=model.name,
        weights=model.limits.weights,
        arithmetic=model.limits.arithmetic,
        revision=model.limits.revision,
        vocab_size=model.limits.vocab_size,
        max_seq=model.max_seq,
        block_size=model.limits.block_size,
        texts={id: tokens.token_bytes(id) for id in sorted(met)},
        controls=controls,
        replies=tuple(replies),
    )


def _fitted(recording: Recording, model: Model) -> Recording:
    """Keep ids away from what the rows leave over until every recorded draw gives the recorded token."""
    script = Script(recording.vocab_size)
    for reply in recording.replies:
        script.add(reply)
    fitted: list[RecordedReply] = []
    # replies that begin alike share rows, so what one keeps away can move what another draws
    while (found := [_fit(reply, script, recording.vocab_size, model) for reply in recording.replies]) != fitted:
        fitted = found
    return replace(recording, replies=tuple(fitted))


def _fit(reply: RecordedReply, script: Script, size: int, model: Model) -> RecordedReply:
    request = Request(
        prompt=reply.prompt, max_new=1, config=reply.config, spec=reply.spec, is_thinking=False, has_tools=False,
        stops=(), eos=frozenset(reply.eos),
    )  # fmt: skip
    chooser = Chooser(request, model._parts.tokens, size)
    for token in reply.given:
        chooser.push(token)
    before = (*reply.prompt, *reply.given)
    rounds = {round.start: round for round in reply.rounds}
    places, draft_rows = [], []
    for place in reply.places:
        if (round := rounds.get(len(before) - 1)) is not None:
            drafts: tuple[int, ...] = ()
            for k, draft in enumerate(round.drafts):
                known = script.drafts.get((round.start, (*before, *drafts)))
                if known is None:
                    raise RequestError(
                        "the drafter tells no probabilities; its drafts cannot be recorded", param="source"
                    )
                _settle_draft(known, size, draft.id, partial(_draft, chooser, len(before) + k, drafts))
                draft_rows.append((round.round, k, known.height, tuple(sorted(known.avoid))))
                drafts = (*drafts, draft.id)
        target = script.rows[before]
        _settle(target, size, place.id, partial(_choice, chooser, len(before)))
        places.append(replace(place, avoid=tuple(sorted(target.avoid))))
        chooser.push(place.id)
        before = (*before, place.id)
    kept = tuple(one for one in draft_rows if one[3] or one[2] != _HEIGHTS[0])
    return replace(reply, places=tuple(places), draft_rows=kept)


def _draft(chooser: Chooser, position: int, ahead: Sequence[int], row: Row) -> int:
    return chooser.draft(row, position, ahead)


def _choice(chooser: Chooser, position: int, row: Row) -> int:
    return chooser.decide(row, position, (), None).token


def _settle(target: TargetRow, size: int, wanted: int, choose: Callable[[Row], int]) -> None:
    if not _can_settle(target, size, wanted, choose, size // 2):
        raise _not_known(wanted)


def _settle_draft(drafted: DraftedRow, size: int, wanted: int, choose: Callable[[Row], int]) -> None:
    if _can_settle(drafted, size, wanted, choose, size // 8):
        return
    for drafted.height in _HEIGHTS:
        drafted.avoid = set()
        if _can_settle(drafted, size, wanted, choose, size // 4):
            return
    raise _not_known(wanted)


def _can_settle(row: TargetRow | DraftedRow, size: int, wanted: int, choose: Callable[[Row], int], most: int) -> bool:
    """Keep ids away until the wanted one is drawn; False when that does not come about."""
    for _ in range(most):
        found = choose(row.row(size))
        if found == wanted:
            return True
        if found in row.told:
            return False
        row.avoid.add(found)
    return False


def _not_known(wanted: int) -> RequestError:
    return RequestError(
        f"the draw of the token {wanted} cannot be recorded: its row is not known well enough", param="source"
    )


def _check(recording: Recording) -> None:
    """Play it once."""
    with replay_model(recording, speed=math.inf) as player:
        for reply in recording.replies:
            given: dict[str, Any] = {"prompt_ids": reply.prompt, "logprobs": reply.n_top}
            request = replace(player.prepare(**given), given=reply.given)
            said = player.start(request).result()
            if said.ids != reply.ids or _drafted(said.rounds) != _drafted(reply.rounds):
                raise RequestError(f"the recording of {reply.asked!r} does not play as it was said", param="source")
            for i, (found, place) in enumerate(zip(said.logprobs, reply.places, strict=False)):
                if found.rank != place.rank or abs(found.entropy - place.entropy) > _NEAR:
                    raise RequestError(
                        f"token {i} of {reply.asked!r} cannot be recorded: of its {place.rank - 1} likelier tokens "
                        f"only {reply.n_top} are told; pass a larger top=, or sample with min_p",
                        param="top",
                    )


def _drafted(rounds: Rounds) -> list[tuple[int, ...]]:
    return [tuple(draft.id for draft in round.drafts) for round in rounds]
