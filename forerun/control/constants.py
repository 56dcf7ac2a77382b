"""Every number that somebody chose for the control of speculation, and the measurement behind it.

"Replayed" means bench/replay.py: recorded answers of the default model, a virtual clock, step
costs 4.0 4.4 5.2 10.1 20.1 ms for 1 2 4 8 16 nodes. "Simulated" means tests/control.
"""

# --- What a step costs: measured at start-up (calibration.py) ------------------------------

NODES = (1, 2, 64, 8, 4, 16, 32, 3, 5, 6)
"""Node counts that are timed, the most telling first: no further one is begun after SECONDS."""
PER_ROW = 8
"""Nodes of one row at most; more nodes mean more rows, as they would in service. So from here on
steps grow at least in proportion; below, kernels work in fours."""
CACHED = 256
"""Cached tokens in the measurement that tells what reading the cache costs."""
SECONDS = 0.5
"""All node counts together get so long; three times that where a machine is slow."""
FIRST_CALLS = 2
"""Steps of a count that are not timed. The first compiles what is made when it is needed, and pages
in what lies on disk; on a GPU the second captures what the others replay. Simulated with both, a
table said 30 to 300 times a step's time."""
REPEATS = 8
"""A count is timed so often at most."""
MIN_REPEATS = 3
"""And at least: one slow step of 32 nodes made a draft token beside 64 rows look like a bargain,
and 64 streams lost 9 % (docs/log.md, third session)."""

# --- What a step costs: corrected by every step (cost_model.py) ----------------------------

FOLLOW = 0.1
"""Share of a step's error that is put down to the whole machine being slower or faster now."""
OUTLIER_FACTOR = 1.5
"""A step that took longer than this times what was believed was interrupted: no more is put down
to its draft tokens. Neighbours interrupt one step in fifty on the machine of docs/log.md."""

# --- What draft tokens bring (acceptance.py) -----------------------------------------------

DECAY = 0.97
"""What is left of an observation's weight after the next one of the sequence."""
FIRST_RATE = 0.7
"""Acceptance that is believed of a drafter that was never seen. With 1.0, simulated text that
defies the drafter makes the guard step in within 50 steps."""

# --- What is drafted (policy.py) -----------------------------------------------------------

MIN_PROB = 0.1
"""A token less likely than this is not looked for under a grammar, however cheap a node is."""
FIXED_MIN_PROB = 0.35
"""The same where nobody knows what a node costs: the fixed policy."""
LOOK_EVERY = 16
"""A sequence whose draft tokens do not pay is asked for one every so many steps, only to be
compared with what came."""
SPARING = 4
"""While looking for draft tokens wins less than it costs, it is done in one step of so many:
looking took 3 % of a step of four rows on two cores (docs/log.md, fourth session)."""
PROBE_EVERY = 128
"""After so many steps without a draft token worth verifying, PROBE_ROWS rows verify one each:
what was measured at start-up may have been wrong."""

PROBE_ROWS = 8
"""At most: beside 64 rows, 64 draft tokens would cost a step of their own. With one row only,
1,500 simulated steps do not find out that start-up was wrong by a factor of four."""

# --- What may be lost (slowdown_guard.py) --------------------------------------------------

CREDIT = 2.0
"""Plain steps that speculation may lose at first, and again after it was disabled."""
LOSS_SHARE = 0.015
"""Credit that every step adds, in plain steps: half of the 3 % that may be lost at most. Probes
of a drafter that costs time take no more of it either."""
MAX_CREDIT = 8.0
"""Credit at most: what was won long ago must not be lost at leisure."""
INITIAL_SPEED = 1.2
"""What speculation is believed to be worth before it was tried: times the speed of plain steps."""
