"""A person at a terminal who knows one command, and after that does what the last one prints."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.workers import AGENTQ

COMMAND_SECONDS_MAX = 120
# What a suggested command leaves to a person, as it stands there.
BLANKS = {"reason": "'...'", "result": "'{...}'", "looked_at": "TIME"}


@dataclass(slots=True, kw_only=True)
class Operator:
    """Runs `agentq` commands as processes of their own, and keeps a transcript of them in a file."""

    environ: Mapping[str, str]
    folder: Path
    commands: list[str] = field(default_factory=list)
    out: str = ""
    err: str = ""

    @property
    def transcript(self) -> Path:
        return self.folder / "transcript.txt"

    def first(self, command: str) -> None:
        """Type a command that nothing printed."""
        self._run(command)

    def next(self, beginning: str, *, having: str = "", consents: bool = False, **filled: str) -> None:
        """Run the suggested command that begins so (and has that option), its blanks filled in; fails when the last one
        didn't print it. `consents`: it is asked whether to do it, and the answer is yes."""
        printed = re.findall(r"^next: (.*)$", self.err, re.MULTILINE)
        found = [command for command in printed if command.startswith(f"agentq {beginning}") and having in command]
        assert found, f"{beginning!r} is not among {printed}"
        [command, *_] = found
        for name, text in filled.items():
            assert BLANKS[name] in command, (name, command)
            command = command.replace(BLANKS[name], shlex.quote(text))
        self._run(f"{command} --yes" if consents else command)

    def _run(self, command: str) -> None:
        agentq, *words = shlex.split(command)
        assert agentq == "agentq"
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", AGENTQ, *words],
            env=dict(self.environ),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS_MAX,
            check=False,
        )
        self.commands.append(command)
        self.out, self.err = ended.stdout, ended.stderr
        with self.transcript.open("a") as transcript:
            transcript.write(f"$ {command}\n{self.out}{self.err}# {time.monotonic() - began:.1f} s\n\n")
        assert ended.returncode == 0, (command, ended.returncode, self.out, self.err)
