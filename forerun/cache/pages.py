"""The page pool: which pages are free, and how many sequences hold each of the others."""


class PagePool:
    """P pages, by number. No arrays: the executor owns what the pages contain.

    A page is in one of three states; this pool knows the first two apart by the count:

        free    references 0, on the free list; its content means nothing
        held    references >= 1: that many sequences have it in their tables
        kept    references 0, not free: the prefix index remembers what it contains
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a pool needs at least one page, not {pages}")
        self.pages = pages
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages on the free list, which nobody holds and whose content means nothing."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages that at least one sequence holds. Counts anew: for checks and statistics."""
        return sum(1 for count in self._references if count)

    def references(self, page: int) -> int:
        """How many sequences hold `page`, from 0 to P-1; 0 = none does."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """Move `count` pages from free to held, one reference each.

        Valid until each is dropped. Raises ValueError, and takes nothing, when fewer are free.
        """
        left = len(self._free) - count
        if left < 0:
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        taken = self._free[left:][::-1]
        del self._free[left:]
        for page in taken:
            self._references[page] = 1
        return taken

    def hold(self, page: int) -> None:
        """Add a reference to a held or kept page. The caller makes sure that it is not free."""
        self._references[page] += 1

    def drop(self, page: int) -> bool:
        """Remove one reference. True when it was the last: the caller then frees or keeps it.

        Raises ValueError where there is none to remove.
        """
        if self._references[page] < 1:
            raise ValueError(f"page {page} is dropped by nobody who holds it")
        self._references[page] -= 1
        return self._references[page] == 0

    def put_back(self, page: int) -> None:
        """Move a page without references to the free list. Raises ValueError if it is held."""
        if self._references[page]:
            raise ValueError(f"page {page} is still held {self._references[page]} times")
        self._free.append(page)

    def check(self) -> None:
        """Prove that the free list is sound. Raises AssertionError with what is wrong."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert all(0 <= page < self.pages for page in free), "a free page does not exist"
        wrong = [page for page in free if self._references[page]]
        assert not wrong, f"pages {wrong} are free and held at once"
        assert min(self._references) >= 0, "a page has fewer than no references"
