"""torchrun starts all ranks anew when one is killed: training goes on from the last checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from warm_python import finished, warm_python

import speedtorch

ROOT = Path(speedtorch.__file__).parents[1]
PROGRAM = """
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import speedtorch

STEPS, KILLED_AT = 6, int(os.environ["KILLED_AT"])
dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = nn.Sequential(speedtorch.Embedding(300, 4))
speedtorch.shard(model, average=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
speedtorch.attach(optimizer, model)

first = 0
if os.path.exists("latest"):
    first = int(open("latest").read())
    of_model, of_optimizer = get_state_dict(model, optimizer)
    checkpoint.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"saved/{first}")
    set_state_dict(
        model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer
    )
print(f"rank {rank} begins with step {first}", flush=True)
for step in range(first, STEPS):
    random = torch.Generator().manual_seed(100 * step + rank)
    optimizer.zero_grad()
    model(torch.randint(300, (32,), generator=random)).square().sum().backward()
    optimizer.step()
    if (step, rank, restarts) == (KILLED_AT, 1, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    saved = {"model": of_model, "optimizer": of_optimizer}
    checkpoint.save(saved, checkpoint_id=f"saved/{step + 1}")
    if rank == 0:
        with open("latest.new", "w") as file:
            file.write(str(step + 1))
        os.replace("latest.new", "latest")
    dist.barrier()
model[0].flush()
torch.save({name: model[0].table[name].clone() for name in model[0].table.fields}, f"{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.examples
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_killed_rank_changes_no_bit_of_what_is_trained(tmp_path: Path) -> None:
    rows, said = [], []
    for killed_at in (-1, 3):
        folder = tmp_path / str(killed_at)
        folder.mkdir()
        (folder / "train.py").write_text(PROGRAM)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = finished(
            [warm_python(), *run, "--max-restarts", "2", "-m", "train"],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                # Ranks that start anew may read addresses of those before (pytorch issue 135712).
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "KILLED_AT": str(killed_at),
            },
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
        rows.append([torch.load(folder / f"{rank}.pt") for rank in range(2)])
    assert "begins with step 3" not in said[0] and said[1].count("begins with step 3") == 2
    for whole, resumed in zip(*rows, strict=True):
        assert whole.keys() == resumed.keys() == {"weight", "exp_avg", "exp_avg_sq"}
        for name, values in whole.items():
            assert torch.equal(resumed[name], values), name
