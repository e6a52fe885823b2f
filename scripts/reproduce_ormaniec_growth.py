"""Run the sweeps of ormaniec2025 on a machine with only torch, numpy and scipy, such as a borrowed GPU.

    python scripts/reproduce_ormaniec_growth.py run DIR --profile full --device cuda   # resumes if begun
    python scripts/reproduce_ormaniec_growth.py publish DIR OUT                        # figures and tables

`run` writes DIR/result.json and DIR/arrays.npz, and during the run a file for every finished piece in
DIR/state. `publish` writes them into a folder of `curvescope reproduce`, as if that command had computed
them.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from curvescope.papers.ormaniec2025 import growth
from curvescope.runs.pieces import Pieces


class Clock:
    """Progress that prints the time of each experiment, and sometimes the position in the run."""

    def __init__(self):
        self.experiment, self.begun, self.start = "", 0.0, time.monotonic()

    def __call__(self, what: str, number: int, total: int) -> None:
        experiment, now = what.split(".")[0], time.monotonic()
        if experiment != self.experiment:
            if self.experiment:
                print(f"{self.experiment}: {now - self.begun:.1f} s", flush=True)
            self.experiment, self.begun = experiment, now
        if number % 100 == 0:
            print(f"  {number} of {total} after {now - self.start:.0f} s", flush=True)


def run(args: argparse.Namespace) -> None:
    cfg = growth.Config(
        profile=args.profile, device=args.device, replay=args.replay, experiments=tuple(args.experiments),
        repeats=args.repeats, probes=args.probes, every=args.every, exact=not args.estimate,
    )  # fmt: skip
    clock = Clock()
    result = growth.run(cfg, progress=clock, state=Pieces(args.folder / "state"))
    clock("end", 0, 1)
    result.save(args.folder)
    print(f"all: {time.monotonic() - clock.start:.1f} s")
    for line in result.summary():
        print(" | ".join(line))


def publish(args: argparse.Namespace) -> None:
    from curvescope.papers import folder

    result = growth.GrowthCurves.load(args.folder)
    entry = {"settings": result.settings, "from": "scripts/reproduce_ormaniec_growth.py"}
    folder.publish(args.out, "ormaniec2025", "growth", result, entry, args.out / "growth-drawing", print)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("folder", type=Path)
    run_parser.add_argument("--profile", default="full")
    run_parser.add_argument("--device", default="cpu")
    run_parser.add_argument("--replay", action="store_true")
    run_parser.add_argument("--experiments", nargs="+", default=["*"])
    run_parser.add_argument("--repeats", type=int)
    run_parser.add_argument("--probes", type=int)
    run_parser.add_argument("--every", type=int, help="2: every second scale")
    run_parser.add_argument("--estimate", action="store_true", help="estimate with probes instead of exactly")
    run_parser.set_defaults(call=run)
    two = commands.add_parser("publish")
    two.add_argument("folder", type=Path)
    two.add_argument("out", type=Path)
    two.set_defaults(call=publish)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
