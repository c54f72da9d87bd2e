"""Generated decisions that a person understands at a glance: messages to a help desk, three typed questions on each.

Which team takes it (choice), how urgent it is (score), whether the writer is angry (noul). About one message in eight
names two problems; its `team` target is split between both, as real raters would.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from colabtrain.records.schema import Question, Record, Seg

TASK = "help_desk"

PROBLEMS = {
    "billing": (
        "I was charged twice for the same month",
        "the invoice shows a tax I never agreed to",
        "my card was declined but the money left my account",
        "the discount code did not lower the price",
        "please send the receipt for my last payment",
        "I need to change the bank account you debit",
    ),
    "delivery": (
        "the parcel has not arrived",
        "the courier left the box at a neighbour I do not know",
        "tracking has said in transit for a week",
        "the driver rang once and drove off",
        "half of the shipment is missing",
        "can you send it to my office address instead",
    ),
    "technical": (
        "the app crashes when I open settings",
        "I cannot log in after the update",
        "the screen stays black when I press the button",
        "it will not connect to the wifi",
        "the sound cuts out during every call",
        "synchronising stops with error 504",
    ),
    "returns": (
        "the jacket is the wrong size and I want to exchange it",
        "the lamp came broken, where do I send it back",
        "I changed my mind and would like to return the shoes",
        "this is not the colour I picked, please swap it",
        "the seal was open, I am sending it back",
        "how do I get a return label for the kettle",
    ),
}
TEAMS: dict[str, str | None] = {
    "billing": "payments, invoices, discounts",
    "delivery": "parcels on their way",
    "technical": "apps and devices that do not work",
    "returns": "sending goods back or exchanging them",
}
URGENCY = {
    "no hurry": ("Take your time.", "There is no rush.", "Whenever you get round to it."),
    "this week": ("It would be good to have this sorted by Friday.", "Please look at it this week.", "I need it before the weekend."),
    "today": ("I need an answer today.", "Please reply before this evening.", "My flight leaves tonight."),
    "at once": ("This is an emergency.", "Call me immediately.", "Every minute counts here."),
}
CALM = ("Thank you for your help.", "Kind regards.", "Thanks, you have been great so far.", "Have a nice day.", "I appreciate it.")
ANGRY = (
    "This is ridiculous.",
    "I am fed up with you people.",
    "Worst service I have ever seen.",
    "You should be ashamed.",
    "I will tell everyone to avoid you.",
)
OPENINGS = ("Hello.", "Hi there.", "Good morning.", "To whom it may concern.", "Order {n}.", "Customer number {n}.")

QUESTIONS = (
    Question(name="team", type="choice", instructions="Which team should take this message?", criteria=TEAMS),
    Question(name="urgency", type="score", instructions="How urgent is this message?", criteria=list(URGENCY)),
    Question(name="angry", type="noul", instructions="Is the writer angry?"),
)


def help_desk(num_records: int, seed: int = 0) -> list[Record]:
    """`num_records` messages; the last fifth is split `test`, the rest `train`."""
    rng = random.Random(f"help desk/{seed}")
    return [_record(rng, i, "train" if i < num_records - num_records // 5 else "test") for i in range(num_records)]


def _record(rng: random.Random, index: int, split: str) -> Record:
    teams = rng.sample(list(PROBLEMS), 2 if rng.random() < 0.125 else 1)
    urgency, angry = rng.randrange(len(URGENCY)), rng.random() < 0.5
    problems = " and ".join(rng.choice(PROBLEMS[team]) for team in teams)
    sentences = [
        problems[0].upper() + problems[1:] + ".",
        rng.choice(URGENCY[list(URGENCY)[urgency]]),
        rng.choice(ANGRY if angry else CALM),
    ]
    rng.shuffle(sentences)
    opening = rng.choice(OPENINGS).format(n=rng.randrange(1000, 10000))
    targets = (
        tuple(float(team in teams) / len(teams) for team in PROBLEMS),
        _one_hot(urgency, len(URGENCY)),
        _one_hot(int(angry), 2),
    )
    return Record(
        task=TASK,
        split=split,
        modality="text",
        state=(Seg("text", " ".join([opening, *sentences])),),
        qs=QUESTIONS,
        targets=targets,
        ys=tuple(target.index(max(target)) for target in targets),
        id=f"{TASK}-{index}",
    )


def _one_hot(index: int, length: int) -> tuple[float, ...]:
    return tuple(float(k == index) for k in range(length))


def shown(record: Record) -> str:
    """One record as a person would want to read it."""
    lines: Sequence[str] = [f'Message: "{record.state[0].data}"']
    for question, target in zip(record.qs, record.targets, strict=True):
        names = list(question["criteria"]) if "criteria" in question else ["no", "yes"]
        answer = ", ".join(f"{name} {p:.0%}" for name, p in zip(names, target, strict=True) if p > 0)
        lines = [*lines, f"  {question['type']}: {question['instructions']} -> {answer}"]
    return "\n".join(lines)
