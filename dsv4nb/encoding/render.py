"""Chat messages → the model's text, byte-exact with the official encoder (encoding.md sections 4-6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4nb.encoding.constants import (
    ASSISTANT,
    BOS,
    EFFORTS,
    EOS,
    LATEST_REMINDER,
    RESPONSE_FORMAT_PREFIX,
    TASKS,
    THINK_CLOSE,
    THINK_OPEN,
    USER,
    Revision,
)
from dsv4nb.encoding.messages import Entry, drop_old_reasoning, last_question, merge, sort_tool_results
from dsv4nb.encoding.tools import calls_block, declaration_pieces, to_json
from dsv4nb.errors import EncodingError


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the prompt.

    Attributes:
        trusted: True for the template's own text, which may hold control tokens; False for text of messages.
    """

    text: str
    trusted: bool


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    revision: Revision,
    thinking: bool,
    effort: str | None = None,
    drop_thinking: bool = True,
    add_bos: bool = True,
    context: Sequence[Mapping[str, Any]] | None = None,
) -> list[Segment]:
    """Render a conversation; a last user turn opens the assistant's.

    Args:
        messages: OpenAI-shaped, `arguments` of tool calls as JSON text.
        effort: low, high or max (preview: high or max); writes its text in thinking mode only.
        drop_thinking: forget reasoning before the last question, unless tools are declared anywhere.
        context: messages that were encoded earlier and are not written again.

    Raises:
        EncodingError: a message, a tool or the effort cannot be rendered.
    """
    if not isinstance(effort, str | None) or effort not in EFFORTS[revision]:
        names = ", ".join(str(e) for e in EFFORTS[revision] if e)
        raise EncodingError(f"effort is {effort!r}; the {revision} encoding has {names}")
    before = merge(context or ())
    entries = sort_tool_results([*before, *merge(messages)])
    drop = drop_thinking and not any(e.get("tools") for e in entries)
    skipped = len(before)
    if thinking and drop:
        entries = drop_old_reasoning(entries)
        # the official encoder counts the context's entries on the context alone
        skipped = len(drop_old_reasoning(before))
    modes = _Modes(thinking=thinking, drop=drop, last=last_question(entries))
    writer = _Writer()
    if add_bos and not before:
        writer.template(BOS)
    for i in range(skipped, len(entries)):
        if i == 0 and thinking:
            writer.template(EFFORTS[revision][effort])
        _body(writer, entries, i, modes)
        _tail(writer, entries, i, modes)
    return writer.segments


def render_text(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return what `render` writes as one string; `options` are those of `render`."""
    return "".join(segment.text for segment in render(messages, **options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modes:
    """What decides whether an entry shows or opens reasoning.

    Attributes:
        drop: reasoning before the last question is forgotten.
        last: index of the last question, -1 when there is none.
    """

    thinking: bool
    drop: bool
    last: int


class _Writer:
    """Collects segments, joining neighbours of one kind."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def template(self, text: str) -> None:
        self._add(text, True)

    def message(self, text: str) -> None:
        self._add(text, False)

    def pieces(self, pieces: Iterable[tuple[str, bool]]) -> None:
        for text, is_template in pieces:
            self._add(text, is_template)

    def _add(self, text: str, trusted: bool) -> None:
        if not text:
            return
        if self.segments and self.segments[-1].trusted == trusted:
            text = self.segments.pop().text + text
        self.segments.append(Segment(text, trusted))


def _text(value: object, index: int) -> str:
    """Return a message's text; None and missing are empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise EncodingError(f"content must be text, not {type(value).__name__}", index=index)
    return value


def _body(w: _Writer, entries: Sequence[Entry], i: int, modes: _Modes) -> None:
    entry = entries[i]
    role, at = entry["role"], entry["at"]
    if role == "system":
        w.message(_text(entry.get("content"), at))
        _appendices(w, entry)
    elif role == "developer":
        content = _text(entry.get("content"), at)
        if not content:
            raise EncodingError("a developer message needs content", index=at)
        w.template(USER)
        w.message(content)
        _appendices(w, entry)
    elif role == "user":
        _user(w, entry)
    elif role == "latest_reminder":
        w.template(LATEST_REMINDER)
        w.message(str(entry.get("content")))
    elif role == "assistant":
        _assistant(w, entries, i, modes)
    else:
        raise EncodingError(f"the role {role!r} cannot be rendered", index=at)


def _appendices(w: _Writer, entry: Entry) -> None:
    if entry.get("tools"):
        w.template("\n\n")
        w.pieces(declaration_pieces(entry["tools"], entry["at"]))
    if entry.get("response_format"):
        w.template(f"\n\n{RESPONSE_FORMAT_PREFIX}")
        w.message(to_json(entry["response_format"], entry["at"]))


def _user(w: _Writer, entry: Entry) -> None:
    w.template(USER)
    for position, block in enumerate(entry["blocks"]):
        if position:
            w.template("\n\n")
        if block["type"] == "text":
            if block["content"] is None:  # empty elsewhere, an error in the official encoder here
                raise EncodingError("a user message needs content", index=block["at"])
            w.message(_text(block["content"], block["at"]))
        else:
            w.template("<tool_result>")
            w.message(_result_text(block["content"], block["at"]))
            w.template("</tool_result>")


def _result_text(content: object, index: int) -> str:
    if not isinstance(content, list):
        return str(content)
    parts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise EncodingError(f"a part of a tool result must be an object, not {part!r}", index=index)
        kind = part.get("type")
        parts.append(_text(part.get("text"), index) if kind == "text" else f"[Unsupported {kind}]")
    return "\n\n".join(parts)


def _assistant(w: _Writer, entries: Sequence[Entry], i: int, modes: _Modes) -> None:
    entry = entries[i]
    follows_task = i > 0 and entries[i - 1].get("task") is not None
    if modes.thinking and not follows_task and (not modes.drop or i > modes.last):
        w.message(_text(entry.get("reasoning_content"), entry["at"]))
        w.template(THINK_CLOSE)
    w.message(_text(entry.get("content"), entry["at"]))
    if entry.get("tool_calls"):
        w.pieces(calls_block(entry["tool_calls"], entry["at"]))
    if not entry.get("wo_eos"):
        w.template(EOS)


def _tail(w: _Writer, entries: Sequence[Entry], i: int, modes: _Modes) -> None:
    if i + 1 < len(entries) and entries[i + 1]["role"] not in ("assistant", "latest_reminder"):
        return
    entry = entries[i]
    task = entry.get("task")
    if task is not None:
        if task not in TASKS:
            raise EncodingError(f"task is {task!r}; it must be one of {', '.join(TASKS)}", index=entry["at"])
        if task == "action":
            w.template(ASSISTANT + (THINK_OPEN if modes.thinking else THINK_CLOSE))
        w.template(TASKS[task])
    elif entry["role"] in ("user", "developer"):
        opens = modes.thinking and (not modes.drop or i >= modes.last)
        w.template(ASSISTANT + (THINK_OPEN if opens else THINK_CLOSE))
