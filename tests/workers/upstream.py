"""A script written for upstream GRACE: only the import and the optimizer line are changed. OUT."""

import sys

import horovod.torch as hvd
import torch
from launch import save

import grace
from grace import grace_from_params

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

params = {"compressor": "topk", "memory": "residual", "communicator": "allgather", "world_size": hvd.size()}
grc = grace_from_params(params)
optimizer = grace.torch.DistributedOptimizer(optimizer, grc, named_parameters=model.named_parameters())
grace.torch.broadcast_parameters(model.state_dict(), root_rank=0)
grace.torch.broadcast_optimizer_state(optimizer, root_rank=0)

torch.manual_seed(hvd.rank())
target = torch.randn(20, 1, generator=torch.Generator().manual_seed(7))
losses = []
for _ in range(150):
    x = torch.randn(32, 20)
    optimizer.zero_grad()
    loss = (model(x) - x @ target).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
save(sys.argv[1], hvd.rank(), (losses, weights, grc.report().ratio))
