"""Which Hub repo, with which token; and whether a name and a pace are ones that the Hub takes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TIMEOUT_SECONDS = 120.0  # of one read or write on a socket
QUIET_SECONDS = 180.0  # without progress: the child is killed
MIN_PUBLISH_SECONDS = 60.0
NAME = re.compile(r"(?!.*(?:--|\.\.))(?!.*\.git$)\w[\w.-]*/(?=.{1,96}$)\w(?:[\w.-]*\w)?", re.ASCII)  # as the Hub wants it
LOOPBACK = re.compile(r"https?://(?:127\.\d+\.\d+\.\d+|localhost|\[::1\])(?::\d+)?(?:/|$)")


@dataclass(frozen=True)
class HubAccess:
    """endpoint: address of the Hub."""

    repo: str
    token: str = field(repr=False)
    endpoint: str
    timeout_seconds: float = TIMEOUT_SECONDS
    quiet_seconds: float = QUIET_SECONDS


def check_repo(repo: str) -> None:
    """Raise ValueError where `repo` cannot be the name of a Hub repo."""
    if not NAME.fullmatch(repo):
        raise ValueError(f"hub={repo!r} is no name of a Hub repo; give owner/name, such as hub='me/my-run'")


def check_pace(publish_every: float, endpoint: str) -> None:
    """Raise ValueError where commits would come so fast that the Hub refuses them."""
    if publish_every < MIN_PUBLISH_SECONDS and not LOOPBACK.match(endpoint):
        least = f"at least {MIN_PUBLISH_SECONDS:g} seconds, for the Hub's sake"
        raise ValueError(f"publish_every={publish_every:g} is too small; it must be {least}")
