"""Reasoning: whether a prompt ends inside it, the rules that apply after it, and its budget."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forerun.constrain.grammar import LETTER, Grammar, Start, ThinkingBudget
from forerun.constrain.grammar.calls import Rules
from forerun.errors import RequestError
from forerun.options.config import ServeSettings
from forerun.serve.bodies.schema import ChatBody
from forerun.text.harmony import ANALYSIS, END, FINAL, MESSAGE, START, THOUGHTS
from forerun.text.reasoning import Marks, Stage
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints


def enforced_budget(
    body: ChatBody, settings: ServeSettings, marks: Marks | None, tokenizer: Tokenizer, room: int
) -> tuple[ThinkingBudget | None, tuple[str, ...]]:
    """Return the budget of reasoning that the prompt has not begun (None: no limit), and a notice
    if it was lowered so that there is room for the answer.

    marks  around reasoning; None = unknown, or the answer has rules for single tokens
    room   tokens of the context after the prompt

    Raises RequestError for a budget that cannot be enforced.
    """
    name, requested = body.requested_budget
    own, must = requested is not None, requested is not None and not body.budget_is_target
    tokens = settings.thinking_budget if requested is None else requested
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


def stage_behind(body: ChatBody, tail: str, marks: Marks) -> tuple[Stage, bool]:
    """Return the stage of the answer at which a prompt with the end `tail` leaves the model, and
    whether that is directly after a mark.
    """
    stage = marks.stage(tail)
    if not body.continue_final_message:
        return stage, True
    last = body.messages[-1]
    begun = marks.begun(last)
    if begun is not None:
        return Stage.THINKING, not begun.strip()
    return Stage.ANSWERING, str(last["content"]).rstrip().endswith(marks.closer)


def after_reasoning(
    prompt: Ints,
    rules: Rules | None,
    stage: Stage,
    marks: Marks,
    tokenizer: Tokenizer,
    control: bool,
    budget: ThinkingBudget | None,
) -> tuple[Ints, Rules | None, Stage]:
    """Make the constraint begin after the reasoning: where the parser of the answer, which sees
    control tokens if `control`, finds the end. Returns prompt int32[T], constraint and stage.

    If the prompt lets the model decide whether to reason, and the constraint would not allow it,
    the prompt begins the reasoning: the constraint, or the budget, needs to know where it begins.
    """
    if (rules is None and budget is None) or stage == Stage.ANSWERING:
        return prompt, rules, stage
    if stage == Stage.UNDECIDED:
        opened = np.array(mark_ids(marks.opener, tokenizer), np.int32)
        prompt = np.concatenate([prompt, opened])
    if budget is not None:
        budget = replace(budget, used=thought_tokens(prompt, marks.opener, tokenizer))
    rules = (rules or Rules(Grammar.free())).after(Start(marks.closer, control), budget)
    return prompt, rules, Stage.THINKING


def after_analysis(
    prompt: Ints,
    rules: Rules | None,
    message: str,
    budget: ThinkingBudget | None,
    tokenizer: Tokenizer,
) -> tuple[Ints, Rules | None, str]:
    """Do the same as `after_reasoning` for Harmony: the constraint begins in the final channel, and
    a budget opens the analysis. Returns prompt, constraint, and the message that the prompt has
    begun.
    """
    opened = MESSAGE in message
    thinks = not opened or (budget is not None and ANALYSIS in message)
    if not thinks or (rules is None and budget is None):
        return prompt, rules, message
    if budget is not None:
        if not opened:
            header = tokenizer.encode(ANALYSIS, specials=True)
            prompt = np.concatenate([prompt, header])
            message += ANALYSIS
        budget = replace(budget, used=thought_tokens(prompt, ANALYSIS, tokenizer), call=END)
    rules = (rules or Rules(Grammar.free())).after(Start(FINAL, True), budget)
    return prompt, rules, message


class BudgetWatch:
    """Detects from an answer's tokens whether its budget ended the reasoning."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._due = max(budget.tokens - budget.used, 0)
        self._ending, self._begun = budget.ending, list[int]()

    def push(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the answer; those long after the end are not stored."""
        if len(self._begun) < self._due + LETTER + len(self._ending):
            self._begun += tokens

    @property
    def cut(self) -> bool:
        """Whether the ending is where the budget forces it: after the N-th token, or after the end
        of its character.
        """
        size = len(self._ending)
        places = range(self._due, self._due + LETTER + 1)
        return any(tuple(self._begun[at : at + size]) == self._ending for at in places)


def thought_tokens(prompt: Ints, opener: str, tokenizer: Tokenizer) -> int:
    """Return how many tokens at the end of a prompt are reasoning, after its opener."""
    token, ids = tokenizer.added.get(opener), list[int](prompt.tolist())
    if token is not None and token.id in ids:
        return ids[::-1].index(token.id)
    text = tokenizer.decode(ids, skip_special=False)
    thought = text[text.rfind(opener) + len(opener) :] if opener in text else ""
    return len(tokenizer.encode_within(thought)) if thought else 0


def mark_ids(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a mark: its own token, or those that spell it."""
    token = tokenizer.added.get(mark)
    return (token.id,) if token is not None else tuple(tokenizer.encode_within(mark))
