"""Ray Serve's request router with prefix affinity."""

from collections import Counter
from typing import Any, ClassVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.ray.affinity import NOWHERE, Affinity, PrefixAffinity
from forerun.ray.asgi import HttpRequest


class PrefixRouter(RequestRouter):
    """Ranks replicas with PrefixAffinity.

    A replica's load is the number of requests that this router has chosen it for and that have not
    ended, whether sent yet or not: many are chosen before the first is sent. If other routers send
    it requests too, the queue length that the replica last reported counts, if it is larger than
    the number sent from here.

    running  number of replicas at the last update; None = no update yet
    """

    running: ClassVar[int | None] = None

    def initialize_state(self, **options: Any) -> None:
        """Initialise with `request_router_kwargs`, PrefixAffinity's arguments. Called by Ray
        Serve.
        """
        self._affinity = PrefixAffinity(**options)
        self._sent: Counter[str] = Counter()
        self._running: set[str] = set()
        self._chosen: dict[str, tuple[PendingRequest, str]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return every candidate as a rank of its own, the best first by cached prefix and load; in
        the given order without a request.
        """
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # A request cancelled before it was sent is done, too.
        self._chosen = {id: one for id, one in self._chosen.items() if not one[0].future.done()}
        if pending_request is None:
            return [[replica] for replica in candidate_replicas]
        id, asked = pending_request.metadata.internal_request_id, _asked(pending_request)
        self._chosen.pop(id, None)
        waiting = Counter(name for _, name in self._chosen.values())
        lengths = self.replica_queue_len_cache
        loads = {
            name: max(self._sent[name], lengths.get(one.replica_id) or 0) + waiting[name]
            for name, one in named.items()
        }
        order = self._affinity.order(asked, loads)
        if order:
            self._chosen[id] = pending_request, order[0]
        return [[named[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count a request as running at that replica, and its blocks as cached there."""
        id = pending_request.metadata.internal_request_id
        self._chosen.pop(id, None)
        self._running.add(id)
        self._sent[replica_id.unique_id] += 1
        self._affinity.sent(_asked(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as ended, whether it failed or not. Ignores requests that this router did
        not route.
        """
        if internal_request_id in self._running:
            self._running.remove(internal_request_id)
            self._sent[replica_id.unique_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Store the number of running replicas. Called by Ray Serve when it changes."""
        super().update_replicas(replicas)
        PrefixRouter.running = len(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget the blocks that were cached at a dead replica; Ray Serve reports the end of each
        of its requests.
        """
        super().on_replica_actor_died(replica_id)
        self._affinity.lost(replica_id.unique_id)


def _asked(pending: PendingRequest) -> Affinity:
    first = pending.args[0] if pending.args else None
    return first.affinity if isinstance(first, HttpRequest) else NOWHERE
