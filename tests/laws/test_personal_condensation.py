"""Hand-checkable cases of FedAF, and the server's own work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.methods.fedaf import mean_gap, sliced_wasserstein, symmetric_divergence
from fedloom.tasks.batch import Batch
from tests.helpers import federation, fit, own, run_of, shared


def test_images_that_are_the_rows_match_them() -> None:
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(z, torch.tensor([0, 1, 0, 1, 0, 1]))
    made = torch.stack([z[0::2], z[1::2]])
    assert float(mean_gap(z, batch, made)) == pytest.approx(0, abs=1e-20)
    assert float(mean_gap(z, batch, made + 1)) == pytest.approx(2 * 4)


def test_a_set_is_at_distance_zero_from_itself_in_any_order() -> None:
    draw = torch.Generator().manual_seed(0)
    a, d = torch.randn(5, 3, generator=draw), torch.randn(7, 3, generator=draw)
    assert float(sliced_wasserstein(a, a, d)) == 0
    assert float(sliced_wasserstein(a, a[[2, 0, 4, 1, 3]], d)) == 0
    assert float(sliced_wasserstein(a, a + 1, d)) == pytest.approx(float((d.sum(1) ** 2).mean()), rel=1e-5)


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert float(symmetric_divergence(p, p)) == 0
    assert float(symmetric_divergence(p, q)) == pytest.approx(0.125 * np.log(3), rel=1e-5)


def test_images_begin_as_rows_of_the_client_and_absent_classes_are_left_out() -> None:
    data = federation((9, 8), one_class=1)
    result = fit("fedaf(ipc=4, image_lr=1e-12, image_steps=1, server_epochs=1)", data=data, rounds=1)
    images = run_of(result).clients["1"].leaves["fedaf:images"]
    assert torch.allclose(images[0], data["1"].train.x[:4].double(), atol=1e-9)  # type: ignore[index, union-attr]
    held = sum(len(c.train.y.unique()) for c in data)
    assert run_of(result).state.memory["fedaf_images"]["x"].shape == (held * 4, 6)


def test_everybody_has_the_servers_model() -> None:
    result = fit("fedaf(image_steps=2, server_epochs=1)", data=federation((9, 14, 5, 8)), cohort=2)
    model = {k: v for k, v in shared(result).items() if ":" not in k}
    for name in run_of(result).sites:
        found = own(result, name)
        assert all(torch.equal(v, found[k]) for k, v in model.items())


def test_no_model_is_uploaded() -> None:
    result = fit("fedaf(ipc=2, image_steps=1, server_epochs=1)", data=federation((9, 14)), rounds=1, precision="fp32")
    images, counts, sums = 3 * 2 * 6, 3, 3 * 6 + 3
    assert result.history[0]["bytes_up"] == 2 * 4 * (images + counts + sums)


def test_models_with_several_inputs_are_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.last(torch.cat([a, b], 1))  # type: ignore[no-any-return]

    x = np.zeros((4, 2), np.float32)
    part = ((x, x), np.array([0, 1, 2, 0]))
    with pytest.raises(fl.UserError, match="one tensor"):
        fit("fedaf", Two(), fl.Federation.from_arrays([(part, part)]))


@pytest.mark.parametrize("plugin", ["clip", "proximal", "isr", "lag", "control_variates", "server_momentum"])
def test_nothing_stacks_on_a_method_whose_clients_train_no_model(plugin: str) -> None:
    with pytest.raises(fl.Conflict, match="its clients train images"):
        fl.method(f"fedaf + {plugin}")
