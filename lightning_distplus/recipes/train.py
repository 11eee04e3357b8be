"""Trains a small network on two CPU processes. Kill it at any moment and run it again: it goes on where it was."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_distplus import ResilientDDP


class Regression(LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Returns the squared error."""
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all weights."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    saves = ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=50, monitor="step", mode="max", save_top_k=3)
    trainer = Trainer(
        strategy=ResilientDDP(timeout="5m"),
        accelerator="cpu",
        devices=2,
        max_steps=1000,
        callbacks=[saves],
    )
    trainer.fit(Regression(), data, ckpt_path="auto")
