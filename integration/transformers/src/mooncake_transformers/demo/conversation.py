"""The scripted conversations: visitors of a made-up observatory, whose handbook is their system prompt."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import msgspec

__all__ = ["CONVERSATIONS", "MAX_TOKENS", "WARM_UP_MESSAGES", "Conversation", "Message", "handbook"]

Message = dict[str, str]

MAX_TOKENS = 32


class Conversation(msgspec.Struct, frozen=True):
    """What one visitor asks, one question after the other."""

    visitor: str
    questions: tuple[str, ...]

    def messages(self, system: str, answers: Sequence[str]) -> list[Message]:
        """The chat so far: the system prompt, every answered question, and the next question.

        ``answers`` are the model's answers so far, one for each earlier question.
        """
        assert len(answers) < len(self.questions), "every question has been answered"
        messages = [{"role": "system", "content": system}]
        for question, answer in zip(self.questions, answers, strict=False):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.questions[len(answers)]}]


CONVERSATIONS = (
    Conversation(
        "a visitor",
        (
            "When can I come and look through a telescope?",
            "What does a ticket cost for me and my child, who is nine?",
            "And if the sky is covered that evening?",
            "Is there anything I should bring?",
            "May my dog come into the dome?",
        ),
    ),
    Conversation(
        "a new observer",
        (
            "Tonight is my first watch. What do I check before I open a dome?",
            "The wind is at fifty-five kilometres an hour. What now?",
            "A dome does not close. Whom do I call?",
            "Where do I find soup at night?",
        ),
    ),
)

# Shares nothing with the handbook. Sent once before the measured requests, so that the cold request's time is
# the time of its prefill and not that of the first call of everything.
WARM_UP_MESSAGES: list[Message] = [{"role": "user", "content": "Say hello."}]


def handbook() -> str:
    """The shared system prompt, about a thousand tokens."""
    return files("mooncake_transformers.demo").joinpath("handbook.md").read_text(encoding="utf-8").strip()
