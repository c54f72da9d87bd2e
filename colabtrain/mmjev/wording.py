"""Wording: how text becomes tokens, and how questions and proposed answers are put to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from colabtrain.records.schema import Question, as_text


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        ...


@dataclass(frozen=True)
class Prompt:
    """Wording around questions and proposed answers; {text} is replaced."""

    question: str = "\n\nQuestion: {text}"
    answer: str = "\nProposed answer: {text}\nIs this proposed answer correct? Answer Yes or No.\n"


def proposed_answers(question: Question) -> list[str]:
    """The text of each branch of `question`: an option with its description, a level, or for noul the one answer Yes."""
    criteria = question.get("criteria")
    if question["type"] == "choice":
        return [option if text is None else f"{option}: {as_text(text)}" for option, text in (criteria or {}).items()]
    if question["type"] == "score":
        return [as_text(level) for level in criteria or ()]
    if not criteria:
        return ["Yes"]
    meanings = [f"{word} ({as_text(criteria[key])})" for word, key in (("Yes", "true"), ("not No", "false")) if criteria.get(key)]
    return [", ".join(meanings)]
