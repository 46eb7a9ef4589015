"""What ranks of a job run: a linear model trained in float64 by each trainer, as its page shows it.

Every job takes a checkpoint of some folder if there is one, trains up to step ``stop``, leaves a checkpoint there, and
returns the rows that its rank saw, step by step, and the weights in the end.
"""

import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mouse_torch
from mouse_core import ConfigError, DatasetStore

warnings.simplefilter("ignore")
ROWS, OPTIONS = 200, {"sequence_length": 4, "batch_size": 12, "seed": 3, "fields": ["reward", "action"]}


def store() -> DatasetStore:
    """Rows whose reward is their number."""
    made = DatasetStore()
    numbers = np.arange(ROWS)
    made.extend({"action": numbers % 3, "done": np.zeros(ROWS, np.int64), "reward": numbers.astype(np.float64)})
    return made


def data_loader(**options: Any) -> mouse_torch.DataLoader:
    return mouse_torch.DataLoader(store(), **OPTIONS, dtypes={"reward": "float64"}, **options)


def rows_of(batch: Any) -> list[list[int]]:
    """The numbers of a batch's rows, window by window."""
    rows: list[list[int]] = batch["reward"].long().tolist()
    return rows


class Net(torch.nn.Module):
    """Predicts the action from the row's number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.seen: list[Any] = []
        for value in self.parameters():
            torch.nn.init.constant_(value, 0.1)

    def forward(self, reward: torch.Tensor, action: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.seen.append(reward.long().tolist())
        return {"loss": (self.layer(reward / ROWS) - action).square().mean()}

    def weights(self) -> list[float]:
        found: list[float] = torch.cat([value.detach().reshape(-1) for value in self.parameters()]).tolist()
        return found


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def numbered(loader: Any, step: int, stop: int) -> Iterator[tuple[int, Any]]:
    """The batches of as many epochs as it takes, from step ``step`` on, with the number of the step that each ends."""
    while step < stop:
        for batch in loader:
            step += 1
            yield step, batch
            if step == stop:
                return


def die(rank: int, kill: list[int] | None, step: int) -> None:
    """Kill this process where a job is told that its rank is killed before a step."""
    if kill == [rank, step]:
        os.kill(os.getpid(), signal.SIGKILL)


def ddp(rank: int, folder: str, stop: int, kill: list[int] | None = None, every: int = 2) -> Any:
    """DistributedDataParallel, with a checkpoint of rank 0 every so many steps."""
    torch.distributed.init_process_group("gloo")
    net, loader = Net(), data_loader()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer, begin = sgd(model), 0
    path = Path(folder) / "checkpoint.pt"
    if path.exists():
        checkpoint = torch.load(path)
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        begin = checkpoint["step"]
    for step, batch in numbered(loader, begin, stop):
        die(rank, kill, step - 1)
        optimizer.zero_grad()
        model(batch["reward"], batch["action"])["loss"].backward()
        optimizer.step()
        if rank == 0 and (step % every == 0 or step == stop):
            kept = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**kept, "loader": loader.state_dict()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        torch.distributed.barrier()
    return {"begin": begin, "rows": net.seen, "weights": net.weights()}


def fsdp(rank: int, folder: str, stop: int) -> Any:
    """``fully_shard``, with model, optimizer and loader in one distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    net, loader = Net(), data_loader()
    fully_shard(net, mesh=mesh)
    optimizer, begin = sgd(net), 0
    # An optimizer has its state after the first step; a checkpoint is read into what is there.
    path = Path(folder) / "distributed"
    if path.exists():
        for value in net.parameters():
            value.grad = torch.zeros_like(value)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "loader": loader}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        begin = loader.state_dict()["next_index"]
    for _, batch in numbered(loader, begin, stop):
        optimizer.zero_grad()
        net(batch["reward"], batch["action"])["loss"].backward()
        optimizer.step()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "loader": loader}, checkpoint_id=path)
    weights = torch.cat([value.full_tensor().reshape(-1) for value in net.parameters()]).tolist()
    return {"begin": begin, "rows": net.seen, "weights": weights}


def accelerate(rank: int, folder: str, stop: int, config: dict[str, bool] | None = None) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**(config or {})))
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, sgd(net), data_loader(device=accelerator.device))
    if any(Path(folder).iterdir()):
        accelerator.load_state(folder)
    begin = loader.state_dict()["next_index"]
    for _, batch in numbered(loader, begin, stop):
        optimizer.zero_grad()
        accelerator.backward(model(batch["reward"], batch["action"])["loss"])
        optimizer.step()
    accelerator.save_state(folder)
    return {"begin": begin, "rows": net.seen, "weights": net.weights()}


def fabric(rank: int, folder: str, stop: int) -> Any:
    from lightning.fabric import Fabric

    ranks = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net))
    loader = fabric.setup_dataloaders(data_loader(device=fabric.device))
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    path = Path(folder) / "fabric.ckpt"
    if path.exists():
        fabric.load(path, state)
    begin = state["step"]
    for state["step"], batch in numbered(loader, begin, stop):
        optimizer.zero_grad()
        fabric.backward(model(batch["reward"], batch["action"])["loss"])
        optimizer.step()
    fabric.save(path, state)
    return {"begin": begin, "rows": net.seen, "weights": net.weights()}


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def lightning_module(on_train_end: Callable[[Any], None] = lambda _: None) -> Any:
    """The net as a LightningModule, which ``on_train_end`` is given at the end."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.net(batch["reward"], batch["action"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def on_train_end(self) -> None:
            on_train_end(self)

    return Module()


def lightning(rank: int, folder: str, stop: int) -> Any:
    import lightning.pytorch as pl

    ranks = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=stop,
        max_epochs=-1,
        default_root_dir=folder,
        **QUIET,
    )
    path = Path(folder) / "lightning.ckpt"
    module, loader = lightning_module(), data_loader()
    trainer.fit(module, loader, ckpt_path=path if path.exists() else None)
    trainer.save_checkpoint(path)
    return {"begin": stop - len(module.net.seen), "rows": module.net.seen, "weights": module.net.weights()}


def transformers(rank: int, folder: str, stop: int, as_dict: bool = True) -> Any:
    from transformers import Trainer, TrainingArguments

    class OurTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return data_loader(as_dict=as_dict)

    net = Net()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=stop,
        save_steps=stop,
        use_cpu=True,
        ddp_backend="gloo" if int(os.environ["WORLD_SIZE"]) > 1 else None,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0.0,
    )
    trainer = OurTrainer(model=net, args=arguments, optimizers=(sgd(net), None))
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    return {"begin": stop - len(net.seen), "rows": net.seen, "weights": net.weights()}


def by_ray(config: dict[str, Any]) -> None:
    """A worker of Ray Train, of which rank 1 is killed before step 5 where nobody was killed yet."""
    import ray.train
    import ray.train.torch

    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    net, loader = Net(), data_loader(device=ray.train.torch.get_device())
    model = ray.train.torch.prepare_model(net)
    try:
        next(iter(ray.train.torch.prepare_data_loader(loader)))
    except ConfigError as error:
        (folder / "told").write_text(str(error))
    optimizer, begin = sgd(net), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as place:
            kept = torch.load(Path(place, "kept.pt"))
        net.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        loader.load_state_dict(kept["loader"])
        begin = kept["step"]
    for step, batch in numbered(loader, begin, config["stop"]):
        if rank == 1 and step == 6 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(batch["reward"], batch["action"])["loss"].backward()
        optimizer.step()
        if step % 2 == 0:
            with tempfile.TemporaryDirectory() as place:
                kept = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**kept, "loader": loader.state_dict()}, Path(place, "kept.pt"))
                done = ray.train.Checkpoint.from_directory(place) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=done)
    found = {"begin": begin, "rows": net.seen, "weights": net.weights()}
    (folder / f"found-{rank}").write_text(json.dumps(found))


def prepared(rank: int, steps: int) -> Any:
    """What Accelerate makes of a loader under each way of its own to share batches out: the rows of some steps."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    found = {}
    for way in ("", "dispatch_batches", "split_batches", "even_batches", "use_stateful_dataloader"):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{way: True} if way else {}))
        loader = accelerator.prepare(data_loader())
        found[way] = [rows_of(loader.next_batch()) for _ in range(steps)]
    accelerator.wait_for_everyone()  # whoever ends takes along what ranks compare themselves by
    return found


def skipped(rank: int, epoch: int, batches: int) -> Any:
    """The rest of an epoch when Accelerate skips its first batches."""
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(data_loader())
    loader.set_epoch(epoch)
    rows = [rows_of(batch) for batch in skip_first_batches(loader, batches)]
    accelerator.wait_for_everyone()  # the notes that ranks leave each other lie with rank 0
    return rows


def made_before(rank: int, forked: int, folder: str, stop: int) -> Any:
    """A loader that is made before Lightning forks the processes: each writes what it saw."""
    import lightning.pytorch as pl

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT", "MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)

    def keep_seen(module: Any) -> None:
        torch.save(module.net.seen, Path(folder) / f"seen-{module.global_rank}.pt")

    module, loader = lightning_module(keep_seen), data_loader()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=forked,
        strategy="ddp_fork",
        max_steps=stop,
        max_epochs=-1,
        use_distributed_sampler=True,
        **QUIET,
    )
    trainer.fit(module, loader)
    return [{"begin": 0, "rows": torch.load(Path(folder) / f"seen-{rank}.pt")} for rank in range(forked)]


def shared_out(rank: int, ways: list[list[Any]]) -> Any:
    """What becomes of the batches of a source when others share them out: the rows that this rank sees."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState
    from lightning.fabric import Fabric

    from mouse_core import BatchSource, PrefetchBatchifier

    ranks = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()

    class OfALoader(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from PrefetchBatchifier(store(), **options)

    found = []
    for library, what, sharded in ways:
        options: dict[str, Any] = {**OPTIONS, "sampling": "sequential", "shard": (rank, ranks) if sharded else (0, 1)}
        loader: Any = torch.utils.data.DataLoader(BatchSource(store(), **options), batch_size=None)
        if what == "loader":
            loader = PrefetchBatchifier(store(), **options)
        if what == "wrapped":
            loader = torch.utils.data.DataLoader(OfALoader(), batch_size=None)
        if library == "fabric":
            loader = fabric.setup_dataloaders(loader, use_distributed_sampler=what != "unsampled")
        else:
            AcceleratorState._reset_state()
            config = DataLoaderConfiguration(dispatch_batches={"dispatched": True}.get(what))
            loader = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
        found.append([np.asarray(batch["reward"]).astype(int).ravel().tolist() for batch in loader])
    return found


if __name__ == "__main__":  # by torchrun: rank 1 is killed before step 5 of the first attempt
    place, last_step = sys.argv[1:]
    own_rank, is_first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    result = ddp(own_rank, place, int(last_step), kill=[1, 5] if is_first else None)
    Path(place, f"found-{own_rank}").write_text(json.dumps(result))
