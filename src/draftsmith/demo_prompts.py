"""The demo's own prompts: short thank-you notes, people x occasions x phrasings, written for this project (Apache-2.0).

A narrow, formulaic family, so that minutes of training on a laptop show a real effect; it says nothing about other text.
Which prompts are held out follows from a hash of the prompt alone, so that a longer list never moves one across.
"""

import hashlib
from itertools import product
from typing import NamedTuple

HELD_OUT_SHARE = 0.1

_PEOPLE = (
    "my neighbor", "my grandmother", "my grandfather", "my aunt", "my uncle", "my cousin", "my sister", "my brother",
    "my best friend", "my teacher", "my piano teacher", "my football coach", "my boss", "my coworker", "my mentor",
    "my landlord", "my doctor", "my dentist", "my nurse", "my mail carrier", "my librarian", "my babysitter",
    "my roommate", "my dog walker", "my gardener", "my hairdresser", "my mechanic", "my accountant", "my new client",
    "my study partner", "my professor", "my guest speaker", "my wedding guests", "my volunteers", "my host family",
)  # fmt: skip
_THINGS = (
    "the lovely dinner", "the birthday present", "the warm scarf", "the homemade bread", "the bouquet of flowers",
    "the box of chocolates", "the good advice", "the ride to the airport", "the help with moving", "the cookbook",
    "the coffee mug", "the concert tickets", "the garden tools", "the picture frame", "the handmade card",
    "the apple pie", "the house plant", "the gift card", "the board game", "the puzzle", "the winter gloves",
    "the knitted blanket", "the fruit basket", "the recommendation letter", "the job interview", "the extra lesson",
    "the help with my homework", "the patience during a hard week", "the quick repair", "the weekend visit",
    "the surprise party", "the book about birds", "the travel guide", "the tea set", "the lamp", "the jar of honey",
    "the old photographs", "the help in the kitchen", "the kind words", "the phone call", "the guitar strings",
    "the painting", "the set of pens", "the notebook", "the bicycle", "the tent", "the hiking boots", "the umbrella",
    "the watch", "the cat toys",
)  # fmt: skip
_PHRASINGS = (
    "Write a short thank-you note to {person} for {thing}.",
    "Please write a brief thank-you message to {person} for {thing}.",
    "Help me thank {person} for {thing} in a short note.",
)


class DemoPrompts(NamedTuple):
    """Distinct single-turn prompts, in a fixed mixed order."""

    train: list[str]
    held_out: list[str]


def demo_prompts() -> DemoPrompts:
    """All 5,250 prompts, ordered by hash: any prefix is an even mixture of people, things and phrasings."""
    prompts = [text.format(person=p, thing=t) for text, p, t in product(_PHRASINGS, _PEOPLE, _THINGS)]
    order = sorted((hashlib.sha256(prompt.encode()).hexdigest(), prompt) for prompt in prompts)
    train, held_out = [], []
    for digest, prompt in order:
        # the last digits decide, the first ones order: a prefix of either list stays a fair sample
        (held_out if int(digest[-8:], 16) < HELD_OUT_SHARE * 16**8 else train).append(prompt)
    return DemoPrompts(train, held_out)
