"""What an event says, as a person reads it."""

import pytest

from agentq.cli.timeline import words_of


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"answer": "failed", "asked_again_in_seconds": 8.0}, ["the probe itself failed, asked again in 8.0 s"]),
        ({"answer": "did_not_happen"}, ["did not happen"]),
        ({"reason": "", "why": None}, []),
        ({"reason": "seen at the bank"}, ["reason seen at the bank"]),
        ({"charge": "try", "due_in_seconds": 0.5}, ["charged: try; due again in 500 ms"]),
    ],
)
def test_names_of_fields_become_words(told: dict[str, object], words: list[str]) -> None:
    """At night nobody has the time to learn what a field is called, and an empty one tells nothing."""
    assert list(words_of(told)) == words
