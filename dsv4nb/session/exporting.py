"""What a chat can be written as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4nb.config import SamplerConfig
from dsv4nb.session.as_code import code_of
from dsv4nb.session.export import to_cells, to_frame, to_jsonl, to_markdown, to_notebook
from dsv4nb.session.request import Limits, Options
from dsv4nb.session.tree import Tree, Turn


class Exports:
    """The forms of a conversation. For a chat, which sets the attributes."""

    name: str
    limits: Limits | None
    _tree: Tree

    @property
    def turns(self) -> list[Turn]:
        """The turns of this branch that ended, failed ones included."""
        return [node.turn for node in self._tree.path]

    @property
    def options(self) -> Options:
        """What the next turns ask for."""
        raise NotImplementedError

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as messages, the system message in front."""
        return [*self._front, *map(dict, self._tree.messages)]

    @property
    def _front(self) -> list[dict[str, Any]]:
        system = self.options.system
        return [] if system is None else [{"role": "system", "content": system}]

    def to_messages(self) -> list[dict[str, Any]]:
        """Return the history of this branch; `Model.chat(messages=...)` takes it back."""
        return self.messages

    def to_jsonl(self, path: str | Path | None = None, *, all_branches: bool = False) -> str:
        """Return, and write to `path`, one line of JSON per conversation: this branch, or every one.

        Raises:
            OSError: the file cannot be written.
        """
        heads = self._tree.branches.leaves if all_branches else [self._tree.head]
        conversations: list[Sequence[Mapping[str, Any]]] = [
            [*self._front, *(m for node in (head.path() if head else ()) for m in node.messages)] for head in heads
        ]
        return _written(to_jsonl(conversations), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return, and write to `path`, the history of this branch as Markdown.

        Raises:
            OSError: the file cannot be written.
        """
        return _written(to_markdown(self.messages, title=f"Chat with {self.name}" if self.name else "Chat"), path)

    def to_cells(self) -> list[dict[str, Any]]:
        """Return the history of this branch as notebook cells; Python that the model wrote becomes code cells."""
        return to_cells(self.messages)

    def to_notebook(self, path: str | Path | None = None) -> str:
        """Return, and write to `path`, a notebook file with the cells of `to_cells`.

        Raises:
            OSError: the file cannot be written.
        """
        return _written(to_notebook(self.messages), path)

    def to_frame(self) -> Any:
        """Return the turns of this branch as a pandas data frame.

        Raises:
            RequestError: pandas is not installed.
        """
        return to_frame(self.turns)

    def to_code(self, turn: int = -1, *, model: str = "m") -> str:
        """Return Python that asks turn `turn` of this branch again, with its sampler values and seed.

        Args:
            turn: index, as in `turns`; negative counts from the end.
            model: name of the variable that holds the model.

        Raises:
            RequestError: there is no such turn.
        """
        node = self._tree.nth(turn)
        before = [message for earlier in node.path()[:-1] for message in earlier.messages]
        defaults = SamplerConfig() if self.limits is None else self.limits.sampler
        return code_of(node.turn, before, self.options, defaults, model)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
