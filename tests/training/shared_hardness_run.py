"""What each of two processes runs for test_sharded_hardness.py: `torchrun --nproc_per_node 2 shared_hardness_run.py`.

The gradients of blocks that FSDP2 shards one by one, and whose gates share one λ, are those of the whole on all rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_lgelu import replace_activations


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)), nn.Linear(4, 2))
    replace_activations(net, granularity="network", init_hardness=1.5)
    return net


def main() -> None:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    rows, mesh = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), init_device_mesh("cpu", (2,))
    for reshards in (True, False):
        sharded, whole = network(), network()
        for block in list(sharded)[:3]:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(sharded, mesh=mesh)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (sharded, whole)]
        for _ in range(2):
            sharded(rows.chunk(2)[dist.get_rank()]).square().mean().backward()
            whole(rows).square().mean().backward()
            wanted = dict(whole.named_parameters())
            for name, parameter in sharded.named_parameters():
                torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
