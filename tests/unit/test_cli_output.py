"""What the CLI prints: data on stdout in the format asked for, messages on stderr, nothing that steers a terminal."""

import json
from typing import Any

import click
import pytest

from agentq.cli.output import (
    Cell,
    Column,
    Format,
    clean,
    duration,
    emit_card,
    emit_list,
    emit_one,
    output_options,
    say,
    short,
)

COLUMNS = (
    Column("RUN", lambda view: Cell(view["id"], "bold red")),
    Column("INPUT", lambda view: Cell(view["input"])),
)
VIEWS = [{"id": "r-1", "input": "Refund order 17"}, {"id": "r-22", "input": "two\nlines"}]


def test_a_table_is_plain_and_aligned_when_it_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    """`awk` and `grep` read it too: one line a record, no colours, nothing cut."""
    emit_list(VIEWS, COLUMNS, Format.TABLE, none="none")
    assert capsys.readouterr().out.splitlines() == [
        "RUN   INPUT",
        "r-1   Refund order 17",
        "r-22  two lines",
    ]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Format.JSON, VIEWS),
        (Format.JSONL, VIEWS),
        (Format.IDS, ["r-1", "r-22"]),
    ],
)
def test_machines_get_the_data_and_nothing_else(
    output: Format, expected: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that parses stdout must never meet a message there."""
    emit_list(VIEWS, COLUMNS, output, none="none")
    captured = capsys.readouterr()
    match output:
        case Format.JSON:
            assert json.loads(captured.out) == expected
        case Format.JSONL:
            assert [json.loads(line) for line in captured.out.splitlines()] == expected
        case _:
            assert captured.out.splitlines() == expected
    assert captured.err == ""


def test_an_empty_list_is_said_to_people_and_empty_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe that gets no ids does nothing; a person should know why there is nothing to see."""
    emit_list([], COLUMNS, Format.TABLE, none="no runs match")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "no runs match\n")
    emit_list([], COLUMNS, Format.JSON, none="no runs match")
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ([], "")


def test_one_record_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """`agentq runs show ID --json | jq .status` must not need an index."""
    emit_one(VIEWS[0], Format.JSON, lambda: None)
    assert json.loads(capsys.readouterr().out) == VIEWS[0]


def test_a_text_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """What a model or a tool wrote is shown to operators; an escape sequence in it could hide what happened."""
    hostile = "fine\x1b[2J\x07\r\n\u202egone"
    assert "\x1b" not in clean(hostile) and "\u202e" not in clean(hostile)
    say(hostile)
    emit_card(Cell(hostile), [("error", Cell(hostile))])
    emit_list([{"id": hostile, "input": hostile}], COLUMNS, Format.TABLE, none="")
    captured = capsys.readouterr()
    assert not any(character in captured.out + captured.err for character in "\x1b\x07\r\u202e")


def test_a_card_keeps_the_lines_of_a_value_and_leaves_out_what_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback of several lines stays readable; facts that don't apply don't take up the eye."""
    emit_card(Cell("dead letter r-1"), [("error", Cell("one\ntwo")), ("key", Cell("")), ("class", Cell("AUTH"))])
    assert capsys.readouterr().out.splitlines() == [
        "dead letter r-1",
        "  error  one",
        "         two",
        "  class  AUTH",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        ("text", "text"),
        ({"a": [1]}, '{"a": [1]}'),
        ("x" * 70, "x" * 59 + "\u2026"),
        ("a\nb", "a b"),
    ],
)
def test_a_glance_is_one_short_line(value: Any, expected: str) -> None:
    """A 16 MB result must not fill the screen of a list."""
    assert short(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-1, "0 ms"), (0.0204, "20 ms"), (1.26, "1.3 s"), (42.4, "42 s"), (125, "2 m"), (7200, "2 h"), (300_000, "3 d")],
)
def test_durations_are_read_at_a_glance(seconds: float, expected: str) -> None:
    """Two digits and a unit say enough; a clock that is a little behind must not show a negative age."""
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], "table"), (["--json"], "json"), (["-o", "jsonl"], "jsonl"), (["--json", "-o", "table"], "json")],
)
def test_json_is_short_for_the_json_format(arguments: list[str], expected: str) -> None:
    """Both spellings are in people's fingers."""
    chosen = []

    @click.command()
    @output_options
    def command(output: Format) -> None:
        chosen.append(output)

    command.main(arguments, standalone_mode=False)
    assert chosen == [expected]
