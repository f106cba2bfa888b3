"""DARP followed by cRT: FixMatch with DARP's pseudo-labels, then a new classifier on the frozen
network.

The first stage is darp.py for --iters iterations. The second starts from its EMA, with labeled
images only, as in supervised.py: class weights ~ 1 / N_k, weak views, BatchNorm in eval mode.
Assumes of the unlabeled set what DARP assumes; the second stage does not use it.

The official second stage mixes its images (mixup) and leaves BatchNorm in train mode, so that the
running statistics drift to those of mixed images. It judges the live network, and which checkpoint
of the first stage it started from is not known: here the EMA is judged, and the last one is taken.
"""
from baselines.darp import DARP
from baselines.supervised import CRT


class DARPThenCRT(DARP, CRT):
    @staticmethod
    def flags(p):
        DARP.flags(p)
        CRT.flags(p)

    @staticmethod
    def check(cfg):
        DARP.check(cfg)
        CRT.check(cfg)

    def schedule(self, step):
        """The first stage's: DARP's shares are of its length."""
        return step, self.ctx.cfg.iters - self.ctx.cfg.crt_iters

    def base(self, step):
        return "supervised" if self.second_stage else super().base(step)
