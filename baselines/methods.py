"""Every comparison method of this folder by base and name."""
from baselines import (
    Method,
    abc_head,
    acr,
    adello,
    cdmad,
    crest,
    darp,
    daso,
    joint,
    logit_adjustment,
    sar,
    supervised,
)

ADJUSTED = {"la": logit_adjustment.LA, "la_post_hoc": logit_adjustment.LAPostHoc}
SUPERVISED = {"vanilla": Method, "upper_bound": supervised.UpperBound,
              "resampling": supervised.Resampling, "ldam": supervised.LDAM,
              "crt": supervised.CRT} | ADJUSTED
SEMI_SUPERVISED = {"none": Method, "darp": darp.DARP, "crest": crest.CReST,
                   "crest+": crest.CReSTPlus, "abc": abc_head.ABC, "sar": sar.SaR,
                   "daso": daso.DASO, "la_all": logit_adjustment.LAAll,
                   "attractor": joint.JointAttractor, "single_level": joint.SingleLevel} | ADJUSTED
AFTER = {"darp_crt": darp.DARPThenCRT, "cdmad": cdmad.CDMAD, "flexda": adello.FlexDA,
         "adello": adello.ADELLO, "acr": acr.ACR}            # published after or beside L2AC
METHODS = {"supervised": SUPERVISED, "pseudolabel": {"none": Method},
           "fixmatch": SEMI_SUPERVISED | AFTER, "mixmatch": SEMI_SUPERVISED}
