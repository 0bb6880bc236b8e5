"""Flower's simulation: ``run_simulation`` with Ray, as many actors of one thread as processors; clients are ``NumPyClient``."""

from __future__ import annotations

from common import Clock, Workload, network, optimizer, start, tensors


def play(work: Workload, rounds: int, processes: int) -> None:
    import logging

    import torch
    import torch.nn.functional as F
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)

    class Client(NumPyClient):
        def __init__(self, number: int) -> None:
            self.number, self.net = number, network(work)

        def fit(self, parameters, config):
            torch.set_num_threads(1)
            state = dict(zip(self.net.state_dict(), map(torch.from_numpy, parameters), strict=True))
            self.net.load_state_dict(state)
            steps = optimizer(work, self.net.parameters())
            x, y = tensors(work)[self.number]
            for _ in range(work.epochs):
                for index in torch.randperm(len(y)).split(work.batch):
                    steps.zero_grad()
                    F.cross_entropy(self.net(x[index]), y[index]).backward()
                    steps.step()
            return [v.numpy() for v in self.net.state_dict().values()], len(y), {}

    def client_fn(context: Context):
        return Client(int(context.node_config["partition-id"])).to_client()

    clock = Clock()

    class Timed(FedAvg):
        def aggregate_fit(self, *args, **kwargs):
            found = super().aggregate_fit(*args, **kwargs)
            clock.mark()
            return found

    first = ndarrays_to_parameters([v.numpy() for v in network(work).state_dict().values()])

    def server_fn(context: Context) -> ServerAppComponents:
        strategy = Timed(
            fraction_fit=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_fit_clients=work.cohort,
            min_available_clients=work.clients,
            initial_parameters=first,
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

    run_simulation(
        ServerApp(server_fn=server_fn),
        ClientApp(client_fn=client_fn),
        num_supernodes=work.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": processes}},
    )
    clock.report(processes=processes)


if __name__ == "__main__":
    start("flower", ["torch==2.13.0", "flwr[simulation]==1.41.0"], play)
