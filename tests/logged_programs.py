"""A program that uses every part of the package, for runs with other values of SPEEDTORCH_LOG.

`python -m logged_programs` prints a digest of all values that the parts have computed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator

import torch
from dispatched_ops import Ops
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import speedtorch


class Gather(nn.Module):
    """A gather in TorchScript."""

    def forward(self, table: Tensor, ids: Tensor) -> Tensor:
        """The rows of some ids."""
        found: Tensor = torch.ops.speedtorch.pinned_gather(table, ids)
        return found


def embedding() -> Iterator[Tensor]:
    """A training loop with prefetch."""
    model = nn.Sequential(speedtorch.Embedding(40, 4, device="cpu"), nn.Linear(4, 1))
    optimizer = speedtorch.optim.RowWiseAdagrad(model.parameters(), lr=0.1)
    speedtorch.attach(optimizer, model)
    assert "load_state_dict" not in vars(optimizer)  # torch's, which calls its hooks
    batches = [torch.randint(40, (9,)) for _ in range(5)]
    for ids in speedtorch.prefetch(batches, model, ids=lambda batch: batch):
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()
    yield from model.state_dict().values()
    yield from (each for each in optimizer.state_dict()["state"][0].values())


def collection() -> Iterator[Tensor]:
    """A step of an EmbeddingBagCollection."""
    tables = speedtorch.EmbeddingBagCollection(
        tables=[speedtorch.EmbeddingBagConfig(30, 4, name) for name in ("user", "item")]
    )
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
    found = tables({name: torch.randint(30, (6, 2)) for name in ("user", "item")}).values()
    found.square().sum().backward()
    optimizer.step()
    yield from (found.detach(), *tables.state_dict().values())


def layers() -> Iterator[Tensor]:
    """Steps whose optimizer state is swapped, and a model that sleeps between them."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    speedtorch.StateSwapper(optimizer, budget=9000)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    other = nn.Linear(6, 6)
    training = speedtorch.TrainingState(other, torch.optim.Adam(other.parameters()))
    with training.asleep():
        yield from (each.clone() for each in other.state_dict().values())
    yield from model.state_dict().values()


def threads() -> Iterator[Tensor]:
    """Two threads, each with a table of its own."""
    tables = [speedtorch.HostTable(20, 3, memory="plain") for _ in range(2)]

    def fill(table: speedtorch.HostTable) -> None:
        for row in range(20):
            table.scatter(torch.tensor([row]), torch.full((1, 3), float(row)))

    workers = [threading.Thread(target=fill, args=(table,)) for table in tables]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    yield from (table["weight"] for table in tables)


def ops() -> Iterator[Tensor]:
    """Compiled, scripted and traced ops, ops with gradients, in a mode, and in a forked child."""
    table, ids = torch.randn(8, 2), torch.tensor([3, 3, 0])
    yield torch.jit.script(Gather())(table, ids)
    yield torch.jit.trace(lambda ids: speedtorch.pinned_gather(table, ids), (ids,))(ids)
    yield torch.compile(speedtorch.pinned_gather, backend="aot_eager", fullgraph=True)(table, ids)
    with FakeTensorMode():
        fake = speedtorch.pinned_gather(torch.empty(8, 2), torch.empty(3, dtype=torch.int64))
    assert fake.shape == (3, 2)
    trained = table.clone().requires_grad_()
    speedtorch.pinned_gather(trained, ids).sum().backward()
    assert trained.grad is not None
    yield trained.grad.to_dense()
    with Ops() as dispatched:
        speedtorch.pinned_gather(table, ids)
    assert dispatched.names == ["pinned_gather_detached"]
    if (child := os.fork()) == 0:
        os._exit(int(speedtorch.pinned_gather(table, ids).equal(table[ids])))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def classes_of_2019() -> Iterator[Tensor]:
    """The classes of 2019 around one training step."""
    model = nn.ModuleDict({"rows": nn.Embedding(4, 3)})
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.1)
    rows = speedtorch.ModelFactory(model["rows"], 20, 3)
    rows.uniformDistributionInit(-0.5, 0.5)
    state = speedtorch.OptimizerFactory(optimizer, 20, 3, model, "rows")
    state.optInit()
    ids = torch.tensor([4, 0, 17, 9]).numpy()
    data = speedtorch.DataGadget(torch.arange(60.0).view(20, 3).numpy())
    data.gadgetInit()
    rows.beforeForwardPass(ids)
    state.beforeForwardPass(ids)
    (model["rows"](torch.arange(4)) * torch.as_tensor(data.getData(ids)).cpu()).sum().backward()
    optimizer.step()
    rows.afterOptimizerStep(ids)
    state.afterOptimizerStep(ids)
    yield model["rows"].weight.detach()
    yield torch.as_tensor(rows.getNumpyVersion())


if __name__ == "__main__":
    for part in (embedding, collection, layers, threads, ops, classes_of_2019):
        torch.manual_seed(1)
        digest = hashlib.sha256()
        for values in part():
            digest.update(values.detach().contiguous().numpy().tobytes())
        print(part.__name__, digest.hexdigest())
    try:
        speedtorch.pinned_gather(torch.zeros(3, 2), torch.tensor([5]))
    except IndexError as error:
        print(error)
