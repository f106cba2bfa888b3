"""CDMAD (Lee and Kim 2024): subtract what the network answers to an image without content.

    b = l(blank)                          its logits for one blank image, measured anew at each step
    q = softmax(l(weak view) - b)         pseudo-labels, from a fifth of the run on; before, b = 0
    L = mean H(y, l(x)) + mean H(q, l(strong view))      q is soft and every image counts: tau = 0
    test: argmax l(x) - b                 l and b of the EMA

The losses see l itself. Post-hoc logit adjustment subtracts log N_k, a constant; b needs no counts
and follows the bias that labels and pseudo-labels have built up together.
Assumes nothing about the unlabeled set, but that b = log prior + const: that no class looks blank.

The official code's image is not white but one where all normalised pixels are 1, a light grey:
--cdmad_image ones. It also lets that image into BatchNorm's running statistics (a sixth of them is
the blank image's); here they stay as they are. As there, the image goes through the network alone,
normalised by its own statistics; at test time by the running ones. Its optimiser and batch differ
from those of this loop: Adam with 1.5e-3, 32 + 64 images.
"""
import torch
import torch.nn.functional as F

import models
from baselines import Method
from support import UserError

START = 0.2                                          # share of the run before b is subtracted


def soft_loss(logits, q):
    """mean H(q, logits): logits (SU, K), S strong views of each image; q (U, K)."""
    return F.cross_entropy(logits, q.repeat_interleave(len(logits) // len(q), dim=0))


def blank_logits(model, features, size, bn):
    """b (1, K) of the live network. Within models.frozen_bn_stats; size: (H, W)"""
    norms = models.norms(model)
    shared = norms[0].shared
    for norm in norms:       # every rank has the same image: nothing to share
        norm.shared, norm.training = False, bn == "batch1"
    b = model.classifier(features(model.blank.expand(-1, -1, *size)))
    for norm in norms:
        norm.shared, norm.training = shared, True
    return b


class CDMAD(Method):
    @staticmethod
    def flags(p):
        add = p.add_argument_group("CDMAD").add_argument
        add("--cdmad_image", choices=("ones", "white", "black"), default="ones",
            help="the blank image: normalised pixels of 1, white or black (default: ones)")
        add("--cdmad_bn", choices=("batch1", "eval"), default="batch1", help="statistics that "
            "normalise it in training: its own, or the running ones (default: batch1)")
        add("--cdmad_targets", choices=("soft", "hard"), default="soft", help="soft labels of all "
            "images, whatever --tau is, or FixMatch's hard ones above --tau (default: soft)")

    @staticmethod
    def check(cfg):
        if cfg.cdmad_targets == "soft":
            cfg.tau = 0.0                            # every image counts, whatever --tau is

    @staticmethod
    def heads(model):
        model.register_buffer("blank", torch.ones(1, 3, 1, 1))                 # one pixel

    def __init__(self, ctx):
        super().__init__(ctx)
        self.start = round(START * ctx.cfg.iters)
        self.size = tuple(ctx.dataset.test_images.shape[2:])
        # ResNet-34 divides the sides by 32: BatchNorm cannot normalise one image of one pixel
        if ctx.cfg.cdmad_bn == "batch1" and ctx.cfg.model == "resnet34" and max(self.size) < 33:
            raise UserError("--cdmad_bn batch1 needs images of at least 33 pixels with --model "
                            "resnet34; choose eval")
        if ctx.cfg.cdmad_image != "ones":
            level = 255 if ctx.cfg.cdmad_image == "white" else 0
            pixel = torch.full((1, 3, 1, 1), level, dtype=torch.uint8, device=ctx.device)
            for network in (ctx.model, ctx.ema.model):
                network.blank.copy_(ctx.normalise(pixel))

    def refine(self, p, batch):
        if batch.step >= self.start:
            model, cfg = self.ctx.model, self.ctx.cfg
            b = blank_logits(model, self.ctx.features, self.size, cfg.cdmad_bn)
            p = (model.classifier(batch.z_u) - b).softmax(1)                   # (U, K)
        self.q = p
        return p

    def unlabeled_loss(self, logits, plain, batch):
        return plain(logits) if self.ctx.cfg.cdmad_targets == "hard" else soft_loss(logits, self.q)

    @staticmethod
    def predict(model, x):
        return model(x) - model(model.blank.expand(-1, -1, *x.shape[2:]))      # (N, K)
