"""DASO: blend the linear classifier's pseudo-label with a semantic one, class by class.

The linear classifier is biased towards the head classes; the similarity to the class centres in
feature space (the "semantic" label q) is biased towards the tail. The more often a class is
predicted, the larger the weight of q for images that the linear classifier assigns to it.

    q  = softmax_k(cos(z_u, c_k) / 0.05)          c_k: mean of a queue of labeled EMA features
    p' = (1 - v_k') p + v_k' q                    k' = argmax p
    v_k = m_k^(1/T_d) / max_j m_j^(1/T_d)         m: histogram of the last window of pseudo-labels
    L += mean H(q, softmax_k(cos(z_s, c_k) / 0.05))    z_s: strong views

The queue's features are those of the EMA in eval mode. The official code leaves it in train mode,
so that they depend on the batch and the pass changes the EMA's running statistics.
The default of T_d depends on whether gamma_l = gamma_u, so it uses knowledge of the unlabeled set.
"""
import torch
import torch.nn.functional as F

from baselines import LIKE_CIFAR10, Method, matched

TEMPERATURE, QUEUE = 0.05, 256
START = 0.02                                   # share of the run before blending starts


def similarity(z, centres):
    """Logits of the semantic classifier. (N, D), (K, D) -> (N, K)"""
    return F.linear(F.normalize(z), F.normalize(centres)) / TEMPERATURE


class DASO(Method):
    @staticmethod
    def flags(p):
        p.add_argument("--daso_td", type=float, help="T_d; None: 1.5 on digits, cifar10 and "
                       "synthetic where gamma_l = gamma_u, else 0.3")

    @staticmethod
    def check(cfg):
        like_cifar10 = cfg.dataset in LIKE_CIFAR10
        cfg.daso_td = cfg.daso_td or (1.5 if like_cifar10 and matched(cfg) else 0.3)

    def __init__(self, ctx):
        super().__init__(ctx)
        K, D = ctx.dataset.num_classes, ctx.model.classifier.in_features
        self.start = round(START * ctx.cfg.iters)
        self.window = max(1, min(100, self.start))     # one is complete when blending starts
        self.register_buffer("queue", torch.zeros(K, QUEUE, D))
        self.register_buffer("pushed", torch.zeros(K, dtype=torch.long))       # so far, per class
        self.register_buffer("histogram", torch.zeros(K))      # of the last complete window: m
        self.register_buffer("current", torch.zeros(K))        # of the current window

    @torch.no_grad()
    def push(self, x_l, y_l):
        """Add the EMA's features of the labeled batch to the queues of their classes."""
        same = F.one_hot(y_l, len(self.queue))                                 # (B, K)
        order = (same.cumsum(0) * same).sum(1) - 1     # (B,) images of its class before it
        place = (self.pushed[y_l] + order) % QUEUE                             # (B,)
        self.queue[y_l, place] = self.ctx.ema.model.features(x_l)
        self.pushed += same.sum(0)

    @property
    def centres(self):
        filled = self.pushed.clamp(1, QUEUE)           # of an empty queue the centre is 0
        return self.queue.sum(1) / filled[:, None]                             # (K, D)

    def refine(self, p, batch):
        self.push(batch.x_l, batch.y_l)
        if batch.step >= self.start:
            self.q = similarity(batch.z_u, self.centres).softmax(1)            # (U, K)
            m = self.histogram / self.histogram.max().clamp_min(1)   # 0 before the first window
            v = (m ** (1 / self.ctx.cfg.daso_td))[p.argmax(1), None]           # (U, 1)
            p = (1 - v) * p + v * self.q
        y_u = p.argmax(1)                              # (U,) also below tau
        self.current += F.one_hot(y_u, len(self.current)).sum(0)     # bincount waits for a GPU
        if (batch.step + 1) % self.window == 0:
            self.histogram.copy_(self.current)
            self.current.zero_()
        return p

    def extra_loss(self, batch):
        """L_align; none on MixMatch, which has no strong views."""
        if batch.step < self.start or self.ctx.cfg.base == "mixmatch":
            return 0
        z_s = batch.z[len(batch.y_l):]                                         # (SU, D)
        targets = self.q.repeat_interleave(len(z_s) // len(self.q), dim=0)     # (SU, K)
        return F.cross_entropy(similarity(z_s, self.centres), targets)
