"""A LightningModule with tables in host memory, saved by ModelCheckpoint and resumed by ckpt_path.

The model predicts ratings of items by users as dot products of rows (matrix factorization). The
ratings are synthetic: dot products of hidden rows, with noise. Needs the package lightning, or
pytorch_lightning.

    python with_lightning.py
    python with_lightning.py --epochs 3 --folder half
    python with_lightning.py --epochs 6 --folder half --resume  # the numbers of 6 epochs in one run
    python with_lightning.py --plain  # the same numbers on the CPU, with torch.nn.Embedding
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
    """Users, items and ratings to train on, and a tenth as many to validate on."""
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
    """A loader in that order, which takes each batch out of the data at once."""
    return DataLoader(data, sampler=order.split(size), batch_size=None)


class Ratings(lightning.LightningModule):
    """Predicts a rating by the dot product of the user's row and the item's."""

    def __init__(self, columns: int, batch: int, count: int, plain: bool) -> None:
        super().__init__()
        self.plain, self.batch = plain, batch
        self.errors: list[float] = []  # held out, after each epoch of this run
        self.train_set, self.held_set = ratings(count)
        # Made here, not in setup or later: Lightning loads a checkpoint into these modules.
        kind = nn.Embedding if plain else speedtorch.Embedding
        self.users = kind(USERS, columns, device=DEVICE)
        self.items = kind(ITEMS, columns, device=DEVICE)
        self.offset = nn.Parameter(torch.zeros(()))
        random = torch.Generator().manual_seed(1)
        for each, rows in ((self.users, USERS), (self.items, ITEMS)):
            each.load_state_dict({"weight": 0.1 * torch.randn(rows, columns, generator=random)})

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The order of an epoch depends on its number alone: a resumed run has the same."""
        random = torch.Generator().manual_seed(self.current_epoch)
        order = torch.randperm(len(self.train_set), generator=random)
        return in_batches(self.train_set, order, self.batch)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The ratings that are held out."""
        return in_batches(self.held_set, torch.arange(len(self.held_set)), 8192)

    def error(self, batch: list[Tensor]) -> Tensor:
        """The mean square error of users, items and ratings `[size]`."""
        users, items, given = batch
        return (
            ((self.users(users) * self.items(items)).sum(1) + self.offset - given).square().mean()
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        return self.error(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Logs the error of the ratings that are held out."""
        self.log("held_out", self.error(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for all. Lightning calls this before it loads the optimizer's state."""
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
    """Trains; gives the error after each epoch of this run, and the state of the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="with those before --resume")
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path("lightning_checkpoints"))
    parser.add_argument("--resume", action="store_true", help="go on from last.ckpt of --folder")
    parser.add_argument("--plain", action="store_true", help="torch.nn.Embedding instead")
    chosen = parser.parse_args(arguments)
    module = Ratings(chosen.columns, chosen.batch, chosen.ratings, chosen.plain)
    saving = ModelCheckpoint(
        chosen.folder,
        filename="last",
        save_on_train_epoch_end=True,  # after the epoch: a resumed run begins with the next one
        enable_version_counter=False,  # each epoch's file replaces the one before
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
