"""CDMAD (Lee and Kim 2024): subtract what the network answers to an image without content.

    b = l(blank)                          its logits for one blank image, measured anew at each step
    q = softmax(l(weak view) - b)         pseudo-labels, from a fifth of the run on; before, b = 0
    L = mean H(y, l(x)) + mean H(q, l(strong view))      q is soft, every image counts
    test: argmax l(x) - b                 l and b of the EMA

The losses see l itself. Post-hoc logit adjustment subtracts log N_k, a constant; b needs no counts
and follows the bias that labels and pseudo-labels have built up together.
Assumes nothing about the unlabeled set, but that b = log prior + const: that no class looks blank.

As in the official code, the blank image is not white but one where all normalised pixels are 1, a
light grey, and it goes through the network alone, normalised by its own statistics; at test time by
the running ones. Here it leaves no trace in the running statistics.
"""
import torch

from baselines import Method

START = 0.2                                          # share of the run before b is subtracted


class CDMAD(Method):
    @staticmethod
    def flags(p):
        p.set_defaults(labels="soft")

    def refine(self, p, batch):
        """The loop freezes BatchNorm's running statistics around this call."""
        if batch.step < round(START * self.ctx.cfg.iters):
            return p
        classify, blank = self.ctx.model.classifier, torch.ones_like(batch.x_l[:1])
        b = classify(self.ctx.features(blank))                                 # (1, K)
        return (classify(batch.z_u) - b).softmax(1)                            # (U, K)

    @staticmethod
    def predict(model, x):
        return model(x) - model(torch.ones_like(x[:1]))                        # (N, K)
