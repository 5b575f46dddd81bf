"""A conversation as data: JSON lines, notebook cells, a notebook, Markdown, a data frame; and back to messages."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.session.tree import Turn

Message = dict[str, Any]
Cell = dict[str, Any]

_FENCE = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$\n?", re.MULTILINE | re.DOTALL)
_HEADINGS = {"system": "System", "user": "You", "assistant": "Model", "tool": "Tool"}


def to_jsonl(conversations: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """Return one line of JSON per conversation: {"messages": [...]}, as training and evaluation tools read it."""
    return "".join(
        json.dumps({"messages": list(map(dict, messages))}, ensure_ascii=False) + "\n" for messages in conversations
    )


def from_jsonl(text: str) -> list[list[Message]]:
    """Return the conversations of JSON lines.

    Raises:
        RequestError: a line is not an object with "messages"; its number is named.
    """
    conversations = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            conversations.append([dict(message) for message in messages])
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f'line {number} is no object with "messages": {error}', param="text") from error
    return conversations


def to_cells(messages: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Return notebook cells (nbformat 4): prose as markdown, Python that the model wrote as code cells.

    The first cell of a message carries it whole in its metadata, so that `from_cells` loses nothing.
    """
    return [cell for message in messages for cell in _cells_of(message)]


def from_cells(cells: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages that `to_cells` made cells of; other cells are passed over."""
    found = (cell.get("metadata", {}).get("dsv4nb") for cell in cells)
    return [dict(own["message"]) for own in found if isinstance(own, Mapping) and "message" in own]


def to_notebook(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a notebook file (nbformat 4) with the cells of `to_cells`."""
    notebook = {"cells": to_cells(messages), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, ensure_ascii=False, indent=1)


def to_markdown(messages: Sequence[Mapping[str, Any]], *, title: str = "") -> str:
    """Return the conversation for reading: a heading per message, calls and their results in fences."""
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", ()) if "id" in call}
    blocks = [f"# {title}"] if title else []
    for message in messages:
        role = str(message.get("role"))
        heading = _HEADINGS.get(role, role)
        if role == "tool":
            heading += f" {names.get(message.get('tool_call_id', ''), '')}".rstrip()
        blocks.append(f"## {heading}")
        if thought := message.get("reasoning_content"):
            blocks.append(f"<details><summary>Thoughts</summary>\n\n{thought}\n\n</details>")
        content = str(message.get("content") or "")
        blocks.append(fenced(content) if role == "tool" else content.strip())
        for call in message.get("tool_calls", ()):
            blocks.append(f"Call of `{call['function']['name']}`:\n\n{fenced(call['function']['arguments'], 'json')}")
    return "\n\n".join(filter(None, blocks)) + "\n"


def fenced(text: str, language: str = "") -> str:
    """Return text in a fence that nothing in it can close."""
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def to_text(turns: Sequence[Turn], *, title: str) -> str:
    """Return the conversation as a terminal shows it."""
    return "\n\n".join([title, *(line for turn in turns for line in _lines(turn))])


def _lines(turn: Turn) -> list[str]:
    """Return a turn as a person reads it."""
    mark = {"cancelled": "[Stopped]", "length": "[Reached the token limit]"}.get(turn.stop_reason or "", "")
    if turn.error is not None:
        mark = f"[Failed: {turn.error}]"
    lines = [f"You: {turn.user}"]
    if turn.reasoning:
        lines.append("[Thoughts]\n" + "\n".join(f"  {line}" for line in turn.reasoning.splitlines()))
    results = {result.id: result for result in turn.results}
    for call in turn.calls:
        result = results.get(call.id)
        arguments = result.arguments if result and result.arguments else call.arguments
        lines.append(f"[Call] {call.name}({arguments}){f' → {result.content}' if result else ''}")
    if turn.text or not (mark or turn.tool):
        lines.append(f"Model: {turn.text}")
    return [*lines, mark] if mark else lines


def to_frame(turns: Sequence[Turn]) -> Any:
    """Return the turns as a pandas data frame, a row each.

    Raises:
        RequestError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise RequestError("a data frame needs pandas, which is not installed; pip install pandas") from error
    columns = ("user", "reasoning", "text", "calls", "results", "stop_reason", "n_tokens", "n_reasoning", "n_cached",
               "seconds", "error")  # fmt: skip
    rows = [{name: getattr(turn, name) for name in columns} for turn in turns]
    return pandas.DataFrame(rows, columns=list(columns))


def _cells_of(message: Mapping[str, Any]) -> list[Cell]:
    role = str(message.get("role"))
    parts = [f"**{_HEADINGS.get(role, role)}:**"]
    if thought := message.get("reasoning_content"):
        parts.append(f"<details><summary>Thoughts</summary>\n\n{thought}\n\n</details>")
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parts.append(f"`{function['name']}({function['arguments']})`")
    pieces = _split(str(message.get("content") or "")) if role == "assistant" else [("markdown", message["content"])]
    if pieces and pieces[0][0] == "markdown":
        parts.append(pieces.pop(0)[1])
    cells = [_cell("markdown", "\n\n".join(part for part in parts if part)), *(_cell(*piece) for piece in pieces)]
    cells[0]["metadata"]["dsv4nb"] = {"message": dict(message)}
    return cells


def _split(text: str) -> list[tuple[str, str]]:
    """Cut text at its fences of Python: (kind of cell, source)."""
    pieces, at = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [("markdown", text[at : fence.start()].strip("\n")), ("code", fence[1].rstrip("\n"))]
        at = fence.end()
    pieces.append(("markdown", text[at:].strip("\n")))
    return [(kind, source) for kind, source in pieces if source]


def _cell(kind: str, source: str) -> Cell:
    cell: Cell = {"id": secrets.token_hex(4), "cell_type": kind, "metadata": {}, "source": source}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell
