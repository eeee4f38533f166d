"""The table as a picture: a row for each system, a bar for each count, in plain SVG."""

from collections.abc import Sequence
from html import escape

from benchmarks.safety.verdict import Verdict

COLUMNS = (
    ("duplicated", "writes done twice", "#c0392b"),
    ("unaudited", "writes without a record", "#d35400"),
    ("lost", "runs lost or stuck", "#8e44ad"),
    ("dead_letters", "runs shown to a person", "#2e6da4"),
)
NAME_WIDTH, COLUMN_WIDTH, BAR_WIDTH = 150, 170, 110
ROW_HEIGHT, BAR_HEIGHT, TOP, MARGIN = 34, 18, 84, 16
TEXT, MUTED, PAPER, GROUND = "#1f2933", "#52606d", "#ffffff", "#e4e7eb"


def draw(verdicts: Sequence[Verdict]) -> str:
    """An SVG document. Each column has a scale of its own, from nothing to its largest count."""
    width = 2 * MARGIN + NAME_WIDTH + COLUMN_WIDTH * len(COLUMNS)
    height = TOP + ROW_HEIGHT * len(verdicts) + MARGIN
    first = verdicts[0]
    title = f"{first.runs:,} runs with one plain write each, {first.kills} workers killed in the middle"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        _text(MARGIN, 32, title, size=16, weight=600),
    ]
    for index, (_, label, _) in enumerate(COLUMNS):
        parts.append(_text(_left(index), TOP - 18, label, color=MUTED))
    for row, verdict in enumerate(verdicts):
        top = TOP + row * ROW_HEIGHT
        parts.append(_text(MARGIN, top + 14, verdict.system, size=14, weight=600))
        for index, (name, _, color) in enumerate(COLUMNS):
            largest = max(getattr(each, name) for each in verdicts)
            parts += _bar(_left(index), top, getattr(verdict, name), largest, color)
    return "\n".join([*parts, "</svg>", ""])


def _left(index: int) -> int:
    return MARGIN + NAME_WIDTH + index * COLUMN_WIDTH


def _bar(left: int, top: int, count: int, largest: int, color: str) -> list[str]:
    length = BAR_WIDTH * count / largest if largest else 0.0
    shape = f'y="{top}" height="{BAR_HEIGHT}" rx="3"'
    bar = [f'<rect x="{left}" {shape} width="{max(length, 2.0):.1f}" fill="{color if count else GROUND}"/>']
    return [*bar, _text(left + max(length, 2.0) + 6, top + 14, str(count), weight=600 if count else 400)]


def _text(x: float, y: float, text: str, *, size: int = 13, weight: int = 400, color: str = TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{color}">{escape(text)}</text>'
