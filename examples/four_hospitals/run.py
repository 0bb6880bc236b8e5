"""Four hospitals as separate processes on this machine, over TLS with authenticated sites.

    python examples/four_hospitals/run.py [FOLDER]

Needs `pip install "fedloom[flower]"` and the heart disease data (FEDLOOM_DATA, or they are downloaded).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from fedloom.flower.server import processes, results
from fedloom.flower.setup import project
from fedloom.flower.site import node
from fedloom.flower.site.site_data import SiteConfig


def main(folder: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # four hospitals share this machine's cores
    consortium = folder / "consortium"
    plan = project.init(
        consortium,
        experiment=Path(__file__).with_name("heart.toml"),
        sites=[],
        host="127.0.0.1",
        port=18443,
        inner=19443,
    )
    with ExitStack() as stack:
        stack.enter_context(processes.server(consortium, listen="127.0.0.1"))
        for name in plan.sites:
            place = consortium / "sites" / name
            log = stack.enter_context((place / "node.log").open("ab"))
            stack.enter_context(node.site(place, SiteConfig.load(place / "site.toml"), log))
        begun = time.monotonic()
        processes.run(consortium, folder / "results")
        print(results.text(results.read(folder / "results")))
        print(f"{plan.rounds} rounds in {time.monotonic() - begun:.0f} s; everything is in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="four-hospitals-")))
