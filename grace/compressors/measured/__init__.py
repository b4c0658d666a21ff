"""Methods that are recommended or measured: their kernels encode and decode a whole bucket at once."""
