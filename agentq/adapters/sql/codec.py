"""JSON and text as both databases can keep them: PostgreSQL refuses NUL, and JSON has no NaN; SQLite takes both."""

import json
import math
from typing import Any

from agentq.domain.errors import StoreRefusedError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def encode(value: object) -> str:
    """The JSON text of a payload. NUL and halves of surrogate pairs become U+FFFD, NaN and infinities null.

    Raises StoreRefusedError for what isn't JSON.
    """
    try:
        text = _dumps(value)
        if "\\u0000" not in text and _is_utf8(text):
            return text
    except ValueError:
        pass  # NaN, an infinity, or a cycle; the last is found again below.
    except (TypeError, RecursionError) as error:
        raise StoreRefusedError(f"the value is not JSON: {error}") from error
    try:
        return _dumps(_cleaned(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreRefusedError(f"the value is not JSON: {error}") from error


def clean_text(text: str) -> str:
    """The text as both databases can keep it."""
    text = text.replace("\0", _REPLACEMENT)
    return text if _is_utf8(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return clean_text(value)
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {_cleaned(key) if isinstance(key, str) else key: _cleaned(each) for key, each in value.items()}
        case list() | tuple():
            return [_cleaned(each) for each in value]
        case _:
            return value
