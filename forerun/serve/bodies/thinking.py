"""Thinking budgets: whether one can be kept, and what ends the thought."""

from collections.abc import Sequence

from forerun.constrain.grammar import LETTER, ThinkingBudget
from forerun.errors import RequestError
from forerun.options.config import ServeSettings
from forerun.serve.bodies.schema import ChatBody
from forerun.text.harmony import FINAL, START, THOUGHTS
from forerun.text.reasoning import Marks
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints


def kept_budget(
    body: ChatBody, settings: ServeSettings, marks: Marks | None, tokenizer: Tokenizer, room: int
) -> tuple[ThinkingBudget | None, tuple[str, ...]]:
    """Return the budget of a thought that the prompt has not begun, None: no limit; and what
    became of the field, if it was lowered so that there is room for the answer.

    marks  around thoughts; None = they are unknown, or the answer has rules for single tokens
    room   tokens of the context behind the prompt

    Raises RequestError for a budget that cannot be kept, if the request has it.
    """
    name, asked = body.asked_budget
    own, must = asked is not None, asked is not None and not body.budget_is_target
    tokens = settings.thinking_budget if asked is None else asked
    message = body.thinking_budget_message
    message = settings.thinking_budget_message if message is None else message
    if tokens < 0:
        return None, ()
    if marks is None:
        if must:
            raise RequestError(
                f"{name} cannot be honoured: it needs a chat template with marks around the "
                "reasoning (--reasoning-end names the closing one), a request that bans no tokens, "
                "and one without tools where the format is gpt-oss's.",
                name,
            )
        return None, ()
    if marks.closer in message:
        raise RequestError(
            f"thinking_budget_message has {marks.closer!r}, which ends the thought by itself; "
            "leave it out.",
            "thinking_budget_message",
        )
    message_ids = tokenizer.encode_within(message) if message else ()
    ending = (*message_ids, *mark_ids(marks.closer, tokenizer))
    if marks is THOUGHTS:
        ending += tuple(tokenizer.encode(f"{START}assistant{FINAL}", specials=True).tolist())
    asked_limit = body.max_completion_tokens or body.max_tokens
    limit = max(room, 1) if asked_limit is None else min(asked_limit, max(room, 1))
    if tokens + len(ending) < limit:
        return ThinkingBudget(tokens, 0, ending), ()
    if must and limit == asked_limit:
        raise RequestError(
            f"{name} is {tokens}: with the {len(ending)} tokens that end the thought it leaves "
            f"nothing of max_tokens, {limit}, for the answer.",
            name,
        )
    if own and limit == asked_limit:
        return None, ()
    lowered = min(tokens, limit // 2)
    notice = f"{name if own else 'thinking_budget'} (cut to {lowered})"
    return ThinkingBudget(lowered, 0, ending), (notice,) if lowered < tokens else ()


class BudgetWatch:
    """Finds out from an answer's tokens whether its budget ended the thought."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._due = max(budget.tokens - budget.used, 0)
        self._ending, self._begun = budget.ending, list[int]()

    def push(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the answer; those far behind the end are not kept."""
        if len(self._begun) < self._due + LETTER + len(self._ending):
            self._begun += tokens

    @property
    def cut(self) -> bool:
        """Whether the ending stands where the budget forces it: behind the N-th token, or the
        letter that it ends in.
        """
        size = len(self._ending)
        places = range(self._due, self._due + LETTER + 1)
        return any(tuple(self._begun[at : at + size]) == self._ending for at in places)


def thought_tokens(prompt: Ints, opener: str, tokenizer: Tokenizer) -> int:
    """Return how many tokens at the end of a prompt are a thought, behind its opener."""
    token, ids = tokenizer.added.get(opener), list[int](prompt.tolist())
    if token is not None and token.id in ids:
        return ids[::-1].index(token.id)
    text = tokenizer.decode(ids, skip_special=False)
    thought = text[text.rfind(opener) + len(opener) :] if opener in text else ""
    return len(tokenizer.encode_within(thought)) if thought else 0


def mark_ids(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a mark: its own token, or what spells it."""
    token = tokenizer.added.get(mark)
    return (token.id,) if token is not None else tuple(tokenizer.encode_within(mark))
