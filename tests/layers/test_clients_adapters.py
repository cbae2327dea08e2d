"""peft changes weights through `.data` and reads adapters from files, while modules come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from speedtorch.layers import Swapper

pytestmark = pytest.mark.clients
WIDTH, MODULES = 16, 4


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(MODULES))
    )
    config = LoraConfig(target_modules=r".*\.0", r=4, init_lora_weights=False)
    return get_peft_model(base, config)


class Run:
    """An adapted model in training, with a swapper or resident."""

    def __init__(self, device: str, *, swaps: bool, step: bool) -> None:
        self.model, self.device = adapted(), device
        modules = self.model.base_model.model
        if not swaps:
            self.model.to(device)
        self.optimizer = optim.AdamW(
            [each for each in self.model.parameters() if each.requires_grad], lr=0.01
        )
        if swaps:
            self.swapper = Swapper(modules, self.optimizer, device=device, budget="12KiB")
            self.swapper.auto(step=step)

    def train(self, seed: int) -> None:
        self.outputs(seed).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def outputs(self, seed: int) -> Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self.device)
        found: Tensor = self.model(x)
        return found


@pytest.mark.parametrize("step", [False, True], ids=["optimizer steps", "backward steps"])
def test_adapters_are_merged_and_swapped_as_in_a_resident_model(
    device: str, step: bool, tmp_path: Path
) -> None:
    from peft.utils.hotswap import hotswap_adapter

    torch.manual_seed(7)
    other = adapted()
    with torch.no_grad():
        for name, each in other.named_parameters():
            if "lora" in name:
                each.mul_(1.5)
    other.save_pretrained(tmp_path / "adapter")
    seen = []
    for swaps in (False, True):
        run = Run(device, swaps=swaps, step=step)
        found = []
        for seed in range(3):
            run.train(seed)
        run.model.merge_adapter()
        with torch.no_grad():
            found.append(run.outputs(10))
        run.model.unmerge_adapter()
        run.train(3)
        hotswap_adapter(run.model, str(tmp_path / "adapter"), adapter_name="default")
        with torch.no_grad():
            found.append(run.outputs(11))
        run.train(4)
        found += [each.detach().cpu() for each in run.model.parameters()]
        seen.append([each.cpu() for each in found])
    for stays, comes in zip(*seen, strict=True):
        assert torch.equal(stays, comes)
