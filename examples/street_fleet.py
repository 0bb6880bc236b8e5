"""A maker of cars trains a network that reads streets. Pictures may not cross borders, but its own test cars fill a cloud.

    python examples/street_fleet.py [FOLDER]

Towns in several countries drive under their own law: their pictures stay there (federated). The maker's home town is its own, so its
pictures lie in the cloud (centralised). Hybrid mode uses both: in every round the cloud and the towns train from the same model, and the two
steps are mixed by how well they agree. `isr` supervises layers inside the network as well (OmniISR). The streets are drawn by formulas, so
that nothing has to be downloaded. About five minutes on a laptop.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fedloom as fl

HOME = "town1"


def main(
    folder: Path,
    rounds: int = 12,
    towns: int = 4,
    frames: int = 18,
    epochs: int = 3,
    size: tuple[int, int] = (48, 72),
    methods: tuple[str, ...] = (),
) -> Path:
    # 1. Towns differ in streets, weather and light; each is a client. The clear skies of the first are over the maker's head office.
    data = fl.data.load("street_scenes", towns=towns, frames=frames, size=size).partition(seed=0)
    print(data.summary())

    # 2. Without and with intermediate supervision: by towns alone, and by cloud and towns together.
    options = {
        "model": "topformer_t",
        "task": "segmentation",
        "rounds": rounds,
        "epochs": epochs,
        "batch_size": 4,
        "optimizer": fl.adam(lr=3e-3),
        "augment": {"flip": 0.5},
        "evaluate": {"every": max(1, rounds // 6)},
        "progress": True,
    }
    abroad = data.subset([town for town in data.ids if town != HOME])
    cloud = abroad.with_cloud((data[HOME].train.x, data[HOME].train.y))
    results = {}
    for method in methods or ("fedavg", "fedavg + isr(points=2)"):
        name = "plain" if method == "fedavg" else "isr"
        results[method, "federated"] = fl.fit(method, data=abroad, out=folder / f"{name}-federated", **options)
        results[method, "hybrid"] = fl.fit(
            method, data=cloud, mode="hybrid", hybrid={"mixing": "adaptive"}, out=folder / f"{name}-hybrid", **options
        )

    # 3. What came out, on test pictures of the towns abroad only.
    for (method, mode), result in results.items():
        last = result.history[-1]
        mixed = (
            f", the cloud's share went from {result.history[0]['alpha']:.2f} to {last['alpha']:.2f}"
            if mode == "hybrid"
            else ""
        )
        print(f"{method} ({mode}): mIoU {last['miou']:.3f}, worst tenth of the towns {last['miou_worst10']:.3f}{mixed}")

    # 4. Pictures say more than mIoU: what the camera saw, the truth, what each run says, and where it is wrong (red).
    shown = {f"{method} ({mode})": result for (method, mode), result in results.items()}
    fl.pictures(shown, abroad, clients=abroad.ids[:2], frames=2)

    # 5. One page: curves, towns, mixing weight and alignment of cloud and towns, losses at the taps, pictures.
    page = fl.report([result.path for result in results.values()], folder, title="A fleet across borders")
    print(f"report: {page}")
    return page


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/street-fleet"))
