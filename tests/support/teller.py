"""A command that tells people: `python teller.py FOLDER` appends what it is given to `FOLDER/told`.

First it does what the file `FOLDER/how` says: `fail`, or `hang` with a child that hangs too.
"""

import subprocess
import sys
import time
from pathlib import Path

FAILED = 3
HANGS_SECONDS = 600


def main() -> int:
    folder = Path(sys.argv[1])
    given = sys.stdin.read()
    how = (folder / "how").read_text()
    if how == "fail":
        return FAILED
    if how == "hang":
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANGS_SECONDS})"])
        (folder / "hanging").write_text(str(child.pid))
        time.sleep(HANGS_SECONDS)
    with (folder / "told").open("a") as told:
        told.write(f"{given}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
