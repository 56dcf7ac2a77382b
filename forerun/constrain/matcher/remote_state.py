"""One sequence under an expensive grammar, which an AsyncMatcher follows."""

from collections.abc import Callable, Sequence

from forerun.constrain.matcher.matcher import CompiledGrammar
from forerun.constrain.matcher.start_marker import StartMarker, only
from forerun.interface.grammars import Committed


class RemoteState:
    """A GrammarState for matchers in processes of their own: it drafts nothing, and may be used
    only when it is `ready`.

    answered  called, on another thread, when it is
    """

    def __init__(
        self, compiled: CompiledGrammar, answered: Callable[[], None], output: Sequence[int]
    ) -> None:
        self._compiled = compiled
        self._matcher = compiled.remote(answered)
        self._start = StartMarker(
            compiled.start, compiled.ends, compiled.vocab, compiled.budget, call=compiled.call
        )
        self._matcher.take(self._constrained(output))

    @property
    def ready(self) -> bool:
        """Whether the process has answered, so that `mask` and `commit` may be called."""
        return self._matcher.ready

    def mask(self) -> bytes | None:
        """Return one bit per known id, set if the token may follow; None = every token may. After a
        failure only end-of-text tokens may: something must be emitted, though it does not count.
        """
        compiled, answer = self._compiled, self._matcher.answer
        if answer.error:  # What is emitted does not count; but something must be.
            return only(compiled.ends, compiled.vocab)
        return self._start.mask(answer.mask)

    def commit(self, tokens: Sequence[int]) -> Committed:
        """Hand decided tokens to the process. That the text is complete, or cannot go on, is known
        one call later: then none of `tokens` count.
        """
        answer = self._matcher.answer
        if answer.error or (answer.complete and not self._start.waiting):
            return Committed(0, answer.complete, answer.error, answer.lost)
        constrained = self._constrained(tokens)
        if constrained:
            self._matcher.take(constrained)
        return Committed(len(tokens))

    def close(self) -> None:
        """End the process that follows the grammar; no call may follow."""
        self._matcher.close()

    def _constrained(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens behind the start, for the constraint. The matcher refuses one that does
        not fit.
        """
        under: list[int] = []
        for token in tokens:
            given = self._start.take(token)
            under += (token,) if given is None else given
        return under
