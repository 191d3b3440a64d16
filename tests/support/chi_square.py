"""Pearson's chi-square test."""

from __future__ import annotations

import numpy as np


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """How likely counts (any shape) that far from the expected ones are, if those are right."""
    from scipy.stats import chisquare  # takes longer to import than most tests to run

    return float(chisquare(counts, expected).pvalue)
