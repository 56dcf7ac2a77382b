"""How many prompt tokens a step takes while rows decode beside them."""

STEP_MS = 250.0
"""Longest step beside decoding rows, milliseconds: the gap that a prompt makes in their streams.
(A stream beside a prompt on two cores of a Xeon, medians of three. Default model, 3,000 tokens: the
longest gap is .13, .30, .67 s with 100, 250 and 500, the prompt's first token comes after 5.8, 5.7
and 5.1 s; without a bound 1.33 and 5.9. Gemma 3 270M, 2,000 tokens: .13, .34, .69 and 5.0, 4.0,
3.5 s.)
"""
LEAST = 32
"""Least prompt tokens of a step; more are a multiple of this. (16, 32 and 64 do not differ.)"""


class PromptPace:
    """Bounds the prompt tokens of a step by its time: STEP_MS, or twice a step without a prompt.

    Updated by every step, so it follows the machine, the batch and the length of texts.

    decoding_ms    recent time of a step without a prompt, milliseconds
    tokens_per_ms  recent prompt tokens per millisecond; 0 before the first
    """

    def __init__(self) -> None:
        self.decoding_ms = self.tokens_per_ms = 0.0

    def bound(self, room: int) -> int:
        """Return the most prompt tokens for a step beside decoding rows, at most `room`."""
        if not self.tokens_per_ms:
            return room
        ms = max(STEP_MS - self.decoding_ms, self.decoding_ms)
        return min(max(int(self.tokens_per_ms * ms) // LEAST, 1) * LEAST, room)

    def observe(self, prompt_tokens: int, ms: float) -> None:
        """Update the rate with a step with prompt tokens that took `ms` milliseconds.

        A step that was slow for another reason, such as one that compiles, counts half at most.
        """
        if prompt_tokens >= LEAST or not self.tokens_per_ms:
            rate = prompt_tokens / max(ms - self.decoding_ms, ms / 4.0, 1e-3)
            self.tokens_per_ms = (rate + (self.tokens_per_ms or rate)) / 2.0
