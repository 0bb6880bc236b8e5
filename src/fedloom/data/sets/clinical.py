"""Data sets of people with natural clients: hospitals, regions, persons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.data.dataset import Dataset
from fedloom.data.preprocess import Preprocess
from fedloom.data.rows import Rows
from fedloom.data.sets.download import Official, Remote, find, load_npz, read_official
from fedloom.errors import UserError

_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_HEART_NAMES = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal"
_HEART = Official(
    "heart_disease",
    ("heart_disease",),
    (Remote("heart+disease.zip", ("https://archive.ics.uci.edu/static/public/45/heart+disease.zip",)),),
    sums=(
        ("processed.cleveland.data", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
        ("processed.hungarian.data", "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
        ("processed.switzerland.data", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
        ("processed.va.data", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
    ),
)
# Cholesterol and blood pressure of 0 are missing values in disguise (Swiss cholesterol throughout).
_HEART_STEPS = Preprocess(impute="median", scale="standard", missing={"chol": [0], "trestbps": [0]})


def heart_disease(
    data_dir: str | Path | None = None, preprocess: Preprocess | Mapping[str, Any] | None = None
) -> Dataset:
    """Heart disease yes or no, 13 features, 920 rows; 4 hospitals are the natural clients (Detrano et al.,
    1989).

    Missing values are imputed by the median and features scaled, fitted on each client's training rows.

    Args:
        data_dir: Where to look for heart_disease.npz or UCI's own files.
        preprocess: What to do with the columns instead.
    """
    if find("heart_disease.npz", data_dir) is not None:
        z = load_npz("heart_disease", "heart_disease.npz", data_dir)
        x, y, hospital = z["X"], z["y"], z["center"].astype(np.int64)
    else:
        names = [f"processed.{hospital}.data" for hospital in _HOSPITALS]
        content = read_official(_HEART, names, data_dir)
        tables = [parse_heart(content[name].decode("ascii", "replace")) for name in names]
        x = np.concatenate([table[:, :-1] for table in tables])
        y = np.concatenate([table[:, -1] for table in tables])
        hospital = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return Dataset(
        "heart_disease",
        Rows(torch.from_numpy(x.astype(np.float32)), torch.from_numpy((y > 0).astype(np.int64))),
        classes=("healthy", "diseased"),
        groups=_HOSPITALS,
        train_groups=hospital,
        preprocess=_HEART_STEPS if preprocess is None else Preprocess.of(preprocess),
        columns=tuple(_HEART_NAMES.split()),
    )


def parse_heart(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """UCI's processed files: 13 features and the diagnosis 0 to 4, separated by commas, "?" where missing."""
    lines = [line.split(",") for line in text.split("\n") if line.strip()]
    return np.array([[np.nan if v.strip() in ("?", "") else float(v) for v in line] for line in lines], np.float32)


def tcga_brca(data_dir: str | Path | None = None, censored: str = "drop") -> Dataset:
    """Breast cancer: death within the median follow-up, 39 features; 6 regions are the natural clients.

    Args:
        data_dir: Where to look for tcga_brca.npz.
        censored: What to do with patients whose follow-up ended earlier without an event, so that the label
            is
            unknown: "drop", or "negative" to count them as no event (all 1,088 rows).

    Reference:
        Liu et al., An integrated TCGA pan-cancer clinical data resource (2018); FLamby (2022) for the
        regions.
    """
    if censored not in ("drop", "negative"):
        raise UserError(f"tcga_brca: censored = {censored!r}; expected 'drop' or 'negative'.")
    z = load_npz("tcga_brca", "tcga_brca.npz", data_dir)
    event, time = z["event"].astype(bool), z["time"]
    horizon = float(np.median(time))
    label = event & (time <= horizon)
    known = label | (time >= horizon) if censored == "drop" else np.ones(len(label), bool)
    train, test = known & z["is_train"], known & ~z["is_train"]
    x = torch.from_numpy(z["X"].astype(np.float32))
    y = torch.from_numpy(label.astype(np.int64))
    region = z["center"].astype(np.int64)
    return Dataset(
        "tcga_brca",
        Rows(x[torch.from_numpy(train)], y[torch.from_numpy(train)]),
        Rows(x[torch.from_numpy(test)], y[torch.from_numpy(test)]),
        classes=("no event", "event"),
        groups=tuple(map(str, z["centers"])),
        train_groups=region[train],
        test_groups=region[test],
        options={} if censored == "drop" else {"censored": censored},
        preprocess=Preprocess(scale="standard", fit="federated"),
        columns=tuple(map(str, z["columns"])),
    )


def har(data_dir: str | Path | None = None) -> Dataset:
    """Activity from a smartphone, windows of 9 channels x 128 samples, 10,299 rows, 6 classes; 30 people.

    Reference:
        Anguita et al., A public domain dataset for human activity recognition using smartphones (2013).
    """
    z = load_npz("har", "har_f16.npz", data_dir)
    # Windows overlap by half: a window's first half is the previous one's second, unless stored apart.
    second = z["second_half"]
    first = np.concatenate([second[:1], second[:-1]])
    first[z["first_half_idx"]] = z["first_half"]
    windows = np.concatenate([first, second], 1).astype(np.float32).transpose(0, 2, 1)
    people = np.unique(z["subject"])
    return Dataset(
        "har",
        Rows(torch.from_numpy(windows.copy()), torch.from_numpy(z["activity"].astype(np.int64))),
        classes=tuple(map(str, z["activities"])),
        groups=tuple(str(person) for person in people),
        train_groups=np.searchsorted(people, z["subject"]).astype(np.int64),
    )
