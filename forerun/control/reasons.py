"""Why rows get the draft tokens they get, in words for people."""

PROMPTS = "only prompts were read"
DISABLED = "off: lately speculation took more time than it saved"
SELDOM = (
    "off, and looked for now and then: lately draft tokens saved less than looking for them took"
)
TOO_DEAR = "off: in steps of so many sequences a draft token takes longer than it could save"
WRONG = "off: the drafter's tokens are wrong too often in this text"
PROBING = "off, but one draft token is looked for: what it costs may be believed wrongly"
PLAIN = "off for one step, which measures what a step without draft tokens takes now"
ON = "on: draft tokens that save time are verified"
ON_LEVELS = "on: {} draft tokens save time"
VERIFIED = "draft tokens were verified"
NOTHING_VERIFIED = "no draft token was found that would have saved time"
