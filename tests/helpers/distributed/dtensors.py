"""Checks of DTensors in the place of tensors."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fastagg
from helpers.distributed.parts import MESHES, check, digests, raises, round_of, same_everywhere, server_of
from helpers.every_method import cohort, models


def as_dtensors(sd, mesh, placements, plain):
    return {
        key: value.clone() if key in plain or value.dim() == 0
        else distribute_tensor(value, mesh, [Shard(min(p.dim, value.dim() - 1)) if isinstance(p, Shard) else p
                                             for p in placements], src_data_rank=None)
        for key, value in sd.items()
    }  # fmt: skip


@check
def dtensors(group, rank, ranks):
    line = MESHES[ranks]
    cases = [(line, [p]) for p in (Shard(0), Shard(1), Replicate())]
    if ranks == 4:
        square = MESHES["square"]
        for placements in (
            [Shard(0), Replicate()],
            [Replicate(), Shard(0)],
            [Shard(0), Shard(1)],
            [Shard(0), Shard(0)],
        ):
            cases.append((square, placements))
        cases.append((MESHES["inner"], [Shard(0)]))  # ranks 0 and 3 have nothing of these
    buffers = ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
    for mesh, placements in cases:
        for plain, used in (
            (buffers, ("fedawa",)),
            ((*buffers, "fc.bias", "bn.weight"), ("fedadam", "fedamp")),
        ):
            for case in used:
                alone, spread = server_of(case), server_of(case, group)
                out = None
                for seed in range(2):
                    g, clients = cohort(seed=seed)
                    whole = round_of(alone, g, clients)
                    g, *clients = (as_dtensors(sd, mesh, placements, plain) for sd in (g, *clients))
                    part = round_of(spread, g, clients, out=out)
                    if whole.gram is not None:
                        assert torch.equal(whole.gram.numel, part.gram.numel), (mesh, placements)
                    assert len(set(digests(group, part))) == 1
                    for a, b in zip(models(whole), models(part), strict=True):
                        assert [type(v) for v in b.values()] == [type(v) for v in g.values()]
                        for key in b:
                            value = b[key]
                            if isinstance(value, DTensor):
                                assert (value.placements, value.device_mesh) == (g[key].placements, g[key].device_mesh)
                                assert value.shape == a[key].shape
                                if mesh.get_coordinate() is None:
                                    continue
                                value = value.full_tensor()
                            torch.testing.assert_close(value, a[key], rtol=2e-5, atol=2e-5)
                    if out is not None:
                        for model, given in zip(models(part), models(out), strict=True):
                            assert all(model[key] is given[key] for key in given)
                    out = part if len(models(part)) == 1 else list(part)


@check
def dtensors_with_strides(group, rank, ranks):
    """As FSDP on top of tensor parallelism has them"""
    if ranks != 4:
        return
    mesh = MESHES["square"]
    rows = torch.arange(8).view(4, 2)[[0, 2, 1, 3]][rank]  # any rows will do: each is on one rank
    g, clients = cohort()
    whole = fastagg.fedawa({"w": torch.randn(8, 3, generator=torch.Generator().manual_seed(0))},
                           [{"w": sd["fc.weight"].reshape(-1)[:24].view(8, 3)} for sd in clients], steps=3)  # fmt: skip

    def shards(w):
        place = [_StridedShard(0, split_factor=2), Shard(0)]
        return {"w": DTensor.from_local(w[rows], mesh, place, run_check=False, shape=w.shape, stride=w.stride())}

    g = shards(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    clients = [shards(sd["fc.weight"].reshape(-1)[:24].view(8, 3)) for sd in clients]
    part = fastagg.fedawa(g, clients, steps=3, group=group)
    assert part.gram.numel == 24
    torch.testing.assert_close(part["w"].to_local(), whole["w"][rows], rtol=1e-5, atol=1e-5)


@check
def what_is_wrong_with_dtensors(group, rank, ranks):
    mesh = MESHES[ranks]
    x = torch.arange(12.0).view(4, 3)

    def place(p, m=mesh):
        return {"w": distribute_tensor(x, m, [p], src_data_rank=None)}

    def refuse(words, g, *clients, **more):
        kind = fastagg.BadClientError if words.startswith("client") else fastagg.InputError
        same_everywhere(group, raises(kind, words, lambda: fastagg.fedawa(g, clients, group=group, **more)))

    unsummed = {"w": DTensor.from_local(x, mesh, [Partial()], run_check=False)}
    refuse("the global model: key 'w' is placed (Partial(sum),) on ranks", unsummed, unsummed)
    refuse("client 1: key 'w' is placed (Shard(dim=1),)", place(Shard(0)), place(Shard(0)), place(Shard(1)))
    refuse("client 0: key 'w' is a plain tensor, expected a DTensor", place(Shard(0)), {"w": x})
    refuse("client 0: key 'w' is a DTensor, expected a plain tensor", {"w": x}, place(Shard(0)))
    longer = {"w": distribute_tensor(torch.ones(ranks * 4, 3), mesh, [Shard(0)], src_data_rank=None)}
    refuse("client 0: key 'w' has shape", place(Shard(0)), longer)
    refuse("out: key 'w' is placed (Replicate(),)", place(Shard(0)), place(Shard(0)), out=place(Replicate()))
    one, all_but = DeviceMesh("cpu", [rank], _init_backend=False), place(Shard(0), MESHES[2])
    refuse("key 'w' is a DTensor on ranks [0] of shape (4, 3) on rank 0, a DTensor on ranks [1]",
           *[{"w": DTensor.from_local(x, one, [Replicate()], run_check=False)}] * 2)  # fmt: skip
    mixed = all_but if rank < 1 else {"w": x}
    refuse("key 'w' is a DTensor on ranks [0, 1] of shape (4, 3) on rank 0, a plain tensor of shape", mixed, mixed)
    if ranks < dist.get_world_size():
        outside = {
            "w": DTensor.from_local(x, DeviceMesh("cpu", [0, 3], _init_backend=False), [Replicate()], run_check=False)
        }
        refuse("on ranks [0, 3], of which some are not in the group", outside, outside)


@check
def fully_sharded_modules(group, rank, ranks):
    """The state dicts that torch's own FSDP has, and takes back"""
    if ranks != 2:
        return
    torch.manual_seed(0)
    whole = [nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)) for _ in range(5)]
    parts = [fully_shard(copy.deepcopy(module), mesh=MESHES[2]) for module in whole]
    expected = fastagg.fedawa(*split(whole), steps=3, params=whole[0])
    result = fastagg.fedawa(*split(parts), steps=3, params=parts[0], group=group)
    torch.testing.assert_close(result.weights, expected.weights, rtol=1e-6, atol=1e-6)
    parts[0].load_state_dict(result)
    for key, value in parts[0].state_dict().items():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(found, expected[key], rtol=1e-6, atol=1e-6)


def split(modules):
    g, *clients = (module.state_dict() for module in modules)
    return g, clients
