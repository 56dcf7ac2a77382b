"""Reasons for the number of draft tokens, as text for users."""

PROMPTS = "only prompts were read"
DISABLED = "off: lately speculation took more time than it saved"
SELDOM = (
    "off, but tried now and then: lately searching for draft tokens took longer than they saved"
)
TOO_DEAR = "off: beside so many sequences a draft token takes longer than it could save"
WRONG = "off: in this text too few of the drafter's tokens were right for the time that they take"
TOO_SLOW = "off: drafting takes longer here than it could save if all draft tokens were right"
TOO_RISKY = "off: trying the drafter could lose more time than speculation may lose now"
PROBING = "off, except for one draft token as a trial: its estimated cost may be wrong"
PLAIN = "off for one step, to measure what a step without draft tokens takes now"
ON = "on: draft tokens that save time are verified"
ON_LEVELS = "on: {} draft tokens save time"
VERIFIED = "draft tokens were verified"
NOTHING_VERIFIED = "no draft token was proposed that would have saved time"
