"""Studies for `grace bench`: training tasks, the network lab, SIDCo's thresholds, and other packages' methods.

A distribution of its own, grace-compression-bench: whoever trains with GRACE needs none of it.
"""
