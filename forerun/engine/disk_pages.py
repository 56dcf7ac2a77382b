"""Reads and writes pages on disk while the server runs: pages of ended sequences are written, those
that waiting ones need are read, by one thread.

    engine's thread                           the store's thread
    awaits    finds a prompt's pages      ->  _read    reads and checks their records
    _insert   puts them into the index    <-           in parts, then the records beside them
    save      an ended sequence's pages   ->  _write   selects those that are not on disk
    _contents_of  copies them             <-           in parts, then the records beside them
                                          ->           appends them to a segment

With recurrent layers, or sliding-window layers that free pages, a text can continue only where its
state or its window is on disk too (disk_states.py): pages beyond are not read.

Functions with an arrow to the left run on the engine's thread before a step (Engine.run_in_engine),
a bounded part in each. Pages that were read are like those of any other request: the sequence waits
until they are in the prefix index, and finds them there. It waits no longer than computing its
prompt would take. A failure here never ends a request.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from time import monotonic

import numpy as np

from forerun.cache.prefix import CachedPage, PrefixIndex
from forerun.cache.store import PageStore
from forerun.engine.chunked_prefill import PromptPace
from forerun.engine.disk_jobs import Reading, Writing
from forerun.engine.disk_states import CachedText, DiskRecords
from forerun.engine.engine_calls import ClosedError, EngineCalls
from forerun.engine.sequence import Sequence
from forerun.engine.store_stats import StoreStats
from forerun.interface.executor import PageContents
from forerun.types import Ints

log = logging.getLogger("forerun.engine")

READ_BYTES, WRITE_BYTES = 16 << 20, 4 << 20
"""Most bytes copied into pages, and out of them, before one step; at least one page."""
LEAST_TOKENS = 1024
"""Fewest tokens of a new prompt whose pages are written. Of a shorter one only the part is written
that another request had before.
"""
LEAST_READ = 32
"""Fewest tokens that are read from disk; at least two pages."""
QUEUED = 64
"""Most ended sequences whose pages wait to be written; further ones replace the oldest."""
LEAST_SECONDS, FIRST_SECONDS = 0.1, 10.0
"""Least time that a sequence waits for its pages, and the time to wait before any prompt was
timed.
"""
CLOSE_SECONDS = 5.0
"""Most seconds spent writing at shutdown."""


class DiskPages:
    """Reads and writes a page store for an engine. Methods run on the engine's thread unless they
    say otherwise.

    running  sequences that have a slot; each may need another page
    post   calls a function on the engine's thread before its next step; from any thread
    least  as LEAST_TOKENS
    beside  records that a text needs besides its pages; None if pages suffice
    """

    def __init__(
        self,
        store: PageStore,
        contents: PageContents,
        index: PrefixIndex,
        pace: PromptPace,
        running: list[Sequence],
        post: Callable[[Callable[[], None]], None],
        *,
        least: int = LEAST_TOKENS,
        beside: DiskRecords | None = None,
    ) -> None:
        self.store, self._beside = store, beside
        self._contents, self._index, self._pace = contents, index, pace
        self._running, self._engine, self._least = running, EngineCalls(post), least
        self._current: Reading | None = None
        self._readings: dict[tuple[int, int], Reading] = {}
        self._hits = self._tokens = self._read_bytes = self._written = self._dropped = 0
        self._size, self._seconds, self._misses = store.folder.size(), 0.0, Counter[str]()
        # Shared with the store's thread, under the lock of `_changed`:
        self._changed = threading.Condition()
        self._reads: deque[Reading] = deque()
        self._writes: deque[Writing] = deque(maxlen=QUEUED)
        self._working = self._refused = False
        self._thread = threading.Thread(target=self._work, name="forerun-store", daemon=True)
        self._thread.start()

    @property
    def held(self) -> list[int]:
        """The pages that readings hold, one entry per reference."""
        return [entry.page for each in self._readings.values() for entry in each.chain]

    @property
    def reading(self) -> bool:
        """Whether a sequence waits for pages."""
        return bool(self._readings)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be read or written. From any thread."""
        with self._changed:
            return not (self._reads or self._writes or self._working)

    def wait(self, seconds: float) -> None:
        """Block until the store's thread posts a function, or `seconds` have passed."""
        self._engine.wait(seconds)

    def awaits(self, sequence: Sequence) -> bool:
        """Return whether a sequence that reuses its prefix has to wait for pages being read. The
        first call looks them up and queues the reading.
        """
        reading = self._readings.get(sequence.order)
        if reading is not None:
            if monotonic() <= reading.deadline and self._thread.is_alive():
                return True
            self._end(reading, "late")
            return False
        if sequence.stored >= 0 or not self._thread.is_alive():
            return False
        sequence.stored = 0
        reading = self._find(sequence)
        if reading is None:
            return False
        if self._current is not None and self._current.over:  # The disk still stalls.
            self._misses["late"] += 1
            return False
        self._readings[sequence.order] = reading
        with self._changed:
            self._reads.append(reading)
            self._changed.notify()
        return True

    def save(self, sequence: Sequence) -> None:
        """Queue the pages of an ending sequence for writing if they are worth it, and cancel its
        reading. Call before it releases its pages.
        """
        reading = self._readings.get(sequence.order)
        if reading is not None:
            self._end(reading)
        size, lookahead = self._index.page_size, self._index.lookahead
        worth = sequence.prompt_len if sequence.prompt_len >= self._least else sequence.shared
        chain = sequence.table.chain[: max(worth - lookahead, 0) // size]
        if chain and not self._refused:
            with self._changed:
                # The same prompt again runs its last token.
                ends = [each // size for each in (sequence.shared, worth - 1, worth)]
                ends = [min(end, len(chain)) for end in ends]
                self._writes.append(Writing(sequence.table.salt, chain, ends))
                self._changed.notify()

    def close(self, run_posted: Callable[[], None], flush: bool) -> None:
        """End the thread; if `flush`, first write what is queued, for at most CLOSE_SECONDS. Call
        after the engine's thread has ended. Idempotent.

        run_posted  runs the functions that were posted to the engine's thread
        """
        deadline = monotonic() + CLOSE_SECONDS
        while flush and not self.idle and monotonic() < deadline:
            run_posted()
            self.wait(0.01)
        with self._changed:
            self._engine.closed = True
            self._changed.notify()
        self._thread.join(1.0)

    def stats(self) -> StoreStats:
        """Return the counters. From any thread."""
        rate = 1000.0 * self._pace.tokens_per_ms
        saved = self._tokens / rate - self._seconds if rate else 0.0
        return StoreStats(
            hits=self._hits,
            tokens=self._tokens,
            misses=dict(self._misses),
            read_bytes=self._read_bytes,
            written_bytes=self._written,
            dropped=self._dropped,
            pages=len(self.store),
            size=self._size,
            seconds_saved=saved,
        )

    # --- on the engine's thread ----------------------------------------------------------

    def _find(self, sequence: Sequence) -> Reading | None:
        """Return a reading of a prompt's pages on disk; None if there are too few to be worth
        reading.
        """
        index, salt = self._index, sequence.table.salt
        size, lookahead = index.page_size, index.lookahead
        # Of a full last page all but one token are reused; but states are there for its end alone.
        last = 0 if self._beside is None else 1 - lookahead
        tokens = sequence.tokens[: sequence.total - last]
        full_pages = (len(tokens) - lookahead) // size
        known = index.acquire(tokens, salt)
        for entry in reversed(known):
            index.release(entry.page)
        usable = self._usable(tokens, known, salt)
        min_pages = usable + max(-(-LEAST_READ // size), 2)
        if full_pages < min_pages:
            return None
        data, digest = tokens.tobytes(), b""
        digests, keys = list[bytes](), list[bytes]()
        for begin in range(0, full_pages * size, size):
            key = data[4 * begin : 4 * (begin + size + lookahead)]
            digest = self.store.digest(digest, key if begin else salt + key)
            if digest not in self.store:
                break
            digests.append(digest)
            keys.append(key)
        sequence.stored = len(digests) * size
        while digests and not self._continues(digests):
            del digests[-1], keys[-1]
        if len(keys) < min_pages:
            self._misses["absent"] += 1
            return None
        rate = 1000.0 * self._pace.tokens_per_ms
        seconds = (len(keys) - usable) * size / rate if rate else FIRST_SECONDS
        return Reading(sequence, digests, keys, monotonic() + max(seconds, LEAST_SECONDS))

    def _begin(self, reading: Reading) -> int:
        """Acquire the pages that are in memory already. Returns their number."""
        if not reading.over:
            sequence, lookahead = reading.sequence, self._index.lookahead
            known = len(reading.keys) * self._index.page_size + lookahead
            reading.chain = self._index.acquire(sequence.tokens[:known], sequence.table.salt)
            reading.first = len(reading.chain)
            reading.usable = self._usable(sequence.tokens, reading.chain, sequence.table.salt)
        return len(reading.chain)

    def _insert(self, reading: Reading, _: range, contents: list[memoryview]) -> bool:
        """Insert pages into the index. Returns False if no more are wanted or no page is free."""
        index, chain = self._index, reading.chain
        for content in contents:
            if reading.over:
                return False
            taken = index.take(1) if index.available > len(self._running) else None
            if taken is None:
                self._end(reading, "full")
                return False
            try:
                self._contents.write_page(taken[0], content)
            except BaseException:
                index.release(taken[0])
                raise
            parent = chain[-1] if chain else index.root
            tokens = reading.sequence.tokens[len(chain) * index.page_size :]
            tokens = tokens[: index.page_size + index.lookahead]
            table = reading.sequence.table
            chain.append(index.insert(parent, tokens, taken[0], table.salt, table.tenant))
        return not reading.over

    def _continues(self, digests: list[bytes]) -> bool:
        """Return whether the records that a text needs to continue after these pages are on
        disk.
        """
        if self._beside is None:
            return True
        store = self._beside.store
        return all(digests[number] in store for number in self._beside.needed(len(digests)))

    def _text(self, tokens: Ints, chain: list[CachedPage], salt: bytes) -> CachedText:
        """Return the text that the pages of `chain` hold; `tokens` begin with it."""
        pages = [entry.page if self._index.contains(entry) else -1 for entry in chain]
        length = len(chain) * self._index.page_size
        return CachedText(tokens[:length], np.array(pages, np.int32), salt)

    def _usable(self, tokens: Ints, known: list[CachedPage], salt: bytes) -> int:
        """Return after how many of the pages in memory a text can continue."""
        if self._beside is None:
            return len(known)
        return self._beside.usable(self._text(tokens, known, salt))

    def _insert_beside(self, reading: Reading, numbers: range, contents: list[memoryview]) -> bool:
        """Give the executor the records that a text needs besides its pages. Returns False if the
        reading is over.
        """
        assert self._beside is not None
        text = self._text(reading.sequence.tokens, reading.chain, reading.sequence.table.salt)
        for number, content in zip(numbers, contents, strict=False):
            if reading.over:
                return False
            if not self._beside.write(text, number, content):
                self._end(reading, "full")
        return not reading.over

    def _end(self, reading: Reading, miss: str = "") -> None:
        """Release the pages of a reading, which stay in the index, and count it. Idempotent."""
        if reading.over:
            return
        reading.over = True
        del self._readings[reading.sequence.order]
        sequence = reading.sequence
        # Pages without the records that a text needs besides them are useless.
        now = self._usable(sequence.tokens, reading.chain, sequence.table.salt)
        taken = now - reading.usable
        for entry in reversed(reading.chain):
            self._index.release(entry.page)
        reading.chain = []
        if miss:
            self._misses[miss] += 1
        if taken > 0:
            self._hits += 1
            self._tokens += taken * self._index.page_size
            self._seconds += monotonic() - reading.began

    def _contents_of(self, entries: list[CachedPage]) -> list[bytes]:
        """Return the contents of these pages, up to the first one that was evicted."""
        contents: list[bytes] = []
        for entry in entries:
            if not self._index.contains(entry):
                break
            contents.append(self._contents.read_page(entry.page))
        return contents

    def _worth(self, tokens: Ints, writing: Writing) -> list[int]:
        """Return the page numbers whose records besides pages are worth writing."""
        assert self._beside is not None
        return self._beside.worth(self._text(tokens, writing.chain, writing.salt), writing.ends)

    def _contents_beside(
        self, tokens: Ints, writing: Writing, numbers: list[int]
    ) -> list[bytes | None]:
        """Return the executor's records for these page numbers; None for one that is gone."""
        assert self._beside is not None
        text = self._text(tokens, writing.chain, writing.salt)
        return [self._beside.read(text, number) for number in numbers]

    # --- on the store's thread -----------------------------------------------------------

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
                self._size = self.store.folder.size()
        except ClosedError:
            pass
        except Exception:
            log.exception("kv-store: nothing is read or written any more")
            self._refused = True
        finally:
            with self._changed:
                self._working = False
            for store in [self.store] + ([self._beside.store] if self._beside else []):
                try:
                    store.close()
                except OSError as error:
                    log.warning("kv-store: a segment could not be closed: %s", error)

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next job: readings first, then the newest writing. Returns None when the
        store is closing.
        """
        with self._changed:
            self._working, self._current = False, None
            self._changed.wait_for(lambda: self._reads or self._writes or self._engine.closed)
            if self._engine.closed:
                return None
            self._working = True
            if self._reads:
                return partial(self._read, self._reads.popleft())
            return partial(self._write, self._writes.pop())

    def _read(self, reading: Reading) -> None:
        """Read the pages of a sequence that are not in memory, up to a damaged one, then the
        records that it needs besides them.
        """
        self._current = reading
        first, last = self._engine.run(partial(self._begin, reading)), len(reading.keys)
        self._copy(self.store, reading, range(first, last), self._insert)
        if self._beside is not None and not reading.miss:
            needed = self._beside.needed(last)
            self._copy(self._beside.store, reading, needed, self._insert_beside)
        self._engine.run(partial(self._end, reading, reading.miss))

    def _copy(
        self,
        store: PageStore,
        reading: Reading,
        numbers: range,
        insert: Callable[[Reading, range, list[memoryview]], bool],
    ) -> None:
        """Read records for a reading, up to a damaged one. While one part is read, the engine's
        thread inserts the part before.
        """
        per_read = max(READ_BYTES // store.record_bytes, 1)
        size = min(per_read, len(numbers)) * store.record_bytes
        buffers = [np.empty(size, np.uint8).data for _ in range(2)]
        inserted: Future[bool] | None = None
        for begin, into in zip(range(0, len(numbers), per_read), cycle(buffers), strict=False):
            part = numbers[begin : begin + per_read]
            contents = self._contents_on_disk(store, reading, part, into)
            if inserted is not None:
                self._engine.answer(inserted)
            inserted = self._engine.start(partial(insert, reading, part, contents))
            if len(contents) < len(part):
                break
        if inserted is not None:
            self._engine.answer(inserted)

    def _contents_on_disk(
        self, store: PageStore, reading: Reading, places: range, into: memoryview
    ) -> list[memoryview]:
        """Return the stored contents of a reading's pages, see PageStore.read. If it stops early,
        `reading.miss` has the reason. Empty if the reading is over.
        """
        if reading.over:
            return []
        pages = [(reading.digests[each], reading.keys[each]) for each in places]
        damaged = store.corrupt
        try:
            contents = store.read(pages, into)
            store.touch(digest for digest, _ in pages[: len(contents)])
        except OSError as error:
            log.warning("kv-store: a page could not be read: %s", error)
            reading.miss = "failed"
            return []
        if len(contents) < len(pages):
            reading.miss = "corrupt" if store.corrupt > damaged else "absent"
        self._read_bytes += sum(len(content) for content in contents)
        return contents

    def _write(self, writing: Writing) -> None:
        """Write those pages of a text that are not on disk, in order."""
        digest = b""
        digests: list[bytes] = []
        missing: list[tuple[CachedPage, bytes]] = []
        for entry in writing.chain:
            digest = self.store.digest(digest, entry.key)
            digests.append(digest)
            if digest not in self.store:
                missing.append((entry, digest))
        per_write = max(WRITE_BYTES // self._contents.page_bytes, 1)
        for begin in range(0, len(missing), per_write):
            part = missing[begin : begin + per_write]
            contents = self._engine.run(partial(self._contents_of, [entry for entry, _ in part]))
            for (entry, digest), content in zip(part, contents, strict=False):
                if not self._append(self.store, digest, self._own(entry), content):
                    self._dropped += len(missing) - begin
                    return
            if len(contents) < len(part):
                self._dropped += len(missing) - begin - len(contents)
                return
            while self._reads and not self._engine.closed:
                self._read(self._reads.popleft())
        self._write_beside(writing, digests)

    def _own(self, entry: CachedPage) -> bytes:
        """Return a page's key without the salt."""
        return entry.key[-4 * (self._index.page_size + self._index.lookahead) :]

    def _write_beside(self, writing: Writing, digests: list[bytes]) -> None:
        """Write the records that a text needs besides its pages, whose digests are `digests`."""
        if self._beside is None:
            return
        store, size = self._beside.store, self._index.page_size
        data = b"".join(self._own(entry)[: 4 * size] for entry in writing.chain)
        tokens = np.frombuffer(data, np.int32)
        worth = self._engine.run(partial(self._worth, tokens, writing))
        numbers = [number for number in worth if digests[number] not in store]
        per_write = max(WRITE_BYTES // store.record_bytes, 1)
        for begin in range(0, len(numbers), per_write):
            part = numbers[begin : begin + per_write]
            contents = self._engine.run(partial(self._contents_beside, tokens, writing, part))
            for number, content in zip(part, contents, strict=True):
                key = self._own(writing.chain[number])
                if content is not None and not self._append(store, digests[number], key, content):
                    return

    def _append(self, store: PageStore, digest: bytes, tokens: bytes, content: bytes) -> bool:
        try:
            store.write(digest, tokens, content)
        except OSError as error:
            log.warning("kv-store: writing ends, reading goes on: %s", error)
            self._refused = True
            with self._changed:
                self._writes.clear()
            return False
        self._written += len(content)
        return True
