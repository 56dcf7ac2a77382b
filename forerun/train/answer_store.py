"""Chats written so far, in parts on disk: an interrupted run loses the last few only."""

from pathlib import Path

import numpy as np

from forerun.errors import ModelError
from forerun.train.answers import Chat

PART = 100
"""Chats in a part."""


class AnswerStore:
    """Parts of settled chats in a folder. `chats` holds all that are usable, `useless` the numbers
    of the others, those on disk included.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.chats: list[Chat] = []
        self.useless: list[int] = []
        self._stored = self._stored_useless = self._parts = 0
        for path in sorted(folder.glob("part-*.npz")):
            self._load(path)

    @property
    def settled(self) -> set[int]:
        """Numbers of all chats that are settled."""
        return {*self.useless, *(chat.number for chat in self.chats)}

    def add(self, number: int, chat: Chat | None) -> None:
        """Keep one chat, or that chat `number` came to nothing; every PART chats are written
        (`save`).
        """
        if chat is None:
            self.useless.append(number)
            return
        self.chats.append(chat)
        if len(self.chats) - self._stored >= PART:
            self.save()

    def save(self) -> None:
        """Write the chats that are not on disk yet as one new part, whole or not at all. Raises
        OSError.
        """
        fresh = self.chats[self._stored :]
        useless = self.useless[self._stored_useless :]
        if not fresh and not useless:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"part-{self._parts:05}.npz"
        beside = path.with_suffix(".new.npz")
        np.savez(
            beside,
            tokens=np.concatenate([np.zeros(0, np.int32), *(chat.tokens for chat in fresh)]),
            wanted=np.concatenate([np.zeros(0, np.bool_), *(chat.wanted for chat in fresh)]),
            lengths=np.array([len(chat.tokens) for chat in fresh], np.int64),
            numbers=np.array([chat.number for chat in fresh], np.int64),
            useless=np.array(useless, np.int64),
        )
        beside.replace(path)
        self._parts += 1
        self._stored, self._stored_useless = len(self.chats), len(self.useless)

    def _load(self, path: Path) -> None:
        if path.name.endswith(".new.npz"):
            return
        try:
            with np.load(path, allow_pickle=False) as part:
                ends = np.cumsum(part["lengths"])[:-1]
                tokens, wanted = np.split(part["tokens"], ends), np.split(part["wanted"], ends)
                numbers = part["numbers"].tolist()
                self.useless += part["useless"].tolist()
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} cannot be read ({error}); remove it and start again"
            ) from None
        # Where no chat is in it, `split` makes one piece of nothing.
        self.chats += map(Chat, tokens[: len(numbers)], wanted[: len(numbers)], numbers)
        self._parts += 1
        self._stored, self._stored_useless = len(self.chats), len(self.useless)
