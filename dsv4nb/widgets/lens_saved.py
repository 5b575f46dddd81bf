"""A lens in a saved notebook: as text, and as a page that needs neither kernel nor JavaScript nor style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from dsv4nb.events import TokenLogprob
from dsv4nb.tables import Grid, as_html, as_text, decimal
from dsv4nb.widgets.lens_reply import Made, Reply, Sums, sums_of, visible

MOST = 2000  # tokens that are drawn; what is longer is told
LISTED = 20  # of the least likely tokens

# backgrounds from likely to unlikely, all light, so that dark ink is read on each; the line below is the second channel
_LEVELS = (
    ("#ffffff", ""),
    ("#fff4d6", ""),
    ("#ffe6b0", "underline dotted"),
    ("#ffd48f", "underline dashed"),
    ("#ffbd80", "underline"),
    ("#ffa585", "underline double"),
    ("#ff8f94", "underline wavy"),
)
_INK = "#1a1a1a"
_MADE: dict[Made, tuple[str, str, str]] = {
    "plain": ("#ffffff", "", "chosen in a single step"),
    "given": ("#e3e3e3", "underline dashed", "given"),
    "first": ("#e6e0ff", "underline dotted", "first"),
    "accepted": ("#d3f3e6", "", "accepted draft"),
    "correction": ("#ffcfae", "underline wavy", "correction"),
    "bonus": ("#cfe0ff", "underline double", "bonus"),
}
BOUNDS = (0.9, 0.7, 0.5, 0.25, 0.1, 0.02)  # of the levels, probabilities


def level_of(logprob: float) -> int:
    """Return how unlikely a token was, from 0 to 6."""
    probability = math.exp(logprob)
    return next((level for level, bound in enumerate(BOUNDS) if probability >= bound), len(BOUNDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLens:
    """What a lens shows, as a value."""

    title: str
    reply: Reply
    text: Callable[[int], str]

    def bundle(self) -> dict[str, str]:
        """Return the MIME types that any reader can show."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _facts(self, sums: Sums) -> list[tuple[str, str]]:
        facts = [("tokens", f"{len(self.reply.ids):,}")]
        if sums.n:
            facts += [
                ("perplexity", decimal(sums.perplexity, 3)),
                ("entropy", f"{decimal(sums.entropy, 3)} nats, mean"),
            ]
        return facts

    def _grid(self, sums: Sums) -> Grid:
        if not sums.n:
            return []
        rows = [["token", "text", "probability", "logprob", "rank", "entropy", "rather"]]
        for i in sums.lowest:
            one = self.reply.scores[i]
            rows.append(
                [
                    *(str(i), visible(self.text(one.id)), probability(one.logprob), f"{one.logprob:.3f}"),
                    *(str(one.rank), f"{one.entropy:.3f}", self._rather(one)),
                ]
            )
        return rows

    def _rather(self, one: TokenLogprob) -> str:
        others = [(token, logprob) for token, logprob in one.top if token != one.id]
        return ", ".join(f"{visible(self.text(token))} {probability(logprob)}" for token, logprob in others[:2])

    @property
    def _left_out(self) -> str:
        n = len(self.reply.ids)
        return f"The first {MOST:,} of {n:,} tokens are shown; the numbers are of all." if n > MOST else ""

    def __str__(self) -> str:
        sums = sums_of(self.reply, LISTED)
        blocks = [" · ".join(part for part in (self.title, _short(self.reply.label)) if part), self.reply.note]
        if self.reply.ids:
            blocks += [as_text(self._facts(sums)), "".join(map(self.text, self.reply.ids[:MOST])), self._left_out]
            if sums.n:
                blocks += [f"The {len(sums.lowest)} least likely tokens:\n{as_text((), self._grid(sums))}"]
        return "\n\n".join(block for block in blocks if block)

    def _repr_html_(self) -> str:
        sums = sums_of(self.reply, LISTED)
        title = f"<strong>{escape(self.title)}</strong>"
        label = f' <span style="opacity:.75">{escape(_short(self.reply.label))}</span>' if self.reply.label else ""
        parts = [f"<p>{title}{label}</p>"]
        if self.reply.note:
            parts.append(f"<p><em>{escape(self.reply.note)}</em></p>")
        if self.reply.ids:
            parts += [as_html(self._facts(sums)), self._tokens(), self._legend()]
            if self._left_out:
                parts.append(f"<p><em>{escape(self._left_out)}</em></p>")
            if sums.n:
                summary = f"The {len(sums.lowest)} least likely tokens"
                parts.append(f"<details><summary>{summary}</summary>{as_html((), self._grid(sums))}</details>")
        return f'<div class="dsv4-tokens">{"".join(parts)}</div>'

    def _tokens(self) -> str:
        spans = "".join(map(self._span, range(min(MOST, len(self.reply.ids)))))
        return f'<div style="white-space:pre-wrap;line-height:2;font-family:monospace;margin:.6em 0">{spans}</div>'

    def _span(self, i: int) -> str:
        reply = self.reply
        text = self.text(reply.ids[i])
        if i < len(reply.scores):
            one = reply.scores[i]
            colour, line = _LEVELS[level_of(one.logprob)]
            told = f"{probability(one.logprob)}, rank {one.rank}, entropy {one.entropy:.2f} nats"
        else:
            colour, line, told = _MADE[reply.made[i]]
        shown = escape(text.replace("\n", "⏎\n")) or "∅"
        return f'<span title="token {i}: {escape(told, quote=True)}" style="{_style(colour, line)}">{shown}</span>'

    def _legend(self) -> str:
        if self.reply.scores:
            bounds = [1.0, *BOUNDS, 0.0]
            named = [
                (colour, line, f"{100 * low:g}–{100 * high:g} %")
                for (colour, line), high, low in zip(_LEVELS, bounds, bounds[1:], strict=False)
            ]
        else:
            named = [(colour, line, word) for made, (colour, line, word) in _MADE.items() if made in self.reply.made]
        keys = "".join(
            f'<span style="{_style(colour, line)};margin-right:.6em">{word}</span>' for colour, line, word in named
        )
        return f"<p>{keys}</p>"


def probability(logprob: float) -> str:
    """Return a log-probability as a share, with as many digits as tell small ones apart."""
    share = 100 * math.exp(logprob)
    if share >= 99.95 or share == 0:
        return f"{share:.0f} %"
    return f"{share:.1f} %" if share >= 1 else f"{share:.2g} %"


def _style(colour: str, line: str) -> str:
    underline = f";text-decoration:{line}" if line else ""
    return f"background:{colour};color:{_INK};border-radius:3px;padding:1px 0{underline}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:79]}…"
