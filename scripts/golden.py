"""Compare the numbers of two commits bit for bit: every method, several engines, three networks.

Hashes differ between processors and versions of torch, so record the old commit on the machine
that compares:

    python scripts/golden.py record before-architecture old.json
    python scripts/golden.py compare old.json

``--engines`` takes loop, mapped, traced, graphed and "waves of two", separated by commas.
``values`` writes the float64 values that ``tests/golden/test_golden.py`` compares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "golden" / "cases.py"
VALUES = ROOT / "tests" / "golden" / "values.json"
ENGINES = "loop,mapped,waves of two,traced"


def run_cases(source: Path, file: Path, engines: str) -> dict[str, str]:
    """Hash all cases with the package in ``source`` and write them to ``file``."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(CASES), str(file), engines], env=environment, check=True)
    hashes: dict[str, str] = json.loads(file.read_text())
    return hashes


def record(commit: str, file: Path, engines: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            hashes = run_cases(tree / "src", file, engines)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print(f"{len(hashes)} hashes of {commit} in {file}")


def compare(file: Path, engines: str) -> int:
    expected = json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as folder:
        hashes = run_cases(ROOT / "src", Path(folder) / "new.json", engines)
    different = [name for name, value in hashes.items() if expected.get(name) != value]
    for name in different:
        print(f"{name}: {expected.get(name)} before, {hashes[name]} now")
    print(f"{len(hashes) - len(different)} of {len(hashes)} hashes are equal")
    return bool(different)


def write_values() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.golden.cases import cases, play, project

    values = {
        f"{network} | {text}": project(play(text, network, engine, precision="fp64"))
        for engine, network, text in cases(["loop"])
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in values.items()]
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(values)} cases in {VALUES}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=ENGINES)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="hash a commit in a worktree")
    recording.add_argument("commit")
    recording.add_argument("file", type=Path)
    comparing = commands.add_parser("compare", help="compare the working tree with recorded hashes")
    comparing.add_argument("file", type=Path)
    commands.add_parser("values", help="write the values of the committed test")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.commit, arguments.file.resolve(), arguments.engines)
        return 0
    if arguments.command == "compare":
        return compare(arguments.file, arguments.engines)
    write_values()
    return 0


if __name__ == "__main__":
    sys.exit(main())
