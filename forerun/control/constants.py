"""Every number that somebody chose for the control of speculation, and the measurement behind it.

"Replayed" means bench/replay.py: 62 recorded answers of the default model through the real n-gram
drafter and policy on a virtual clock, step costs 4.0 4.4 5.2 10.1 20.1 ms for 1 2 4 8 16 nodes;
two runs differ by up to .005, where nodes are nearly free by .06. "Simulated" means tests/control,
on a device tests/control/device.py.
"""

MIN_REPEATS = 3
"""So many plain steps come first, for every number of rows, and a count of nodes is timed so often
at least at start-up. (One slow step of 32 nodes made a draft token beside 64 rows look like a
bargain, and 64 streams lost 9 %.)"""
FOLLOW = 0.1
"""Share of a step's error that is put down to the whole machine being slower or faster now.
(Replayed, one stream, with neighbours that slow the machine down for 50 steps: 1.446 of plain at
.1, 1.439 at .03, 1.444 at .3.)"""
OUTLIER = 1.5
"""A step that took longer than this times what was believed was interrupted: no more is put down
to its draft tokens. Twice that of the first steps of a size, of which start-up may be wrong by
more. (Replayed, one and two streams: 1.449 and 1.245 of plain, with 3: 1.436 and 1.226; new
engines, start-up wrong, with 1.5 for the first steps as well: .914.)"""
DECAY = 0.97
"""What is left of an observation's weight after the next one, wherever a mean of late ones is
kept. (Replayed: .95 and .99 are the same within .005.)"""
FIRST_RATE = 0.7
"""Acceptance that is believed of a drafter that was never seen. (Simulated: with 1.0, text that
defies the drafter uses up the credit within 50 steps; .5 and .9: heads of one row .995 and .994 of
the best fixed shape in the mean, .998 as it is.)"""
MIN_PROB = 0.1
"""A token less likely than this is not looked for under a grammar, however cheap a node is: draft
tokens given .15 to .24 come true less often than that."""
PLAIN_EVERY = 128
"""After so many steps with draft tokens one goes without, and after so many without they are looked
for; after so many a count of nodes that none had is believed to cost less: what is believed of
costs may be wrong. (Replayed, four streams, start-up wrong by a factor of
seven: .81 of plain with it, .43 without.)"""
RENEW = 8
"""What draft tokens cost is believed for so many steps, at first for one: to ask again takes 40
microseconds. (Replayed, 50 held-out answers at T=0 and .8, 1, 4 and 16 rows: 1, 4, 8 and 16 are the
same within .004 but one row at T=0: 1.507, 1.507, 1.516, 1.515 of plain.)"""
TRIAL = 12.0
"""Draft tokens of rows that tell whether a shape pays, of a head that was off. (Simulated, heads
at 1 and 16 rows, worst single seed over the best fixed shape: .956; 16: .939.)"""
CREDIT = 2.0
"""Plain steps that speculation may lose at first, and again when that was used up; four times as
much is kept at most of what was won."""
LOSS_SHARE = 0.02
"""Credit that every step adds, in plain steps: with CREDIT, no more than the 3 % that may be lost.
A third of it may go into looking for draft tokens while that loses; and a head goes on, and off,
where it is so much better, or worse, than none. (Simulated, n-grams at 1 and 16 rows, whole over
plain decoding: worst of twelve .992; where it was looked once in four steps, or, where that was
dear, in some steps after 64: .972. Replayed: .015 and .03 are the same. Heads at 1 and 16 rows,
speed over the best fixed shape, worst of texts that change: 1.009; going on and off at .015: .940.)
"""
PRIOR = 2.0
"""Observations that what is believed counts for. (Simulated, as TRIAL: 3 gives .861.)"""
