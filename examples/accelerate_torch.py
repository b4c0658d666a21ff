"""Handwritten digits with Hugging Face Accelerate: `AccelerateHook` compresses what the prepared model exchanges.

torchrun --nproc-per-node 2 examples/accelerate_torch.py
accelerate launch --cpu --num_processes 2 examples/accelerate_torch.py --method powersgd
"""

from __future__ import annotations

import digits
import torch
from accelerate import Accelerator
from digits_torch import make_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import grace.torch
from grace import grace_from_params


def main() -> None:
    options = digits.arguments("Handwritten digits with Accelerate.").parse_args()
    torch.set_num_threads(1)  # more threads do not help so small a model
    torch.manual_seed(options.seed)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())

    # All images: `prepare` gives each worker its own batches.
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in digits.load(0, 1))
    data = TensorDataset(images[:, None], labels)
    loader = DataLoader(data, options.batch_size, shuffle=True, drop_last=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    grc = grace_from_params({"compressor": options.method, **options.params})
    accelerator.ddp_handler = grace.torch.AccelerateHook(grc, accelerator)  # before prepare
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)  # of the means
            optimizer.step()
        with torch.no_grad():
            found = model(test_images[:, None].to(accelerator.device)).argmax(1).cpu()
        accuracy = (found == test_labels).double().mean().item()
        accelerator.print(f"epoch {epoch + 1}: test accuracy {accuracy:.3f}, ratio {grc.report().ratio:.1f}")
    accelerator.print(grc.report())
    accelerator.end_training()


if __name__ == "__main__":
    main()
