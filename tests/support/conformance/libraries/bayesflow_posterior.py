"""A posterior of BayesFlow, learned from simulations with a coupling flow and a summary network."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # BayesFlow prefers JAX where it is installed

import bayesflow as bf  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)


def prior():
    return {"mean": draw.normal(size=2)}


def likelihood(mean):
    return {"observed": draw.normal(mean, 0.5, size=(8, 2))}


simulator = bf.make_simulator([prior, likelihood])
workflow = bf.BasicWorkflow(
    simulator=simulator,
    inference_network=bf.networks.CouplingFlow(depth=2, subnet_kwargs={"dropout": 0.0}),
    summary_network=bf.networks.DeepSet(summary_dim=4, depth=1, dropout=0.0),
    inference_variables=["mean"],
    summary_variables=["observed"],
)
batches = bf.datasets.OfflineDataset(simulator.sample(128), batch_size=16, adapter=workflow.adapter, shuffle=False)
workflow.approximator.compile(optimizer=keras.optimizers.SGD(0.01))
workflow.approximator.fit(dataset=batches, epochs=3, shuffle=False, verbose=0)
print(workflow.sample(conditions=simulator.sample(2), num_samples=5)["mean"].shape)
