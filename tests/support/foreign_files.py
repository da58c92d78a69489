"""Weights files as other programs write them."""

import torch
import torchvision
from torch import nn


def lived_in(model: nn.Module) -> nn.Module:
    """Give batch norms statistics of their own, so that lost ones would show."""
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
        if name.endswith("num_batches_tracked"):
            buffer.fill_(7)
    return model.eval()


def resnet(name: str = "resnet18", **more) -> nn.Module:
    return lived_in(getattr(torchvision.models, name)(**more))


def prefixed(prefix: str, tensors: dict) -> dict:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def moco_file(file, name="resnet18", head="mlp", dim=16, keys=64, zipped=True) -> nn.Module:
    """Write a checkpoint as official MoCo's main_moco.py does, and return its query encoder."""
    query, key = resnet(name), resnet(name)
    width = query.fc.in_features
    for encoder in (query, key):
        mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim))
        encoder.fc = mlp if head == "mlp" else nn.Linear(width, dim)
    state = {
        "module.queue": torch.randn(dim, keys),
        "module.queue_ptr": torch.tensor([32]),
        **prefixed("module.encoder_q.", query.state_dict()),
        **prefixed("module.encoder_k.", key.state_dict()),
    }
    optimizer = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9)
    content = {"epoch": 200, "arch": name, "state_dict": state}
    content["optimizer"] = optimizer.state_dict()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return query
