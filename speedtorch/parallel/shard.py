"""shard: shards the rows of a model's modules among the processes of torch.distributed."""

from __future__ import annotations

import weakref
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from speedtorch.parallel import machine
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.row_parameters import row_parameters
from speedtorch.parallel.same_modules import same_modules
from speedtorch.parallel.sharded_rows import ShardedRows
from speedtorch.table.lazy_init import ShardSpec
from speedtorch.table.new_table import waiting_bytes
from speedtorch.table.row_blocks import rows_of_a_block
from speedtorch.torch_internals import ignored_by_data_parallel

__all__ = ["shard"]


def shard(
    model: nn.Module, *, process_group: dist.ProcessGroup | None = None, average: bool = True
) -> None:
    """Shards the rows of a model's Embeddings row-wise among processes, which train their shards.

    Every rank must call shard() once for its copy of the model, before the rows are used. The
    initial values are the same as for the whole model with the first rank's seeds. Afterwards all
    ranks must make every lookup together and in the same order; a rank without data must pass an
    empty batch. Gradients of a row are sent to the rank that owns the row. If ids of one rank are
    bad, the lookup raises on all ranks (with a capacity on a GPU, the next lookup). A
    DistributedDataParallel that later wraps this model or a part of it trains the other parameters
    and ignores the rows. For fully_shard see row_parameters(), for scaled gradients GradScaler.

    A module's capacity then limits a step's unique rows that one rank owns, without the row of
    padding_idx. A training lookup of one rank may name at most `capacity / ranks + 8 *
    sqrt(capacity / ranks) + 32 / 3` unique rows of each owner, rounded up, and at most the
    capacity. A padding_idx then adds one row. If the capacity is at least the number of unique rows
    per lookup, ids that are spread at random over the table exceed the limit of an owner with a
    probability of at most 1.3e-14. A lookup that names more rows changes no row, and raises
    RuntimeError on all ranks (on a GPU the next lookup raises).

    Args:
        model: A model with at least one speedtorch Embedding, EmbeddingBag or collection.
        process_group: The processes among which rows are sharded; the default is all processes.
        average: Divide the sum of all ranks' gradients, once, by the number of ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised, or rows have been used.
        TypeError: process_group is a DeviceMesh.
        NotImplementedError: A module has scale_grad_by_freq, or has a padding_idx, a max_norm and a
            capacity together.
        ValueError: The model has no such module, a module has cache_rows, this process is not in
            the group, the group cannot have its own communicators, another rank raises one of these
            errors, or ranks differ in their modules, settings, init functions or `average`.
        MemoryError: The rows of a machine's ranks do not fit into its host memory.

        An error in the model of one rank raises on all ranks, and nothing has changed.

    Example:
        Under torchrun, which starts a process for each GPU::

            torch.distributed.init_process_group()
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            model = Recommender(device="cuda")
            speedtorch.shard(model)
            model = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters())
            speedtorch.attach(optimizer, model)
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "shard: torch.distributed is not initialised. Start the processes with torchrun, and"
            " call torch.distributed.init_process_group() first."
        )
    if isinstance(process_group, DeviceMesh):
        raise TypeError(
            "shard: process_group must be a ProcessGroup, got a DeviceMesh. Pass mesh.get_group(),"
            " or mesh.get_group(name) for one dimension of a mesh with several. The dimensions are"
            f" {process_group.mesh_dim_names or list(range(process_group.ndim))}."
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            "shard: this process is not in process_group. Call shard only in its processes."
        )
    is_part = dist.get_world_size(process_group) < dist.get_world_size()
    if is_part and dist.group.WORLD.bound_device_id is not None:  # type: ignore[union-attr]
        raise ValueError(
            "shard: process_group must contain all processes if init_process_group() has a"
            " device_id. NCCL would split a communicator of all processes, and wait for the"
            " processes outside of the group. Omit device_id."
        )
    ranks = Ranks.of(process_group)
    named = same_modules(ranks, model, average=average)
    modules = list(named.values())
    shardings, specs, needed = [], [], waiting_bytes()
    for module in modules:
        block = rows_of_a_block((module.embedding_dim,))
        shardings.append(BlockCyclic.of(module.num_embeddings, ranks.size, block))
        blocks = list(shardings[-1].blocks(ranks.rank))
        specs.append(ShardSpec(module.num_embeddings, blocks, ranks.broadcast))
        needed += module.trained_rows.table.new.bytes_of(specs[-1].size)
    machine.check_host_memory(ranks, needed)
    own = row_parameters(model)
    for submodule in model.modules():  # DistributedDataParallel may wrap any of these
        if names := [name for name, param in submodule.named_parameters() if param in own]:
            ignored_by_data_parallel(submodule, names)
    for (name, module), sharding, spec in zip(named.items(), shardings, specs, strict=True):
        module.keep_shard(
            spec,
            partial(
                ShardedRows,
                sharding=sharding,
                ranks=ranks,
                number=ranks.add_table(name),
                padding=module.padding_idx,
                average=average,
                sparse=bool(getattr(module, "sparse", False)),
                model=weakref.ref(model),
            ),
        )
