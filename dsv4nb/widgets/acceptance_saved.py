"""Rounds in a saved notebook: as text, and as a page that needs neither kernel nor JavaScript nor style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dsv4nb.rounds import DraftStatus, Reliability, Round
from dsv4nb.tables import Grid, as_html, as_text, decimal, percent
from dsv4nb.widgets.acceptance_figures import Figures, figures_of

GLYPHS: dict[DraftStatus, str] = {
    "accepted": "█",
    "rejected": "✕",
    "unreached": "░",
    "not_verified": "·",
    "past_stop": "▒",
}
WORDS: dict[DraftStatus, str] = {
    "accepted": "accepted",
    "rejected": "rejected",
    "unreached": "unreached",
    "not_verified": "not verified",
    "past_stop": "past stop",
}
MOST = 1000  # rounds of a picture; what is longer is told, and is data in `rounds`

_LINE, _PITCH, _SLOT, _GAP = 72, 10, 9, 26  # rounds of a line; pixels
_LEFT = 58
# readable on white and on black
_TEAL, _RED, _GREY = "#14897c", "#d9542b", "#8a8f98"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRounds:
    """What a panel shows, as a value."""

    title: str
    label: str
    note: str
    rounds: tuple[Round, ...]

    def bundle(self) -> dict[str, str]:
        """Return the MIME types that any reader can show."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    @property
    def _lines(self) -> Iterable[Sequence[Round]]:
        shown = self.rounds[:MOST]
        return (shown[i : i + _LINE] for i in range(0, len(shown), _LINE))

    @property
    def _left_out(self) -> str:
        n = len(self.rounds)
        return f"The first {MOST:,} of {n:,} rounds are drawn; the numbers are of all." if n > MOST else ""

    def _facts(self, figures: Figures) -> list[tuple[str, str]]:
        return [(fact.name, f"{fact.value}  ({fact.hint})") for fact in figures.facts]

    def __str__(self) -> str:
        figures = figures_of(self.rounds)
        blocks = [" · ".join(part for part in (self.title, _short(self.label)) if part), self.note]
        if self.rounds:
            width = max(len(name) for name, _ in self._facts(figures)) + 2
            facts = [f"{name:<{width}}{value}" for name, value in self._facts(figures)]
            blocks += ["\n".join(facts), self._characters(), self._left_out, as_text((), _grid(figures))]
            blocks.append("\n".join(_calibration(figures)))
        return "\n\n".join(block for block in blocks if block)

    def _characters(self) -> str:
        legend = "   ".join(f"{GLYPHS[status]} {word}" for status, word in WORDS.items())
        return "\n\n".join([legend, *(_strip(line) for line in self._lines)])

    def _repr_html_(self) -> str:
        figures = figures_of(self.rounds)
        title = f"<strong>{escape(self.title)}</strong>"
        label = f' <span style="opacity:.75">{escape(_short(self.label))}</span>' if self.label else ""
        parts = [f"<p>{title}{label}</p>"]
        if self.note:
            parts.append(f"<p><em>{escape(self.note)}</em></p>")
        if self.rounds:
            parts += [as_html(self._facts(figures)), "".join(map(_svg, self._lines)), _legend()]
            if self._left_out:
                parts.append(f"<p><em>{escape(self._left_out)}</em></p>")
            parts += [as_html((), _grid(figures)), *(f"<p>{escape(one)}</p>" for one in _calibration(figures))]
            # a reader that takes pictures out of pages still shows this
            parts.append(
                '<details><summary>The rounds in characters</summary><pre style="line-height:1.1;overflow-x:auto">'
                f"{escape(self._characters())}</pre></details>"
            )
        return f'<div class="dsv4-rounds">{"".join(parts)}</div>'


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:79]}…"


def _strip(rounds: Sequence[Round]) -> str:
    """A line of rounds in characters, a row per slot, and the tokens of each below."""
    block = max(len(round.drafts) for round in rounds)
    rows = [
        f"{f'draft {k + 1}':<9}"
        + "".join(GLYPHS[round.drafts[k].status] if k < len(round.drafts) else " " for round in rounds)
        for k in range(block)
    ]
    tokens = "".join(str(round.emitted) if round.emitted < 10 else "+" for round in rounds)
    return "\n".join([*rows, f"{'tokens':<9}{tokens}", f"round {rounds[0].round} to {rounds[-1].round}"])


def _grid(figures: Figures) -> Grid:
    if not figures.accepts:
        return []
    return [
        ["accepted", *(f"draft {k}" for k in range(1, len(figures.accepts)))],
        *([name, *map(percent, curve)] for name, curve in figures.curves),
    ]


def _calibration(figures: Figures) -> list[str]:
    named = (("confidence", figures.confidence), ("survival", figures.survival))
    return [line for name, told in named if (line := _reliability(name, told))]


def _reliability(name: str, told: Reliability) -> str:
    if not told.n:
        return ""
    means = f"predicted {percent(told.predicted)}, observed {percent(told.observed)}"
    return f"{name} of {told.n:,} drafts: {means}, ECE {percent(told.ece)}, AUC {decimal(told.auc, 3)}"


def _svg(rounds: Sequence[Round]) -> str:
    """A line of rounds: a column each, tokens as bars below. One path per status keeps it small."""
    block = max(len(round.drafts) for round in rounds)
    below = block * _PITCH + 4
    width, height = _LEFT + len(rounds) * _PITCH + 4, below + _GAP
    paths: dict[DraftStatus, list[str]] = {status: [] for status in GLYPHS}
    bars = []
    for i, round in enumerate(rounds):
        x = _LEFT + i * _PITCH
        for k, draft in enumerate(round.drafts):
            paths[draft.status].append(_shape(draft.status, x, k * _PITCH))
        tall = min(round.emitted, block + 1) * 3
        bars.append(f"M{x + 1} {below + 20}v-{tall}h{_SLOT - 2}v{tall}z")
    told = ", ".join(f"{len(shapes)} {WORDS[status]}" for status, shapes in paths.items() if shapes)
    drawn = "".join(_path(status, shapes) for status, shapes in paths.items() if shapes)
    labels = "".join(_label(f"draft {k + 1}", k * _PITCH + 8) for k in range(block)) + _label("tokens", below + 18)
    first, last = rounds[0].round, rounds[-1].round
    name = escape(f"Rounds {first} to {last}: drafts {told}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{name}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="display:block;max-width:100%;height:auto;margin:.4em 0">'
        f'{labels}{drawn}<path fill="{_GREY}" d="{"".join(bars)}"/></svg>'
    )


def _label(text: str, y: float) -> str:
    return f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" font-size="9" fill="currentColor">{text}</text>'


def _shape(status: DraftStatus, x: float, y: float) -> str:
    size = _SLOT
    square = f"M{x} {y}h{size}v{size}h-{size}z"
    match status:
        case "rejected":
            return f"M{x + 1} {y + 1}l{size - 2} {size - 2}m0 -{size - 2}l-{size - 2} {size - 2}"
        case "unreached":
            return f"M{x + 0.5} {y + 0.5}h{size - 1}v{size - 1}h-{size - 1}zm0 {size - 1}l{size - 1} -{size - 1}"
        case "not_verified":
            return f"M{x + 3} {y + 3}h3v3h-3z"
        case "past_stop":
            return f"M{x} {y}h3v{size}h-3zm6 0h3v{size}h-3z"
        case _:
            return square


def _path(status: DraftStatus, shapes: Sequence[str]) -> str:
    looks = {
        "accepted": f'fill="{_TEAL}"',
        "past_stop": f'fill="{_TEAL}"',
        "rejected": f'fill="none" stroke="{_RED}" stroke-width="2"',
        "unreached": f'fill="none" stroke="{_GREY}"',
        "not_verified": f'fill="{_GREY}"',
    }
    return f'<path {looks[status]} d="{"".join(shapes)}"/>'


def _legend() -> str:
    parts = []
    for status, word in WORDS.items():
        picture = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10" viewBox="0 0 10 10" aria-hidden="true">'
            f"{_path(status, [_shape(status, 0, 0)])}</svg>"
        )
        parts.append(f'<span style="margin-right:1.2em">{picture} {word}</span>')
    return f"<p>{''.join(parts)}</p>"
