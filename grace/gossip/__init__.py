"""Gossip: each worker mixes its parameters with its neighbours' instead of averaging gradients over all workers.

There is no collective over all workers. After its own optimizer step, a worker moves its parameters towards its
neighbours', so that all workers' parameters stay close while training moves their mean. A `Mixing` defines the messages
between neighbours; `Gossip` exchanges them. Integrations: `grace.torch.gossip` and `grace.keras.GossipCallback`.
"""

from grace.gossip.choco import Choco
from grace.gossip.mixings import Full, Mixing, PowerGossip
from grace.gossip.rounds import Gossip
from grace.gossip.topology import Edge, edges, neighbours

__all__ = ["Choco", "Edge", "Full", "Gossip", "Mixing", "PowerGossip", "edges", "neighbours"]
