"""FedJAX: ``fed_avg.federated_averaging``, clients jitted one after another (its ``jit`` backend for a CPU)."""

from __future__ import annotations

from common import Clock, Workload, arrays, start

# The last release of FedJAX is of early 2023: newer ones of what it stands on have dropped names that it uses.
REQUIREMENTS = ["fedjax", "jax<0.4.24", "jaxlib<0.4.24", "numpy<2", "scipy<1.12"]
REQUIREMENTS += ["dm-haiku==0.0.11", "optax==0.1.8", "chex==0.1.85"]


def play(work: Workload, rounds: int, processes: int) -> None:
    import fedjax
    import haiku as hk
    import jax
    import numpy as np
    from fedjax.algorithms import fed_avg

    def forward(batch):
        x = batch["x"]
        if work.name == "mlp":
            return hk.nets.MLP([32, 16, 2])(x)
        x = jax.nn.relu(hk.Conv2D(32, 5, padding="VALID")(x))
        x = hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID")(x)
        x = jax.nn.relu(hk.Conv2D(64, 5, padding="VALID")(x))
        x = hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID")(x)
        return hk.Linear(10)(jax.nn.relu(hk.Linear(512)(hk.Flatten()(x))))

    data = {}
    for i, (x, y) in enumerate(arrays(work)):
        pictures = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x
        data[b"%06d" % i] = {"x": pictures, "y": y.astype(np.int32)}
    federation = fedjax.InMemoryFederatedData(data)
    model = fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(forward),
        sample_batch={k: v[:2] for k, v in next(iter(data.values())).items()},
        train_loss=lambda batch, out: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], out),
    )
    grads = fedjax.model_grad(model)
    local = fedjax.optimizers.adam(work.lr) if work.name == "mlp" else fedjax.optimizers.sgd(work.lr)
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=work.epochs)
    algorithm = fed_avg.federated_averaging(grads, local, fedjax.optimizers.sgd(1.0), batches)
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    sampler = fedjax.client_samplers.UniformGetClientSampler(federation, work.cohort, seed=0)
    clock = Clock()
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        clock.mark()
    clock.report(processes=1)


if __name__ == "__main__":
    start("fedjax", REQUIREMENTS, play)
