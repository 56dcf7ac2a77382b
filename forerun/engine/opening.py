"""Opens and closes slots in executor, drafter and grammars, before a step that has new rows."""

import logging
from collections.abc import Callable
from time import monotonic

import numpy as np

from forerun.engine.parts import Parts
from forerun.engine.row_output import Ending, failed
from forerun.engine.scheduler import Schedule
from forerun.engine.sequence import Sequence
from forerun.interface.slot_init import SlotInit
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")


def open_slots(schedule: Schedule, parts: Parts, end: Callable[[RequestId, Ending], None]) -> bool:
    """Close and open slots as planned. Returns False if opening a sequence raised; its request
    ended then, through `end`.
    """
    for slot in schedule.closed:
        parts.close(slot)
    sound = True
    for sequence in schedule.opened:
        if sequence.slot is None:  # Its request ended: another choice could not be opened.
            continue
        sequence.admitted = sequence.admitted or monotonic()
        try:
            open_slot(sequence, parts)
        except Exception as error:
            log.exception("request %s could not be opened", sequence.request.id)
            end(sequence.request.id, failed(error))
            sound = False
    return sound


def open_slot(sequence: Sequence, parts: Parts) -> None:
    """Open the slot of `sequence` in executor, drafter and grammars. Raises what they raise;
    `Parts.close` cleans up then.
    """
    assert sequence.slot is not None
    slot_init = SlotInit(
        slot=sequence.slot,
        text=sequence,
        prompt_len=sequence.prompt_len,
        sampling=sequence.sampling,
        prediction=sequence.request.prediction,
        cached=sequence.table.length,
        pages=np.array(sequence.table.pages, np.int32),
        shared=sequence.shared,
        salt=sequence.table.salt,
        tenant=sequence.request.tenant_key,
        adapter=sequence.request.adapter,
    )
    try:
        parts.executor.open(slot_init)
    except Exception:
        parts.executor.close(slot_init.slot)  # Or the slot would fail all that come after.
        raise
    parts.open_slots[slot_init.slot] = sequence
    parts.drafter.begin(slot_init)
    grammar = sequence.request.grammar
    if grammar is not None and sequence.constrained:
        output, tenant = sequence.output.tolist(), slot_init.tenant
        parts.grammars.open(slot_init.slot, grammar, output, tenant)
