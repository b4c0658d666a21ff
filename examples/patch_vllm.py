"""A vLLM plug-in: an engine that applies the patches of a folder. Written against vLLM's interfaces, not run with vLLM.

A package names `register` as an entry point of the group "vllm.general_plugins": grace = "patch_vllm:register". Then
WeightTransferConfig(backend="grace"), init_info={"folder": ...}, and update_info={"version": 7} for each version.
The engine keeps the checkpoint's tensors in the host's memory: a patch holds differences, and vLLM's own may be fused.
"""

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

import grace


@dataclass
class Init(WeightTransferInitInfo):
    """The publisher's folder."""

    folder: str


@dataclass
class Update(WeightTransferUpdateInfo):
    """The version to go to."""

    version: int


class GraceEngine(WeightTransferEngine):
    """Follows a `grace.patch.Publisher`."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info):
        self.folder, self.receiver = init_info.folder, grace.patch.Receiver(init_info.folder)
        self.tensors = self.receiver.tensors()  # the newest version
        views = [(name, self._typed(each.words, each.dtype).reshape(each.shape)) for name, each in self.tensors.items()]
        self.model.load_weights(views)

    def receive_weights(self, update_info):
        for version in range(self.receiver.version + 1, update_info.version + 1):
            patch = grace.patch.load(self.folder, version, base=version - 1)
            changes = [
                CheckpointWeightPatch(
                    item.name,
                    item.shape,
                    getattr(torch, item.dtype),
                    self._typed(item.values, item.dtype),
                    torch.from_numpy(item.indices),
                )
                for item in patch.items(self.tensors)
            ]
            grace.patch.apply(patch, self.tensors, version=version - 1)  # checks all before vLLM sees a value
            load_checkpoint_weight_patches(self.model, changes)
            self.receiver.version = version

    @staticmethod
    def _typed(array, dtype):
        return torch.from_numpy(array.view("u1")).view(getattr(torch, dtype))

    def start_weight_update(self):
        pass

    def finish_weight_update(self):
        pass

    def shutdown(self):
        pass

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        raise NotImplementedError("the trainer publishes with grace.patch.Publisher")


def register():
    WeightTransferEngineFactory.register_engine("grace", GraceEngine)
