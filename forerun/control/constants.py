"""Every number that somebody chose for the control of speculation, and the measurement behind it.

"Replayed" means bench/replay.py: 62 recorded answers of the default model through the real n-gram
drafter and policy on a virtual clock, step costs 4.0 4.4 5.2 10.1 20.1 ms for 1 2 4 8 16 nodes;
two runs differ by up to .005, where nodes are nearly free by .06. "Simulated" means tests/control.
"Log" is docs/log.md.
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
REPEATS = 8
"""A count is timed so often at most."""
FIRST_CALLS = 2
"""Steps of a count that are not timed. The first compiles what is made when it is needed, and pages
in what lies on disk; on a GPU the second captures what the others replay. Simulated with both, a
table said 30 to 300 times a step's time."""
MIN_REPEATS = 3
"""And at least; so many plain steps come first in service, too, for every number of rows.
(One slow step of 32 nodes made a draft token beside 64 rows look like a bargain, and 64 streams
lost 9 %: log, third session.)"""

# --- What a step costs: corrected by every step (cost_model.py) ----------------------------

FOLLOW = 0.1
"""Share of a step's error that is put down to the whole machine being slower or faster now.
(Replayed, one stream, with neighbours that slow the machine down for 50 steps: 1.446 of plain at
.1, 1.439 at .03, 1.444 at .3.)"""
OUTLIER_FACTOR = 1.5
"""A step that took longer than this times what was believed was interrupted: no more is put down
to its draft tokens. (Replayed, one and two streams: 1.449 and 1.245 of plain, with 3: 1.436 and
1.226.)"""
NEW_OUTLIER = 3.0
"""The same of a step larger than those seen, and of the first MIN_REPEATS of a size: what start-up
said of them may be wrong by more than an interruption takes.
(Replayed as NEW_SHARE: with 1.5, .914 of plain.)"""
NEW_SHARE = 0.5
"""Of the credit, what a step larger than those seen may lose if it takes time in proportion to its
nodes. (Replayed, new engines, 90 steps, 16 streams, start-up that called nodes nearly free: .976 of
plain; .453 where start-up is believed. With .25, one stream never tries draft tokens: 1.01 of plain
instead of 1.24.)"""
UNSEEN = 1e-3
"""Steps that what start-up said of a count is worth against one that was seen. (Replayed as
NEW_SHARE: with 1, .905 of plain.)"""
LARGEST = 8192
"""Nodes up to which corrections have counts of their own, by powers of two: no step has more by
default (build/with_torch.py: MOST_CHUNK). (Replayed as above without them, the table's own
counts 1, 8, 64, 256: .80.)"""

# --- What draft tokens bring (acceptance.py) -----------------------------------------------

DECAY = 0.97
"""What is left of an observation's weight after the next one, wherever a mean of late ones is
kept. (Replayed: .95 and .99 are the same within .005, so is another value for what all sequences
share.)"""
FIRST_RATE = 0.7
"""Acceptance that is believed of a drafter that was never seen. (Simulated: with 1.0, text that
defies the drafter makes the guard step in within 50 steps.)"""
MERGED_PRIOR = 4.0
"""Observations that what all sequences share counts as in a new one, where levels compete with free
drafters: one bad draw must not silence the head. (Simulated, test_merged: a head right at .85
beside n-grams, nodes nearly free, is asked in .78 of steps with 1, in .99 with 4 and 8; one right
at .3 in .45, .07 and .05.)"""

# --- What is drafted (adaptive.py) ---------------------------------------------------------

MIN_PROB = 0.1
"""A token less likely than this is not looked for under a grammar, however cheap a node is: draft
tokens given .15 to .24 come true less often than that (log, structured output)."""
FIXED_MIN_PROB = 0.35
"""The same where nobody knows what a node costs: the fixed policy."""
LOOK_EVERY = 16
"""A sequence whose draft tokens do not pay is asked for one every so many steps, only to be
compared with what came. (Replayed: 8 and 32 are the same within .005.)"""
SPARING = 4
"""While looking for draft tokens wins less than it costs, it is done in one step of so many.
(Replayed, four and eight streams: .997 and 1.000 of plain; looking always .989 and .994. With 8,
easy text is found too late: 1.044 for 1.061 at eight streams where nodes are dear. So many that
looks cost at most .005 or .01 of a step: no better, log, 2026-11-23.)"""
PROBE_EVERY = 128
"""After so many steps without a draft token worth verifying, PROBE_ROWS rows verify one each; after
so many steps with draft tokens, one goes without: what is believed of costs may be wrong.
(Replayed, four streams, start-up wrong by a factor of seven: .81 of plain with it, .43 without.
Where start-up was right it costs .003.)"""
PROBE_ROWS = 8
"""At most: beside 64 rows, 64 draft tokens would cost a step of their own. (Simulated: with one
row, 1,500 steps do not find out that start-up was wrong by a factor of four.)"""

# --- What may be lost (slowdown_guard.py) --------------------------------------------------

CREDIT = 2.0
"""Plain steps that speculation may lose at first, and again after it was disabled."""
LOSS_SHARE = 0.015
"""Credit that every step adds, in plain steps: half of the 3 % that may be lost at most. Probes
of a drafter that costs time take no more of it either. (Replayed: .03 is the same.)"""
MAX_CREDIT = 8.0
"""Credit at most: what was won long ago must not be lost at leisure. One step may lose a share
CREDIT / MAX_CREDIT of it. (Without that, four streams lost 3.0 to 4.5 plain steps of 96 to draft
tokens that are always wrong, with it 0.7 to 0.8: log, fourth session.)"""
INITIAL_SPEED = 1.5
"""How many times as fast as plain decoding steps with draft tokens are believed to be before there
was one; counts as MIN_REPEATS steps. (Replayed: 1.1 is the same. Under a grammar, three answers of
a new engine take 2.82 ms a token at 1.5, 2.85 at 1.2: docs/log.md.)"""
