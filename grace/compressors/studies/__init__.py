"""Methods kept for studies: the same laws hold, without kernels for whole buckets and without a promise of speed."""
