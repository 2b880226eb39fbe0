"""Runs a scheduler's own command line tool. They hold the user's login; we never see it."""

import shutil
import subprocess

from launcher.errors import LaunchError


def checked(command: list[str], stdin: str | None = None) -> str:
    """Its output. Raises LaunchError if it is not installed, or with its own words if it fails."""
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"{command[0]} is not installed here",
            remedy=f"install {command[0]}, or submit the rendered file where it is: leave out --submit",
        )
    ended = subprocess.run(command, input=stdin, text=True, capture_output=True)
    if ended.returncode:
        words = (ended.stderr or ended.stdout).strip()
        raise LaunchError(
            f"{' '.join(command[:3])} ended with code {ended.returncode}: {words}",
            remedy="correct what it complains of, and launch again",
        )
    return ended.stdout
