"""Metrics against scikit-learn and torchmetrics, merged over batches and clients."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torchmetrics.functional as tm
from torch import Tensor

import fedloom as fl
from fedloom.tasks import TASKS, Task, named
from fedloom.tasks.base import class_logits
from fedloom.tasks.batch import Batch
from fedloom.tensors import Leaves
from tests.helpers import federation, fit

DRAW = np.random.default_rng(0)


def added(task: Task, output: Tensor, y: Tensor, cuts: list[int]) -> Leaves:
    """Statistics added up over pieces, each with padding rows behind it."""
    assert task.statistics is not None
    total: Leaves = {}
    for out, target in zip(output.tensor_split(cuts), y.tensor_split(cuts), strict=True):
        padded = torch.cat([out, torch.full_like(out[:1], 3.0)])
        labels = torch.cat([target, torch.zeros_like(target[:1])])
        mask = torch.tensor([1.0] * len(out) + [0.0])
        part = task.statistics(padded, Batch(padded, labels, mask))
        total = {k: total[k] + v if total else v for k, v in part.items()}
    return total


def test_classification_equals_scikit_learn() -> None:
    task = TASKS["classification"]
    logits = torch.from_numpy(DRAW.normal(size=(50, 4)))
    y = torch.from_numpy(DRAW.integers(0, 4, 50))
    found = task.judge(added(task, logits, y, [7, 30]), {})
    said = logits.argmax(1)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, said))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, said))
    assert found["f1"] == pytest.approx(sk.f1_score(y, said, average="macro"))
    assert found["loss"] == pytest.approx(sk.log_loss(y, logits.softmax(1), labels=range(4)))


def test_a_missing_class_counts_as_scikit_learn_does() -> None:
    task = TASKS["classification"]
    logits, y = torch.eye(4)[[0, 1, 1, 0]].double(), torch.tensor([0, 1, 0, 0])
    found = task.judge(added(task, logits, y, [2]), {})
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, logits.argmax(1)))
    assert found["f1"] == pytest.approx(sk.f1_score(y, logits.argmax(1), average="macro"))


def test_binary_equals_scikit_learn_with_ties() -> None:
    task = TASKS["binary"]
    score = torch.from_numpy(DRAW.normal(size=60).round(1))[:, None]
    y = torch.from_numpy(DRAW.integers(0, 2, 60))
    found = task.judge({}, {"output": score, "y": y})
    p, said = torch.sigmoid(score[:, 0]), (score[:, 0] > 0).long()
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, score[:, 0]))
    assert found["auprc"] == pytest.approx(sk.average_precision_score(y, score[:, 0]))
    assert found["brier"] == pytest.approx(sk.brier_score_loss(y, p))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, said))
    assert found["sensitivity"] == pytest.approx(sk.recall_score(y, said))
    assert found["specificity"] == pytest.approx(sk.recall_score(y, said, pos_label=0))
    assert found["loss"] == pytest.approx(sk.log_loss(y, p))


def test_binary_with_one_class_has_no_auc() -> None:
    found = TASKS["binary"].judge({}, {"output": torch.tensor([[1.0], [-1.0]]), "y": torch.tensor([1, 1])})
    assert found["auc"] is None
    assert found["specificity"] is None
    assert found["accuracy"] == 0.5


def test_regression_equals_scikit_learn() -> None:
    output, y = torch.from_numpy(DRAW.normal(size=(30, 1))), torch.from_numpy(DRAW.normal(size=30))
    found = TASKS["regression"].judge({}, {"output": output, "y": y})
    assert found["mse"] == pytest.approx(sk.mean_squared_error(y, output[:, 0]))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, output[:, 0]))
    assert found["r2"] == pytest.approx(sk.r2_score(y, output[:, 0]))


@pytest.mark.parametrize("seed", range(3))
def test_segmentation_equals_torchmetrics_with_ignored_pixels(seed: int) -> None:
    draw = np.random.default_rng(seed)
    task, classes = TASKS["segmentation"], 5
    logits = torch.from_numpy(draw.normal(size=(6, classes, 7, 9)))
    y = torch.from_numpy(draw.integers(0, classes, (6, 7, 9)))
    y[torch.from_numpy(draw.random(y.shape)) < 0.2] = 255
    found = task.judge(added(task, logits, y, [1, 4]), {})
    valid = y != 255
    said, truth = logits.argmax(1)[valid], y[valid]
    options = {"task": "multiclass", "num_classes": classes, "average": "macro"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["miou"] == pytest.approx(float(tm.jaccard_index(said, truth, **options)), rel=1e-6)
        assert found["mf1"] == pytest.approx(float(tm.f1_score(said, truth, **options)), rel=1e-6)
        assert found["mprecision"] == pytest.approx(float(tm.precision(said, truth, **options)), rel=1e-6)
        assert found["mrecall"] == pytest.approx(float(tm.recall(said, truth, **options)), rel=1e-6)
    assert found["pixel_accuracy"] == pytest.approx(float((said == truth).double().mean()))
    plain = torch.nn.functional.cross_entropy(logits, y, ignore_index=255)
    assert found["loss"] == pytest.approx(float(plain))
    assert float(task.value(logits, Batch(logits, y))) == pytest.approx(float(plain))


def test_mean_of_a_masked_batch_is_that_of_the_real_rows() -> None:
    for name in ("classification", "binary", "regression"):
        task = TASKS[name]
        out = torch.randn(6, 3 if name == "classification" else 1, dtype=torch.float64)
        y = torch.randint(0, 2, (6,))
        mask = torch.tensor([1.0] * 4 + [0.0] * 2)
        whole = task.value(out, Batch(out, y, mask))
        assert float(whole) == pytest.approx(float(task.value(out[:4], Batch(out[:4], y[:4]))))


def test_binary_logits_as_class_logits() -> None:
    assert class_logits(torch.tensor([[2.0], [-1.0]])).tolist() == [[0.0, 2.0], [0.0, -1.0]]


def test_a_task_of_ones_own() -> None:
    task = fl.Task(
        lambda out, y: (out[:, 0] - y).abs(),
        metrics=lambda out, y: {"within": float(((out[:, 0] - y).abs() < 1).double().mean())},
        primary="within",
        higher_is_better=True,
    )
    for engine in ("loop", "vectorised"):
        result = fit(
            "fedper", lambda: torch.nn.Sequential(torch.nn.Linear(6, 1)), federation(), task=task, engine=engine
        )
        record = result.history[-1]
        assert 0 <= record["within"] <= 1
        assert record["within_worst10"] <= record["within"]
        assert set(result.clients["0"].metrics) >= {"loss", "within", "n_test"}


def test_unknown_tasks_suggest() -> None:
    with pytest.raises(fl.UnknownName, match="classification"):
        named("clasification")
