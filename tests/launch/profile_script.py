"""One rank a host: profiled fits of ring_ddp, one for each number of features; rank 0 writes the profiles."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.callbacks import ProfilerReport
from tests.launch.wide import Wide, fit_wide


def main() -> None:
    root = Path(sys.argv[1])
    profiles = []
    for num_features in map(int, sys.argv[2:]):
        report = ProfilerReport(wait=1, warmup=0, active=2)
        steps = 5  # the window, and the step behind it
        fit_wide(Wide(num_features), root, RingDDPStrategy(), max_steps=steps, batch_size=2, callbacks=[report])
        profiles.append(report.profile)
    if os.environ["NODE_RANK"] == "0":
        (root / "profiles.json").write_text(json.dumps(profiles))


if __name__ == "__main__":
    main()
