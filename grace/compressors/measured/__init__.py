"""Methods that are recommended or measured: kernels encode and decode a whole bucket at once, except of `oktopk`."""
