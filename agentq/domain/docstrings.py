"""What a function's docstring tells a model: its first paragraph, and a line on each parameter."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_GOOGLE_HEADING = re.compile(r"(Args|Arguments|Parameters):\s*")
_GOOGLE_PARAMETER = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_NUMPY_PARAMETER = re.compile(r"(\w+)\s*(?::.*)?")
_SPHINX_PARAMETER = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?(\w+):\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Docstring:
    """`description` is the first paragraph as one line; `parameters` what is said of each parameter by name."""

    description: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


def parse_docstring(text: str) -> Docstring:
    """Read a docstring (cleaned of its indentation) in Google's, numpy's or Sphinx's style, or in none at all."""
    lines = text.splitlines()
    first = "\n".join(lines).strip().split("\n\n", 1)[0].splitlines()
    is_section = bool(first) and (_starts_parameters(first, 0) or _SPHINX_PARAMETER.match(first[0]) is not None)
    return Docstring(
        description="" if is_section else " ".join(line.strip() for line in first),
        parameters={name: " ".join(words) for name, words in _parameters(lines) if words},
    )


def _starts_parameters(lines: list[str], index: int) -> bool:
    return bool(_GOOGLE_HEADING.fullmatch(lines[index])) or _is_numpy_heading(lines, index)


def _is_numpy_heading(lines: list[str], index: int) -> bool:
    return (
        lines[index].strip() == "Parameters"
        and index + 1 < len(lines)
        and re.fullmatch(r"-{3,}", lines[index + 1].strip()) is not None
    )


def _parameters(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    for index, line in enumerate(lines):
        if _GOOGLE_HEADING.fullmatch(line):
            yield from _entries(lines[index + 1 :], _GOOGLE_PARAMETER, is_indented=True)
        elif _is_numpy_heading(lines, index):
            yield from _entries(lines[index + 2 :], _NUMPY_PARAMETER, is_indented=False)
        elif found := _SPHINX_PARAMETER.match(line):
            yield found[1], _words([found[2], *_deeper(lines[index + 1 :], 0)])


def _entries(lines: list[str], pattern: re.Pattern[str], *, is_indented: bool) -> Iterator[tuple[str, list[str]]]:
    """The entries of a section: lines at its indentation, each with the deeper ones below it."""
    indentation = _indentation(lines[0]) if lines and is_indented else 0
    if is_indented and indentation == 0:
        return
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        if _indentation(line) < indentation or re.fullmatch(r"-{3,}", line.strip()):
            return
        if _indentation(line) == indentation and (found := pattern.fullmatch(line.strip())):
            own = found[2] if pattern.groups > 1 else ""
            yield found[1].lstrip("*"), _words([own, *_deeper(lines[index + 1 :], indentation)])


def _deeper(lines: list[str], indentation: int) -> Iterator[str]:
    for line in lines:
        if not line.strip() or _indentation(line) <= indentation:
            return
        yield line


def _words(lines: list[str]) -> list[str]:
    return " ".join(lines).split()


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
