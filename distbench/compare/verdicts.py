"""The words for what a comparison found; nothing else names a verdict."""

# Of a case that is held against a tolerance (`families.tolerance_words`). The worst first: how a report is ordered.
REGRESSION, INVALID, MISSING, INCOMPARABLE = "regression", "invalid", "missing", "incomparable"
INCONCLUSIVE, NEW, IMPROVEMENT, PASS = "inconclusive", "new", "improvement", "pass"
VERDICTS = (REGRESSION, INVALID, MISSING, INCOMPARABLE, INCONCLUSIVE, NEW, IMPROVEMENT, PASS)
JUDGED = (REGRESSION, INCONCLUSIVE, IMPROVEMENT, PASS)
BROKEN = (INVALID, MISSING, INCOMPARABLE)  # there is nothing to compare, though there should be
# Of a ratio without a tolerance.
FASTER, SLOWER, WITHIN_NOISE = "faster", "slower", "within noise"
