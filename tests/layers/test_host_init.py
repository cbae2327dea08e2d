"""host_init: whatever a module's code asks for, it is built in host memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor, nn, optim

from speedtorch.layers import Swapper, host_init


class Asking(nn.Module):
    """Asks for a GPU in all the ways that there are."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, device=device)
        self.moved = nn.Linear(3, 3).to(device)
        self.register_buffer("made", torch.arange(4, device=torch.device(device)))
        self.register_buffer("sent", torch.ones(2).to(device, torch.float64))
        self.register_buffer("like", torch.empty_like(self.made, device=device))
        self.register_buffer("narrow", torch.ones(2).to(torch.float16))


def test_nothing_is_made_on_a_gpu_or_sent_there() -> None:
    with host_init():
        module = Asking("cuda")
        module.moved.cuda()
    devices = {each.device.type for each in [*module.parameters(), *module.buffers()]}
    assert devices == {"cpu"}
    assert module.get_buffer("sent").dtype == torch.float64
    assert module.get_buffer("narrow").dtype == torch.float16
    assert module.get_buffer("made").tolist() == [0, 1, 2, 3]


def test_values_are_those_of_the_cpu() -> None:
    made = []
    for within in (False, True):
        torch.manual_seed(3)
        if within:
            with host_init():
                made.append(nn.Linear(3, 3, device="cuda").weight)
        else:
            made.append(nn.Linear(3, 3).weight)
    assert torch.equal(*made)


class OfAGPU(torch.Generator):
    """Says that it is one of a GPU, also where there is none."""

    device = torch.device("cuda")


def test_a_generator_of_a_gpu_draws_on_the_host() -> None:
    generators: list[torch.Generator] = [OfAGPU(), torch.Generator()]
    if torch.cuda.is_available():
        generators[0] = torch.Generator("cuda")
    drawn = []
    for generator in generators:
        generator.manual_seed(5)
        before = generator.get_state()
        with host_init():
            weight = torch.empty(3, device="cuda")
            first = torch.randn(3, device="cuda", generator=generator)
            drawn += [first, weight.normal_(generator=generator)]
        is_same = torch.equal(generator.get_state(), before)
        assert is_same == (generator.device.type == "cuda")
    assert all(each.device.type == "cpu" for each in drawn)
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


@NEEDS_GPU
def test_other_ways_to_a_gpu(tmp_path: Path) -> None:
    def by_default() -> Tensor:
        torch.set_default_device("cuda")
        try:
            return torch.empty(2)
        finally:
            torch.set_default_device(None)

    torch.save({"a": torch.ones(2)}, tmp_path / "saved.pt")
    made_before = torch.ones(2, device="cuda")
    with host_init():
        assert torch.cat([made_before, made_before]).is_cuda
        assert by_default().is_cpu
        assert torch.ones(2).type("torch.cuda.FloatTensor").is_cpu
        assert torch.load(tmp_path / "saved.pt", map_location="cpu")["a"].is_cpu
        # As the docstring says: an error, and what no mode of torch is told of.
        with pytest.raises(RuntimeError, match="storage"):
            torch.load(tmp_path / "saved.pt", map_location="cuda")
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.empty, 2, device="cuda").result().is_cuda
    assert torch.ones(2, device="cuda").is_cuda


def test_a_model_of_the_meta_device_takes_its_values_from_a_file(
    device: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with host_init(), torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert model[0].weight.is_meta
    with pytest.raises(
        ValueError, match=r"0.weight|weight: the tensor is on the meta device.*assign=True"
    ):
        Swapper(model, device=device)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    swapper = Swapper(model, optimizer, device=device)
    x = torch.ones(2, 4)
    with swapper.use(model[0], model[1]):
        found = model(x.to(device))
        found.sum().backward()
        swapper.step()
    torch.testing.assert_close(found.cpu(), whole(x))
