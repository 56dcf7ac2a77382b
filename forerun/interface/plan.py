"""What crosses between the engine and an executor: small NumPy ints in, one packed copy out."""

from dataclasses import dataclass, field
from functools import cached_property

from forerun.speculative.sampling import Sampling
from forerun.types import Bools, Ints


@dataclass(frozen=True, slots=True)
class SlotInit:
    """What an executor must know of a sequence when it takes a slot.

    tokens      int32[T] all tokens decided so far (prompt, and output after a preemption);
                the sampler's history, which prefix-cache hits never show in a plan
    prompt_len  how many of them are the prompt: output position n = index - prompt_len
    """

    slot: int
    tokens: Ints
    prompt_len: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does. Row b advances the sequence in slot slots[b].

    slots       int32[B]
    kv_len      int32[B]    tokens whose keys and values are already in pages
    known       B x int32[.] tokens to run whatever happens: a prompt chunk, or the last token
    samples     bool[B]     False for a chunk that stops short of the known tokens' end:
                            its row emits nothing
    max_nodes   int32[B]    draft tokens the row may carry (0 = plain decoding)
    max_depth   int32[B]    longest path of draft tokens
    page_table  int32[B,W]  page of position p is page_table[b, p // page_size]; -1 = none;
                            reserved for kv_len + len(known) + max_depth positions
    constrained bool[B]     a grammar holds the row
    min_prob    draft tokens less likely than this are not worth proposing: none would be verified
    ends        int32[B]    None, but of a step that carries on from the running one before that is
                            looked at: positions that a row may take up in the end. Only the
                            device knows such a row then: kv_len is the most that it can be, known
                            stands for one token, and its draft tokens are what the device has grown
    """

    slots: Ints
    kv_len: Ints
    known: tuple[Ints, ...]
    samples: Bools
    max_nodes: Ints
    max_depth: Ints
    page_table: Ints
    constrained: Bools
    min_prob: float = 0.0
    ends: Ints | None = None

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw model log-probabilities (before any sampling parameter) of one reported token.

    top is best first: (token, log-probability in nats); its length is what was asked.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a step decided. The only thing copied from device to host.

    n_tokens        int32[B]   tokens emitted: 0 where the row does not sample, else accepted + 1
    tokens          int32[B,D] the accepted draft tokens, then the target's own token; -1 padded
    n_draft_tokens       int32[B]   draft tokens the row's tree carried
    finite          bool[B]    False where the target's logits were not finite: the row
                               emitted nothing and its request must end with an error
    logprobs        B lists, one entry per emitted token where asked, else empty
    prompt_logprobs B lists where asked, else empty: entry i is the log-probability of
                    known[i+1]. A row that does not sample has one more entry, for the decided
                    token after its chunk, so a prompt's chunks join up without a hole; for a
                    sampling row the emitted tokens' entries follow in `logprobs`
    """

    n_tokens: Ints
    tokens: Ints
    n_draft_tokens: Ints
    finite: Bools
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = field(default=())
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = field(default=())

    @cached_property
    def output_tokens(self) -> list[list[int]]:
        """The emitted tokens of every row, unpadded."""
        counts = self.n_tokens.tolist()
        return [row[:count] for row, count in zip(self.tokens.tolist(), counts, strict=True)]

    def committed(self, plan: Plan) -> list[int]:
        """Per row, positions that became permanent: its known tokens plus accepted draft tokens."""
        counts = self.n_tokens.tolist()
        return [len(k) + max(count - 1, 0) for k, count in zip(plan.known, counts, strict=True)]
