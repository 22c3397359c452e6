"""Which code a record was made with: between two releases the version does not say."""

import subprocess
from pathlib import Path

from hf_lgelu.environment import package_versions

SOURCES = ("hf_lgelu", "scripts")
"""What the numbers of a run or a measurement can depend on, from the top of the checkout."""


def last_commit(*paths: str, inside: Path = Path(__file__).parent) -> str | None:
    """The last commit that changed any of these, with "-dirty" where they differ from it; None outside a checkout.

    Args:
        paths: from the top of the checkout.
        inside: a folder of the checkout.
    """
    names = ("--", *(f":/{path}" for path in paths))
    commit = _git(inside, "log", "-1", "--format=%h", *names)
    if not commit:
        return None
    return commit + "-dirty" * bool(_git(inside, "status", "--porcelain", *names))


def software_versions() -> dict[str, str]:
    """{package: version}, and under "commit" the one that the sources are of, where git knows."""
    commit = last_commit(*SOURCES)
    return package_versions() | ({"commit": commit} if commit else {})


def _git(inside: Path, *words: str) -> str:
    try:
        done = subprocess.run(("git", *words), cwd=inside, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
