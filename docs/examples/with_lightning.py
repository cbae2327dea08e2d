"""A LightningModule with tables in host memory, saved by ModelCheckpoint and resumed by ckpt_path.

The model predicts ratings of items by users as dot products of rows (matrix factorization). The
ratings are synthetic: dot products of hidden rows, with noise. The example requires the package
lightning or pytorch_lightning.

    python with_lightning.py
    python with_lightning.py --epochs 3 --folder half
    python with_lightning.py --epochs 6 --folder half --resume  # as 6 epochs in one run
    python with_lightning.py --plain  # torch.nn.Embedding, with the same numbers on the CPU
"""

from __future__ import annotations

import argparse
from pathlib import Path

try:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
except ImportError:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import speedtorch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USERS, ITEMS, HIDDEN = 10_000, 1_000, 2


def ratings(count: int) -> tuple[TensorDataset, TensorDataset]:
    """Creates training data (users, items, ratings) and a tenth as much validation data."""
    random = torch.Generator().manual_seed(0)
    users, items = (torch.randn(rows, HIDDEN, generator=random) for rows in (USERS, ITEMS))
    users /= HIDDEN**0.5
    found = []
    for size in (count, count // 10):
        user = torch.randint(USERS, (size,), generator=random)
        item = torch.randint(ITEMS, (size,), generator=random)
        noise = 0.1 * torch.randn(size, generator=random)
        found.append(TensorDataset(user, item, (users[user] * items[item]).sum(1) + noise))
    return found[0], found[1]


def in_batches(data: TensorDataset, order: Tensor, size: int) -> DataLoader[tuple[Tensor, ...]]:
    """A loader in the given order, which indexes the data once per batch."""
    return DataLoader(data, sampler=order.split(size), batch_size=None)


class Ratings(lightning.LightningModule):
    """Predicts a rating as the dot product of the user's row and the item's row."""

    def __init__(self, columns: int, batch: int, count: int, plain: bool) -> None:
        super().__init__()
        self.plain, self.batch = plain, batch
        self.errors: list[float] = []  # on held-out ratings, after each epoch of this run
        self.train_set, self.held_set = ratings(count)
        # Lightning loads a checkpoint into these modules, so the constructor must create them.
        kind = nn.Embedding if plain else speedtorch.Embedding
        self.users = kind(USERS, columns, device=DEVICE)
        self.items = kind(ITEMS, columns, device=DEVICE)
        self.offset = nn.Parameter(torch.zeros(()))
        random = torch.Generator().manual_seed(1)
        for table, rows in ((self.users, USERS), (self.items, ITEMS)):
            table.load_state_dict({"weight": 0.1 * torch.randn(rows, columns, generator=random)})

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Orders an epoch by its number only, so that a resumed run has the same order."""
        random = torch.Generator().manual_seed(self.current_epoch)
        order = torch.randperm(len(self.train_set), generator=random)
        return in_batches(self.train_set, order, self.batch)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The held-out ratings."""
        return in_batches(self.held_set, torch.arange(len(self.held_set)), 8192)

    def error(self, batch: list[Tensor]) -> Tensor:
        """The mean squared error of users, items and ratings `[size]`."""
        users, items, given = batch
        return (
            ((self.users(users) * self.items(items)).sum(1) + self.offset - given).square().mean()
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        return self.error(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Logs the error of the held-out ratings."""
        self.log("held_out", self.error(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Creates and attaches the optimizer. Lightning loads the optimizer's state afterwards."""
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.2)
        if not self.plain:
            speedtorch.attach(optimizer, self)
        return optimizer

    def on_validation_end(self) -> None:
        """Prints the error after each epoch."""
        held_out = self.trainer.callback_metrics["held_out"].item()
        self.errors.append(held_out)
        print(f"epoch {self.current_epoch}: mean square error {held_out:.4f} of held out ratings")


def main(arguments: list[str] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Trains; returns the error after each epoch of this run, and the module's state dict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="epochs in total")
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path("lightning_checkpoints"))
    parser.add_argument("--resume", action="store_true", help="continue from last.ckpt in --folder")
    parser.add_argument("--plain", action="store_true", help="use torch.nn.Embedding")
    chosen = parser.parse_args(arguments)
    module = Ratings(chosen.columns, chosen.batch, chosen.ratings, chosen.plain)
    saving = ModelCheckpoint(
        chosen.folder,
        filename="last",
        save_on_train_epoch_end=True,  # so that a resumed run begins with the next epoch
        enable_version_counter=False,  # each epoch's file replaces the previous file
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if DEVICE == "cuda" else "cpu",
        devices=1,
        max_epochs=chosen.epochs,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=chosen.folder / "last.ckpt" if chosen.resume else None)
    return module.errors, module.state_dict()


if __name__ == "__main__":
    main()
