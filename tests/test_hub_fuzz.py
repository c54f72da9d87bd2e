"""Sessions against a Hub where everything goes wrong: what was published stays, and one session at a time publishes."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hub_truth
import pytest
from hub_driver import Server
from hub_faults import BIT_FLIP, MAKERS
from hub_rounds import Round
from minihub import Repo

AT_ONCE = 4  # rounds; they wait a lot
ROUNDS, FULL_ROUNDS, COLAB_ROUNDS, MUTANT_ROUNDS = 40, 300, 8, 40


@pytest.fixture
def server(online_client: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(Repo, "advance", hub_truth.keeps_journal(Repo.advance))
    with Server() as server:
        yield server


def rounds(seeds: range, server: Server, folder: Path, mutant: str = "") -> Iterator[Round]:
    def play(seed: int) -> Round:
        return Round(seed, server, folder / f"{seed}", mutant).run()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(seeds.start, seeds.stop, AT_ONCE):
            for played in pool.map(play, range(start, min(start + AT_ONCE, seeds.stop))):
                yield played
                shutil.rmtree(played.folder)


def check_rounds(seeds: range, server: Server, folder: Path) -> Counter[str]:
    """How often each fault happened."""
    counts = Counter[str]()
    for played in rounds(seeds, server, folder):
        if played.problems:
            pytest.fail(played.report(), pytrace=False)
        counts += played.counts
    print(f"{len(seeds)} rounds:", ", ".join(f"{name} {number}" for name, number in sorted(counts.items())), file=sys.stderr)
    return counts


def check_all_happened(counts: Counter[str]) -> None:
    missing = [kind for kind in [*MAKERS, BIT_FLIP] if not counts[kind]]
    assert not missing, f"these faults did not happen: {missing}"


def test_whatever_goes_wrong_the_history_is_whole_and_one_session_publishes(server: Server, tmp_path: Path) -> None:
    check_all_happened(check_rounds(range(ROUNDS), server, tmp_path))


@pytest.mark.full
def test_the_same_many_times(server: Server, tmp_path: Path) -> None:
    check_all_happened(check_rounds(range(1000, 1000 + FULL_ROUNDS), server, tmp_path))


@pytest.mark.colab
def test_the_same_a_few_times(server: Server, tmp_path: Path) -> None:
    check_rounds(range(100, 100 + COLAB_ROUNDS), server, tmp_path)


@pytest.mark.colab
def test_without_a_condition_on_the_commit_it_fails(server: Server, tmp_path: Path) -> None:
    found = (problem for played in rounds(range(MUTANT_ROUNDS), server, tmp_path, "no parent_commit") for problem in played.problems)
    assert any("a commit of a session that does not own the repo" in problem for problem in found)
