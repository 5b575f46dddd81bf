"""Turns as a tree: an edit or another try is a branch, and what was said before is never lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4nb.errors import RequestError
from dsv4nb.events import Done, StopReason, TokenLogprob, ToolCall, ToolResult
from dsv4nb.rounds import Rounds
from dsv4nb.session.request import Options
from dsv4nb.session.thoughts import GAP

_SHOWN = 60  # characters of a message in the drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and what came back.

    Attributes:
        reasoning: the thoughts of its runs, with a blank line between.
        tool: calls, as the model wrote them; `calls` and `results` are their values.
        stop_reason: None when it failed; "cancelled" when it was stopped, with the text so far.
        n_reasoning: tokens of the reasoning.
        n_cached: prompt tokens that were not computed again.
        rounds: of speculation, of all its runs; `marks` are the characters of reasoning and text before each of them.
        runs: how each of its runs ended: sampler values, route, timings; () when it failed or was not run here.
        ids: of the reply, of its last run where it made calls; () when it came as text. The first `n_given` of them
            were given, not chosen.
        logprobs: one per id, when the turn asked for them.
        options: what it asked for, None when it was not run here.
        error: why it failed; such a turn is not part of the history.
    """

    user: str
    reasoning: str = ""
    text: str = ""
    tool: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    stop_reason: StopReason | None = None
    n_tokens: int = 0
    n_reasoning: int | None = None
    n_cached: int = 0
    seconds: float = 0.0
    rounds: Rounds = field(default_factory=Rounds, repr=False)
    marks: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    runs: tuple[Done, ...] = field(default=(), repr=False)
    ids: tuple[int, ...] = field(default=(), repr=False)
    n_given: int = 0
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    options: Options | None = field(default=None, repr=False)
    error: str | None = None

    @property
    def reasoning_s(self) -> float | None:
        """Seconds that its runs reasoned, None when nobody measured."""
        measured = [run.timings.reasoning_s for run in self.runs if run.timings.reasoning_s is not None]
        return sum(measured) if measured else None

    def before(self, round: int) -> Turn:
        """Return the turn as if it had been stopped before one of its rounds, counted from 0.

        Raises:
            RequestError: there is no such round, or the turn failed, or it made calls, between whose runs nothing can
                be cut.
        """
        if self.error is not None:
            raise RequestError("this turn failed and is not part of the history; go back to a turn", param="round")
        if self.calls:
            raise RequestError("this turn made calls; go back to a turn, not to a round", param="round")
        if isinstance(round, bool) or not isinstance(round, int) or not 0 <= round < len(self.rounds):
            has = f"rounds 0 to {len(self.rounds) - 1}" if self.rounds else "no rounds: it was not speculated"
            raise RequestError(f"round is {round!r}; the turn has {has}", param="round")
        n_reasoning, n_text = self.marks[round]
        kept = self.rounds[:round]
        n_tokens = 1 + sum(one.emitted for one in kept)
        return replace(
            self,
            reasoning=self.reasoning[:n_reasoning],
            text=self.text[:n_text],
            tool="",
            stop_reason="cancelled",
            n_tokens=n_tokens,
            n_reasoning=None,
            rounds=kept,
            marks=self.marks[:round],
            runs=tuple(_stopped(run, n_tokens) for run in self.runs),
            ids=self.ids[: self.n_given + n_tokens],
            logprobs=self.logprobs[: self.n_given + n_tokens],
        )


def _stopped(run: Done, n_tokens: int) -> Done:
    """Return the end of a run as if it had been stopped; how long that would have taken nobody knows."""
    marks = tuple(mark for mark in run.timings.marks if mark[0] != "ended")
    timings = replace(run.timings, decode_s=None, reasoning_s=None, marks=marks)
    return replace(run, stop_reason="cancelled", n_tokens=n_tokens, timings=timings, spec=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A turn and where it stands.

    Attributes:
        number: in the order of time, from 1.
        messages: what the turn added to the history, () when it failed.
    """

    number: int
    parent: Node | None
    turn: Turn
    messages: tuple[Mapping[str, Any], ...] = field(repr=False)

    def path(self) -> list[Node]:
        """Return the nodes from the first turn to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """All turns of a conversation, drawn as a tree; the current branch is marked."""

    nodes: tuple[Node, ...]
    head: Node | None

    @property
    def leaves(self) -> list[Node]:
        """The last turn of each branch, oldest first."""
        parents = {id(node.parent) for node in self.nodes}
        return [node for node in self.nodes if id(node) not in parents]

    def path(self) -> list[tuple[Node, list[int]]]:
        """Return the nodes of the current branch, each with the numbers of those that stand in its place, its own too.

        They are in the order of time.
        """
        siblings: dict[int, list[int]] = {}
        for node in self.nodes:
            siblings.setdefault(node.parent.number if node.parent else 0, []).append(node.number)
        nodes = self.head.path() if self.head else []
        return [(node, siblings[node.parent.number if node.parent else 0]) for node in nodes]

    def __len__(self) -> int:
        return len(self.leaves)

    def __repr__(self) -> str:
        if not self.nodes:
            return "no turns yet"
        current = {id(node) for node in (self.head.path() if self.head else [])}
        lines: list[str] = []
        # turns that follow one another stand below one another; where there is a choice, each way gets a connector
        stack: list[tuple[Node, str, str]] = []

        def push(parent: Node | None, prefix: str) -> None:
            children = self._children(parent)
            for i, child in reversed(list(enumerate(children))):
                connector = "" if len(children) == 1 else "└─ " if i == len(children) - 1 else "├─ "
                stack.append((child, prefix, connector))

        push(None, "")
        while stack:
            node, prefix, connector = stack.pop()
            mark = "●" if node is self.head else "○" if id(node) in current else " "
            lines.append(f"{mark} {prefix}{connector}{node.number}. {_short(node.turn.user)} → {_reply(node.turn)}")
            push(node, prefix + {"├─ ": "│  ", "└─ ": "   "}.get(connector, ""))
        return "\n".join(lines)

    def _children(self, parent: Node | None) -> list[Node]:
        return [node for node in self.nodes if node.parent is parent]


class Tree:
    """The turns of one chat, and the one that the next turn follows. Grows only; not safe for threads by itself."""

    def __init__(self, nodes: Sequence[Node] = (), head: Node | None = None) -> None:
        self._nodes = list(nodes)
        self._left_at: dict[int, Node] = {}  # number of a turn -> where its branch was left last
        self.head = head

    @property
    def head(self) -> Node | None:
        """The turn that the next one follows, None before the first."""
        return self._head

    @head.setter
    def head(self, node: Node | None) -> None:
        self._head = node
        for passed in node.path() if node else ():
            self._left_at[passed.number] = node  # type: ignore[assignment]

    def left_at(self, node: Node) -> Node:
        """Return where the branch of `node` was left last; its newest end when nobody has been there."""
        if node.number in self._left_at:
            return self._left_at[node.number]
        behind = {node.number: node}
        for other in self._nodes[node.number :]:  # a turn comes after the one that it follows
            if other.parent is not None and other.parent.number in behind:
                behind[other.number] = other
        return list(behind.values())[-1]

    @property
    def path(self) -> list[Node]:
        """The turns of the current branch, failed ones included."""
        return self.head.path() if self.head else []

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The history of the current branch."""
        return tuple(message for node in self.path for message in node.messages)

    @property
    def branches(self) -> Branches:
        return Branches(nodes=tuple(self._nodes), head=self.head)

    def add(self, turn: Turn, messages: Sequence[Mapping[str, Any]]) -> Node:
        """Write a turn down behind the head, and make it the head."""
        node = Node(number=len(self._nodes) + 1, parent=self.head, turn=turn, messages=tuple(messages))
        self._nodes.append(node)
        self.head = node
        return node

    def node(self, number: int) -> Node:
        """Return the turn with this number.

        Raises:
            RequestError: there is none.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(self._nodes):
            has = f"turns 1 to {len(self._nodes)}" if self._nodes else "no turns yet"
            raise RequestError(f"turn is {number!r}; the chat has {has}", param="turn")
        return self._nodes[number - 1]

    def nth(self, i: int) -> Node:
        """Return the turn at index `i` of the current branch; negative counts from its end.

        Raises:
            RequestError: there is none.
        """
        path = self.path
        if isinstance(i, bool) or not isinstance(i, int) or not -len(path) <= i < len(path):
            has = f"turns 0 to {len(path) - 1}" if path else "no turns yet"
            raise RequestError(f"turn is {i!r}; this branch has {has}", param="turn")
        return path[i]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"


def _reply(turn: Turn) -> str:
    if turn.error is not None:
        return f"[failed: {_short(turn.error)}]"
    mark = {"cancelled": " [stopped]", "length": " [cut]"}.get(turn.stop_reason or "", "")
    calls = ", ".join(f"{call.name}()" for call in turn.calls)
    return f"{_short(turn.text or calls)}{mark}"


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Turn, list[Mapping[str, Any]]]]:
    """Cut a history, without its system message, into turns: each begins with what a person said.

    Raises:
        RequestError: it does not begin with a user message.
    """
    if messages and messages[0]["role"] != "user":
        role = messages[0]["role"]
        raise RequestError(f"the history begins with a message of {role}; it must be user", param="messages")
    groups: list[list[Mapping[str, Any]]] = []
    for message in messages:
        if message["role"] == "user":
            groups.append([])
        groups[-1].append(message)
    return [(_turn_of(group), group) for group in groups]


def _turn_of(group: Sequence[Mapping[str, Any]]) -> Turn:
    replies = [message for message in group if message["role"] == "assistant"]
    asked = [call for reply in replies for call in reply.get("tool_calls", ())]
    calls = [
        ToolCall(id=str(call.get("id", "")), name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in asked
    ]
    names = {call.id: call.name for call in calls}
    results = [
        ToolResult(id=m.get("tool_call_id", ""), name=names.get(m.get("tool_call_id", ""), ""), content=m["content"])
        for m in group
        if m["role"] == "tool"
    ]
    return Turn(
        user=group[0]["content"],
        reasoning=GAP.join(thought for reply in replies if (thought := reply.get("reasoning_content"))),
        text="".join(reply["content"] for reply in replies),
        calls=tuple(calls),
        results=tuple(results),
        stop_reason="tool_calls" if group[-1].get("tool_calls") else "stop",
    )
