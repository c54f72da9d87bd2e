"""A small Hugging Face Hub on loopback for tests: repositories, LFS, Xet, tokens, and faults on demand."""

from minihub.faults import QUOTA_FULL, RATE_LIMITED, Fault
from minihub.hub import MiniHub
from minihub.repos import Commit, Entry, Repo, Token
from minihub.server import Seen

__all__ = ["QUOTA_FULL", "RATE_LIMITED", "Commit", "Entry", "Fault", "MiniHub", "Repo", "Seen", "Token"]
