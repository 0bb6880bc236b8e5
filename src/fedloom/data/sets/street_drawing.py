"""Drawing street scenes: a camera drives along a straight street, and every pixel knows what it sees.

A frame is made of formulas over the pixel grid, for all frames of a town at once. With the camera at height 1 above the
road, focal length f (in pixels) and the horizon at row h, a point at lateral position X, height Y and depth d is seen at

    column = c0 + f X / d,        row = h + f (1 - Y) / d.

Ground, house fronts and sky follow by inverting this; trees, cars, people and poles are painted over, far ones first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Generator = np.random.Generator

CLASSES = ("road", "sidewalk", "building", "sky", "vegetation", "car", "person", "pole", "sign")
VOID = 255
ROAD, SIDEWALK, BUILDING, SKY, VEGETATION, CAR, PERSON, POLE, SIGN = range(len(CLASSES))

FAR = 60.0
"""Depth beyond which nothing but sky and haze is drawn, in camera heights."""
_SLOTS = {"tree": 8, "pole": 6, "car": 6, "person": 6}
_HOUSES = 64


@dataclass(frozen=True, slots=True)
class Town:
    """How a town looks.

    Args:
        road: Half the width of the road, in camera heights.
        sidewalk: Width of each sidewalk.
        houses: Mean height of the houses.
        gaps: Share of house fronts that are open (green) instead.
        rates: Share of the places for a tree, pole, car, person that are taken.
        horizon: Row of the horizon, as a share of the height.
        focal: Focal length, as a share of the width.
        bonnet: Height of the car's own bonnet, as a share of the height; it is void.
        light: Brightness, 1 for a clear day.
        warmth: Gain of red against blue.
        haze: Density of fog per unit of depth.
        rain: Strength of rain.
        hue: Offsets of the houses' and the road's colours.
    """

    road: float
    sidewalk: float
    houses: float
    gaps: float
    rates: Mapping[str, float]
    horizon: float
    focal: float
    bonnet: float
    light: float
    warmth: float
    haze: float
    rain: float
    hue: Array


@dataclass(slots=True)
class Canvas:
    """Frames being painted: labels, depth and colour of every pixel, and the pixel grid."""

    label: NDArray[np.uint8]
    depth: Array
    colour: Array
    row: Array
    column: Array

    def paint(self, where: NDArray[np.bool_], label: Array | int, depth: Array | float, colour: Array) -> None:
        """Sets the pixels ``where``; ``label``, ``depth`` and ``colour`` may differ from frame to frame."""
        np.copyto(self.label, np.asarray(label).astype(np.uint8), where=where)
        np.copyto(self.depth, depth, where=where)
        np.copyto(self.colour, colour, where=where[..., None])


def draw(
    town: Town, travelled: Array, sway: Array, world: Array, size: tuple[int, int], seed: Generator
) -> tuple[Bytes, Bytes]:
    """Frames of a town: images (n, 3, h, w) and masks (n, h, w), 255 for void.

    Args:
        town: How it looks.
        travelled: For each frame, how far the camera has driven along its street.
        sway: For each frame, its lateral position.
        world: For each frame, 0 to 1: which street it is in; frames of one sequence share it.
        size: Height and width.
        seed: Source of grain and rain.
    """
    height, width = size
    n = len(travelled)
    focal, horizon = town.focal * width, town.horizon * height
    row = np.broadcast_to((np.arange(height) + 0.5)[None, :, None], (n, height, width))
    column = np.broadcast_to((np.arange(width) + 0.5 - width / 2)[None, None, :], (n, height, width))
    canvas = Canvas(
        np.full((n, height, width), SKY, np.uint8),
        np.full((n, height, width), FAR),
        np.zeros((n, height, width, 3)),
        row - horizon,
        column,
    )
    street = (world[:, None, None] * 1e4).round()
    sky = np.clip((horizon - row) / max(horizon, 1.0), 0, 1)[..., None]
    canvas.colour = np.array([0.78, 0.84, 0.92]) * (1 - sky) + np.array([0.45, 0.65, 0.92]) * sky
    _ground(canvas, town, focal, travelled, sway)
    _houses(canvas, town, focal, travelled, sway, street)
    _objects(canvas, town, focal, travelled, sway, world)
    bonnet = (canvas.row + horizon) > height * (1 - town.bonnet * (1 - (2 * column / width) ** 2))
    canvas.paint(bonnet & (town.bonnet > 0), VOID, 1.0, np.array([0.16, 0.17, 0.2]))
    return _developed(canvas, town, seed), canvas.label


def chance(*keys: Array) -> Array:
    """Numbers in [0, 1) that depend on whole numbers only, so that a house keeps its look from frame to frame."""
    word = np.zeros(np.broadcast_shapes(*(k.shape for k in keys)), np.uint64)
    for key in keys:
        word = (word ^ (key.astype(np.int64).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        word = (word ^ (word >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(29)
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _ground(canvas: Canvas, town: Town, focal: float, travelled: Array, sway: Array) -> None:
    """Road with a dashed line, sidewalks beside it, green beyond."""
    below = canvas.row > 0
    depth = np.where(below, focal / np.maximum(canvas.row, 1e-3), FAR)
    lateral = canvas.column * depth / focal + sway[:, None, None]
    along = depth + travelled[:, None, None]
    seen = below & (depth < FAR)
    grain = 0.05 * (chance(np.floor(along * 3), np.floor(lateral * 4)) - 0.5)[..., None]
    canvas.paint(seen, VEGETATION, depth, np.array([0.33, 0.46, 0.24]) + grain)
    paved = seen & (np.abs(lateral) < town.road + town.sidewalk)
    canvas.paint(paved, SIDEWALK, depth, np.array([0.66, 0.62, 0.6]) + 0.5 * town.hue[1] + grain)
    road = seen & (np.abs(lateral) < town.road)
    canvas.paint(road, ROAD, depth, np.array([0.33, 0.33, 0.35]) + 0.5 * town.hue[2] + grain)
    line = road & (np.abs(lateral) < 0.06) & (np.mod(along, 4) < 2)
    canvas.paint(line, ROAD, depth, np.array([0.9, 0.9, 0.86]))


def _houses(canvas: Canvas, town: Town, focal: float, travelled: Array, sway: Array, street: Array) -> None:
    """House fronts on both sides: a front at lateral distance B is seen at depth f B / |column|."""
    distance = town.road + town.sidewalk + 0.3
    for side in (-1.0, 1.0):
        offset = side * canvas.column
        reach = distance - side * sway[:, None, None]
        depth = np.where(offset > 0.5, focal * reach / np.maximum(offset, 0.5), FAR)
        along = depth + travelled[:, None, None]
        house = np.mod(np.floor(along / 5), _HOUSES) + (side > 0) * _HOUSES
        tall = town.houses * (0.55 + 0.9 * chance(house, street, np.array([1.0])))
        open_ = chance(house, street, np.array([2.0])) < town.gaps
        tall = np.where(open_, 0.6 + 0.5 * chance(np.floor(along * 2), street), tall)
        height = 1 - canvas.row * depth / focal
        front = (depth < FAR) & (height < tall) & (height > 0)
        tint = 0.22 * (chance(house, street, np.array([3.0]))[..., None] - 0.5)
        wall = np.array([0.6, 0.5, 0.42]) + town.hue[0] + tint
        window = (np.mod(height, 1) > 0.45) & (np.mod(along, 1.2) < 0.6) & ~open_
        shade = np.where(window[..., None], wall * 0.45, wall)
        green = np.array([0.22, 0.4, 0.18]) + 0.1 * (chance(np.floor(along * 4), np.floor(height * 6))[..., None] - 0.5)
        canvas.paint(front, np.where(open_, VEGETATION, BUILDING), depth, np.where(open_[..., None], green, shade))


def _objects(canvas: Canvas, town: Town, focal: float, travelled: Array, sway: Array, world: Array) -> None:
    """Trees, poles with signs, cars and people, painted by depth, far ones first, frame by frame in step."""
    parts = [_parts(kind, slot, town, travelled, world) for kind, slots in _SLOTS.items() for slot in range(slots)]
    table = {key: np.stack([part[key] for group in parts for part in group]) for key in parts[0][0]}
    order = np.argsort(-table["depth"], axis=0, kind="stable")
    for rank in range(len(order)):
        one = {
            key: np.take_along_axis(value, order[rank : rank + 1, :, *[None] * (value.ndim - 2)], 0)[0]
            for key, value in table.items()
        }
        here = (one["depth"] > 0.8) & (one["depth"] < FAR)
        if not here.any():
            continue
        depth = np.where(here, one["depth"], 1.0)[:, None, None]
        x, y, w, h, power = (one[key][:, None, None] for key in ("x", "y", "w", "h", "power"))
        across = (canvas.column[:1, :1, :] * depth / focal + sway[:, None, None] - x) / w
        up = (1 - canvas.row[:1, :, :1] * depth / focal - y) / h
        inside = (np.abs(across) ** power + np.abs(up) ** power <= 1) & here[:, None, None]
        colour = one["colour"][:, None, None, :] * (1 + 0.25 * np.clip(up, -1, 1)[..., None])
        canvas.paint(inside & (depth < canvas.depth), one["label"][:, None, None], depth, colour)


def _parts(kind: str, slot: int, town: Town, travelled: Array, world: Array) -> list[dict[str, Array]]:
    """One thing in every frame, as two shapes: centre (x, y), half sizes (w, h), power 2 round to 8 square."""
    spacing, n = FAR / _SLOTS[kind], len(travelled)
    key = np.full(n, 100.0 * (list(_SLOTS).index(kind) + 1))
    # Things stand in cells along the street; a cell's number, not its slot, decides its look, so that it stays the same
    # thing while the camera passes. Cars and people move on their own.
    moving = travelled * {"car": 0.5, "person": 0.9}.get(kind, 1.0)
    cell = np.floor(moving / spacing) + slot
    street = (world * 1e4).round()

    def draw(i: int) -> Array:
        return chance(cell, street, key + i)

    taken = draw(0) < town.rates[kind]
    depth = np.where(taken, (cell + 0.8 * draw(1)) * spacing - moving, -1.0)
    side = np.where(draw(2) < 0.5, -1.0, 1.0)
    shade = 0.75 + 0.5 * draw(3)[:, None]

    def shape(
        label: int, x: Array, y: Array | float, w: Array | float, h: Array | float, power: float, colour: Array
    ) -> dict[str, Array]:
        full = np.ones(n)
        values = {
            "depth": depth,
            "x": x,
            "y": y * full,
            "w": w * full,
            "h": h * full,
            "power": power * full,
            "label": label * full,
        }
        return values | {"colour": np.broadcast_to(colour, (n, 3)) * shade}

    edge = side * (town.road + 0.25)
    if kind == "tree":
        tall, x = 1.6 + 1.6 * draw(4), side * (town.road + 0.75 * town.sidewalk)
        crown = shape(VEGETATION, x, tall, 0.5 + 0.4 * draw(5), 0.55 * tall, 2.0, np.array([0.2, 0.42, 0.16]))
        return [shape(VEGETATION, x, 0.5 * tall, 0.08, 0.5 * tall, 8.0, np.array([0.3, 0.22, 0.15])), crown]
    if kind == "pole":
        tall = 1.8 + 0.8 * draw(4)
        plate = np.where(draw(5)[:, None] < 0.5, np.array([0.85, 0.15, 0.12]), np.array([0.15, 0.3, 0.8]))
        sign = shape(SIGN, edge, tall, np.where(draw(6) < 0.6, 0.28, 0.0) + 1e-6, 0.28, 2.0, plate)
        return [shape(POLE, edge, 0.5 * tall, 0.06, 0.5 * tall, 8.0, np.array([0.45, 0.45, 0.47])), sign]
    if kind == "car":
        lane = side * town.road * (0.35 + 0.4 * draw(4))
        paint = np.stack([draw(5), draw(6), draw(7)], -1) * 0.7 + 0.15
        cabin = shape(CAR, lane, 0.85, 0.42, 0.3, 4.0, paint * 0.5)
        return [shape(CAR, lane, 0.42, 0.6, 0.36, 6.0, paint), cabin]
    walk = np.where(
        draw(4) < 0.7, side * (town.road + town.sidewalk * (0.2 + 0.6 * draw(5))), side * town.road * draw(5)
    )
    clothes = np.stack([draw(6), draw(7), draw(8)], -1) * 0.8 + 0.1
    head = shape(PERSON, walk, 1.05, 0.11, 0.13, 2.0, np.array([0.78, 0.6, 0.5]))
    return [shape(PERSON, walk, 0.47, 0.19, 0.46, 4.0, clothes), head]


def _developed(canvas: Canvas, town: Town, seed: Generator) -> Bytes:
    """Light, haze, rain and grain: the scene as the camera records it, in bytes."""
    fog = 1 - np.exp(-town.haze * canvas.depth)[..., None]
    picture = canvas.colour * (1 - fog) + np.array([0.75, 0.77, 0.8]) * fog
    grey = picture.mean(-1, keepdims=True)
    picture = picture + 0.5 * town.rain * (grey - picture)
    picture = picture * town.light * np.array([town.warmth, 1.0, 1 / town.warmth])
    shape = picture.shape[:3]
    grain = (0.015 + 0.02 * (town.light < 0.6)) * seed.standard_normal((*shape, 1), np.float32)
    streak = np.repeat(seed.random((shape[0], -(-shape[1] // 4), shape[2], 1), np.float32), 4, axis=1)[:, : shape[1]]
    picture = picture + grain + 0.25 * town.rain * (streak > 0.93)
    return np.asarray(np.clip(np.moveaxis(picture, -1, 1) * 255 + 0.5, 0, 255), np.uint8)
