"""Chats written so far, in parts on disk: an interrupted run loses the last few only."""

from pathlib import Path

import numpy as np

from forerun.errors import ModelError
from forerun.train.answers import Chat

PART = 500
"""Chats in a part."""


class AnswerStore:
    """Parts of finished chats in a folder. `chats` holds all of them, those on disk included.

    begun  chats that had been begun when the last part was written
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.chats: list[Chat] = []
        self.begun = 0
        self._stored = self._parts = 0
        for path in sorted(folder.glob("part-*.npz")):
            self._load(path)

    def add(self, chat: Chat, begun: int) -> None:
        """Keep one chat; every PART of them are written (`save`). begun: chats begun so far, stored
        with them.
        """
        self.chats.append(chat)
        self.begun = begun
        if len(self.chats) - self._stored >= PART:
            self.save()

    def save(self) -> None:
        """Write the chats that are not on disk yet as one new part, whole or not at all. Raises
        OSError.
        """
        fresh = self.chats[self._stored :]
        if not fresh:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"part-{self._parts:05}.npz"
        beside = path.with_suffix(".new.npz")
        np.savez(
            beside,
            tokens=np.concatenate([chat.tokens for chat in fresh]),
            wanted=np.concatenate([chat.wanted for chat in fresh]),
            lengths=np.array([len(chat.tokens) for chat in fresh], np.int64),
            numbers=np.array([chat.number for chat in fresh], np.int64),
            begun=np.array(self.begun, np.int64),
        )
        beside.replace(path)
        self._parts += 1
        self._stored = len(self.chats)

    def _load(self, path: Path) -> None:
        if path.name.endswith(".new.npz"):
            return
        try:
            with np.load(path, allow_pickle=False) as part:
                ends = np.cumsum(part["lengths"])[:-1]
                tokens, wanted = np.split(part["tokens"], ends), np.split(part["wanted"], ends)
                numbers = part["numbers"].tolist()
                self.begun = int(part["begun"])
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} cannot be read ({error}); remove it and start again"
            ) from None
        self.chats += map(Chat, tokens, wanted, numbers)
        self._parts += 1
        self._stored = len(self.chats)
