"""After a rank is killed torchrun restarts all ranks, which resume from the last checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from warm_python import run_warm

PROGRAM = """
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import speedtorch
from speedtorch.files import system_calls

STEPS, KILLED_AT, HOW = 6, int(os.environ["KILLED_AT"]), os.environ["HOW"]
dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = nn.Sequential(speedtorch.Embedding(300, 4))
speedtorch.shard(model, average=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
speedtorch.attach(optimizer, model)
model[0].table.track_changes()

first = 0
if HOW != "checkpoint" and os.path.exists("saved/generation-00000001"):
    first = speedtorch.load("saved", model=model, optimizer=optimizer)["step"]
elif os.path.exists("latest"):
    first = int(open("latest").read())
    of_model, of_optimizer = get_state_dict(model, optimizer)
    checkpoint.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"saved/{first}")
    set_state_dict(
        model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer
    )
print(f"rank {rank} begins with step {first}", flush=True)


def batch(step):
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(300, (32,), generator=random)


loop = speedtorch.prefetch(map(batch, range(first, STEPS)), model[0], ids=lambda ids: ids)
for step, ids in enumerate(loop, first):
    optimizer.zero_grad()
    model(ids).square().sum().backward()
    optimizer.step()
    if (step, rank, restarts) == (KILLED_AT, 1, 0):
        kill = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
        if "background" in HOW:
            saving.result()
        if HOW.startswith("within"):
            system_calls.calls.write = kill
        else:
            kill()
    if HOW != "checkpoint":
        parts = {"model": model, "optimizer": optimizer, "step": step + 1}
        if "background" in HOW:
            saving = speedtorch.async_save("saved", keep=9, base=step or None, **parts)
        else:
            speedtorch.save("saved", keep=9, **parts)
        continue
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


def trained(folder: Path, how: str, killed_at: int) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """What two ranks print, and their rows and states."""
    (folder / "train.py").write_text(PROGRAM)
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_warm(
        *(*run, "--max-restarts", "2", "-m", "train"),
        cwd=folder,
        OMP_NUM_THREADS="1",
        # Restarted ranks may read addresses of ended ranks (pytorch issue 135712).
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        CUDA_VISIBLE_DEVICES="",
        KILLED_AT=str(killed_at),
        HOW=how,
    )
    saved = sorted(os.listdir(folder / "saved"))
    assert len(saved) == 6 and not any(name.startswith(".") for name in saved), saved
    return done.stdout, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    output, rows = trained(tmp_path_factory.mktemp("whole"), "between saves", -1)
    assert "begins with step 3" not in output
    return rows


@pytest.mark.examples
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "how", ["between saves", "within a save", "within a background save", "checkpoint"]
)
def test_training_is_bitwise_identical_after_a_rank_is_killed(
    how: str, uninterrupted: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    output, rows = trained(tmp_path, how, 3)
    assert output.count("begins with step 3") == 2
    for whole, resumed in zip(uninterrupted, rows, strict=True):
        assert whole.keys() == resumed.keys() == {"weight", "exp_avg", "exp_avg_sq"}
        for name, values in whole.items():
            assert torch.equal(resumed[name], values), name
