"""Which errors are the same one again: a short name for an error's text without what differs from run to run."""

import hashlib
import re

CHARACTERS = 10  # Hex digits: with a few thousand different errors open at once two share one by a chance of 1 in 10^5.
TEXT_CHARACTERS_MAX = 2000  # A stack of texts that a service sent back says no more about its cause after that.

_MASKED = (
    (re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE), "#"),
    # An apostrophe within a word, as in "can't", is no quote.
    (re.compile(r"(?<!\w)'[^'\n]*'(?!\w)|\"[^\"\n]*\"|`[^`\n]*`|\u201c[^\u201d\n]*\u201d"), "'#'"),
    (re.compile(r"\b[0-9a-f]{8,}\b", re.IGNORECASE), "#"),
    (re.compile(r"\w*\d\w*"), "#"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"#(?:[-.:,/_+ ]*#)+"), "#"),  # Times, versions, addresses and lists of numbers, whatever their length.
)


def fingerprint(error: str) -> str:
    """The same for errors whose texts differ in numbers, ids, hex digits and quoted parts alone.

    It is stored, so a change of the rules parts the errors of before from those after.
    """
    return hashlib.sha256(masked(error).encode("utf-8", "replace")).hexdigest()[:CHARACTERS]


def masked(error: str) -> str:
    """The text with `#` for what differs from run to run."""
    text = error[:TEXT_CHARACTERS_MAX]
    for pattern, mask in _MASKED:
        text = pattern.sub(mask, text)
    return text.strip()
