"""State of one sequence with an expensive grammar, which an AsyncMatcher matches."""

from collections.abc import Callable, Sequence

from forerun.constrain.matcher.matcher import CompiledGrammar
from forerun.constrain.matcher.start_marker import StartMarker, only
from forerun.interface.grammars import Committed


class RemoteState:
    """The GrammarState of a matcher in a process of its own: it drafts nothing, and may be used
    only when it is `ready`.

    answered  called on another thread when it becomes ready
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
        failure only end-of-text tokens are allowed: the step must emit something, though it does
        not count.
        """
        compiled, answer = self._compiled, self._matcher.answer
        if answer.error:  # What is emitted does not count; but something must be.
            return only(compiled.ends, compiled.vocab)
        return self._start.mask(answer.mask)

    def commit(self, tokens: Sequence[int]) -> Committed:
        """Send decided tokens to the process. Whether the text is complete, or cannot continue, is
        known one call later: then none of `tokens` count.
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
        """Return the tokens after the start, which the constraint sees. A token that does not fit
        is rejected by the matcher.
        """
        under: list[int] = []
        for token in tokens:
            given = self._start.take(token)
            under += (token,) if given is None else given
        return under
