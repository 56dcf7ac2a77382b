"""The constants that control speculation, and the measurement for each.

"Replayed" means bench/replay.py: 62 recorded answers of the default model through the real n-gram
drafter and policy on a virtual clock, step costs 4.0 4.4 5.2 10.1 20.1 ms for 1 2 4 8 16 nodes;
two runs differ by up to .005, by .06 if nodes are nearly free. "Simulated" means tests/control,
for a device tests/control/device.py.
"""

MIN_REPEATS = 3
"""Plain steps that come first, for every number of rows, and least timings of a count of nodes at
start-up. (With one timing, a single slow step of 32 nodes made draft tokens beside 64 rows look
cheap, and 64 streams lost 9 %.)"""
FOLLOW = 0.1
"""Share of a step's error that is attributed to the machine's present pace. (Replayed, one stream,
with neighbours that slow the machine down for 50 steps: speed over plain decoding 1.446 with .1,
1.439 with .03, 1.444 with .3.)
"""
OUTLIER = 1.5
"""A step that took longer than this times the expected time was interrupted: draft tokens are
charged no more than that. Twice that for the first steps of a size, where start-up may be wrong by
more. (Replayed, speed over plain decoding of one and two streams: 1.449 and 1.245, with 3: 1.436
and 1.226; new engines, start-up wrong, with 1.5 for the first steps as well: .914.)"""
DECAY = 0.97
"""Share of its weight that an observation keeps after the next one, in every running mean.
(Replayed: .95 and .99 are the same within .005.)"""
FIRST_RATE = 0.7
"""Acceptance rate that a new drafter is assumed to have. (Simulated: with 1.0, text that the
drafter cannot predict uses up the credit within 50 steps; .5 and .9: heads of one row .995 and .994
of the best fixed shape on average, .998 with .7.)"""
MIN_PROB = 0.1
"""Least probability of a token to be drafted under a grammar, however cheap a node is. (Draft
tokens with probabilities .15 to .24 are right less often than that.)"""
PLAIN_EVERY = 128
"""A plain step follows after this many steps with draft tokens, and a step with draft tokens after
this many without; a count of nodes that no step had for this many steps is assumed to cost less.
Estimated costs may be wrong. (Replayed, four streams, start-up wrong by a factor of seven: .81 of
plain decoding with it, .43 without.)
"""
RETRY = 16.0
"""Steps until an estimated cost is doubted. Draft tokens that seem too expensive are tried for the
first time after RETRY steps. A count of nodes that only start-up measured is assumed to cost less
after half of RETRY, and RETRY later for every step that had it, up to MIN_REPEATS. (Simulated,
start-up disturbed from some count of nodes on, one answer: 1.6 tokens a step at least; with 32
1.51, with 64 1.34. Beside 64 rows 32 would save half a percent.)
"""
DOUBT = 2
"""Number of consecutive slow steps with draft tokens after which a plain step checks whether the
machine is slow. (Simulated, 80 fresh starts on a machine whose pace drifts by a quarter, by half:
1.546 and 1.489 tokens a step; with 1: 1.519 and 1.439; with 3 and 5 the same within .013.)
"""
FIRST_RETURNS = 8.0
"""Weight, in steps, of the initial assumptions that draft tokens pay for themselves, and that
n-grams beside a draft model bring nothing. (Simulated, 100 fresh starts of 100 steps on a machine
whose pace drifts by a quarter, tokens a step: least 1.27, mean 1.557; with 16: 1.27, 1.560; with
3, one slow step left searches in one step of five: 1.06, 1.549. 30 fresh starts of 100 steps,
n-grams that double the speed, beside a draft model that is always wrong and one that gains a
tenth, over n-grams alone: .968 and 1.079; with 2: .981 and 1.061; with 16: .953 and 1.091.)
"""
FIRST_TOKENS = 1.1
"""Tokens per step that are assumed at first of steps with draft tokens. (Fresh engines of the
default model, twelve prompts, four answers of 160 tokens to each, in turns: 1.62 tokens a step at
T=0 and 1.39 at .8, one and two of 48 below 1.1; with 1.02, where the first wrong draft token left
searches in one step of five: 1.56 and 1.37, three and two; with 1.2: 1.64 at T=0 and no more
speed.)
"""
RENEW = 8
"""Steps after which the cost of draft tokens is computed again (every step at first), which takes
40 microseconds. (Replayed, 50 held-out answers at T=0 and .8, 1, 4 and 16 rows: 1, 4, 8 and 16 are
equal within .004 except for one row at T=0: 1.507, 1.507, 1.516, 1.515 of plain decoding.)
"""
TRIAL = 12.0
"""Draft tokens, over all rows, that decide whether a shape of a disabled head pays. (Simulated,
heads at 1 and 16 rows, worst single seed over the best fixed shape: .956; with 16: .939.)"""
CREDIT = 2.0
"""Plain steps that speculation may lose at first, and again after it used them up; the credit from
gains is limited to four times as much."""
LOSS_SHARE = 0.02
"""Credit that every step adds, in plain steps: with CREDIT, at most the 3 % that may be lost. A
third of it may be spent on searching for draft tokens while that loses time. A head is enabled or
disabled if it is better or worse than none by more than this. (Simulated, n-grams at 1 and 16 rows,
speed over plain decoding, worst of twelve: .992; with one search in four steps, or, if dear, in
some steps after 64: .972. Replayed: .015 and .03 are the same. Heads at 1 and 16 rows, speed over
the best fixed shape, worst of texts that change: 1.009; enabling and disabling at .015: .940.)
"""
PRIOR = 2.0
"""Weight of a prior estimate, in observations. (Simulated, as TRIAL: 3 gives .861.)"""
