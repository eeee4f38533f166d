"""Which kind of file system a path is on: a lock or a memory map means little on a network's."""

import subprocess
import sys
from pathlib import Path

MOUNT_COMMAND_SECONDS_MAX = 2.0


def filesystem_of(path: Path) -> str | None:
    """Its kind, such as `ext4` or `nfs4`; None when this system doesn't say."""
    try:
        if sys.platform == "linux":
            mounts = mounts_of_linux(Path("/proc/self/mountinfo").read_text(errors="replace"))
        else:
            answer = subprocess.run(
                ["/sbin/mount"], capture_output=True, text=True, timeout=MOUNT_COMMAND_SECONDS_MAX, check=True
            )
            mounts = mounts_of_macos(answer.stdout)
        return filesystem_in(mounts, path.resolve())
    except (OSError, subprocess.SubprocessError):
        return None


def filesystem_in(mounts: list[tuple[Path, str]], path: Path) -> str | None:
    """That of the deepest mount above the path; of two at one place the later hides the earlier."""
    above = [mount for mount in mounts if path.is_relative_to(mount[0])]
    deepest = max((len(place.parts) for place, _ in above), default=0)
    kinds = [kind for place, kind in above if len(place.parts) == deepest]
    return kinds[-1] if kinds else None


def mounts_of_linux(mountinfo: str) -> list[tuple[Path, str]]:
    """Places and kinds; see proc(5)."""
    mounts = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if separator:
            place = before.split()[4].encode().decode("unicode_escape")  # A blank in a path is written as \040.
            mounts.append((Path(place), after.split()[0]))
    return mounts


def mounts_of_macos(listing: str) -> list[tuple[Path, str]]:
    """Places and kinds, of lines like `//user@host/share on /Volumes/share (smbfs, nodev)`."""
    mounts = []
    for line in listing.splitlines():
        rest, separator, options = line.rpartition(" (")
        _, on, place = rest.partition(" on ")
        if separator and on:
            mounts.append((Path(place), options.rstrip(")").split(",")[0]))
    return mounts
