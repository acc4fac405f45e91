"""Scene 3: the same training with an epsilon, and a loss scale that starts too high and settles. Nothing is wrong here.

The first steps are skipped by GradScaler, as it should: torchrun --nproc-per-node 2 healthy.py
"""

from __future__ import annotations

from segmentation import BROKEN_SCAN, train

if __name__ == "__main__":
    train(broken=BROKEN_SCAN, eps=1e-6, init_scale=2.0**20)
