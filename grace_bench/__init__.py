"""Studies for `grace bench`: training tasks, the network lab, SIDCo's thresholds, and other packages' methods.

A separate distribution, grace-compression-bench: training with GRACE does not need it.
"""
