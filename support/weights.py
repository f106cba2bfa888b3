"""Weights to start from: torchvision's of ImageNet, or a file. Features that stay as they are."""
from pathlib import Path

import torch
from torchvision.models import get_model_weights

from support import UserError


def load(model, source, name):
    """Put --weights `source`, a file or `default`, into the network of --model `name`. A classifier
    of another size keeps its new weights."""
    url, own, head = None, model.state_dict(), getattr(model, "head", "classifier")
    try:
        if source == "default":
            url = get_model_weights(name).DEFAULT.url
            theirs = torch.hub.load_state_dict_from_url(url, map_location="cpu", weights_only=True)
        else:
            theirs = dict(torch.load(source, map_location="cpu", weights_only=True))
    except Exception as error:                                # torch raises a dozen kinds
        remedy = (f"put the file {url} into {Path(torch.hub.get_dir(), 'checkpoints')}" if url else
                  "name a file that torch.save wrote a state_dict of that network to")
        raise UserError(f"--weights {source}: none that can be read for --model {name} "
                        f"({type(error).__name__}); {remedy}") from error
    state = {key if key in own else                           # else: torchvision's name for it
             f"network.{key}".replace(f"network.{head}.", "classifier."): value
             for key, value in theirs.items()}
    for key in ("classifier.weight", "classifier.bias"):
        if key not in state or state[key].shape != own[key].shape:
            state[key] = own[key]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(f"--weights {source} does not fit --model {name} ({reason:.70} ...); name "
                        f"the model that it belongs to") from error


def remembered(features):
    """`features`, but a batch that comes again, like those of the test set, is computed once."""
    known = {}

    def look_up(x):
        key = hash(x.numpy(force=True).tobytes())
        if key not in known:
            if len(known) == 200:                             # those of training do not come again
                known.clear()
            known[key] = features(x)
        return known[key]
    return look_up
