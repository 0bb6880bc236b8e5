"""Street scenes without a download: towns that differ in layout, weather, light, classes and size."""

from __future__ import annotations

import inspect

import numpy as np
import torch

from fedloom.data.client_data import Scale
from fedloom.data.dataset import Dataset
from fedloom.data.rows import Rows
from fedloom.data.sets.street_drawing import CLASSES, Town, draw
from fedloom.errors import UserError
from fedloom.rng import stream

WEATHERS = ("clear", "fog", "rain", "dusk", "night")
SCALE = Scale((0.41, 0.42, 0.43), (0.18, 0.18, 0.23))


def street_scenes(
    *,
    towns: int = 6,
    frames: int = 24,
    length: int = 6,
    size: tuple[int, int] = (64, 96),
    layout: float = 1.0,
    weather: float = 1.0,
    quantity: float = 0.5,
    seed: int = 0,
) -> Dataset:
    """Street scenes with a class for every pixel, drawn by formulas; towns are the natural clients.

    Each town has streets, houses, green, traffic, weather and light of its own. Frames come in short sequences in which the
    camera drives on, so that neighbouring frames are near-copies, as in real recordings.

    Args:
        towns: Number of towns.
        frames: Frames of a town, on average; a whole number of sequences.
        length: Frames of a sequence.
        size: Height and width of a frame, at least 16.
        layout: How much towns differ in layout and in what there is to see (label skew); 0 for not at all.
        weather: How much they differ in weather and light (feature skew); 0 for a clear day everywhere.
        quantity: How much they differ in their number of frames: spread of its logarithm; 0 for equal.
        seed: Seed of everything.

    Example:
        >>> data = street_scenes(towns=3, frames=12, size=(32, 48)).partition()
        >>> data.ids, tuple(data[0].train.x.shape[1:]), data.classes[:3]
        (('town1', 'town2', 'town3'), (3, 32, 48), ('road', 'sidewalk', 'building'))
    """
    _check(towns, frames, length, size, (layout, weather, quantity))
    names = tuple(f"town{k + 1}" for k in range(towns))
    pictures, masks, group = [], [], []
    sequence: list[np.ndarray] = []
    for k in range(towns):
        choose = stream(seed, "partition", "town", k)
        count = max(2, round(frames / length * float(np.exp(quantity * choose.standard_normal()))))
        town = _town(choose, k, layout, weather)
        one, mask = _film(town, k, count, length, (size[0], size[1]), stream(seed, "partition", "film", k))
        pictures.append(one)
        masks.append(mask)
        group.append(np.full(len(mask), k))
        sequence.append(np.repeat(np.arange(count), length) + sum(map(len, sequence)))
    rows = Rows(torch.from_numpy(np.concatenate(pictures)), torch.from_numpy(np.concatenate(masks).astype(np.int64)))
    values = {"towns": towns, "frames": frames, "length": length, "size": tuple(size), "layout": layout}
    values |= {"weather": weather, "quantity": quantity, "seed": seed}
    defaults = {name: p.default for name, p in inspect.signature(street_scenes).parameters.items()}
    return Dataset(
        "street_scenes",
        rows,
        classes=CLASSES,
        scale=SCALE,
        groups=names,
        train_groups=np.concatenate(group).astype(np.int64),
        options={name: value for name, value in values.items() if value != defaults[name]},
        sequences=np.concatenate(sequence).astype(np.int64),
    )


def _check(towns: int, frames: int, length: int, size: object, skews: tuple[float, ...]) -> None:
    whole = all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in (towns, frames, length))
    pair = isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(v, int) and v >= 16 for v in size)
    if not whole or not pair:
        raise UserError(
            f"street_scenes: towns = {towns!r}, frames = {frames!r}, length = {length!r}, size = {size!r}; expected whole "
            "numbers of at least 1, and size = (height, width) of at least 16 each."
        )
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v <= 2 for v in skews):
        raise UserError(f"street_scenes: layout, weather, quantity = {skews}; expected numbers from 0 to 2.")


def _film(
    town: Town, k: int, count: int, length: int, size: tuple[int, int], move: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """``count`` sequences of a town: in each the camera starts somewhere and drives on, swaying a little."""
    start, speed = move.uniform(0, 300, count), move.uniform(0.3, 0.9, count)
    lane, phase = move.uniform(-0.2, 0.2, count), move.uniform(0, 6, count)
    tick = np.arange(length)
    travelled = (start[:, None] + speed[:, None] * tick).reshape(-1)
    sway = (town.road * lane[:, None] + 0.05 * np.sin(phase[:, None] + tick)).reshape(-1)
    world = np.repeat(move.random(count), length) + k
    return draw(town, travelled, sway, world, size, move)


def _town(choose: np.random.Generator, k: int, layout: float, weather: float) -> Town:
    """A town: the middle of the road for layout = weather = 0, an odd one for 1."""

    def between(middle: float, low: float, high: float, skew: float) -> float:
        value = middle + skew * (choose.uniform(low, high) - middle)
        return float(np.clip(value, min(low, 0.5 * middle), max(high, 2 * middle)))

    def often(middle: float, spread: float) -> float:
        odds = middle / (1 - middle) * np.exp(layout * spread * choose.standard_normal())
        return float(odds / (1 + odds))

    rates = {"tree": often(0.4, 1.0), "pole": often(0.5, 0.8), "car": often(0.55, 1.0), "person": often(0.5, 1.0)}
    road, walk = between(2.0, 1.2, 3.2, layout), between(1.0, 0.5, 1.8, layout)
    houses, gaps = between(4.0, 1.6, 8.0, layout), often(0.2, 1.2)
    horizon, focal = between(0.45, 0.36, 0.54, layout), between(0.7, 0.55, 0.9, layout)
    bonnet = between(0.06, 0.0, 0.12, layout)
    kind = WEATHERS[int(choose.integers(len(WEATHERS)))] if k else WEATHERS[0]
    strength = weather * float(choose.uniform(0.6, 1.0)) if kind != "clear" else 0.0
    light = {"dusk": 0.35, "night": 0.62, "rain": 0.2}.get(kind, 0.0)
    warmth = float(np.exp(weather * (0.06 * choose.standard_normal() + 0.12 * (kind == "dusk"))))
    return Town(
        road=road,
        sidewalk=walk,
        houses=houses,
        gaps=gaps,
        rates=rates,
        horizon=horizon,
        focal=focal,
        bonnet=bonnet,
        light=float(np.clip(1 - light * strength + 0.08 * weather * choose.standard_normal(), 0.25, 1.25)),
        warmth=warmth,
        haze=0.004 + (0.07 * strength if kind == "fog" else 0.0),
        rain=min(strength, 1.0) if kind == "rain" else 0.0,
        hue=0.07 * weather * choose.standard_normal((3, 3)),
    )
