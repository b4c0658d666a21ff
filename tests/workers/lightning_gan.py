"""A GAN by Lightning's manual optimization under DDP, with the hook from a callback: OUT. Saves weights."""

import logging
import sys
import tempfile

import lightning
import torch
from launch import leave_gloo, save
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

import grace

(out,) = sys.argv[1:]
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Gan(lightning.LightningModule):
    def __init__(self, toggled):
        super().__init__()
        self.automatic_optimization, self.toggled = False, toggled
        self.g, self.d = nn.Linear(16, 20), nn.Sequential(nn.Linear(20, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.g.parameters(), 0.1), torch.optim.SGD(self.d.parameters(), 0.1)

    def training_step(self, batch, number):
        real, z = batch
        ones = torch.ones(len(z), 1)
        g, d = self.optimizers()
        if self.toggled:
            self.toggle_optimizer(g)
        self.manual_backward(loss_of(self.d(self.g(z)), ones))
        g.step()
        g.zero_grad()
        if self.toggled:
            self.untoggle_optimizer(g)
            self.toggle_optimizer(d)
        else:
            d.zero_grad()
        self.manual_backward(loss_of(self.d(real), ones) + loss_of(self.d(self.g(z).detach()), 0 * ones))
        d.step()
        d.zero_grad()
        if self.toggled:
            self.untoggle_optimizer(d)


class Compress(lightning.Callback):
    def __init__(self, params):
        self.params = params

    def on_train_start(self, trainer, module):
        self.grace = grace.grace_from_params({"min_numel": 0, "timeout": 30.0, **self.params})
        model = trainer.strategy.model
        grace.torch.name_parameters(self.grace, model)
        model.register_comm_hook(self.grace, grace.torch.ddp_hook)


def train(toggled, params):
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(1)
    data = [torch.randn(64, 20, generator=drawn) + 1, torch.randn(64, 16, generator=drawn)]
    module = Gan(toggled)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=True),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Compress(params)] if params else [],
        default_root_dir=tempfile.gettempdir(),
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=8))
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


METHODS = (None, {"compressor": "none"}, {"compressor": "topk", "compress_ratio": 0.3})
found = {toggled: [train(toggled, params) for params in METHODS] for toggled in (True, False)}
save(out, torch.distributed.get_rank(), found)
leave_gloo()
