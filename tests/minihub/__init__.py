"""A small Hugging Face Hub on loopback for tests: repositories, LFS, Xet, tokens, and faults on demand."""

from minihub.faults import QUOTA_FULL, Fault, rate_limited
from minihub.hub import MiniHub
from minihub.repos import Commit, Entry, Repo, Token
from minihub.server import Seen

__all__ = ["QUOTA_FULL", "Commit", "Entry", "Fault", "MiniHub", "Repo", "Seen", "Token", "rate_limited"]
