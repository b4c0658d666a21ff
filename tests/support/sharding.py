"""Where FSDP2 runs."""

import torch

ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""Whether FSDP2 of this PyTorch takes CPUs: 2.6 waits for an event of a device."""
