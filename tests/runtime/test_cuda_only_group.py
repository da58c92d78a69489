"""A program whose process group takes tensors on GPUs alone, as `init_process_group("nccl")`.

The group is a registered backend for cuda, and there is no GPU: every tensor is on a CPU and must
travel by a group of our own.
"""

import gc
import socket
import weakref

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from hardmix.runtime.distributed import (
    agree_on_max,
    broadcast_object,
    gather,
    gather_objects,
    group_for,
)
from hardmix.training.pretrain import pretrain
from ranks import state_of, tiny

pytestmark = pytest.mark.slow


def like_nccl(options, _):
    """Gloo under another name, for tensors on GPUs."""
    return torch.distributed.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )


def train(number, port, out):
    torch.set_num_threads(1)
    torch.distributed.Backend.register_backend("like-nccl", like_nccl, True, devices=["cuda"])
    torch.distributed.init_process_group(
        "like-nccl", init_method=f"tcp://localhost:{port}", rank=number, world_size=2
    )
    with pytest.raises(RuntimeError, match="No backend"):
        torch.distributed.all_reduce(torch.zeros(1))
    assert gather(torch.tensor([number])).tolist() == [0, 1]
    assert agree_on_max(number) == 1
    assert broadcast_object(f"of rank {number}") == "of rank 0"
    assert gather_objects({"rank": number}) == [{"rank": 0}, {"rank": 1}]
    for name in ("whole", "stopped"):
        pretrain(tiny(), out / name)
    pretrain(tiny(train={"epochs": 3}), out / "stopped", resume=True)
    ours = weakref.ref(group_for(torch.device("cpu")))
    torch.distributed.destroy_process_group()
    gc.collect()
    assert ours() is None  # its threads would outlive the program's end, and abort it now and then


def test_pretrain_within_a_group_that_refuses_tensors_on_cpus(tmp_path, capfd):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port, tmp_path), nprocs=2)
    assert state_of(tmp_path / "whole") != state_of(tmp_path / "stopped")  # a third epoch
    assert capfd.readouterr().out.count("Done: ") == 3  # rank 0 alone
