"""How likely is a drafted token to be accepted? An additive logistic model, the priors that its
weights start from, and how they learn from every output token, drafted or not."""

from __future__ import annotations

from bisect import bisect
from math import exp

Outcomes = int
"""Whether the last up to three guesses of a kind were right, latest last, after a leading 1 that
marks how many there were: 1 none, 0b10 missed, 0b11 hit, ... 0b1111 three hits."""

NO_OUTCOMES: Outcomes = 1

Recorded = tuple[dict[int, Outcomes], int, Outcomes]
"""(record, key, the outcomes it holds there)."""

Feature = tuple[list[float], int]
"""(weights, which of them)."""

# A small learning rate for what many guesses share, a larger one for what few do.
RATE, COPY_RATE, CALIBRATION_RATE = 0.05, 0.3, 0.2

# Every prior is in logits. They are round numbers: the first request moves them soon enough.
# Match lengths 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23, 24-31, 32.
MATCH = (-1.35, -0.5, -0.5, -0.25, -0.25, -0.25, 0.0, 0.4, 0.4, 2.4)
# Matches that agree: 1, 2, 3-4, more. Those that contradict: 0, 1, 2, 3-5, more.
AGREEING = (-0.4, -0.15, 0.15, 0.55)
OPPOSING = (0.85, 0.2, -0.05, -0.3, -0.5)
# The winner's share of the votes: all, over 0.8, over 0.5, less.
SHARE = (0.35, 0.2, -0.1, -0.35)
# How the last three guesses of any kind fared, latest in the lowest bit.
RECENT = (-0.5, -0.1, -0.1, 0.15, -0.2, 0.25, 0.15, 0.6)
# By Outcomes: guesses made after the same two tokens, and guesses of the same token.
AFTER_PAIR = (
    *(0, 0.5, -0.05, 0.55, -0.15, 0.3, -0.6, 0.85),
    *(-0.15, -0.05, -0.1, -0.3, -0.55, -0.4, -0.3, 0.6),
)
SAME_TOKEN = (
    *(0, -0.4, -0.8, 0.35, -0.85, -0.25, 0, 0.85),
    *(-1.65, -0.2, 0.35, 0.6, 0.05, 0.4, 0.35, 1.3),
)
# Whether a copy in progress expects the same token: no copy, the same, another one.
COPY_AGREES = (0.0, 0.15, -0.4)

# In a conversation with earlier answers: where the matches of the token are (in none, only shorter
# ones than the longest in one, the longest in an earlier one, in that under way, in both), by the
# longest's length: 1, 2, 3, 4-7, 8-31, 32.
OUTSIDE, SHORTER_IN_ANSWER, EARLIER_ANSWER, PRESENT_ANSWER, BOTH_ANSWERS = 0, 6, 12, 18, 24
IN_ANSWERS = (
    *(0.0, -0.5, 0.1, 0.0, 0.5, -2.0),
    *(0.0, 0.4, 0.7, 0.0, 0.4, 0.0),
    *(0.7, 1.0, 0.4, 0.2, 0.4, -2.3),
    *(0.2, 0.2, 0.7, 0.0, 0.3, 0.1),
    *(-0.2, -1.2, -0.1, 0.1, 0.4, -1.2),
)
# How many of the matches in answers are for it, 0, 1, 2, more, and against it: 0, 1, 2, more.
ANSWERS_FOR = (
    *(-0.2, -0.2, -0.3, -0.4),
    *(-0.1, -0.1, 0.0, -1.1),
    *(0.5, 0.1, 0.5, -0.1),
    *(0.8, 0.2, 0.5, 0.6),
)

# A copy that contradicts the longest match, by its state: 1, 2, 3-4, 5-8, 9-16, more tokens copied
# so far; then broken off, with a context of 1, 2, 3 tokens at which it could be resumed; then the
# same six run lengths after a skip to the next field, a first one and a known one; then behind a
# token that was replaced in a long copy.
IN_PLACE, CONTEXT_1, CONTEXT_2, CONTEXT_3, FIRST_SKIP, KNOWN_SKIP = 0, 6, 7, 8, 9, 15
REPLACED = 21
COPY = (
    *(-1.9, -1.5, -1.1, -0.3, 1.2, 2.2),
    *(-2.3, -1.7, -1.5),
    *(-2.0, -1.2, -1.0, -0.3, 0.6, 1.5),
    *(0.2, 0.8, 1.0, 0.8, 1.2, 2.0),
    -0.8,
)
COPY_RECENT = (-0.2, 0, 0, 0.1, 0, 0.1, 0.1, 0.3)
COPY_TOKEN = (0, 0, -0.5, 0.6, -0.6, -0.2, 0.3, 1.0, -1.4, -0.3, -0.2, 0.5, -0.3, 0.4, 0.4, 1.3)
SKIP = (0, -0.4, -1.5, 1.3, -2, -0.5, 0.3, 1.5, -3, -1, -0.5, 1.5, -0.5, 0.5, 0.5, 2.7)
EDIT = (0, -2.2, -2.9, 0.2, -3, -1.5, -1.5, 2, -4, -2, -2, 0.5, -2, 0, 0, 3.5)

# Memory: contexts of 1, 2, 3, 4, 5 and more tokens; places that agree (1, 2, more) and that do not
# (0, 1, more). Its part in a guess of the conversation's own: none, the same token, another one.
MEMORY_MATCH = (-2.0, -1.6, -1.1, -0.7, -0.4)
MEMORY_AGREEING = (-0.1, 0.4, 1.2)
MEMORY_OPPOSING = (0.7, -0.2, -0.6)
MEMORY_AGREES = (0.0, 0.9, -0.4)
MEMORY_AGAINST = (0.0, -0.6)  # alone, or against a guess of the conversation's own
MEMORY_TOKEN = (0, 0, -0.4, 0.6, -0.6, 0, 0.3, 1.0, -1.0, -0.1, -0.1, 0.4, -0.2, 0.4, 0.4, 1.2)

# The last stage, by what the guess comes from and its estimate. The best of several estimates is
# too high more often than too low, most of all in the middle: hence the negative priors there.
CALIBRATION_EDGES = (-1.73, -0.62, 0.41, 1.73, 3.48)  # of 15, 35, 60, 85, 97 per cent
CALIBRATION = (0.2, -0.1, -0.3, -0.2, 0.0, 0.0)
SOURCES = 7  # what a guess comes from: FROM_... in `guess`

_MATCH_CLASS = [0, 0, 1, 2, 3, 3, 4, 4, *[5] * 4, *[6] * 4, *[7] * 8, *[8] * 8]
_ANSWER_CLASS = [0, 0, 1, 2, *[3] * 4, *[4] * 24]
_RUN_CLASS = [0, 0, 1, 2, 2, 3, 3, 3, 3, *[4] * 8]


def sigmoid(logit: float) -> float:
    """The probability of `logit`, kept away from 0 and 1."""
    if logit > 12.0:
        return 0.999994
    if logit < -12.0:
        return 0.000006
    return 1.0 / (1.0 + exp(-logit))


def push(outcomes: Outcomes, hit: bool) -> Outcomes:
    """`outcomes` with one more; the oldest of more than three is forgotten."""
    return outcomes << 1 | hit if outcomes < 8 else 8 | ((outcomes << 1 | hit) & 7)


def match_class(length: int) -> int:
    """Which of the ten classes of MATCH `length` (at least 1) falls into."""
    return _MATCH_CLASS[length] if length < 32 else 9


def answer_class(length: int) -> int:
    """Which of the six classes of IN_ANSWERS `length` (at least 1) falls into."""
    return _ANSWER_CLASS[length] if length < 32 else 5


def run_class(run: int) -> int:
    """Which of the six run lengths of COPY `run` falls into."""
    return _RUN_CLASS[run] if run < 17 else 5


class Candidate:
    """A token that may come next, with what is needed to learn whether it did.

    logit: of the probability that it does, the sum of its features' weights. rate: its learning
    rate. outcomes: to be updated.
    """

    __slots__ = ("features", "logit", "outcomes", "rate", "token")

    def __init__(
        self, token: int, rate: float, features: list[Feature], outcomes: list[Recorded]
    ) -> None:
        self.token = token
        self.rate = rate
        self.features = features
        self.outcomes = outcomes
        logit = 0.0
        for weights, i in features:
            logit += weights[i]
        self.logit = logit

    def add(self, feature: Feature) -> None:
        """One more feature."""
        weights, i = feature
        self.features.append(feature)
        self.logit += weights[i]

    def learn(self, token: int) -> None:
        """`token` came: one step of gradient descent on the log loss, one more recorded outcome."""
        hit = self.token == token
        step = self.rate * (hit - sigmoid(self.logit))
        for weights, i in self.features:
            weights[i] += step
        for record, key, before in self.outcomes:
            record[key] = push(before, hit)


class AcceptanceModel:
    """The weights of all features, learning online.

    Source: logistic mixing with indirect histories and a final adaptive stage, as in the PAQ
    family of compressors (Mahoney 2005, sections on indirect context models and APM/SSE), with
    the event "the guess is right" in place of a bit.
    """

    def __init__(self) -> None:
        self.match = list(MATCH)
        self.agreeing = list(AGREEING)
        self.opposing = list(OPPOSING)
        self.share = list(SHARE)
        self.recent = list(RECENT)
        self.after_pair = list(AFTER_PAIR)
        self.same_token = list(SAME_TOKEN)
        self.in_answers = list(IN_ANSWERS)
        self.answers_for = list(ANSWERS_FOR)
        self.copy_agrees = list(COPY_AGREES)
        self.copy = [list(COPY), list(COPY)]
        self.copy_recent = list(COPY_RECENT)
        self.copy_token = list(COPY_TOKEN)
        self.skip = list(SKIP)
        self.edit = list(EDIT)
        self.memory_match = list(MEMORY_MATCH)
        self.memory_agreeing = list(MEMORY_AGREEING)
        self.memory_opposing = list(MEMORY_OPPOSING)
        self.memory_agrees = list(MEMORY_AGREES)
        self.memory_against = list(MEMORY_AGAINST)
        self.memory_token = list(MEMORY_TOKEN)
        self.calibration = [list(CALIBRATION) for _ in range(SOURCES)]
        # Outcomes by what the guess was made after, or by the token guessed.
        self.pair_outcomes: dict[int, Outcomes] = {}
        self.token_outcomes: dict[int, Outcomes] = {}
        self.copy_outcomes: dict[int, Outcomes] = {}
        self.memory_outcomes: dict[int, Outcomes] = {}
        self.skip_outcomes: dict[int, Outcomes] = {}
        self.edit_outcomes: dict[int, Outcomes] = {}

    def calibrate(self, source: int, logit: float) -> tuple[float, int]:
        """The last stage: the probability, and which of `calibration[source]` corrected it."""
        bucket = bisect(CALIBRATION_EDGES, logit)
        return sigmoid(logit + self.calibration[source][bucket]), bucket
