"""The chance that a draft token is accepted: an additive logistic model that learns online."""

from __future__ import annotations

from bisect import bisect
from itertools import islice
from math import exp
from operator import getitem
from typing import Any

# Hits (1) and misses of up to three last predictions, latest in the lowest bit, after a leading 1.
Outcomes = int
NO_OUTCOMES: Outcomes = 1
OutcomeUpdate = tuple[dict[int, Outcomes], int, Outcomes]  # (record, key, current outcomes)

RATE, COPY_RATE, CALIBRATION_RATE = 0.05, 0.3, 0.2  # learning rates

_SHARING_RATE = 0.4  # share of the latest answer in the moving average
_MAX_WEIGHT = 1000.0  # logits; a valid weight is far smaller

# Priors in logits.
# Match lengths 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23, 24-31, 32.
MATCH = (-1.35, -0.5, -0.5, -0.25, -0.25, -0.25, 0.0, 0.4, 0.4, 2.4)
# Matches that agree: 1, 2, 3-4, more. Those that contradict: 0, 1, 2, 3-5, more.
AGREEING = (-0.4, -0.15, 0.15, 0.55)
OPPOSING = (0.85, 0.2, -0.05, -0.3, -0.5)
# The winner's share of the votes: all, over 0.8, over 0.5, less.
SHARE = (0.35, 0.2, -0.1, -0.35)
# Outcomes of the last three predictions of any kind, latest in the lowest bit.
RECENT = (-0.5, -0.1, -0.1, 0.15, -0.2, 0.25, 0.15, 0.6)
# By Outcomes: predictions made after the same two tokens, and predictions of the same token.
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

# Where the token's longest match is (outside answers, longer than those in answers, in an earlier
# answer, in the present one, in both), by its length: 1, 2, 3, 4-7, 8-31, 32.
OUTSIDE, SHORTER_IN_ANSWER, EARLIER_ANSWER, PRESENT_ANSWER, BOTH_ANSWERS = 0, 6, 12, 18, 24
IN_ANSWERS = (
    *(0.0, -0.5, 0.1, 0.0, 0.5, -2.0),
    *(0.0, 0.4, 0.7, 0.0, 0.4, 0.0),
    *(0.7, 1.0, 0.4, 0.2, 0.4, -2.3),
    *(0.2, 0.2, 0.7, 0.0, 0.3, 0.1),
    *(-0.2, -1.2, -0.1, 0.1, 0.4, -1.2),
)
# Matches in answers that agree, 0, 1, 2, more, by those that contradict: 0, 1, 2, more.
ANSWERS_FOR = (
    *(-0.2, -0.2, -0.3, -0.4),
    *(-0.1, -0.1, 0.0, -1.1),
    *(0.5, 0.1, 0.5, -0.1),
    *(0.8, 0.2, 0.5, 0.6),
)

# A copy that contradicts the longest match, by state: 1, 2, 3-4, 5-8, 9-16, more copied tokens;
# broken off with 1, 2, 3 tokens of context to resume at; six run lengths after a first skip, and
# after a known skip; after a replaced token in a long copy.
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

# Answer cache: contexts of 1, 2, 3, 4, 5 and more tokens; agreeing places (1, 2, more) and opposing
# ones (0, 1, more); versus the prediction from the conversation: none, the same token, another one.
CACHE_MATCH = (-2.0, -1.6, -1.1, -0.7, -0.4)
CACHE_AGREEING = (-0.1, 0.4, 1.2)
CACHE_OPPOSING = (0.7, -0.2, -0.6)
CACHE_AGREES = (0.0, 0.9, -0.4)
CACHE_AGAINST = (0.0, -0.6)  # alone, or against a prediction from the conversation
CACHE_TOKEN = (0, 0, -0.4, 0.6, -0.6, 0, 0.3, 1.0, -1.0, -0.1, -0.1, 0.4, -0.2, 0.4, 0.4, 1.2)

# Final calibration by origin and estimate. The best of several estimates tends to be too high.
CALIBRATION_EDGES = (-1.73, -0.62, 0.41, 1.73, 3.48)  # of 15, 35, 60, 85, 97 per cent
CALIBRATION = (0.2, -0.1, -0.3, -0.2, 0.0, 0.0)
SOURCE_COUNT = 7  # sources of predictions: FROM_... in `prediction`

# By the length of a match: the classes of MATCH and IN_ANSWERS.
MATCH_CLASS = (0, 0, 1, 2, 3, 3, 4, 4, *[5] * 4, *[6] * 4, *[7] * 8, *[8] * 8, 9)
ANSWER_CLASS = (0, 0, 1, 2, *[3] * 4, *[4] * 24, 5)
# By the tokens copied since a copy resumed, up to 17: the classes of COPY.
RUN_CLASS = (0, 0, 1, 2, 2, 3, 3, 3, 3, *[4] * 8, 5)


def sigmoid(logit: float) -> float:
    """Return the probability of `logit`, clipped away from 0 and 1."""
    if logit > 12.0:
        return 0.999994
    if logit < -12.0:
        return 0.000006
    return 1.0 / (1.0 + exp(-logit))


# The outcomes after a miss and after a hit, by the old outcomes; only three are kept.
_PUSHED = tuple(
    tuple(2 * old + hit if old < 8 else 8 | (2 * old + hit & 7) for old in range(16))
    for hit in (0, 1)
)


class Candidate:
    """A possible next token, with the features to learn from."""

    __slots__ = ("logit", "outcomes", "places", "rate", "source", "tables", "token")

    def __init__(
        self,
        token: int,
        source: int,
        rate: float,
        tables: tuple[list[float], ...],
        places: tuple[int, ...],
        outcomes: list[OutcomeUpdate],
    ) -> None:
        """tables: of the weights. places: the index of the feature's weight in each table."""
        self.token, self.source, self.rate = token, source, rate
        self.tables, self.places = tables, places
        self.outcomes = outcomes  # updated by `learn`
        self.logit: float = sum(map(getitem, tables, places))  # of "`token` is next"

    def add(self, weights: list[float], place: int) -> None:
        """Add a feature."""
        self.tables += (weights,)
        self.places += (place,)
        self.logit += weights[place]

    def learn(self, token: int) -> None:
        """Take one gradient step on the log loss and record the outcome for `token`."""
        hit = self.token == token
        step = self.rate * (hit - sigmoid(self.logit))
        for weights, place in zip(self.tables, self.places, strict=True):
            weights[place] += step
        pushed = _PUSHED[hit]
        for record, key, before in self.outcomes:
            record[key] = pushed[before]


def keep_newest(table: dict[int, Any], most: int) -> None:
    """Delete the oldest entries if there are more than `most`, so that half of `most` stay."""
    if len(table) > most:
        for key in list(islice(table, len(table) - most // 2)):
            del table[key]


class AcceptanceModel:
    """The weights of all features, learning online.

    Source: logistic mixing with indirect histories and a final adaptive stage, as in PAQ
    compressors (Mahoney 2005, indirect context models and APM/SSE). The predicted bit is "the
    prediction is right".
    """

    def __init__(self) -> None:
        # The tables of a candidate's features, by its source.
        priors = MATCH, AGREEING, OPPOSING, SHARE, RECENT, AFTER_PAIR, SAME_TOKEN, COPY_AGREES
        self.match_tables = tuple(list(each) for each in priors)
        recent, token = list(COPY_RECENT), list(COPY_TOKEN)
        self.copy_tables = [(list(COPY), recent, token) for _ in range(2)]
        self.skip_tables, self.edit_tables = (list(SKIP),), (list(EDIT),)
        cache_priors = CACHE_MATCH, CACHE_AGREEING, CACHE_OPPOSING, CACHE_AGAINST, CACHE_TOKEN
        self.cache_tables = (*(list(each) for each in cache_priors), recent)
        # Of features that not every candidate has.
        self.in_answers, self.answers_for = list(IN_ANSWERS), list(ANSWERS_FOR)
        self.cache_agrees = list(CACHE_AGREES)
        self.calibration = [list(CALIBRATION) for _ in range(SOURCE_COUNT)]
        # All lists of weights. Other modules refer to them, so they are only changed in place.
        self.weights: list[list[float]] = [
            *self.match_tables, self.in_answers, self.answers_for, self.cache_agrees,
            *self.copy_tables[0], self.copy_tables[1][0], *self.skip_tables, *self.edit_tables,
            *self.cache_tables[:-1], *self.calibration,
        ]  # fmt: skip
        # Outcomes by the two tokens before the prediction, by the predicted token, or by the edit.
        self.pair_outcomes: dict[int, Outcomes] = {}
        self.token_outcomes: dict[int, Outcomes] = {}
        self.copy_outcomes: dict[int, Outcomes] = {}
        self.cache_outcomes: dict[int, Outcomes] = {}
        self.skip_outcomes: dict[int, Outcomes] = {}
        self.edit_outcomes: dict[int, Outcomes] = {}

    def drop_oldest(self, most: int) -> None:
        """Keep at most `most` outcomes of each kind."""
        for name, table in vars(self).items():
            if name.endswith("_outcomes"):
                keep_newest(table, most)

    def calibrate(self, source: int, logit: float) -> tuple[float, int]:
        """Return the final probability, and the index into `calibration[source]`."""
        bucket = bisect(CALIBRATION_EDGES, logit)
        return sigmoid(logit + self.calibration[source][bucket]), bucket


class SharedWeights:
    """Moving average of acceptance weights over all answers; each answer starts from it."""

    def __init__(self) -> None:
        self._weights = AcceptanceModel().weights

    def load_into(self, model: AcceptanceModel) -> None:
        """Copy the shared weights into `model` before an answer."""
        for own, shared in zip(model.weights, self._weights, strict=True):
            own[:] = shared

    def learn(self, model: AcceptanceModel) -> None:
        """Add the weights of `model` to the average after an answer."""
        for own, shared in zip(model.weights, self._weights, strict=True):
            shared[:] = [
                old + _SHARING_RATE * (new - old) for old, new in zip(shared, own, strict=True)
            ]

    def to_list(self) -> list[list[float]]:
        """Return the weights, ready for JSON."""
        return self._weights

    @classmethod
    def from_list(cls, content: Any) -> SharedWeights:
        """Restore `to_list`, unless the features differ. Raises ValueError for invalid weights."""
        shared = cls()
        lengths = [len(each) for each in shared._weights]
        if [len(each) for each in content] == lengths:
            shared._weights = [list(each) for each in content]
        if not all(abs(weight) <= _MAX_WEIGHT for each in shared._weights for weight in each):
            raise ValueError("a weight beyond all bounds")
        return shared
