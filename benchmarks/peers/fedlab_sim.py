"""FedLab: ``SGDSerialClientTrainer`` in a ``StandalonePipeline``, one process of one thread; its loaders are torch's, as in its tutorials."""

from __future__ import annotations

from common import Clock, Workload, arrays, network, optimizer, start


def play(work: Workload, rounds: int, processes: int) -> None:
    import logging
    import sys
    from unittest.mock import MagicMock

    import torch

    # FedLab imports torchvision for data sets that are not used here, and PyPI's is built for CUDA: beside a CPU build of torch
    # its import fails. Names that nobody calls then stand in for it.
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [n for n in sys.modules if n.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("torchvision", "torchvision.transforms", "torchvision.datasets", "torchvision.datasets.folder"):
            sys.modules[name] = MagicMock()
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline
    from torch.utils.data import DataLoader, TensorDataset

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays(work)]

    class Data:
        def get_dataloader(self, id: int, batch_size: int) -> DataLoader:
            return DataLoader(sets[id], batch_size=batch_size, shuffle=True)

    class Trainer(SGDSerialClientTrainer):
        def train(self, model_parameters, train_loader):
            self.optimizer = optimizer(work, self._model.parameters())
            return super().train(model_parameters, train_loader)

    clock = Clock()

    class Pipeline(StandalonePipeline):
        def evaluate(self) -> None:
            clock.mark()

    trainer = Trainer(network(work), work.clients)
    trainer.setup_dataset(Data())
    trainer.setup_optim(work.epochs, work.batch, work.lr)
    handler = SyncServerHandler(network(work), rounds, work.cohort / work.clients)
    Pipeline(handler, trainer).main()
    clock.report(processes=1)


if __name__ == "__main__":
    start("fedlab", ["torch==2.13.0", "fedlab"], play)
