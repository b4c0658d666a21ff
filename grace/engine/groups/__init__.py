"""Groups: the tensors of a bucket that one method compresses by one call."""
