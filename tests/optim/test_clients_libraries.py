"""Libraries around torch save, wrap and train a model whose Embedding is attached.

Needs those libraries: make clients.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from test_attach import EVERY, IDS, Model, pair, step
from test_attach_changes import assert_same_rows
from torch import Tensor, nn, optim
from warm_python import finished

import speedtorch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def trained() -> tuple[Model, optim.Optimizer]:
    _, (ours, adam) = pair()
    step(ours, adam, IDS)
    return ours, adam


def test_safetensors_saves_an_attached_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    ours, _ = trained()
    safetensors.save_model(ours, tmp_path / "model.safetensors")
    again = Model()
    speedtorch.attach(optim.Adam(again.parameters()), again)
    safetensors.load_model(again, tmp_path / "model.safetensors")
    assert_same_rows(again, ours)
    safetensors.save_file(ours.state_dict(), tmp_path / "file.safetensors")
    loaded = safetensors.load_file(tmp_path / "file.safetensors")
    for name, value in ours.state_dict().items():
        assert_same_bytes(loaded[name], value)


def test_accelerate_prepares_saves_and_loads_an_attached_model(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    (theirs, their_adam), (ours, adam) = pair()
    speedtorch.detach(adam)
    ours, wrapped = accelerator.prepare(ours, adam)
    speedtorch.attach(wrapped, ours)
    for model, each in ((theirs, their_adam), (ours, wrapped)):
        step(model, each)
    accelerator.save_state(str(tmp_path))
    expected = copy.deepcopy(ours.state_dict())
    step(ours, wrapped)
    accelerator.load_state(str(tmp_path))
    for name, value in ours.state_dict().items():
        assert_same_bytes(value, expected[name])
    step(theirs, their_adam)
    step(ours, wrapped)
    assert_same_rows(ours, theirs)
    speedtorch.detach(wrapped)


def test_an_optimizer_that_fabric_wraps_is_attached() -> None:
    fabric_module = pytest.importorskip("lightning.fabric")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    (theirs, their_adam), (ours, adam) = pair()
    speedtorch.detach(adam)
    model, wrapped = fabric.setup(ours, adam)
    speedtorch.attach(wrapped, ours)
    for _ in range(2):
        step(theirs, their_adam)
        wrapped.zero_grad()
        fabric.backward(model(EVERY).square().sum())
        wrapped.step()
    assert_same_rows(ours, theirs)
    speedtorch.detach(wrapped)


def lightning_trainer(folder: Path, **settings: Any) -> Any:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings |= {"accelerator": "cpu", "default_root_dir": folder, **dict.fromkeys(quiet, False)}
    return pytest.importorskip("lightning").Trainer(**settings)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_an_optimizer_that_lightning_wraps_is_attached(tmp_path: Path, manual: bool) -> None:
    lightning = pytest.importorskip("lightning")
    (theirs, their_adam), (ours, adam) = pair()
    speedtorch.detach(adam)

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = ours
            self.automatic_optimization = not manual

        def on_train_start(self) -> None:
            speedtorch.attach(self.optimizers(), self.model)

        def training_step(self, batch: Tensor, index: int) -> Any:
            loss = self.model(batch[0]).square().sum()
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return None if manual else loss

        def configure_optimizers(self) -> optim.Optimizer:
            return adam

    trainer = lightning_trainer(tmp_path, max_epochs=2)
    trainer.fit(Task(), torch.utils.data.DataLoader(EVERY[None, None]))
    for _ in range(2):
        step(theirs, their_adam)
    assert_same_rows(ours, theirs)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert_same_bytes(saved["state_dict"]["model.words.weight"], ours.state_dict()["words.weight"])


def with_accelerate(model: nn.Module, make: Any, folder: Path, steps: range, resumes: bool) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    speedtorch.attach(optimizer, model)
    if resumes:
        accelerator.load_state(str(folder / "state"))
    for number in steps:
        optimizer.zero_grad()
        accelerator.backward(model(batch(number)).square().sum())
        optimizer.step()
    if not resumes:
        accelerator.save_state(str(folder / "state"))


def with_lightning(model: nn.Module, make: Any, folder: Path, steps: range, resumes: bool) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.model(batch[0]).square().sum()

        def configure_optimizers(self) -> optim.Optimizer:
            optimizer = make(self.model.parameters())
            speedtorch.attach(optimizer, self.model)
            return optimizer

        def train_dataloader(self) -> Any:
            batches = torch.stack([batch(self.trainer.current_epoch)])
            return torch.utils.data.DataLoader(batches)

    trainer = lightning_trainer(folder, max_epochs=steps.stop, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Task(), ckpt_path=str(folder / "all.ckpt") if resumes else None)
    if not resumes:
        trainer.save_checkpoint(folder / "all.ckpt")


def batch(number: int) -> Tensor:
    return torch.randint(20, (6,), generator=torch.Generator().manual_seed(number))


OPTIMIZERS = {
    "Adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
}


def train_part(way: str, name: str, folder: str, steps: range, resumes: bool) -> dict[str, Tensor]:
    torch.manual_seed(7 if resumes else 0)
    model = Model()
    globals()[f"with_{way}"](model, OPTIMIZERS[name], Path(folder), steps, resumes)
    torch.save(model.state_dict(), Path(folder, "last.pt"))
    return model.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["accelerate", "lightning"])
def test_a_fresh_process_goes_on_with_what_a_library_has_saved(
    way: str, name: str, tmp_path: Path
) -> None:
    expected = train_part(way, name, str(tmp_path), range(6), False)
    train_part(way, name, str(tmp_path), range(3), False)
    given = (way, name, str(tmp_path), range(3, 6), True)
    program = f"import test_clients_libraries as t; t.train_part(*{given!r})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = finished([sys.executable, "-c", program], env=environment)
    assert done.returncode == 0, done.stderr
    resumed = torch.load(tmp_path / "last.pt")
    for key, value in expected.items():
        assert_same_bytes(resumed[key], value)


class Words(nn.Module):
    """A module of sentence-transformers: the mean of a sentence's words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = speedtorch.Embedding(20, 4)

    def tokenize(self, texts: list[str], **more: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[len(word) for word in texts]]).T}

    preprocess = tokenize

    def forward(self, features: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
        features["sentence_embedding"] = self.words(features["input_ids"]).mean(1)
        return features

    def save(self, path: str, *args: Any, safe_serialization: bool = True, **more: Any) -> None:
        import safetensors.torch

        safetensors.torch.save_model(self, str(Path(path) / "model.safetensors"))


def test_sentence_transformers_saves_an_attached_model(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    words = Words()
    model = library.SentenceTransformer(modules=[words], device="cpu")
    adam = optim.Adam(model.parameters(), lr=0.1)
    speedtorch.attach(adam, model)
    adam.zero_grad()
    model(model.tokenize(["a", "bcd"]))["sentence_embedding"].square().sum().backward()
    adam.step()
    model.save(str(tmp_path))
    import safetensors.torch

    files = list(tmp_path.rglob("model.safetensors"))
    assert len(files) == 1
    loaded = safetensors.torch.load_file(files[0])
    assert_same_bytes(loaded["words.weight"], words.state_dict()["words.weight"])
