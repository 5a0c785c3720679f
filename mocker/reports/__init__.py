"""What a finished replay can be turned into: an HTML page, a pass trace, time series, a comparison, a short text.

`definitions` says what each number means; `run` gathers what a page needs of a run; the rest writes one form each.
"""
