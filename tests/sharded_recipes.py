"""Trains sharded tables by accelerate, Lightning and transformers, and by a plain loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_training import raises
from torch import Tensor, nn, optim

import speedtorch

ROWS, WIDTH, BATCH, STEPS, SAVED_AFTER = 70, 4, 6, 6, 3
DataParallel = nn.parallel.DistributedDataParallel
EVALUATED = torch.arange(7 * 3).view(7, 3)
"""Ids that are looked up between steps, of an uneven number of samples."""
REFUSED = r"with speedtorch.full_state_dict\(model\):"
"""What a save outside of full_state_dict() names."""


class Model(nn.Module):
    """Rows, bags, two tables of one width and a dense layer."""

    def __init__(self, seed: int, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        names = {"users": ROWS, "goods": 2 * ROWS}
        tables = [speedtorch.EmbeddingBagConfig(n, WIDTH, name) for name, n in names.items()]
        self.words = speedtorch.Embedding(ROWS, WIDTH)
        self.bags = speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.tables = speedtorch.EmbeddingBagCollection(tables=tables)
        self.out = nn.Linear(4 * WIDTH, 1)
        self.seen: list[Tensor] = []
        if sharded:
            speedtorch.shard(self)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen.append(ids.clone())
        pooled = self.tables(dict.fromkeys(("users", "goods"), ids)).values()
        found = torch.cat([self.words(ids).mean(1), self.bags(ids), pooled], 1)
        return {"loss": self.out(found.tanh()).square().sum()}


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "Adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
}


def samples() -> Tensor:
    """The ids of all ranks' steps, `[n, 3]`."""
    count = STEPS * BATCH * (dist.get_world_size() if dist.is_initialized() else 1)
    return torch.randint(ROWS, (count, 3), generator=torch.Generator().manual_seed(5))


def local_batches() -> list[Tensor]:
    """The batches of this rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return list(samples().split(BATCH)[rank::ranks])


def as_torchrun() -> None:
    """The variables by which libraries know that torchrun has begun this rank."""
    if not dist.is_initialized():
        return
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    given |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    os.environ.update(given, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")


def content(model: nn.Module) -> dict[str, Tensor]:
    """This rank's rows with their state, and the dense parameters."""
    found = {name: value.detach().clone() for name, value in model.out.named_parameters()}
    for name, module in model.named_modules():
        if hasattr(module, "trained_rows"):
            for field in module.table.fields:
                found[f"{name}.{field}"] = module.table[field].clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def plain(name: str, batches: list[Tensor], most: float = 0.0, parts: int = 1) -> Any:
    """What a loop of DistributedDataParallel alone trains."""
    sharded = dist.is_initialized()
    model = Model(0, sharded)
    wrapped = DataParallel(model) if sharded else model
    optimizer = OPTIMIZERS[name](wrapped.parameters())
    speedtorch.attach(optimizer, wrapped)
    norms = [torch.zeros(())]
    for step, ids in enumerate(batches):
        is_last = (step + 1) % parts == 0
        with nullcontext() if is_last or not sharded else wrapped.no_sync():
            (wrapped(ids)["loss"] / parts).backward()
        if not is_last:
            continue
        if most:
            norms.append(speedtorch.clip_grad_norm_(wrapped.parameters(), most))
        optimizer.step()
        optimizer.zero_grad()
    assert not most or max(norms) > most  # or nothing would be clipped
    return content(model)


class Host:
    """A library that trains a model; `folder` is where it saves."""

    most, parts = 0.0, 1  # the norm that gradients are clipped to, if any; batches of a step
    clips = True  # as the docs say, not by the library's own function

    def __init__(self, folder: str, name: str, **settings: Any) -> None:
        self.folder, self.name = Path(folder), name
        vars(self).update(settings)
        as_torchrun()

    def model(self, resumed: bool) -> Model:
        return Model(1 if resumed else 0, dist.is_initialized())

    def train(self, steps: int, *, saves: bool = False, resumes: bool = False) -> Any:
        """Trains until so many steps are done; gives the model, and the batches that it had."""
        raise NotImplementedError

    def refused(self) -> None:
        """Saves outside of full_state_dict()."""
        raise NotImplementedError


class Accelerate(Host):
    """Accelerator.prepare, save_state and load_state."""

    safe = True

    def _made(self, resumes: bool) -> Any:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.parts)
        if self.clips:
            accelerator.clip_grad_norm_ = speedtorch.clip_grad_norm_
        own = self.model(resumes)
        model, optimizer = accelerator.prepare(own, OPTIMIZERS[self.name](own.parameters()))
        speedtorch.attach(optimizer, model)
        return accelerator, own, model, optimizer

    def train(self, steps: int, *, saves: bool = False, resumes: bool = False) -> Any:
        accelerator, own, model, optimizer = self._made(resumes)
        first = 0
        if resumes:
            accelerator.load_state(str(self.folder))
            first = SAVED_AFTER
        for ids in local_batches()[first:steps]:
            with accelerator.accumulate(model):
                accelerator.backward(model(ids)["loss"])
                if accelerator.sync_gradients and self.most:
                    accelerator.clip_grad_norm_(model.parameters(), self.most)
                optimizer.step()
                optimizer.zero_grad()
        if saves:
            with speedtorch.full_state_dict(model):
                accelerator.save_state(str(self.folder), safe_serialization=self.safe)
        return own, local_batches()[:steps]

    def refused(self) -> None:
        accelerator, _, _, _ = self._made(False)
        accelerator.save_state(str(self.folder), safe_serialization=self.safe)


class Fabric(Host):
    """Lightning's Fabric: setup, save and load."""

    def _made(self, resumes: bool) -> Any:
        import lightning
        from lightning.fabric.strategies import DDPStrategy

        several = dist.is_initialized()
        fabric = lightning.Fabric(
            accelerator="cpu",
            devices=dist.get_world_size() if several else 1,
            strategy=DDPStrategy(process_group_backend="gloo") if several else "auto",
        )
        fabric.launch()
        own = self.model(resumes)
        model, optimizer = fabric.setup(own, OPTIMIZERS[self.name](own.parameters()))
        speedtorch.attach(optimizer, model)
        return fabric, own, model, optimizer

    def train(self, steps: int, *, saves: bool = False, resumes: bool = False) -> Any:
        fabric, own, model, optimizer = self._made(resumes)
        state, first, path = {"model": model, "optimizer": optimizer}, 0, self.folder / "saved"
        if resumes:
            fabric.load(path, state)
            first = SAVED_AFTER
        for ids in local_batches()[first:steps]:
            optimizer.zero_grad()
            fabric.backward(model(ids)["loss"])
            if self.most:
                speedtorch.clip_grad_norm_(model.parameters(), self.most)
            optimizer.step()
        if saves:
            with speedtorch.full_state_dict(model):
                fabric.save(path, state)
        return own, local_batches()[:steps]

    def refused(self) -> None:
        fabric, _, model, optimizer = self._made(False)
        fabric.save(self.folder / "saved", {"model": model, "optimizer": optimizer})


class Lightning(Host):
    """Lightning's Trainer, which saves after each epoch of half of the steps."""

    def _fitted(self, steps: int, saves: bool, resumes: bool) -> Any:
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.strategies import DDPStrategy

        host, several = self, dist.is_initialized()

        class Task(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = Model(1 if resumes else 0, sharded=False)

            def configure_model(self) -> None:
                if several:
                    speedtorch.shard(self)

            def configure_optimizers(self) -> optim.Optimizer:
                optimizer = OPTIMIZERS[host.name](self.parameters())
                speedtorch.attach(optimizer, self)
                return optimizer

            def training_step(self, batch: Tensor, _: int) -> Tensor:
                return self.model(batch)["loss"]

            def validation_step(self, batch: Tensor, _: int) -> Tensor:
                return self.model(batch)["loss"]

            def configure_gradient_clipping(self, *given: Any, **more: Any) -> None:
                if not host.clips:
                    super().configure_gradient_clipping(*given, **more)
                elif host.most:
                    speedtorch.clip_grad_norm_(self.parameters(), host.most)

        class Trainer(lightning.Trainer):
            def save_checkpoint(self, *given: Any, **more: Any) -> None:
                with speedtorch.full_state_dict(self.model):
                    super().save_checkpoint(*given, **more)

        kept = ModelCheckpoint(self.folder, filename="saved", every_n_epochs=1, save_top_k=1)
        trainer = Trainer(
            max_epochs=steps // SAVED_AFTER,
            gradient_clip_val=self.most or None,
            accelerator="cpu",
            devices=dist.get_world_size() if several else 1,
            strategy=DDPStrategy(process_group_backend="gloo") if several else "auto",
            callbacks=[kept] if saves else [],
            enable_checkpointing=saves,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
        )
        task, half = Task(), len(samples()) // 2
        loaders = [torch.utils.data.DataLoader(e, BATCH) for e in (samples()[:half], EVALUATED)]
        trainer.fit(task, *loaders, ckpt_path=self.folder / "saved.ckpt" if resumes else None)
        return trainer, task

    def train(self, steps: int, *, saves: bool = False, resumes: bool = False) -> Any:
        _, task = self._fitted(steps, saves, resumes)
        return task.model, task.model.seen

    def refused(self) -> None:
        import lightning

        trainer, _ = self._fitted(SAVED_AFTER, False, False)
        lightning.Trainer.save_checkpoint(trainer, self.folder / "saved.ckpt")


class Transformers(Host):
    """Hugging Face's Trainer."""

    def _made(self, steps: int, saves: bool, resumes: bool) -> Any:
        import transformers

        class Trainer(transformers.Trainer):
            def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
                with speedtorch.full_state_dict(model):
                    super()._save_checkpoint(model, trial)

        args = transformers.TrainingArguments(
            output_dir=str(self.folder),
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            save_strategy="steps" if saves else "no",
            save_steps=SAVED_AFTER,
            max_grad_norm=self.most,
            eval_strategy="steps",
            eval_steps=2,
            prediction_loss_only=True,
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo" if dist.is_initialized() else None,
            disable_tqdm=True,
            logging_steps=1,
        )
        model = self.model(resumes)
        optimizer = OPTIMIZERS[self.name](model.parameters())
        speedtorch.attach(optimizer, model)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=[{"ids": ids} for ids in samples()],
            eval_dataset=[{"ids": ids} for ids in EVALUATED],
            optimizers=(optimizer, optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        )
        return trainer, model

    def train(self, steps: int, *, saves: bool = False, resumes: bool = False) -> Any:
        trainer, model = self._made(steps, saves, resumes)
        if self.clips:
            trainer.accelerator.clip_grad_norm_ = speedtorch.clip_grad_norm_
        folder = str(self.folder / f"checkpoint-{SAVED_AFTER}")
        trainer.train(resume_from_checkpoint=folder if resumes else None)
        return model, model.seen

    def refused(self) -> None:
        trainer, _ = self._made(SAVED_AFTER, False, False)
        trainer.save_model(str(self.folder / "saved"))


HOSTS: dict[str, type[Host]] = {
    "accelerate": Accelerate,
    "fabric": Fabric,
    "lightning": Lightning,
    "transformers": Transformers,
}


def begin(host: str, folder: str, name: str, settings: dict[str, Any]) -> None:
    """Trains without an interruption as a plain loop does; then as much as is saved."""
    made = HOSTS[host](folder, name, **settings)
    model, batches = made.train(STEPS)
    assert len(batches) == STEPS
    expected = plain(name, batches, made.most, made.parts)
    assert_same(content(model), expected)
    torch.save(expected, Path(folder, f"expected-{own_rank()}.pt"))
    made.train(SAVED_AFTER, saves=True)


def go_on(host: str, folder: str, name: str, settings: dict[str, Any]) -> None:
    """Goes on in a fresh process."""
    model, _ = HOSTS[host](folder, name, **settings).train(STEPS, resumes=True)
    assert_same(content(model), torch.load(Path(folder, f"expected-{own_rank()}.pt")))


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def check_refused(host: str, folder: str) -> None:
    """A save outside of full_state_dict() names it."""
    raises((NotImplementedError, TypeError), REFUSED, HOSTS[host](folder, "Adam").refused)


def check_clipping_refused(host: str, folder: str, most: float) -> None:
    """A library's own norm is refused on all ranks before a row changes, and the remedy named."""
    made = HOSTS[host](folder, "SGD", most=most, clips=False)
    remedy = "configure_gradient_clipping" if host == "lightning" else "accelerator.clip_grad_norm_"
    raises(NotImplementedError, f"Use speedtorch.clip_grad_norm_ .*{remedy}", lambda: made.train(3))
