"""Apple's pfl-research: ``SimulatedBackend`` and ``FederatedAveraging``, in processes of one thread each."""

from __future__ import annotations

import os
import socket
import sys

from common import Clock, Workload, arrays, network, optimizer, start


def play(work: Workload, rounds: int, processes: int) -> None:
    if processes > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])
    import numpy as np
    import torch
    import torch.nn.functional as F
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    np.random.seed(0)
    rows = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays(work)]
    net = network(work)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            return F.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict:
            return {"loss": Weighted(float(F.cross_entropy(self(x), y, reduction="sum")), len(y))}

    module = Module()
    model = PyTorchModel(
        model=module,
        local_optimizer_create=lambda parameters, lr: optimizer(work, parameters),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    users = list(range(work.clients))
    data = FederatedDataset(lambda user: Dataset(raw_data=list(rows[user])), get_user_sampler("minimize_reuse", users))
    clock = Clock()

    class Timer(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            clock.mark()
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        model_eval_params=None,
        callbacks=[Timer()],
    )
    if int(os.environ.get("RANK", "0")) == 0:
        clock.marks = [
            (w, c * max(1, processes)) for w, c in clock.marks
        ]  # ranks are equal, and this one sees only itself
        clock.report(processes=processes)


if __name__ == "__main__":
    start("pfl", ["torch==2.13.0", "pfl==0.6.0"], play)
