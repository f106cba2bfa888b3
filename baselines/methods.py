"""Every comparison method by base and name, for train.py and evaluate.py."""
from baselines import Method, abc_head, crest, darp, daso, logit_adjustment, sar, supervised

ADJUSTED = {"la": logit_adjustment.LA, "la_post_hoc": logit_adjustment.LAPostHoc}
SUPERVISED = {"vanilla": Method, "lower_bound": Method, "upper_bound": supervised.UpperBound,
              "resampling": supervised.Resampling, "ldam": supervised.LDAM,
              "crt": supervised.CRT} | ADJUSTED
SEMI_SUPERVISED = {"none": Method, "darp": darp.DARP, "crest": crest.CReST,
                   "crest+": crest.CReSTPlus, "abc": abc_head.ABC, "sar": sar.SaR,
                   "daso": daso.DASO, "la_all": logit_adjustment.LAAll} | ADJUSTED
METHODS = {"supervised": SUPERVISED, "pseudolabel": {"none": Method},
           "fixmatch": SEMI_SUPERVISED, "mixmatch": SEMI_SUPERVISED}
