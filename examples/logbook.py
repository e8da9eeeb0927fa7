"""A long document in plain language, made up: the logbook of a harbour office, with a few facts worth asking about."""

from __future__ import annotations

import random

WEATHER = (
    "wind from the west",
    "fog until noon",
    "a clear sky",
    "rain in short showers",
    "a light breeze",
    "heavy swell",
)
SHIPS = ("the Marten", "the Old Friend", "the Heron", "the Sister Anne", "the Cutlass", "the Grey Goose", "the Juniper")
CARGO = ("timber", "salt", "barrels of oil", "wool", "roof tiles", "grain", "dried fish", "rope")
REMARKS = (
    "The crew asked for fresh water and received it.",
    "Two hands stayed ashore until the evening.",
    "The customs officer found nothing to object to.",
    "A damaged mooring line was replaced.",
    "The pilot was waiting at the breakwater.",
    "The harbour fee was paid in full.",
    "Her papers were in order.",
    "She will leave with the next tide.",
)
FACTS = {
    0.18: "The new lighthouse keeper moved in today. His name is Tobias Wren, and he has a grey cat called Biscuit.",
    0.47: "The spare key of the signal tower is now kept under the third flower pot behind the bakery.",
    0.74: "The council decided to paint the ferry house green before the summer fair.",
}
QUESTION = "Where is the spare key of the signal tower kept?"
ANSWER = "under the third flower pot behind the bakery"


def logbook(n_days: int, seed: int = 7) -> str:
    """The document, about 45 tokens a day."""
    rng = random.Random(seed)
    facts = {int(share * n_days): text for share, text in FACTS.items()}
    lines = []
    for day in range(n_days):
        entry = (
            f"Day {day + 1}: {rng.choice(WEATHER)}. {rng.choice(SHIPS).capitalize()} came in with {rng.choice(CARGO)}."
        )
        lines.append(f"{entry} {rng.choice(REMARKS)} {facts.get(day, rng.choice(REMARKS))}")
    return "\n".join(lines)
